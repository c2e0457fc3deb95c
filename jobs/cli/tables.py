"""Runs, jobs, receipts and plans as tables and as JSON."""

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from jobs.client.job import Job, JobAttempt
from jobs.contract.budget import NOTHING_SPENT
from jobs.contract.display import json_text, printable
from jobs.contract.plan import Plan
from jobs.contract.records import Receipt

if TYPE_CHECKING:
    from jobs.client.why import Finding

_WIDTH_WITHOUT_TERMINAL = 160
_RESULT_LABELS = {
    "eval_accuracy": "accuracy",
    "eval_majority_accuracy": "majority class",
    "eval_f1": "F1",
    "eval_loss": "loss",
    "eval_samples": "held-out examples",
    "train_samples_per_second": "samples/s",
}
"""Results by the words people use; every other one is shown by its own key."""

_VERDICT_STYLES = {"cause": "yellow", "unknown": "magenta", "fine": "green"}
_STATE_STYLES = {"SUCCEEDED": "green", "FAILED": "red", "RUNNING": "cyan", "STARTING": "cyan"}


def stdout() -> Console:
    """Return the console for data."""
    return _console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL)


def stderr() -> Console:
    """Return the console for whatever is said about the data."""
    return _console(stderr=True, width=None if sys.stderr.isatty() else _WIDTH_WITHOUT_TERMINAL)


def _console(*, width: int | None, stderr: bool = False) -> Console:
    """Return a console that prints texts as they are.

    `:secret:` in an ARN is no emoji, and brackets in a path are no style.
    """
    return _PrintableConsole(stderr=stderr, width=width, highlight=False, emoji=False, markup=False)


class _PrintableConsole(Console):
    """Shows no control character of a text, whoever wrote it: a terminal would obey."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def show(table: Table, *, on: Console) -> None:
    """Print a table; in a file or a pipe without the blanks that fill its last column."""
    if on.is_terminal:
        on.print(table)
        return
    with on.capture() as captured:
        on.print(table)
    for line in captured.get().splitlines():
        on.out(line.rstrip())


def print_json(value: Any) -> None:
    print(json_text(value, indent=2))


def pairs(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table with labels on the left and values on the right; a row without a value is left out."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        if value:
            table.add_row(printable(label), Text(printable(value)))
    return table


def columns(*headings: str) -> Table:
    """Return an empty table with a heading over each column, whose cells are not wrapped."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table


def duration(seconds: float) -> str:
    """Return a duration as text: `48 s`, `12 min 05 s`, `3 h 20 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def moment(time: datetime | None) -> str:
    """Return a time as text, in local time and to the second."""
    return f"{time.astimezone():%Y-%m-%d %H:%M:%S}" if time else ""


def megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB"


def usd(amount: float) -> str:
    return f"{amount:.2f} USD" if amount >= 0.1 or amount == 0 else f"{amount:.4f} USD"


def state(job: Job) -> Text:
    return Text(job.state, style=_STATE_STYLES.get(job.state, "yellow"))


def plan_table(plan: Plan, *, embedded: bool) -> Table:
    row = plan.instance_type
    nodes = f"{plan.nnodes} x {row.name}, {plan.nproc_per_node} ranks{' each' if plan.nnodes > 1 else ''}"
    price = "nothing here; in AWS " if embedded else ""
    price += f"{plan.on_demand_usd_per_hour:.2f} USD/h On-Demand"
    if plan.capacity == "spot":
        price += f", {plan.spot_usd_per_hour:.2f} USD/h Spot"
    limit = duration(plan.request["timeout"]["attemptDurationSeconds"])
    return pairs(
        [
            ("run", plan.run_id),
            ("queue", f"{plan.queue} ({plan.queue_reason})"),
            ("instances", nodes),
            ("accelerator", f"{plan.accelerator} ({plan.accelerator_reason})"),
            (
                "price",
                f"{price} (as of {row.price_date}, from {row.price_source})",
            ),
            ("limits", f"{plan.request['retryStrategy']['attempts']} attempts of at most {limit} each"),
            ("budget", _budget(plan)),
            ("waits for", ", ".join(run.run_id for run in plan.awaited)),
            ("files", str(plan.run_location)),
            *(("note", note) for note in plan.notes),
        ]
    )


def _budget(plan: Plan) -> str:
    so_far = plan.continued.spent if plan.continued else NOTHING_SPENT
    text = plan.spec.budget.text(so_far)
    return f"{text} used until now; it saves and stops before the rest is" if text else ""


def plans_table(plans: Sequence[Plan], *, embedded: bool) -> Table:
    """Return a table of runs that are submitted together, one a row."""
    table = columns("RUN", "QUEUE", "INSTANCES", "USD/H" if not embedded else "USD/H IN AWS", "AT MOST")
    table.add_column("WAITS FOR", overflow="fold")
    names = {plan.run_id: plan.spec.name for plan in plans}
    for plan in plans:
        spot = " Spot" if plan.capacity == "spot" else ""
        limit = duration(plan.request["timeout"]["attemptDurationSeconds"])
        table.add_row(
            plan.run_id,
            plan.queue,
            f"{plan.nnodes} x {plan.instance_type.name}, {plan.nproc_per_node} rank{'s' * (plan.nproc_per_node > 1)}",
            f"{plan.usd_per_hour:.2f}{spot}",
            f"{plan.request['retryStrategy']['attempts']} x {limit}",
            ", ".join(names.get(run.run_id, run.run_id) for run in plan.awaited),
        )
    return table


def plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "run_id": plan.run_id,
        "location": str(plan.run_location),
        "queue": plan.queue,
        "capacity": plan.capacity,
        "instance_type": plan.instance_type.name,
        "nnodes": plan.nnodes,
        "nproc_per_node": plan.nproc_per_node,
        "on_demand_usd_per_hour": plan.on_demand_usd_per_hour,
        "spot_usd_per_hour": plan.spot_usd_per_hour,
        "usd_per_hour": plan.usd_per_hour,
        "price_date": plan.instance_type.price_date,
        "price_source": plan.instance_type.price_source,
        "waits_for": [run.run_id for run in plan.awaited],
    }


def jobs_table(jobs: Iterable[Job]) -> Table:
    table = columns("RUN", "STATE", "ATTEMPT", "TEAM", "QUEUE", "SUBMITTED", "TOOK")
    for job in jobs:
        took = duration((job.stopped_at - job.created_at).total_seconds()) if job.stopped_at else ""
        table.add_row(
            job.run_id,
            state(job),
            f"{job.attempt} of {job.max_attempts}",
            job.team,
            job.queue,
            moment(job.created_at),
            took,
        )
    return table


def job_json(job: Job) -> dict[str, Any]:
    """Return a job as JSON, with times in ISO 8601, UTC."""
    fields = dataclasses.asdict(job)
    del fields["log_streams"]
    return {key: _with_iso_times(value) for key, value in fields.items()}


def _with_iso_times(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {key: _with_iso_times(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_iso_times(item) for item in value]
    return value


def attempts_table(attempts: Iterable[JobAttempt]) -> Table:
    table = columns("ATTEMPT", "STARTED", "STOPPED", "EXIT CODE")
    table.add_column("REASON", overflow="fold")
    for attempt in attempts:
        table.add_row(
            str(attempt.number),
            moment(attempt.started_at),
            moment(attempt.stopped_at) or "runs",
            "" if attempt.exit_code is None else str(attempt.exit_code),
            printable(attempt.reason),
        )
    return table


def findings_table(findings: "Iterable[Finding]") -> Table:
    """Return a table of what keeps a job from starting, and below it of what was looked at besides."""
    table = columns("", "LOOKED AT")
    table.add_column("FOUND", overflow="fold")
    for finding in findings:
        text = Text(printable(finding.text))
        if finding.next_step:
            text.append(f"\nNext: {finding.next_step}", style="dim")
        table.add_row(Text(finding.verdict, style=_VERDICT_STYLES[finding.verdict]), finding.about, text)
    return table


def receipt_table(receipt: Receipt, *, location: str, ended_by: str = "") -> Table:
    """Return a table of what a run took and brought; its cost is an estimate and says so."""
    cost = f"{usd(receipt.on_demand_usd)} On-Demand, {usd(receipt.spot_usd)} Spot"
    if receipt.estimated_usd is not None:
        cost = f"{usd(receipt.estimated_usd)}; all of it {cost}"
    types = " and ".join(dict.fromkeys(attempt.instance_type for attempt in receipt.attempts))
    return pairs(
        [
            ("run", receipt.run_id),
            ("state", receipt.state),
            ("ended by", ended_by),
            *result_rows(receipt.result),
            ("attempts", str(len(receipt.attempts))),
            ("duration", duration(receipt.duration_seconds)),
            ("estimated cost", f"{cost} ({receipt.instance_hours:.4f} h of {types})"),
            ("budget", f"{receipt.budget} used" if receipt.budget else ""),
            ("price", f"as of {receipt.price_date}, from {receipt.price_source}"),
            ("note", receipt.estimate_note),
            ("files", location),
        ]
    )


def result_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the final metrics as rows of a table, the well-known ones first."""
    keys = [*(key for key in _RESULT_LABELS if key in result), *(key for key in result if key not in _RESULT_LABELS)]
    return [(_RESULT_LABELS.get(key, key), _figure(result[key])) for key in keys]


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)
