"""What is known of a run while it goes on: how busy its cards are, what it has cost, and what it will at its end.

The end is where its steps end at the pace that the running attempt has had: what comes after the last step, and what a
reclaim would take, are not foreseen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from jobs.core.log_lines import Progress
from jobs.core.records import Attempt, Receipt
from jobs.core.words import time_left, usd
from jobs.money.budget import attempt_usd_per_hour, spent

UNSEEN_SECONDS = 120.0
"""An attempt counts up to now where its last heartbeat is no older than that: they come every half minute."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The figures of a run that goes on; dollars are instance hours times recorded prices: an estimate."""

    seconds_left: float | None
    """Until its last step; None: nobody knows."""
    usd: float
    on_demand_usd: float
    """The same hours at the On-Demand price."""
    usd_at_end: float | None
    on_demand_usd_at_end: float | None


def seconds_per_step(attempt: Attempt, progress: Progress, *, at: datetime) -> float | None:
    """Return the pace of an attempt that was at a step then; None before it has made one."""
    steps = progress.step - attempt.began_at_step
    if attempt.training_started_at is None or steps < 1:
        return None
    return max(0.0, (at - attempt.training_started_at).total_seconds()) / steps


def outlook(attempts: Sequence[Attempt], progress: Progress | None, pace: float | None, *, now: datetime) -> Outlook:
    """Return the figures of a run that is at `progress`. `pace`: its seconds for a step, where they are known."""
    *before, last = attempts
    unseen = (now - last.last_seen_at).total_seconds()
    if last.finished_at is None and 0 < unseen < UNSEEN_SECONDS:
        last = last.model_copy(update={"last_seen_at": last.last_seen_at + timedelta(seconds=unseen)})
    so_far, on_demand = spent([*before, last]), spent([*before, last], all_on="on-demand")
    left = None
    if progress is not None and pace is not None and last.finished_at is None:
        left = pace * max(0, progress.total_steps - progress.step)
    hours = (left or 0.0) / 3600 * last.nnodes
    on_demand_usd_per_hour = attempt_usd_per_hour(last, on="on-demand")
    return Outlook(
        seconds_left=left,
        usd=so_far.usd,
        on_demand_usd=on_demand.usd,
        usd_at_end=None if left is None else so_far.usd + hours * attempt_usd_per_hour(last),
        on_demand_usd_at_end=None if left is None else on_demand.usd + hours * on_demand_usd_per_hour,
    )


def cards_name(attempt: Attempt) -> str:
    """Return what people call what an attempt trains on."""
    return {"hpu": "HPUs", "cuda": "GPUs", "cpu": "CPUs"}.get(attempt.accelerator, "cards")


def cards_text(receipt: Receipt) -> str:
    """Return how busy the newest attempt's cards are: `HPUs 93 % busy (88 % on average), 61 % of their memory in use`.

    Empty where nobody could say.
    """
    last = receipt.attempts[-1]
    if (cards := last.cards) is None:
        return ""
    busy = f"{cards.utilization_percent:.0f} % busy ({cards.mean_utilization_percent:.0f} % on average)"
    return f"{cards_name(last)} {busy}, {cards.memory_percent:.0f} % of their memory in use"


def money_text(found: Outlook, *, ended: bool = False) -> str:
    """Return what it costs: `0.12 USD so far, 0.40 USD at the end; On-Demand 0.41 and 1.33 USD`."""
    parts = [usd(found.usd) if ended else f"{usd(found.usd)} so far"]
    if found.usd_at_end is not None:
        parts.append(f"{usd(found.usd_at_end)} at the end")
    text = ", ".join(parts)
    if found.on_demand_usd <= found.usd:
        return text
    dearer = usd(found.on_demand_usd)
    if found.on_demand_usd_at_end is not None:
        dearer = f"{dearer.removesuffix(' USD')} and {usd(found.on_demand_usd_at_end)}"
    return f"{text}; On-Demand {dearer}"


def time_text(found: Outlook) -> str:
    """Return the time until the last step; empty where nobody knows it."""
    return "" if found.seconds_left is None else f"{time_left(found.seconds_left)} to the last step"
