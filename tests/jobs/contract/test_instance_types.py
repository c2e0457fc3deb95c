import gzip
import json
from importlib import resources

import pytest

from jobs.contract.errors import UsageError
from jobs.contract.instance_types import INSTANCE_TYPES, InstanceType, instance_type

ROWS = INSTANCE_TYPES.values()


def test_dl1_is_what_the_platform_is_built_for() -> None:
    row = instance_type("dl1.24xlarge")
    assert (row.accelerator, row.accelerators, row.gaudi_generation) == ("hpu", 8, 1)
    assert (row.vcpus, row.memory_mib, row.network_cards) == (96, 786_432, 4)
    assert row.on_demand_usd_per_hour == 13.10904
    assert row.processes == 8


def test_a_type_without_a_row_is_refused_with_the_closest_one() -> None:
    with pytest.raises(UsageError) as caught:
        instance_type("dl1.24xl")
    assert str(caught.value) == (
        "instance type 'dl1.24xl' has no row; did you mean 'dl1.24xlarge'?\n"
        "Next: add a row to jobs/contract/instance_types.py, or name one that is there"
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_job_that_owns_a_node_fits_it(row: InstanceType) -> None:
    # Asking for all of the memory leaves a job waiting for ever: the ECS agent keeps some back.
    assert 0.9 * row.memory_mib < row.job_memory_mib < 0.98 * row.memory_mib


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_accelerators_agree_with_their_kind(row: InstanceType) -> None:
    assert (row.accelerators > 0) == (row.accelerator != "cpu")
    assert (row.gaudi_generation is not None) == (row.accelerator == "hpu")


def test_every_type_has_a_row_of_prices_and_every_price_a_type() -> None:
    assert json.loads(resources.files("jobs.contract").joinpath("instance_prices.json").read_text()).keys() == set(
        INSTANCE_TYPES
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_prices_are_plausible_and_say_where_they_come_from(row: InstanceType) -> None:
    # Trap: an On-Demand price that stands in for Spot ends a run at a third of its max_usd.
    assert 0 < row.spot_usd_per_hour < 0.6 * row.on_demand_usd_per_hour
    assert row.price_date
    assert row.price_source


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_zones_belong_to_their_region(row: InstanceType) -> None:
    for region, zones in row.zone_ids.items():
        continent, direction, number = region.split("-")
        assert all(zone.startswith(f"{continent}{direction[0]}{number}-az") for zone in zones)
        assert len(set(zones)) == len(zones) > 0


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        # vCPUs, GiB, GPUs, EFA cards, NVMe disks
        ("p4d.24xlarge", (96, 1152, 8, 4, 8)),
        ("p5.48xlarge", (192, 2048, 8, 32, 8)),
        ("p5en.48xlarge", (192, 2048, 8, 16, 8)),
        ("g5.4xlarge", (16, 64, 1, 0, 1)),
        ("g5.48xlarge", (192, 768, 8, 1, 2)),
        ("g6e.48xlarge", (192, 1536, 8, 4, 4)),
    ],
)
def test_cuda_instances_stand_in_where_there_are_no_gaudi_ones(name: str, shape: tuple[int, ...]) -> None:
    row = instance_type(name)
    assert (row.vcpus, row.memory_mib // 1024, row.gpus, row.network_cards, row.nvme_disks) == shape
    assert (row.accelerator, row.card, row.image) == ("cuda", "GPU", "cuda")
    assert row.processes == row.gpus


def test_every_row_has_an_ami_in_a_family_that_batch_still_gives_out() -> None:
    # Trap: Batch's Amazon Linux 2 families are closed to new compute environments.
    assert {row.image_type for row in ROWS if row.machine_image == "batch"} == {"ECS_AL2023", "ECS_AL2023_NVIDIA"}
    assert {row.name for row in ROWS if row.machine_image == "stage"} == {"dl1.24xlarge"}


@pytest.mark.parametrize("row", [row for row in ROWS if row.accelerator == "cuda"], ids=lambda row: row.name)
def test_cuda_rows_agree_with_ec2s_own_data(row: InstanceType) -> None:
    known = json.loads(gzip.decompress((resources.files("moto.ec2.resources") / "instance_types.json.gz").read_bytes()))
    ec2 = known[row.name]
    # Trap: PyTorch's wheel of CUDA 13 has no code for V100 and older cards.
    assert {gpu["Name"] for gpu in ec2["GpuInfo"]["Gpus"]} <= {"A100", "A10G", "H100", "H200", "L40S"}
    assert row.vcpus == ec2["VCpuInfo"]["DefaultVCpus"]
    assert row.memory_mib == ec2["MemoryInfo"]["SizeInMiB"]
    assert row.gpus == sum(gpu["Count"] for gpu in ec2["GpuInfo"]["Gpus"])
    assert row.nvme_disks == sum(disk["Count"] for disk in ec2["InstanceStorageInfo"]["Disks"])
    assert row.network_cards == ec2["NetworkInfo"].get("EfaInfo", {"MaximumEfaInterfaces": 0})["MaximumEfaInterfaces"]
