"""The EC2 instance types that a stage can train on: one row of instance_types.json each.

To add an instance type, add a row. The rows are JSON because the container's Python 3.10 cannot read TOML. Receipts
quote the date and the source of a row's prices next to each amount.

The vCPUs, memory, cards, disks and zones of the CUDA rows are EC2's own data (DescribeInstanceTypes and
DescribeInstanceTypeOfferings). Types with V100 cards (P3) have no row: the image cuda installs PyTorch's wheel from
PyPI, whose CUDA 13 does not support cards older than Turing (compute capability 7.5).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jobs.core.errors import UsageError, did_you_mean

Accelerator = Literal["hpu", "cuda", "cpu"]

ImageType = Literal["ECS_AL2023", "ECS_AL2023_NVIDIA"]
"""AMI families by Batch's names (API reference of Ec2Configuration)."""

SCRATCH = "/scratch"
"""Folder on the instance's local disks, if it has any, mounted into the containers of jobs."""

STOP_TIMEOUT_SECONDS = 100
"""Seconds between SIGTERM and SIGKILL, after a Spot notice (which leaves two minutes) or when a job is stopped.

In this time the ranks finish their step, save and upload the checkpoint, and the launcher writes the attempt's record.
"""


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """The properties of an EC2 instance type that jobs and stacks need."""

    name: str
    """EC2's name."""
    accelerator: Accelerator
    """The accelerator that a process trains on; `hpu` is a Gaudi card."""
    accelerators: int
    """Cards in one instance. 0 for types that train on vCPUs."""
    vcpus: int
    memory_mib: int
    """Total memory of the instance."""
    job_memory_mib: int
    """Memory that a job on the whole instance requests: less than the total, because the ECS agent and the kernel
    reserve some."""
    network_cards: int
    """Network cards that can each have an EFA interface. 0 for types without EFA."""
    nvme_disks: int = 0
    """Local disks, deleted with the instance: scratch space and Docker's storage."""
    image_type: ImageType = "ECS_AL2023"
    """AMI family, which Batch requires even for a custom AMI."""
    machine_image: Literal["batch", "stage"] = "batch"
    """AMI to boot if the settings name none: AWS's newest of the family (batch), or the one that the stage builds."""
    gaudi_generation: int | None = None
    """Generation of the Gaudi cards, which determines the supported software releases. None for other cards."""
    card_teraflops: float | None = None
    """Published peak of one card's dense bfloat16 matrix multiplication, in TFLOP/s. None if not published."""
    link_gigabytes_per_second: float | None = None
    """Published one-way speed of one card's links to the other cards of the instance, in GB/s. None for a single
    card."""
    huge_pages: int = 0
    """2 MiB huge pages that the accelerator's driver needs the kernel to reserve."""
    on_demand_quota_code: str
    """Service Quotas code of the limit on the family's On-Demand vCPUs."""
    spot_quota_code: str
    """Service Quotas code of the limit on the family's Spot vCPUs."""
    zone_ids: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Ids of zones known to offer the type, by region. Regions that were never checked are missing."""
    image: str
    """Folder under images/ of the image for this accelerator."""
    on_demand_usd_per_hour: float
    """Price of one Linux instance in us-east-1, in US dollars."""
    spot_usd_per_hour: float
    """Typical Spot price there: the median over the zones."""
    price_date: str
    """Day on which the prices were read."""
    price_source: str
    """Source of the prices."""
    notes: str = ""
    """Sources of the other numbers, and which of them are unconfirmed."""

    @property
    def processes(self) -> int:
        """Return the ranks that fill one instance: one per card; without cards, one per 24 vCPUs (a NUMA node)."""
        return self.accelerators or max(1, self.vcpus // 24)

    @property
    def gpus(self) -> int:
        """Return the cards that Batch counts as GPU resources; it has no resource type for HPUs."""
        return self.accelerators if self.accelerator == "cuda" else 0

    @property
    def card(self) -> str:
        """Return the name of one card: HPU or GPU, or vCPU for types without cards."""
        return {"hpu": "HPU", "cuda": "GPU", "cpu": "vCPU"}[self.accelerator]


def _row(name: str, values: Mapping[str, Any]) -> InstanceType:
    zone_ids = {region: tuple(zones) for region, zones in values.get("zone_ids", {}).items()}
    return InstanceType(name=name, **{**values, "zone_ids": zone_ids})


INSTANCE_TYPES = {
    name: _row(name, values)
    for name, values in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items()
}


def instance_type(name: str) -> InstanceType:
    """Return the instance type called `name`. Raises UsageError with the closest name if there is none."""
    try:
        return INSTANCE_TYPES[name]
    except KeyError:
        raise UsageError(
            f"unknown instance type '{name}'{did_you_mean(name, INSTANCE_TYPES)}",
            next_step="use a type of jobs/core/instance_types.json, or add a row there",
        ) from None
