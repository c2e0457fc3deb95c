import pytest

from jobs.errors import UsageError
from jobs.instance_types import INSTANCE_TYPES, InstanceType, instance_type

ROWS = INSTANCE_TYPES.values()


def test_dl1_is_what_the_platform_is_built_for() -> None:
    row = instance_type("dl1.24xlarge")
    assert (row.accelerator, row.accelerators, row.gaudi_generation) == ("hpu", 8, 1)
    assert (row.vcpus, row.memory_mib, row.network_cards) == (96, 786_432, 4)
    assert row.on_demand_usd_per_hour == 13.10904
    assert row.processes == 8


def test_a_row_is_found_by_its_own_name() -> None:
    assert all(instance_type(name).name == name for name in INSTANCE_TYPES)


def test_a_type_without_a_row_is_refused_with_the_closest_one() -> None:
    with pytest.raises(UsageError) as caught:
        instance_type("dl1.24xl")
    assert str(caught.value) == (
        "instance type 'dl1.24xl' has no row; did you mean 'dl1.24xlarge'?\n"
        "Next: add a row to jobs/instance_types.py, or name one that is there"
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_job_that_owns_a_node_fits_it(row: InstanceType) -> None:
    # Asking for all of the memory leaves a job waiting for ever: the ECS agent keeps some back.
    assert 0.9 * row.memory_mib < row.job_memory_mib < 0.98 * row.memory_mib


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_accelerators_agree_with_their_kind(row: InstanceType) -> None:
    assert (row.accelerators > 0) == (row.accelerator != "cpu")
    assert (row.gaudi_generation is not None) == (row.accelerator == "hpu")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_prices_are_plausible_and_say_where_they_come_from(row: InstanceType) -> None:
    assert 0 < row.spot_usd_per_hour <= row.on_demand_usd_per_hour
    assert row.price_date
    assert row.price_source


def test_a_cpu_row_gets_a_rank_for_a_handful_of_vcpus() -> None:
    assert instance_type("m6i.4xlarge").processes == 1
