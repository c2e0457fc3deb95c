"""The EC2 instance types that a stage can train on: EC2's own data in instance_types.json, and beside it what EC2 does
not tell.

To add an instance type, run `python -m jobs.money.instance_types --add TYPE`, which asks EC2 and writes the row. If its
card or family is new, add a row to CARDS or QUOTAS. The file is JSON because the container's Python 3.10 cannot read
TOML. Receipts quote the date and the source of a row's prices next to each amount.

Types with V100 cards (P3) have no row: the image cuda installs PyTorch's wheel from PyPI, whose CUDA 13 does not
support cards older than Turing (compute capability 7.5).
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
    efa_cards: tuple[int, ...] = ()
    """Indexes of the network cards that can have an EFA interface. Empty for types without EFA."""
    card_model: str | None = None
    """EC2's name of the cards' model. None for types without cards."""
    card_memory_mib: int = 0
    """Memory of one card."""
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
    on_demand_quota_code: str | None
    """Service Quotas code of the limit on the family's On-Demand vCPUs. None if we do not know it."""
    spot_quota_code: str | None
    """Service Quotas code of the limit on the family's Spot vCPUs. None if we do not know it."""
    zone_ids: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Ids of zones known to offer the type, by region. Regions that were never checked are missing."""
    image: str
    """Folder under images/ of the image for this accelerator."""
    on_demand_usd_per_hour: float
    """Price of one Linux instance in us-east-1 (or where `price_source` says), in US dollars."""
    spot_usd_per_hour: float
    """Typical Spot price there: the median over the zones."""
    price_date: str
    """Day on which the prices were read."""
    price_source: str
    """Source of the prices."""

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


@dataclass(frozen=True, kw_only=True)
class _Card:
    """What EC2 does not tell of a card."""

    accelerator: Accelerator = "cuda"
    teraflops: float | None = None
    link_gigabytes_per_second: float | None = None


CARDS: dict[str | None, _Card] = {
    # Links: seven of a card's ten 100 Gbit/s ports connect to the other seven cards (Habana's Gaudi white paper). No
    # peak is published for matrix multiplication.
    "Gaudi": _Card(accelerator="hpu", link_gigabytes_per_second=87.5),
    # NVIDIA's datasheets of each card. They give NVLink's speed both ways. The other cards have PCIe with 16 lanes.
    "A10G": _Card(teraflops=70, link_gigabytes_per_second=32),
    "L4": _Card(teraflops=121, link_gigabytes_per_second=32),
    "L40S": _Card(teraflops=362, link_gigabytes_per_second=32),
    "RTX PRO Server 6000": _Card(link_gigabytes_per_second=64),
    "A100": _Card(teraflops=312, link_gigabytes_per_second=300),
    "H100": _Card(teraflops=989, link_gigabytes_per_second=450),
    "H200": _Card(teraflops=989, link_gigabytes_per_second=450),
    "B200": _Card(teraflops=2250, link_gigabytes_per_second=900),
    "B300": _Card(teraflops=2250, link_gigabytes_per_second=900),
    None: _Card(accelerator="cpu"),
}

_P_ON_DEMAND = "L-417A185B"
QUOTAS: dict[str, tuple[str | None, str | None]] = {
    "dl1": ("L-6E869C2A", "L-85EED4F7"),
    **dict.fromkeys(("g5", "g6", "g6e", "g7e"), ("L-DB2E81BA", "L-3819A6DF")),
    **dict.fromkeys(("p4d", "p4de"), (_P_ON_DEMAND, "L-7212CCBC")),
    # That the Spot quota of p5 is also the one of p5e and p5en is unconfirmed.
    **dict.fromkeys(("p5", "p5e", "p5en"), (_P_ON_DEMAND, "L-C4BD4855")),
    **dict.fromkeys(("p6-b200", "p6-b300"), (_P_ON_DEMAND, None)),
    **dict.fromkeys(("m6i", "m7i"), ("L-1216C47A", "L-34B43A08")),
}
"""Service Quotas codes of the vCPU limits of a family: On-Demand and Spot."""

_GAUDI: Mapping[str, Any] = {
    "image": "gaudi",
    "machine_image": "stage",
    "gaudi_generation": 1,
    # Habana's installation guide.
    "huge_pages": 15000,
    # What the published DL1 job definitions request.
    "job_memory_mib": 760000,
}
_BY_ACCELERATOR: Mapping[Accelerator, Mapping[str, Any]] = {
    "hpu": _GAUDI,
    "cuda": {"image": "cuda", "image_type": "ECS_AL2023_NVIDIA"},
    "cpu": {"image": "cpu"},
}


def _job_memory_mib(memory_mib: int) -> int:
    """Return the memory that a job can request: without 2.75 GiB and 3 %, at most 8 %, rounded down.

    Batch's guide ("Compute resource memory management") tells to leave memory to the agent and the system, but not how
    much. The shares follow the published DL1 job definitions, which request 96.6 % of 768 GiB.
    """
    left = memory_mib - min(0.08 * memory_mib, 2816 + 0.03 * memory_mib)
    unit = 10_000 if left >= 60_000 else 1_000
    return int(left // unit) * unit


def _row(name: str, found: Mapping[str, Any]) -> InstanceType:
    card = CARDS[found.get("card_model")]
    on_demand_quota_code, spot_quota_code = QUOTAS[name.partition(".")[0]]
    values: dict[str, Any] = {
        "accelerators": 0,
        "accelerator": card.accelerator,
        "job_memory_mib": _job_memory_mib(found["memory_mib"]),
        "card_teraflops": card.teraflops,
        "link_gigabytes_per_second": card.link_gigabytes_per_second if found.get("accelerators", 0) > 1 else None,
        "on_demand_quota_code": on_demand_quota_code,
        "spot_quota_code": spot_quota_code,
        **_BY_ACCELERATOR[card.accelerator],
        **found,
        "efa_cards": tuple(found.get("efa_cards", ())),
        "zone_ids": {region: tuple(zones) for region, zones in found.get("zone_ids", {}).items()},
    }
    return InstanceType(name=name, **values)


PATH = Path(__file__).with_suffix(".json")
"""EC2's data of the types, written by `python -m jobs.money.instance_types`."""

INSTANCE_TYPES = {
    name: _row(name, values) for name, values in json.loads(PATH.read_text(encoding="utf-8"))["types"].items()
}


def instance_type(name: str) -> InstanceType:
    """Return the instance type called `name`. Raises UsageError with the closest name if there is none."""
    try:
        return INSTANCE_TYPES[name]
    except KeyError:
        raise UsageError(
            f"unknown instance type '{name}'{did_you_mean(name, INSTANCE_TYPES)}",
            next_step="use a type of jobs/core/instance_types.json, or see python -m jobs.money.instance_types --help",
        ) from None
