"""What an hour of an instance costs, with the day and the source of each figure: AWS's word, or the recorded row's."""

from dataclasses import dataclass

from jobs.contract.instance_types import InstanceType
from jobs.contract.queues import Capacity


@dataclass(frozen=True, kw_only=True)
class Quote:
    """One price."""

    usd_per_hour: float
    date: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The prices of an hour of one instance."""

    on_demand: Quote
    spot: Quote

    def of(self, capacity: Capacity) -> Quote:
        return self.spot if capacity == "spot" else self.on_demand


def recorded(row: InstanceType) -> Prices:
    """Return the prices of the row, which count where AWS does not answer."""
    return Prices(
        on_demand=Quote(usd_per_hour=row.on_demand_usd_per_hour, date=row.price_date, source=row.price_source),
        spot=Quote(usd_per_hour=row.spot_usd_per_hour, date=row.price_date, source=row.price_source),
    )
