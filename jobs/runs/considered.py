"""The instance types considered for a run: zones, prices, placement scores, expected cost, and which are chosen."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from jobs.aws.connection import Aws
from jobs.core.instance_types import InstanceType
from jobs.core.queues import environments
from jobs.core.stage import DeployedStage
from jobs.core.words import duration
from jobs.money.aws_prices import current_prices
from jobs.money.estimate import Estimate
from jobs.runs.batch import fallback_place
from jobs.spec.placement import Placement, may_fall_back, place
from jobs.spec.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class Considered:
    """An instance type of the stage. None means unknown, not that there is none."""

    instance_type: str
    card: str | None
    cards: int
    zones: tuple[str, ...] | None
    """Ids of the region's zones known to offer it."""
    spot_usd_per_hour: float
    on_demand_usd_per_hour: float
    card_usd_per_hour: float | None
    """Price of one card, for the capacity of the run. None for types without cards."""
    placement_score: int | None
    """EC2's rating from 1 to 10, in the best zone, of Spot capacity for all types of its compute environment together.
    EC2 rates fewer than three types low (API reference of GetSpotPlacementScores)."""
    hours: float | None
    """Expected duration of the run."""
    usd: float | None
    """Expected cost of the run."""
    is_chosen: bool
    reason: str
    region: str | None = None
    """Region of the fallback stage, if the type is considered there. Cost is at prices of the run's own region."""


def considered(
    aws: Aws, stage: DeployedStage, spec: JobSpec, estimates: Callable[[], Mapping[str, Estimate]]
) -> list[Considered]:
    """Return the stage's types for the spec's kind, in Batch's order, and then those of its fallback stage.

    Empty if there is only one. `estimates` returns the estimates of the run by instance type. Raises UsageError if the
    stage cannot run the spec.
    """
    types = stage.instance_types if spec.kind.accelerated else ()
    if len(types) < 2 and stage.fallback is None:
        return []
    chosen = place(spec, stage)
    elsewhere = may_fall_back(spec, stage, chosen.queue_name)
    if len(types) < 2 and not elsewhere:
        return []
    expected = estimates()
    found = _rows(aws, types, chosen, expected, lambda row: _reason(spec, row, chosen.instance_types))
    if elsewhere and stage.fallback is not None:
        with suppress(Exception):  # denied, unreachable or not deployed: what it has is unknown
            there, other = fallback_place(aws, stage.fallback)
            reason = f"after {duration(stage.fallback.wait_seconds)} without any above"
            rows = _rows(there, other.instance_types, chosen, expected, lambda _: reason)
            found += [replace(row, region=stage.fallback.region, is_chosen=False) for row in rows]
    return found


def _rows(
    aws: Aws,
    types: Sequence[InstanceType],
    chosen: Placement,
    expected: Mapping[str, Estimate],
    reason: Callable[[InstanceType], str],
) -> list[Considered]:
    """Return the rows of types in the connection's region."""
    capacity, nodes = chosen.queue.capacity, chosen.nnodes
    found = []
    for group in environments(types):
        score = placement_score(aws, group, nodes) if capacity == "spot" else None
        for row in group:
            prices, estimate = current_prices(aws, row), expected.get(row.name)
            price = prices.of(capacity).usd_per_hour
            found.append(
                Considered(
                    instance_type=row.name,
                    card=row.card_model,
                    cards=row.accelerators,
                    zones=row.zone_ids.get(aws.region_name),
                    spot_usd_per_hour=prices.spot.usd_per_hour,
                    on_demand_usd_per_hour=prices.on_demand.usd_per_hour,
                    card_usd_per_hour=price / row.accelerators if row.accelerators else None,
                    placement_score=score,
                    hours=estimate.seconds / 3600 if estimate else None,
                    usd=estimate.usd if estimate else None,
                    is_chosen=row in chosen.instance_types,
                    reason=reason(row),
                )
            )
    return found


def _reason(spec: JobSpec, row: InstanceType, chosen: Sequence[InstanceType]) -> str:
    if misfit := spec.resources.misfit(row):
        return misfit
    if row not in chosen:
        return "nodes need equal cards" if spec.resources.nnodes > 1 else "narrowed to one card"
    first = environments(chosen)[0]
    if row not in first:
        return "if EC2 has none above"
    return "chosen" if len(first) == 1 else "chosen by price and capacity"


def placement_score(aws: Aws, types: Sequence[InstanceType], nodes: int) -> int | None:
    """Return EC2's rating of Spot capacity for `nodes` instances in the region's best zone, or None if unknown."""
    try:
        answer = aws.quick_ec2.get_spot_placement_scores(
            InstanceTypes=[row.name for row in types],
            TargetCapacity=nodes,
            SingleAvailabilityZone=True,
            RegionNames=[aws.ec2.meta.region_name],
        )
    except Exception:  # noqa: BLE001 - denied, unreachable or over its limit: the score is unknown
        return None
    return max((item["Score"] for item in answer["SpotPlacementScores"]), default=None)
