"""Runs, jobs, receipts and plans as tables and as JSON."""

import sys
import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from jobs.cli.plain import print_text
from jobs.core.records import Receipt
from jobs.core.words import (
    baseline_warning,
    cost_label,
    counted,
    duration,
    json_text,
    printable,
    result_rows,
    size,
    usd,
)
from jobs.data_checks.classes import ClassReport
from jobs.money.budget import NOTHING_SPENT
from jobs.money.receipt import savings, stored_text, unproductive
from jobs.runs.job import Job, JobAttempt
from jobs.spec.code import Pack
from jobs.spec.plan import Plan

if TYPE_CHECKING:
    from jobs.runs.why import Finding

_WIDTH_WITHOUT_TERMINAL = 160
_LEAST_ROOM = 20
"""Columns that values get beside their labels, however narrow the terminal is."""
_VERDICT_STYLES = {"cause": "yellow", "unknown": "magenta", "fine": "green"}
_STATE_STYLES = {"SUCCEEDED": "green", "FAILED": "red", "CANCELLED": "magenta", "RUNNING": "cyan", "STARTING": "cyan"}


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


def show(table: "Table | Pairs", *, on: Console) -> None:
    """Print a table; in a file or a pipe without the blanks that fill its last column."""
    if on.is_terminal:
        on.print(table, crop=False)
        return
    with on.capture() as captured:
        on.print(table, crop=False)
    for line in captured.get().splitlines():
        on.out(line.rstrip())


def print_line(line: Text, *, on: Console) -> None:
    """Print a line, on a terminal wrapped between words; one longer than it is wide, an address, stays whole."""
    for part in (_wrapped(line.plain, on.width) if on.is_terminal else []) or [line.plain]:
        on.print(Text(part, style=line.style), no_wrap=True, overflow="ignore", crop=False)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def print_json(value: Any) -> None:
    print_text(json_text(value, indent=2))


class Pairs:
    """Labels on the left and values on the right; a row without a value is left out.

    A word that is longer than the terminal is wide, an address for instance, stays whole: the terminal itself goes on
    with it in the next line, and who copies it copies it all.
    """

    def __init__(self, rows: Iterable[tuple[str, str | Text]]) -> None:
        self._rows = [(printable(label), value) for label, value in rows if value]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        labels = max((cell_len(label) for label, _ in self._rows), default=0)
        room = max(_LEAST_ROOM, options.max_width - labels - 2)
        for label, value in self._rows:
            begin = Text(f"{label}{' ' * (labels - cell_len(label))}  ", style="dim")
            text, style = (value.plain, value.style) if isinstance(value, Text) else (value, "")
            for line in _wrapped(printable(text), room):
                yield Text.assemble(begin, (line, style), no_wrap=True, overflow="ignore")
                begin = Text(" " * (labels + 2))


def columns(*headings: str) -> Table:
    """Return an empty table with a heading over each column, whose cells are not wrapped."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table


def fitted(
    cells: Mapping[str, Sequence[str | Text]],
    *,
    width: int,
    leave_out: Iterable[str],
    right: Container[str] = (),
    wrapped: int = 1,
) -> Table:
    """Return a table of the columns, by their headings, that fit a width.

    Those of `leave_out` go one by one, the first one first, until the others fit: better none than one that is cut.
    Those of `right` are aligned right. The first `wrapped` wrap if not even they fit.
    """
    shown = dict(cells)
    for heading in leave_out:
        widths = [max(map(len, [name, *column])) for name, column in shown.items()]
        if sum(widths) + len(widths) - 1 <= width:
            break
        shown.pop(heading, None)
    table = columns(*shown)
    table.padding = (0, 1, 0, 0)
    for column in table.columns:
        column.justify = "right" if str(column.header) in right else "left"
    for column in table.columns[:wrapped]:
        column.no_wrap, column.overflow = False, "fold"
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    return table


def moment(time: datetime | None) -> str:
    """Return a time as text, in local time and to the second."""
    return f"{time.astimezone():%Y-%m-%d %H:%M:%S}" if time else ""


def megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB"


def state(job: Job) -> Text:
    return Text(job.state, style=_STATE_STYLES.get(job.state, "yellow"))


def plan_table(plan: Plan, *, emulated: bool) -> Pairs:
    row = plan.instance_type
    ranks = counted(plan.nproc_per_node, "rank")
    nodes = f"{plan.nnodes} x {row.name}, {ranks}{' each' if plan.nnodes > 1 else ''}"
    if plan.sweep is not None:
        nodes = f"{plan.instances} x {row.name}, {ranks} each"
    return Pairs(
        [
            ("run", plan.run_id),
            ("sweep", _sweep(plan)),
            ("queue", f"{plan.queue} ({plan.queue_reason})"),
            ("instances", nodes),
            ("accelerator", f"{plan.accelerator} ({plan.accelerator_reason})"),
            ("price", _price(plan, emulated=emulated)),
            ("limits", _limits(plan)),
            ("code", code_text(plan.pack) if plan.pack else ""),
            ("budget", _budget(plan)),
            ("waits for", ", ".join(run.run_id for run in plan.dependencies)),
            ("files", str(plan.run_location)),
            *(("note", note) for note in plan.notes),
        ]
    )


def _limits(plan: Plan) -> str:
    if plan.sweep is not None:
        hours = plan.spec.timeout_hours or plan.spec.kind.timeout_hours
        return f"{counted(plan.spec.attempts, 'attempt')} of at most {duration(3600 * hours)} for each point"
    limit = duration(plan.request["timeout"]["attemptDurationSeconds"])
    attempts = plan.request["retryStrategy"]["attempts"]
    return f"{counted(attempts, 'attempt')} of at most {limit}{' each' if attempts > 1 else ''}"


def _sweep(plan: Plan) -> str:
    """Return how many points there are to run, how many at once, and what ranks them."""
    if plan.sweep is None or plan.spec.sweep is None:
        return ""
    swept = ", ".join(plan.spec.sweep.arguments)
    at_once = "one after the other" if plan.sweep.workers == 1 else f"{plan.sweep.workers} at once"
    halving = plan.spec.sweep.halving
    rungs = f"; from step {halving.from_step} on one in {halving.factor} goes on" if halving else ""
    return f"{counted(plan.sweep.points, 'point')} of {swept}, {at_once}; one budget over all{rungs}"


def code_text(pack: Pack) -> str:
    """Return which code is submitted, in some words."""
    commit = f", commit {pack.commit[:12]}{' and changes' if pack.dirty else ''}" if pack.commit else ", in no commit"
    return f"{counted(len(pack.files), 'file')}, {size(pack.bytes)} of {pack.folder}{commit}"


def _price(plan: Plan, *, emulated: bool) -> str:
    """Return what an hour costs and who says so, of Spot too where that is what it runs on."""
    prices = plan.prices
    parts = [(f"{plan.on_demand_usd_per_hour:.2f} USD/h On-Demand", prices.on_demand)]
    if plan.capacity == "spot":
        parts.append((f"{plan.spot_usd_per_hour:.2f} USD/h Spot", prices.spot))
    first = "nothing here; in AWS " if emulated else ""
    if len({(quote.date, quote.source) for _, quote in parts}) == 1:
        together = ", ".join(text for text, _ in parts)
        return f"{first}{together} (as of {parts[0][1].date}, from {parts[0][1].source})"
    return first + ", ".join(f"{text} (as of {quote.date}, from {quote.source})" for text, quote in parts)


def _budget(plan: Plan) -> str:
    so_far = plan.resumed.spent if plan.resumed else NOTHING_SPENT
    text = plan.spec.budget.text(so_far)
    return f"{text} used until now; it saves and stops before the rest is" if text else ""


def plans_table(plans: Sequence[Plan], *, emulated: bool) -> Table:
    """Return a table of runs that are submitted together, one a row."""
    table = columns("RUN", "QUEUE", "INSTANCES", "USD/H" if not emulated else "USD/H IN AWS", "AT MOST")
    table.add_column("WAITS FOR", overflow="fold")
    names = {plan.run_id: plan.spec.name for plan in plans}
    for plan in plans:
        spot = " Spot" if plan.capacity == "spot" else ""
        limit = duration(plan.request["timeout"]["attemptDurationSeconds"])
        table.add_row(
            plan.run_id,
            plan.queue,
            f"{plan.instances} x {plan.instance_type.name}, {counted(plan.nproc_per_node, 'rank')}",
            f"{plan.usd_per_hour:.2f}{spot}",
            f"{plan.request['retryStrategy']['attempts']} x {limit}",
            ", ".join(names.get(run.run_id, run.run_id) for run in plan.dependencies),
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
        "price_date": plan.prices.of(plan.capacity).date,
        "price_source": plan.prices.of(plan.capacity).source,
        "waits_for": [run.run_id for run in plan.dependencies],
        "points": [point.record.run_id for point in plan.points],
    }


def job_json(job: Job) -> dict[str, Any]:
    """Return a job as JSON, with times in ISO 8601, UTC."""
    return {key: value for key, value in to_jsonable_python(job).items() if key != "log_streams"}


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


def show_result(table: Pairs, classes: ClassReport | None, *, on: Console) -> None:
    """Print a receipt, and below it how well each class was found, where the run is a classification."""
    show(table, on=on)
    if classes is not None:
        on.print()
        for line in classes.lines():
            print_line(Text(line), on=on)


def receipt_table(
    receipt: Receipt,
    *,
    location: str,
    state: str = "",
    ended_by: str = "",
    code: str = "",
    emulated: bool = False,
) -> Pairs:
    """Return a table of what a run took and brought; its cost is an estimate and says so.

    `state`: where the command line knows better than the container, which takes a cancellation for a reclaim.
    `emulated`: nothing is paid for here.
    """
    cost = f"{usd(receipt.on_demand_usd)} On-Demand, {usd(receipt.spot_usd)} Spot"
    if receipt.estimated_usd is not None:
        cost = usd(receipt.estimated_usd)
        if receipt.on_demand_usd > receipt.estimated_usd:
            cost += f"; the same hours On-Demand: {usd(receipt.on_demand_usd)}"
        if receipt.spot_usd < receipt.estimated_usd:
            cost += f"; the same hours on Spot: {usd(receipt.spot_usd)}"
    types = " and ".join(dict.fromkeys(attempt.instance_type for attempt in receipt.attempts))
    return Pairs(
        [
            ("run", receipt.run_id),
            ("state", state or receipt.state),
            ("ended by", ended_by),
            ("halving", receipt.halving.text if receipt.halving else ""),
            *result_rows(receipt.result),
            ("warning", baseline_warning(receipt.result)),
            ("code", code),
            ("attempts", str(len(receipt.attempts))),
            ("ran for", f"{duration(receipt.duration_seconds)}, without its wait for instances"),
            (cost_label(emulated=emulated), f"{cost} ({receipt.instance_hours:.4f} h of {types})"),
            ("saved", savings(receipt)),
            ("of the cost", unproductive(receipt)),
            ("budget", f"{receipt.budget} used" if receipt.budget else ""),
            ("stored", stored_text(receipt.stored)),
            ("price", f"as of {receipt.price_date}, from {receipt.price_source}; {receipt.estimate_note}"),
            ("files", location),
        ]
    )
