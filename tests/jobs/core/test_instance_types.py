import gzip
import json
from importlib import resources

import pytest

from jobs.core.errors import UsageError
from jobs.core.instance_types import INSTANCE_TYPES, InstanceType, instance_type

ROWS = INSTANCE_TYPES.values()


def test_values_of_dl1_and_other_types() -> None:
    row = instance_type("dl1.24xlarge")
    assert (row.accelerator, row.accelerators, row.gaudi_generation, row.card) == ("hpu", 8, 1, "HPU")
    assert (row.vcpus, row.memory_mib, row.network_cards) == (96, 786_432, 4)
    assert (row.on_demand_usd_per_hour, row.processes, row.gpus) == (13.10904, 8, 0)
    assert instance_type("m6i.4xlarge").processes == 1
    assert instance_type("p4d.24xlarge").processes == 8
    with pytest.raises(UsageError, match=r"^unknown instance type 'dl1\.24xl'; did you mean 'dl1\.24xlarge'\?\nNext: "):
        instance_type("dl1.24xl")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row_is_consistent(row: InstanceType) -> None:
    # A job that requests all of the memory waits forever, because the ECS agent reserves some.
    assert 0.9 * row.memory_mib < row.job_memory_mib < 0.98 * row.memory_mib
    assert (row.accelerators > 0) == (row.accelerator != "cpu")
    assert (row.gaudi_generation is not None) == (row.accelerator == "hpu")
    # Trap: an On-Demand price in place of the Spot price would stop a run at a third of its max_usd.
    assert 0 < row.spot_usd_per_hour < 0.6 * row.on_demand_usd_per_hour
    assert row.price_date
    assert row.price_source
    for region, zones in row.zone_ids.items():
        continent, direction, number = region.split("-")
        assert all(zone.startswith(f"{continent}{direction[0]}{number}-az") for zone in zones)
        assert len(set(zones)) == len(zones) > 0
    # Trap: Batch's Amazon Linux 2 families are closed to new compute environments.
    assert row.machine_image == ("stage" if row.accelerator == "hpu" else "batch")
    assert row.image_type == ("ECS_AL2023_NVIDIA" if row.accelerator == "cuda" else "ECS_AL2023")


@pytest.mark.parametrize("row", [row for row in ROWS if row.accelerator == "cuda"], ids=lambda row: row.name)
def test_cuda_rows_agree_with_ec2s_own_data(row: InstanceType) -> None:
    known = json.loads(gzip.decompress((resources.files("moto.ec2.resources") / "instance_types.json.gz").read_bytes()))
    ec2 = known[row.name]
    # Trap: PyTorch's CUDA 13 wheel does not support V100 and older cards.
    assert {gpu["Name"] for gpu in ec2["GpuInfo"]["Gpus"]} <= {"A100", "A10G", "H100", "H200", "L40S"}
    assert row.vcpus == ec2["VCpuInfo"]["DefaultVCpus"]
    assert row.memory_mib == ec2["MemoryInfo"]["SizeInMiB"]
    assert row.gpus == sum(gpu["Count"] for gpu in ec2["GpuInfo"]["Gpus"])
    assert row.nvme_disks == sum(disk["Count"] for disk in ec2["InstanceStorageInfo"]["Disks"])
    assert row.network_cards == ec2["NetworkInfo"].get("EfaInfo", {"MaximumEfaInterfaces": 0})["MaximumEfaInterfaces"]
