"""Formats runs, jobs, receipts and plans as tables and JSON, and creates the consoles that print them."""

import re
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

from jobs.cli.terminal import print_text
from jobs.core.queues import types_text
from jobs.core.records import Receipt
from jobs.core.retries import EXITED_REASON
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
from jobs.money.receipt import old_versions_text, savings, unproductive
from jobs.runs.job import Job, JobAttempt
from jobs.spec.code import Pack
from jobs.spec.plan import Plan

if TYPE_CHECKING:
    from jobs.runs.considered import Considered
    from jobs.runs.why import Finding

_WIDTH_WITHOUT_TERMINAL = 160
_MIN_VALUE_WIDTH = 20
"""Minimum width of values next to their labels, even on a narrow terminal."""
# Yellow and cyan of the 16 ANSI colours are unreadable on a white background. These two are readable on any.
ORANGE = "dark_orange3"
BLUE = "deep_sky_blue3"
_VERDICT_STYLES = {"cause": ORANGE, "unknown": "magenta", "fine": "green"}
_STATE_STYLES = {"SUCCEEDED": "green", "FAILED": "red", "CANCELLED": "magenta", "RUNNING": BLUE, "STARTING": BLUE}


def stdout() -> Console:
    """Return the console for data."""
    return _console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL)


def stderr() -> Console:
    """Return the console for messages."""
    return _console(stderr=True, width=None if sys.stderr.isatty() else _WIDTH_WITHOUT_TERMINAL)


def _console(*, width: int | None, stderr: bool = False) -> Console:
    """Return a console that prints texts unchanged: `:secret:` in an ARN is not an emoji, brackets are not a style."""
    return _PrintableConsole(stderr=stderr, width=width, highlight=False, emoji=False, markup=False)


class _PrintableConsole(Console):
    """Escapes control characters, which a terminal would interpret."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def show(table: "Table | Pairs", *, on: Console) -> None:
    """Print a table. In a file or a pipe, its lines have no trailing blanks."""
    if on.is_terminal:
        on.print(table, crop=False)
        return
    with on.capture() as captured:
        on.print(table, crop=False)
    for line in captured.get().splitlines():
        on.out(line.rstrip())


def print_line(line: Text, *, on: Console) -> None:
    """Print a line, wrapped between words on a terminal. A word that is too long, e.g. an address, stays whole."""
    for part in (_wrapped(line.plain, on.width) if on.is_terminal else []) or [line.plain]:
        on.print(Text(part, style=line.style), no_wrap=True, overflow="ignore", crop=False)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def print_json(value: Any) -> None:
    print_text(json_text(value, indent=2))


class Pairs:
    """Labels on the left and values on the right, wrapped on a terminal. Rows without a value are left out.

    A word that is wider than the terminal, e.g. an address, is not broken, so that it can be copied whole.
    """

    def __init__(self, rows: Iterable[tuple[str, str | Text]]) -> None:
        self._rows = [(printable(label), value) for label, value in rows if value]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        labels = max((cell_len(label) for label, _ in self._rows), default=0)
        # In a file or a pipe each row is one line, for grep.
        room = max(_MIN_VALUE_WIDTH, options.max_width - labels - 2) if options.is_terminal else sys.maxsize
        for label, value in self._rows:
            begin = Text(f"{label}{' ' * (labels - cell_len(label))}  ", style="dim")
            text, style = (value.plain, value.style) if isinstance(value, Text) else (value, "")
            for line in _wrapped(printable(text), room):
                yield Text.assemble(begin, (line, style), no_wrap=True, overflow="ignore")
                begin = Text(" " * (labels + 2))


def columns(*headings: str) -> Table:
    """Return an empty table with these headings, whose cells do not wrap."""
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
    """Return a table with the columns that fit a width; `cells` are columns by heading.

    Columns are dropped in the order of `leave_out` until the others fit, so that no cell is cut. Columns in `right` are
    right-aligned. The first `wrapped` columns wrap if even they are too wide.
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
    """Return a time as text, in local time, to the second; empty for None."""
    return f"{time.astimezone():%Y-%m-%d %H:%M:%S}" if time else ""


def megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB"


def state(job: Job) -> Text:
    return Text(job.state, style=_STATE_STYLES.get(job.state, ORANGE))


def plan_table(plan: Plan, *, emulated: bool) -> Pairs:
    """Return a plan in detail: instances, price, limits, budget, code, notes."""
    ranks = counted(plan.nproc_per_node, "rank")
    each = " each" if plan.sweep or plan.nnodes > 1 else ""
    nodes = f"{plan.instances} x {types_text(plan.instance_types)}, {ranks}{each}"
    return Pairs(
        [
            ("run", plan.run_id),
            ("sweep", _sweep(plan)),
            ("queue", f"{plan.queue} ({plan.queue_reason})"),
            ("priority", f"{plan.spec.priority} among the team's waiting runs" if plan.spec.priority else ""),
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
    """Return the number of points and workers of a sweep, and how it halves; empty if the plan is not a sweep."""
    if plan.sweep is None or plan.spec.sweep is None:
        return ""
    swept = ", ".join(plan.spec.sweep.arguments)
    at_once = "one at a time" if plan.sweep.workers == 1 else f"{plan.sweep.workers} at a time"
    halving = plan.spec.sweep.halving
    rungs = f"; from step {halving.from_step} on, 1 of {halving.factor} continues" if halving else ""
    return f"{counted(plan.sweep.points, 'point')} of {swept}, {at_once}; one budget for all{rungs}"


def code_text(pack: Pack) -> str:
    """Return the size, folder and commit of the submitted code as text."""
    commit = f", commit {pack.commit[:12]}{' with changes' if pack.dirty else ''}" if pack.commit else ", not committed"
    return f"{counted(len(pack.files), 'file')}, {size(pack.bytes)} of {pack.folder}{commit}"


def _price(plan: Plan, *, emulated: bool) -> str:
    """Return the On-Demand price per hour, and for a Spot run also the Spot price, with date and source."""
    prices = plan.prices
    parts = [(f"{plan.on_demand_usd_per_hour:.2f} USD/h On-Demand", prices.on_demand)]
    if plan.capacity == "spot":
        parts.append((f"{plan.spot_usd_per_hour:.2f} USD/h Spot", prices.spot))
    first = "free on the emulator; in AWS " if emulated else ""
    if len({(quote.date, quote.source) for _, quote in parts}) == 1:
        together = ", ".join(text for text, _ in parts)
        return f"{first}{together} (as of {parts[0][1].date}, {_short_source(parts[0][1].source)})"
    return first + ", ".join(f"{text} (as of {quote.date}, {_short_source(quote.source)})" for text, quote in parts)


def _short_source(source: str) -> str:
    """Return a price's source without details: its first address, or the text before a colon."""
    match = re.search(r"[a-z.-]+\.[a-z]+/[\w./-]*\w", source)
    return match[0] if match else source.partition(":")[0]


def _budget(plan: Plan) -> str:
    so_far = plan.resumed.spent if plan.resumed else NOTHING_SPENT
    text = plan.spec.budget.text(so_far)
    return f"{text} used so far; the run saves and stops before it uses up the rest" if text else ""


def plans_table(plans: Sequence[Plan], *, emulated: bool) -> Table:
    """Return a table of runs that are submitted together, one per row."""
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


def considered_table(rows: "Sequence[Considered]") -> Table:
    """Return a table of the instance types considered for a run, at most 80 characters wide. Prices are in USD."""
    cells = {
        "TYPE": [row.instance_type for row in rows],
        "ZONES": [" ".join(filter(None, (row.region, _short_zones(row.zones)))) for row in rows],
        "SPOT/H": [f"{row.spot_usd_per_hour:.2f}" for row in rows],
        "ON-D./H": [f"{row.on_demand_usd_per_hour:.2f}" for row in rows],
        "CARD/H": [_known(row.card_usd_per_hour, ".2f") for row in rows],
        "SCORE": [_known(row.placement_score, "d") for row in rows],
        "HOURS": [_known(row.hours, ".1f") for row in rows],
        "USD": [_known(row.usd, ".2f") for row in rows],
    }
    shown = {name: column for name, column in cells.items() if name not in ("HOURS", "USD") or {*column} != {"unknown"}}
    table = columns(*shown)
    table.width = 80
    for column in table.columns[2:]:
        column.justify = "right"
    table.add_column("WHY", overflow="fold")
    for row, *values in zip(rows, *shown.values(), strict=True):
        table.add_row(*values, Text(row.reason, style="" if row.is_chosen else "dim"))
    return table


def show_considered(rows: "Sequence[Considered]", *, on: Console, emulated: bool) -> None:
    """Print the instance types considered for a run, if there are several."""
    if rows:
        on.print()
        show(considered_table(rows), on=on)
        if emulated:
            on.print("on the emulator, prices are the recorded ones, and scores are one recorded answer of EC2")


def _known(value: float | None, form: str) -> str:
    return "unknown" if value is None else f"{value:{form}}"


def _short_zones(zones: Sequence[str] | None) -> str:
    """Return ids of one region's zones: `az1,2,4`."""
    if zones is None:
        return "unknown"
    return f"az{','.join(zone.rpartition('az')[2] for zone in zones)}"


def plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "run_id": plan.run_id,
        "location": str(plan.run_location),
        "queue": plan.queue,
        "capacity": plan.capacity,
        "instance_type": plan.instance_type.name,
        "instance_types": [row.name for row in plan.instance_types],
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
    """Return a job as JSON, with times in ISO 8601 and UTC."""
    return {key: value for key, value in to_jsonable_python(job).items() if key != "log_streams"}


def attempts_table(attempts: Iterable[JobAttempt]) -> Table:
    """Return a table of attempts, with a column of reasons if any attempt has one."""
    attempts = list(attempts)
    # Batch gives EXITED_REASON for every container that exits; the exit code has its own column.
    reasons = ["" if attempt.reason == EXITED_REASON else printable(attempt.reason) for attempt in attempts]
    table = columns("ATTEMPT", "STARTED", "STOPPED", "EXIT CODE")
    if any(reasons):
        table.add_column("REASON", overflow="fold")
    for attempt, reason in zip(attempts, reasons, strict=True):
        table.add_row(
            str(attempt.number),
            moment(attempt.started_at),
            moment(attempt.stopped_at) or "running",
            "" if attempt.exit_code is None else str(attempt.exit_code),
            *([reason] if any(reasons) else []),
        )
    return table


def findings_table(findings: "Iterable[Finding]") -> Table:
    """Return a table of what keeps a job from starting, followed by the other checks."""
    table = columns("", "CHECKED")
    table.add_column("FOUND", overflow="fold")
    for finding in findings:
        text = Text(printable(finding.text))
        if finding.next_step:
            text.append(f"\nnext: {finding.next_step}", style="dim")
        table.add_row(Text(finding.verdict, style=_VERDICT_STYLES[finding.verdict]), finding.about, text)
    return table


def show_result(table: Pairs, classes: ClassReport | None, *, on: Console) -> None:
    """Print a receipt, followed by the results per class if the run is a classification."""
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
    """Return a receipt as a table: result, attempts, time, estimated cost, storage.

    `state` replaces the receipt's state, because the container cannot tell a cancellation from a reclaim. `emulated`:
    the run cost nothing.
    """
    cost = f"{usd(receipt.on_demand_usd)} On-Demand, {usd(receipt.spot_usd)} Spot"
    if receipt.estimated_usd is not None:
        cost = usd(receipt.estimated_usd)
        if receipt.on_demand_usd > receipt.estimated_usd:
            cost += f"; On-Demand {usd(receipt.on_demand_usd)}"
        if receipt.spot_usd < receipt.estimated_usd:
            cost += f"; on Spot {usd(receipt.spot_usd)}"
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
            ("ran for", f"{duration(receipt.duration_seconds)}, not counting the wait for instances"),
            (cost_label(emulated=emulated), f"{cost} ({receipt.instance_hours:.4f} h of {types})"),
            ("saved", savings(receipt)),
            ("without steps", unproductive(receipt)),
            ("budget", f"{receipt.budget} used" if receipt.budget else ""),
            ("stored", _stored(receipt)),
            ("price", f"as of {receipt.price_date}, {_short_source(receipt.price_source)}; {receipt.estimate_note}"),
            ("files", location),
        ]
    )


def _stored(receipt: Receipt) -> str:
    """Return the size of a run's files and what they cost; empty if S3 was not queried."""
    kept = receipt.stored
    if kept is None:
        return ""
    checkpoints = f", including {size(kept.checkpoint_bytes)} of checkpoints" if kept.checkpoint_bytes else ""
    what = f"{size(kept.all_bytes)}{checkpoints}{old_versions_text(kept)}"
    return f"{what}: {usd(kept.usd_per_month)} a month at {kept.price.partition(',')[0]}"
