"""Prices of instances, of what a stage stores (storage_price.json, kept_prices.json), and of transfer between regions
(transfer_price.json), with dates and sources.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.core.instance_types import InstanceType
from jobs.core.queues import Capacity
from jobs.core.records import Stored
from jobs.core.run import CHECKPOINTS


@dataclass(frozen=True, kw_only=True)
class Quote:
    """A price with its date and source."""

    usd_per_hour: float
    date: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The prices of one instance type."""

    on_demand: Quote
    spot: Quote

    def of(self, capacity: Capacity) -> Quote:
        return self.spot if capacity == "spot" else self.on_demand


def recorded(row: InstanceType) -> Prices:
    """Return the recorded prices of an instance type, which are used if AWS gives none."""
    return Prices(
        on_demand=Quote(usd_per_hour=row.on_demand_usd_per_hour, date=row.price_date, source=row.price_source),
        spot=Quote(usd_per_hour=row.spot_usd_per_hour, date=row.price_date, source=row.price_source),
    )


def kept_prices() -> dict[str, dict[str, Any]]:
    """Return prices of resources that outlive their stage, by CloudFormation type (fields: infra/idle_costs.toml)."""
    prices: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("kept_prices.json").read_text("utf-8"))
    return prices


GB_OF_S3 = 2**30
"""Bytes that S3 bills as a GB (https://aws.amazon.com/s3/faqs/, billing examples)."""


def stored(sizes: Mapping[str, int], old_version_bytes: int | None) -> Stored:
    """Return the size and storage cost of a run's files. `sizes` maps names below the run's folder to bytes."""
    row = json.loads(Path(__file__).with_name("storage_price.json").read_text(encoding="utf-8"))
    total = sum(sizes.values())
    return Stored(
        all_bytes=total,
        checkpoint_bytes=sum(size for name, size in sizes.items() if name.startswith(CHECKPOINTS)),
        old_version_bytes=old_version_bytes,
        usd_per_month=(total + (old_version_bytes or 0)) / GB_OF_S3 * row["usd_per_gb_month"],
        price=f"{row['usd_per_gb_month']:g} USD per GB-month, {row['date']}: {row['source']}",
    )


def transfer_text(size: int) -> str:
    """Return what AWS charges for `size` bytes between two regions through NAT, with the price of a GB, as text."""
    row = json.loads(Path(__file__).with_name("transfer_price.json").read_text(encoding="utf-8"))
    per_gb = row["usd_per_gb"] + row["nat_usd_per_gb"]
    return (
        f"{size / GB_OF_S3 * per_gb:.2f} USD at {row['usd_per_gb']:g} USD per GB and {row['nat_usd_per_gb']:g} for NAT "
        f"({row['date']}: {row['source']})"
    )
