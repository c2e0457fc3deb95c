"""The EC2 instance types a stage can train on: one row each, and all that the rest derives from them.

Adding a type is adding a row. Prices are On-Demand and typical Spot, in US dollars an hour for one instance in
us-east-1, Linux, with the day they were read; the receipt repeats day and source beside every figure it derives.
"""

from dataclasses import dataclass
from typing import Literal

from jobs.errors import UsageError, did_you_mean

Accelerator = Literal["hpu", "cuda", "cpu"]


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """One row."""

    name: str
    """EC2's name."""
    accelerator: Accelerator
    """What a process trains on; `hpu` is a Gaudi card."""
    accelerators: int
    """Cards in one instance; 0 where it trains on its vCPUs."""
    vcpus: int
    memory_mib: int
    """All of the instance's memory."""
    job_memory_mib: int
    """What a job that owns the instance asks for: less than all, since the ECS agent and the kernel keep some back."""
    network_cards: int
    """Cards that can carry an EFA interface each; 0 where the type has no EFA."""
    gaudi_generation: int | None = None
    """Which Gaudi its cards are, and so which software releases fit; None where they are none."""
    huge_pages: int = 0
    """2 MiB pages that the accelerator's driver wants the kernel to set aside."""
    on_demand_quota_code: str
    """Service Quotas' code of the vCPUs that instances of its family may have at the On-Demand price."""
    spot_quota_code: str
    image: str
    """Folder under images/ whose image fits the accelerator."""
    on_demand_usd_per_hour: float
    spot_usd_per_hour: float
    price_date: str
    price_source: str

    @property
    def processes(self) -> int:
        """Ranks that fill one instance: one a card, else one a NUMA-sized 24 vCPUs (at least one)."""
        return self.accelerators or max(1, self.vcpus // 24)


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
        gaudi_generation=1,
        huge_pages=15_000,  # what Habana's installation guide sets
        on_demand_quota_code="L-6E869C2A",
        spot_quota_code="L-85EED4F7",
        image="gaudi",
        on_demand_usd_per_hour=13.10904,
        spot_usd_per_hour=3.93,
        price_date="2022-08-24",
        price_source="the published DL1 pre-training tutorial (philschmid.de/pre-training-bert-habana)",
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
        on_demand_usd_per_hour=0.768,
        spot_usd_per_hour=0.768,
        price_date="2026-11-21",
        price_source="memory of AWS's price list, unconfirmed; for want of a Spot price the On-Demand one stands in",
    ),
)

INSTANCE_TYPES = {row.name: row for row in _ROWS}


def instance_type(name: str) -> InstanceType:
    """The row called `name`. Raises UsageError with the closest name if there is none."""
    try:
        return INSTANCE_TYPES[name]
    except KeyError:
        raise UsageError(
            f"instance type '{name}' has no row{did_you_mean(name, INSTANCE_TYPES)}",
            next_step="add a row to jobs/instance_types.py, or name one that is there",
        ) from None
