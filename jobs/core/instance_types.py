"""The EC2 instance types a stage can train on: one row of instance_types.json each, from which the rest derives.

The rows are JSON because the container has Python 3.10, which reads no TOML. Receipts repeat the day and the source of
a row's prices beside every figure that they derive.

The CUDA rows have vCPUs, memory, cards, disks and zones as EC2 answers them (DescribeInstanceTypes and
DescribeInstanceTypeOfferings). None has V100 cards (P3): PyTorch's wheel on PyPI, which the image cuda installs, is
built with CUDA 13, and that has no code for cards older than Turing (compute capability 7.5).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jobs.core.errors import UsageError, did_you_mean

Accelerator = Literal["hpu", "cuda", "cpu"]

ImageType = Literal["ECS_AL2023", "ECS_AL2023_NVIDIA"]
"""Families of AMIs as Batch calls them (API reference of Ec2Configuration)."""

SCRATCH = "/scratch"
"""Folder in which containers of jobs see the disks of their instance's own, if it has any."""

STOP_TIMEOUT_SECONDS = 100
"""Time between SIGTERM and SIGKILL, at a Spot notice as when a job is stopped: most of a notice's two minutes.

In it the ranks come to the end of their step, save, and upload what they saved; then the attempt's record is written.
"""


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """An EC2 instance type, as far as jobs and stacks need to know it."""

    name: str
    """EC2's name."""
    accelerator: Accelerator
    """The accelerator that a process trains on; `hpu` is a Gaudi card."""
    accelerators: int
    """Cards in one instance; 0 where it trains on its vCPUs."""
    vcpus: int
    memory_mib: int
    """All of the instance's memory."""
    job_memory_mib: int
    """Memory that a job which owns the instance asks for: less than all, since ECS agent and kernel keep some back."""
    network_cards: int
    """Cards that can carry an EFA interface each; 0 where the type has no EFA."""
    nvme_disks: int = 0
    """Disks of its own, gone with the instance: scratch space, and Docker's."""
    image_type: ImageType = "ECS_AL2023"
    """The family that its AMI belongs to, as Batch has to be told, whoever made it."""
    machine_image: Literal["batch", "stage"] = "batch"
    """Whose AMI it boots where the settings name none: AWS's newest of the family, or one that the stage builds."""
    gaudi_generation: int | None = None
    """The Gaudi that its cards are, which decides the software releases that fit; None where they are none."""
    card_teraflops: float | None = None
    """Published peak of one card's matrix multiplication in bfloat16, dense, in TFLOP/s; None: not published."""
    link_gigabytes_per_second: float | None = None
    """Published speed of one card's links to the others of its instance, one way, in GB/s; None: it has no others."""
    huge_pages: int = 0
    """2 MiB pages that the accelerator's driver wants the kernel to set aside."""
    on_demand_quota_code: str
    """Service Quotas' code of the vCPUs that instances of its family may have at the On-Demand price."""
    spot_quota_code: str
    zone_ids: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Region to the ids of the zones there that are known to offer it; a region is left out where nobody asked."""
    image: str
    """Folder under images/ whose image fits the accelerator."""
    on_demand_usd_per_hour: float
    """US dollars for one instance in us-east-1 with Linux, as the Spot price."""
    spot_usd_per_hour: float
    """The typical Spot price: where zones differ, the median of theirs."""
    price_date: str
    """The day on which the prices were read."""
    price_source: str
    notes: str = ""
    """Where the other figures come from, and what of them is unconfirmed."""

    @property
    def processes(self) -> int:
        """Return how many ranks fill one instance: one a card, else one a NUMA-sized 24 vCPUs (at least one)."""
        return self.accelerators or max(1, self.vcpus // 24)

    @property
    def gpus(self) -> int:
        """Return how many cards Batch counts as a resource of type GPU; it has no such type for HPUs."""
        return self.accelerators if self.accelerator == "cuda" else 0

    @property
    def card(self) -> str:
        """Return what people call one of its cards; a vCPU where it has none."""
        return {"hpu": "HPU", "cuda": "GPU", "cpu": "vCPU"}[self.accelerator]


def _row(name: str, values: Mapping[str, Any]) -> InstanceType:
    zone_ids = {region: tuple(zones) for region, zones in values.get("zone_ids", {}).items()}
    return InstanceType(name=name, **{**values, "zone_ids": zone_ids})


INSTANCE_TYPES = {
    name: _row(name, values)
    for name, values in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items()
}


def instance_type(name: str) -> InstanceType:
    """Return the row called `name`. Raises UsageError with the closest name if there is none."""
    try:
        return INSTANCE_TYPES[name]
    except KeyError:
        raise UsageError(
            f"instance type '{name}' has no row{did_you_mean(name, INSTANCE_TYPES)}",
            next_step="add a row to jobs/core/instance_types.json, or name one that is there",
        ) from None
