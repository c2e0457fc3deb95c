"""The totals of a receipt over a run's attempts, and the texts that show a receipt's amounts."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from jobs.core.instance_types import instance_type
from jobs.core.records import Attempt, Receipt, Stored
from jobs.core.words import size, usd
from jobs.money.budget import duration_seconds, spent
from jobs.money.phases import usd_by_phase


def sums(attempts: Sequence[Attempt], *, on_instance: bool) -> dict[str, Any]:
    """Return the fields of a receipt that are totals over the attempts.

    `on_instance` is False if the job runs on a laptop and not on its instance type, so that it costs nothing.
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
    """Return the receipt with the end time of its Batch job, if the newest attempt has none.

    An attempt whose launcher was killed or whose node was lost has no end time, only its latest heartbeat.
    """
    *before, last = receipt.attempts
    # A node's job id starts with the id of its job.
    if last.finished_at is not None or not (last.job_id or "").startswith(job_id):
        return receipt
    attempts = [*before, last.model_copy(update={"finished_at": max(stopped_at, last.last_seen_at)})]
    on_instance = instance_type(last.instance_type).accelerator == last.accelerator
    state = "failed" if receipt.state == "running" else receipt.state
    return receipt.model_copy(update={"attempts": attempts, "state": state, **sums(attempts, on_instance=on_instance)})


def savings(receipt: Receipt) -> str:
    """Return what Spot saved, in dollars and percent; empty if it saved nothing or the savings are unknown."""
    if not receipt.saved_usd or receipt.saved_percent is None:
        return ""
    return f"{usd(receipt.saved_usd)}, {receipt.saved_percent:.0f} % of the On-Demand price"


def unknown_loss(receipts: Iterable[Receipt]) -> str:
    """Return a note if the cost of lost steps is incomplete, because a script may have repeated steps; else empty."""
    unknown = sum(attempt.may_repeat for receipt in receipts for attempt in receipt.attempts)
    if not unknown:
        return ""
    attempts = "an attempt" if unknown == 1 else f"{unknown} attempts"
    return f"not including steps that {attempts} repeated if the script did not load the restored checkpoint"


def unproductive(receipt: Receipt) -> str:
    """Return the cost of phases without progress: `starting 0.10 USD, lost steps 0.05 USD`; empty if there are none."""
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
    """Return the size and storage cost of a run's files; empty if S3 was not queried."""
    if kept is None:
        return ""
    what = f"{size(kept.all_bytes)}, {size(kept.checkpoint_bytes)} of it in checkpoints"
    free = "transfer within the region is free"
    return f"{what}{old_versions_text(kept)}: {usd(kept.usd_per_month)} per month at {kept.price}; {free}"


def old_versions_text(kept: Stored) -> str:
    """Return the size of deleted and replaced versions, beginning with a comma; empty if there are none."""
    if kept.old_version_bytes is None:
        return ", not counting old versions, which you may not list (s3:ListBucketVersions)"
    return f", and {size(kept.old_version_bytes)} of old versions" if kept.old_version_bytes else ""


def cards_name(attempt: Attempt) -> str:
    """Return the plural name of the cards that an attempt trains on: HPUs, GPUs or CPUs."""
    return {"hpu": "HPUs", "cuda": "GPUs", "cpu": "CPUs"}.get(attempt.accelerator, "cards")


def cards_text(receipt: Receipt) -> str:
    """Return how busy the newest attempt's cards are: `HPUs 93 % busy (88 % on average), 61 % of their memory in use`.

    Empty if it was not measured.
    """
    last = receipt.attempts[-1]
    if (cards := last.cards) is None:
        return ""
    busy = f"{cards.utilization_percent:.0f} % busy ({cards.mean_utilization_percent:.0f} % on average)"
    return f"{cards_name(last)} {busy}, {cards.memory_percent:.0f} % of their memory in use"
