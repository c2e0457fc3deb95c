"""The EC2 instance types a stage can train on: one row each, and all that the rest derives from them.

Adding a type is adding a row here, and one with its prices to instance_prices.json: they change on days of their own,
and are JSON because the container has Python 3.10, which reads no TOML. The receipt repeats their day and source beside
every figure that it derives.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jobs.contract.errors import UsageError, did_you_mean

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
class Price:
    """A row of instance_prices.json: US dollars an hour for one instance in us-east-1, Linux."""

    on_demand_usd_per_hour: float
    spot_usd_per_hour: float
    """The typical Spot price: where zones differ, the median of theirs."""
    date: str
    """The day on which the prices were read."""
    source: str
    """The place where the prices were read."""


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

    @property
    def on_demand_usd_per_hour(self) -> float:
        return _PRICES[self.name].on_demand_usd_per_hour

    @property
    def spot_usd_per_hour(self) -> float:
        return _PRICES[self.name].spot_usd_per_hour

    @property
    def price_date(self) -> str:
        return _PRICES[self.name].date

    @property
    def price_source(self) -> str:
        return _PRICES[self.name].source

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


_PRICES = {
    name: Price(**price)
    for name, price in json.loads(Path(__file__).with_name("instance_prices.json").read_text(encoding="utf-8")).items()
}

# The CUDA rows have vCPUs, memory, cards, disks and zones as EC2 answers them (DescribeInstanceTypes and
# DescribeInstanceTypeOfferings, which moto 5.2.5 ships). None has V100 cards (P3): PyTorch's wheel on PyPI, which the
# image cuda installs, is built with CUDA 13, and that has no code for cards older than Turing (compute capability 7.5).
_ROWS = (
    InstanceType(
        name="dl1.24xlarge",
        accelerator="hpu",
        accelerators=8,
        vcpus=96,
        memory_mib=786_432,
        # 96.6 % of the memory: what the published DL1 job definitions ask for so that one job owns the node.
        job_memory_mib=760_000,
        network_cards=4,
        nvme_disks=4,
        machine_image="stage",
        gaudi_generation=1,
        # Seven of a card's ten ports of 100 Gbit/s lead to the other seven cards (Habana's Gaudi white paper). For the
        # multiplication nothing is published [?].
        link_gigabytes_per_second=87.5,
        huge_pages=15_000,  # what Habana's installation guide sets
        on_demand_quota_code="L-6E869C2A",
        spot_quota_code="L-85EED4F7",
        # One zone in each region, as long as EC2 offered it; it may have withdrawn the type in 2026, unconfirmed.
        zone_ids={"us-east-1": ("use1-az2",), "us-west-2": ("usw2-az1",)},
        image="gaudi",
    ),
    InstanceType(
        name="p4d.24xlarge",
        accelerator="cuda",
        accelerators=8,  # A100, 40 GiB each
        vcpus=96,
        memory_mib=1_179_648,
        job_memory_mib=1_140_000,
        network_cards=4,
        nvme_disks=8,
        image_type="ECS_AL2023_NVIDIA",
        card_teraflops=312,  # NVIDIA A100 datasheet, as is NVLink: 600 GB/s both ways
        link_gigabytes_per_second=300,
        on_demand_quota_code="L-417A185B",
        spot_quota_code="L-7212CCBC",
        zone_ids={
            "us-east-1": ("use1-az1", "use1-az2", "use1-az4", "use1-az6"),
            "us-east-2": ("use2-az1", "use2-az2", "use2-az3"),
            "us-west-2": ("usw2-az1", "usw2-az2", "usw2-az3", "usw2-az4"),
        },
        image="cuda",
    ),
    InstanceType(
        name="p5.48xlarge",
        accelerator="cuda",
        accelerators=8,  # H100, 80 GiB each
        vcpus=192,
        memory_mib=2_097_152,
        job_memory_mib=2_030_000,
        network_cards=32,
        nvme_disks=8,
        image_type="ECS_AL2023_NVIDIA",
        card_teraflops=989,  # NVIDIA H100 datasheet, as is NVLink: 900 GB/s both ways
        link_gigabytes_per_second=450,
        on_demand_quota_code="L-417A185B",
        spot_quota_code="L-C4BD4855",
        zone_ids={
            "us-east-1": ("use1-az1", "use1-az2", "use1-az3", "use1-az4", "use1-az5", "use1-az6"),
            "us-east-2": ("use2-az1", "use2-az2", "use2-az3"),
            "us-west-2": ("usw2-az1", "usw2-az2", "usw2-az3", "usw2-az4"),
        },
        image="cuda",
    ),
    InstanceType(
        name="p5en.48xlarge",
        accelerator="cuda",
        accelerators=8,  # H200, 141 GiB each
        vcpus=192,
        memory_mib=2_097_152,
        job_memory_mib=2_030_000,
        network_cards=16,
        nvme_disks=8,
        image_type="ECS_AL2023_NVIDIA",
        card_teraflops=989,  # NVIDIA H200 datasheet, as is NVLink: 900 GB/s both ways
        link_gigabytes_per_second=450,
        on_demand_quota_code="L-417A185B",
        spot_quota_code="L-C4BD4855",  # as P5's; unconfirmed [?]
        zone_ids={
            "us-east-1": ("use1-az2", "use1-az6"),
            "us-east-2": ("use2-az1", "use2-az2", "use2-az3"),
            "us-west-2": ("usw2-az2", "usw2-az3", "usw2-az4"),
        },
        image="cuda",
    ),
    InstanceType(
        name="g5.4xlarge",
        accelerator="cuda",
        accelerators=1,  # A10G, 24 GiB
        vcpus=16,
        memory_mib=65_536,
        job_memory_mib=60_000,
        network_cards=0,
        nvme_disks=1,
        image_type="ECS_AL2023_NVIDIA",
        card_teraflops=70,  # NVIDIA A10G datasheet
        on_demand_quota_code="L-DB2E81BA",
        spot_quota_code="L-3819A6DF",
        zone_ids={
            "us-east-1": ("use1-az1", "use1-az2", "use1-az4", "use1-az5", "use1-az6"),
            "us-east-2": ("use2-az1", "use2-az2", "use2-az3"),
            "us-west-2": ("usw2-az1", "usw2-az2", "usw2-az3"),
        },
        image="cuda",
    ),
    InstanceType(
        name="g5.48xlarge",
        accelerator="cuda",
        accelerators=8,  # A10G, 24 GiB each
        vcpus=192,
        memory_mib=786_432,
        job_memory_mib=760_000,
        network_cards=1,
        nvme_disks=2,
        image_type="ECS_AL2023_NVIDIA",
        card_teraflops=70,
        link_gigabytes_per_second=32,  # PCIe 4.0, 16 lanes
        on_demand_quota_code="L-DB2E81BA",
        spot_quota_code="L-3819A6DF",
        zone_ids={
            "us-east-1": ("use1-az1", "use1-az2", "use1-az4", "use1-az5", "use1-az6"),
            "us-east-2": ("use2-az1", "use2-az2", "use2-az3"),
            "us-west-2": ("usw2-az1", "usw2-az2", "usw2-az3"),
        },
        image="cuda",
    ),
    InstanceType(
        name="g6e.48xlarge",
        accelerator="cuda",
        accelerators=8,  # L40S, 48 GiB each
        vcpus=192,
        memory_mib=1_572_864,
        job_memory_mib=1_520_000,
        network_cards=4,
        nvme_disks=4,
        image_type="ECS_AL2023_NVIDIA",
        card_teraflops=362,  # NVIDIA L40S datasheet
        link_gigabytes_per_second=32,  # PCIe 4.0, 16 lanes
        on_demand_quota_code="L-DB2E81BA",
        spot_quota_code="L-3819A6DF",
        zone_ids={
            "us-east-1": ("use1-az1", "use1-az2", "use1-az4", "use1-az6"),
            "us-east-2": ("use2-az1", "use2-az2", "use2-az3"),
            "us-west-2": ("usw2-az1", "usw2-az2", "usw2-az3", "usw2-az4"),
        },
        image="cuda",
    ),
    InstanceType(
        name="m6i.4xlarge",
        accelerator="cpu",
        accelerators=0,
        vcpus=16,
        memory_mib=65_536,
        job_memory_mib=60_000,
        network_cards=0,
        on_demand_quota_code="L-1216C47A",
        spot_quota_code="L-34B43A08",
        image="cpu",
    ),
)

INSTANCE_TYPES = {row.name: row for row in _ROWS}


def instance_type(name: str) -> InstanceType:
    """Return the row called `name`. Raises UsageError with the closest name if there is none."""
    try:
        return INSTANCE_TYPES[name]
    except KeyError:
        raise UsageError(
            f"instance type '{name}' has no row{did_you_mean(name, INSTANCE_TYPES)}",
            next_step="add a row to jobs/contract/instance_types.py, or name one that is there",
        ) from None
