import pytest

from jobs.core.errors import UsageError
from jobs.core.instance_types import INSTANCE_TYPES, InstanceType, instance_type

ROWS = INSTANCE_TYPES.values()


def test_values_of_dl1_and_other_types() -> None:
    row = instance_type("dl1.24xlarge")
    assert (row.accelerator, row.accelerators, row.gaudi_generation, row.card) == ("hpu", 8, 1, "HPU")
    assert (row.vcpus, row.memory_mib, row.efa_cards) == (96, 786_432, (0, 1, 2, 3))
    assert (row.on_demand_usd_per_hour, row.processes, row.gpus) == (13.10904, 8, 0)
    assert instance_type("m6i.4xlarge").processes == 1
    a100 = instance_type("p4d.24xlarge")
    assert (a100.processes, a100.job_memory_mib, a100.link_gigabytes_per_second) == (8, 1_140_000, 300)
    h100 = instance_type("p5.4xlarge")
    assert (h100.gpus, h100.card_model, h100.card_memory_mib, h100.link_gigabytes_per_second) == (
        1,
        "H100",
        81_920,
        None,
    )
    # The first of its 17 network cards has no EFA.
    assert instance_type("p6-b300.48xlarge").efa_cards == tuple(range(1, 17))
    with pytest.raises(UsageError, match=r"^unknown instance type 'dl1\.24xl'; did you mean 'dl1\.24xlarge'\?\nNext: "):
        instance_type("dl1.24xl")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row_is_consistent(row: InstanceType) -> None:
    # A job that requests all of the memory waits forever, because the ECS agent reserves some.
    assert 0.9 * row.memory_mib < row.job_memory_mib < 0.98 * row.memory_mib
    assert (row.card_memory_mib > 0) == (row.card_model is not None) == (row.accelerators > 0)
    assert (row.accelerators > 0) == (row.accelerator != "cpu")
    assert (row.gaudi_generation is not None) == (row.accelerator == "hpu")
    # Trap: an On-Demand price in place of the Spot price would stop a run at a third of its max_usd.
    assert 0 < row.spot_usd_per_hour < row.on_demand_usd_per_hour
    assert row.price_date
    assert row.price_source
    for region, zones in row.zone_ids.items():
        continent, direction, number = region.split("-")
        assert all(zone.startswith(f"{continent}{direction[0]}{number}-az") for zone in zones)
        assert len(set(zones)) == len(zones) > 0
    # Trap: Batch's Amazon Linux 2 families are closed to new compute environments.
    assert row.machine_image == ("stage" if row.accelerator == "hpu" else "batch")
    assert row.image_type == ("ECS_AL2023_NVIDIA" if row.accelerator == "cuda" else "ECS_AL2023")
