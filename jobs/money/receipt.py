"""What the attempts of a run took, added up for its receipt."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from jobs.core.instance_types import instance_type
from jobs.core.records import Attempt, Receipt, Stored
from jobs.core.words import size, usd
from jobs.money.budget import duration_seconds, spent
from jobs.money.phases import usd_by_phase


def sums(attempts: Sequence[Attempt], *, on_instance: bool) -> dict[str, Any]:
    """Return the fields of a receipt that are sums over the attempts.

    `on_instance` is False if the job runs on another machine than the instance type it names: nobody has paid for it.
    """
    so_far = spent(attempts)
    on_demand_usd = spent(attempts, all_on="on-demand").usd
    by_phase = usd_by_phase(attempts)
    saved = on_instance and on_demand_usd
    return {
        "duration_seconds": round(sum(duration_seconds(attempt) for attempt in attempts), 3),
        "instance_hours": round(so_far.instance_hours, 6),
        "on_demand_usd": round(on_demand_usd, 6),
        "spot_usd": round(spent(attempts, all_on="spot").usd, 6),
        "estimated_usd": round(so_far.usd, 6),
        "saved_usd": round(on_demand_usd - so_far.usd, 6) if saved else None,
        "saved_percent": round(100 * (1 - so_far.usd / on_demand_usd), 1) if saved else None,
        "waiting_usd": round(by_phase["waiting"], 6),
        "starting_usd": round(by_phase["starting"], 6),
        "compiling_usd": round(by_phase["compiling"], 6),
        "saving_usd": round(by_phase["saving"], 6),
        "lost_usd": round(by_phase["lost"], 6),
        "idle_usd": round(by_phase["idle"], 6),
    }


def with_end(receipt: Receipt, *, job_id: str, stopped_at: datetime) -> Receipt:
    """Return the receipt of a run whose newest attempt left no end, with the one that Batch gives its job.

    The launcher was killed, or its node was lost: nobody could write down more than a heartbeat.
    """
    *before, last = receipt.attempts
    if last.finished_at is not None or not (last.job_id or "").startswith(job_id):  # a node's begins with its job's
        return receipt
    attempts = [*before, last.model_copy(update={"finished_at": max(stopped_at, last.last_seen_at)})]
    on_instance = instance_type(last.instance_type).accelerator == last.accelerator
    state = "failed" if receipt.state == "running" else receipt.state
    return receipt.model_copy(update={"attempts": attempts, "state": state, **sums(attempts, on_instance=on_instance)})


def savings(receipt: Receipt) -> str:
    """Return what Spot saved, in dollars and per cent; empty where it saved nothing, or the receipt does not say."""
    if not receipt.saved_usd or receipt.saved_percent is None:
        return ""
    return f"{usd(receipt.saved_usd)}, {receipt.saved_percent:.0f} % of the On-Demand price"


def unknown_loss(receipts: Iterable[Receipt]) -> str:
    """Return what the lost dollars leave out, since nobody knows it; empty if that is nothing."""
    unknown = sum(attempt.may_repeat for receipt in receipts for attempt in receipt.attempts)
    if not unknown:
        return ""
    whose = "an attempt" if unknown == 1 else f"{unknown} attempts"
    return f"without what {whose} did again if the script did not read the checkpoint that was put back"


def unproductive(receipt: Receipt) -> str:
    """Return what brought no step: `starting 0.10 USD, lost steps 0.05 USD`; empty if nothing did."""
    parts = {
        "waiting": receipt.waiting_usd,
        "starting": receipt.starting_usd,
        "compiling": receipt.compiling_usd,
        "saving": receipt.saving_usd,
        "lost steps": receipt.lost_usd,
        "idle cards": receipt.idle_usd,
    }
    found = ", ".join(f"{name} {usd(amount)}" for name, amount in parts.items() if amount)
    return "; ".join(filter(None, [found, unknown_loss([receipt])]))


def stored_text(kept: Stored | None) -> str:
    """Return what a run's files take and cost; empty where nobody has asked S3."""
    if kept is None:
        return ""
    what = f"{size(kept.all_bytes)}, {size(kept.checkpoint_bytes)} of it checkpoints"
    free = "old versions apart, and transfer within the region costs nothing"
    return f"{what}: {usd(kept.usd_per_month)} a month at {kept.price}; {free}"


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
