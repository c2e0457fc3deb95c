"""Render the page of an acceptance run: each claim with its evidence, and the steps with time and cost."""

from datetime import datetime

from jobs.core.acceptance import OUTCOMES, AcceptanceRecord, StepRecord, claim_outcomes
from jobs.core.words import duration, usd
from jobs.report.rendering import Tile, render


def acceptance_page(record: AcceptanceRecord, *, now: datetime) -> str:
    """Return the page as one HTML file."""
    seen = claim_outcomes(record)
    counts = [Tile(outcome.capitalize(), str(sum(found == outcome for _, found, _ in seen))) for outcome in OUTCOMES]
    where = "the emulator on one machine" if record.emulated else f"account {record.account}, {record.region}"
    return render(
        "acceptance.html",
        charts={},
        now=now,
        title=f"Acceptance of stage {record.stage}",
        where=where,
        emulated=record.emulated,
        tiles=[*counts, Tile("Estimated cost", usd(record.spent_usd), f"limit {usd(record.max_usd)}")],
        claims=[
            (
                claim.text,
                claim.step,
                outcome,
                evidence.text if evidence else "",
                ", ".join(f"{name} {value}" for name, value in evidence.ids.items()) if evidence else "",
            )
            for claim, outcome, evidence in seen
        ],
        steps=[_row(step) for step in record.steps],
        errors=[(step.name, text) for step in record.steps for text in (step.error, step.undo_error) if text],
    )


def _row(step: StepRecord) -> tuple[str, ...]:
    lasted = ""
    if step.started_at and step.ended_at:
        lasted = duration((step.ended_at - step.started_at).total_seconds())
    started = f"{step.started_at:%Y-%m-%d %H:%M:%S}" if step.started_at else ""
    return step.name, step.outcome, started, lasted, f"{step.usd:.2f}", "yes" if step.needs_undo else ""
