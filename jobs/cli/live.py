"""Shows a job while it runs: a progress bar, the log above it, and changes of the job's state."""

import re
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TaskProgressColumn, TimeElapsedColumn
from rich.progress import TextColumn as Column
from rich.text import Text

from jobs.cli import tables
from jobs.cli.tables import stderr, stdout
from jobs.cli.terminal import print_text
from jobs.core.errors import Detached
from jobs.core.output import LAST_LINE
from jobs.core.output import Progress as ProgressLine
from jobs.core.records import Receipt
from jobs.core.retries import EXITED_REASON
from jobs.core.words import cost_label, duration, json_text, log_text, printable
from jobs.money.estimate import forecast, money_text, time_text
from jobs.money.receipt import cards_text
from jobs.runs.job import Job
from jobs.runs.logs import LogLine

REPORT_SECONDS = 60.0
"""Interval at which a line about accelerators and cost is printed if there is no terminal."""

_TAIL_LINES = 15
_REMEMBERED_LINES = 500


class Repeats:
    """Finds the log lines that the launcher repeats after a failure: the last lines of the rank that failed.

    They help in CloudWatch, but are redundant for a person who has just read them.
    """

    _REPEAT = re.compile(LAST_LINE.format(rank=r"(?P<rank>\d+)", node=r"\d+", line="(?P<line>.*)"), re.DOTALL)

    def __init__(self) -> None:
        self._seen: deque[str] = deque(maxlen=_REMEMBERED_LINES)

    def repeated(self, text: str) -> str | None:
        """Return the line that `text` repeats; None if it repeats none of the newest lines."""
        match = self._REPEAT.fullmatch(text)
        if match and {match["line"], f"[rank {match['rank']}] {match['line']}"} & set(self._seen):
            return match["line"]
        self._seen.append(text)
        return None


class LiveView:
    """Shows what `jobs.runs.logs.follow` reports, until it is closed.

    On a terminal, progress lines and receipts update a panel, and the other lines scroll above it. Elsewhere every line
    is printed, and once a minute a line on stderr reports how busy the accelerators are and what the run costs.
    """

    def __init__(
        self,
        *,
        show_log: bool,
        emulated: bool = False,
        as_json: bool = False,
        log_to: TextIO | None = None,
        hold_errors: bool = False,
    ) -> None:
        """`log_to`: stream for the log's lines, by default stdout. `emulated`: the run costs nothing.

        `hold_errors` delays the log's last lines that begin with `error:` until the view is closed, so that
        `drop_error` can remove the error that the command itself reports.
        """
        self._show_log = show_log
        self._log = log_to or sys.stdout
        self._as_json = as_json
        self._console = stderr()
        self._emulated = emulated
        self._bar: Progress | None = None
        self._live: Live | None = None
        self._task: TaskID | None = None
        self._attempt = 0
        self._progress: ProgressLine | None = None
        self._first: tuple[int, datetime] | None = None
        self._pace: float | None = None
        self._receipt: Receipt | None = None
        self._reported_at = time.monotonic()
        self._repeats = Repeats()
        self._hold_errors = hold_errors
        self._held: list[LogLine] = []
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines of the log without progress; after a failure, the last lines of the rank that failed."""
        self._tail_repeats = False

    def __enter__(self) -> "LiveView":
        if self._console.is_terminal:
            self._bar = Progress(
                Column("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._live = Live(
                get_renderable=self._panel,
                console=self._console,
                # If stdout is a file or a pipe, the log belongs there and not above the panel.
                redirect_stdout=sys.stdout.isatty(),
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._print_held()
        if self._live is not None:
            self._live.stop()

    def drop_error(self, reason: str) -> None:
        """Drop held lines that report an error with this reason."""
        self._held = [line for line in self._held if line.text != f"error: {reason}"]

    def show(self, event: Job | LogLine | Receipt) -> None:
        """Show a change of the job, a line of its log, or its newest receipt."""
        if isinstance(event, LogLine):
            self._show_line(event)
        elif isinstance(event, Receipt):
            self._receipt = event
            self._report_if_due()
        else:
            self._console.print(Text(f"[{event.state}] {_state_text(event)}", style="bold"))

    def _panel(self) -> Group:
        """Return the panel below the log: the bar, the newest progress note, and the figures."""
        lines = [self._progress.note] if self._progress and self._progress.note else []
        lines += self._figures()
        return Group(
            *([self._bar] if self._bar and self._bar.tasks else []), *(Text(printable(line)) for line in lines)
        )

    def _figures(self) -> list[str]:
        """Return lines about accelerator utilization, cost and time left, as far as they are known."""
        if self._receipt is None or self._receipt.state != "running":
            return []
        found = forecast(self._receipt.attempts, self._progress, self._pace, now=datetime.now(timezone.utc))
        money = f"{f'{cost_label(emulated=True)} ' if self._emulated else ''}{money_text(found)}"
        in_progress = self._progress is not None and self._progress.time_left  # our own kinds log the time left
        money = "; ".join(filter(None, (money, "" if in_progress else time_text(found))))
        return [text for text in (cards_text(self._receipt), money) if text]

    def _report_if_due(self) -> None:
        if self._live is not None or self._as_json or time.monotonic() - self._reported_at < REPORT_SECONDS:
            return
        self._reported_at = time.monotonic()
        for line in self._figures():
            self._console.print(Text(line), soft_wrap=True)

    def _show_line(self, line: LogLine) -> None:
        progress = ProgressLine.parse(line.text)
        if progress is None:
            repeated = self._repeats.repeated(line.text)
            if repeated is not None and not self._tail_repeats:
                self.tail.clear()
            self._tail_repeats = repeated is not None
            self.tail.append(line.text if repeated is None else repeated)
            if repeated is not None and not self._as_json:
                return
        else:
            self._record_pace(progress, line)
            if self._bar is not None:
                self._advance(self._bar, progress, line.attempt)
                return
        if not self._show_log:
            return
        if self._hold_errors and line.text.startswith("error: "):
            self._held.append(line)
            return
        self._print_held()
        self._print(line)

    def _print_held(self) -> None:
        for line in self._held:
            self._print(line)
        self._held.clear()

    def _print(self, line: LogLine) -> None:
        if self._as_json:
            print_text(line_json(line), to=self._log)
        elif self._bar is not None and self._log.isatty():
            tables.print_line(Text(prefix(line) + log_text(line.text)), on=self._console)
        else:
            print_text(prefix(line) + log_text(line.text), to=self._log)

    def _record_pace(self, progress: ProgressLine, line: LogLine) -> None:
        """Record the step, and the average seconds per step since this attempt's first progress line."""
        if self._first is None or line.attempt != self._attempt:
            self._first, self._pace = (progress.step, line.time), None
        step, at = self._first
        if progress.step > step:
            self._pace = max(0.0, (line.time - at).total_seconds()) / (progress.step - step)
        self._progress = progress
        if self._bar is None:
            self._attempt = line.attempt

    def _advance(self, bar: Progress, progress: ProgressLine, attempt: int) -> None:
        if self._task is None or attempt != self._attempt:
            if self._task is not None:
                bar.remove_task(self._task)
            self._attempt = attempt
            self._task = bar.add_task(f"attempt {attempt}", total=progress.total_steps)
        bar.update(self._task, completed=progress.step, total=progress.total_steps)


@contextmanager
def detaching(run_id: str) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into Detached, whose message names the command that follows the run again."""
    before = signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    try:
        yield
    except KeyboardInterrupt:
        raise Detached(
            f"detached from {run_id}, which continues",
            next_step=f"trainyard logs {run_id} --follow, or trainyard cancel {run_id}",
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def prefix(line: LogLine) -> str:
    """Return the prefix that names the node, or the worker of a sweep, that logged a line; empty for one node."""
    return "" if line.node is None else f"[{'worker' if line.of_sweep else 'node'} {line.node}] "


def line_json(line: LogLine) -> str:
    """Return a log line as a JSON object on one line."""
    return json_text(
        {"time": line.time.isoformat(), "attempt": line.attempt, "node": line.node, "text": line.text},
    )


def print_line(line: LogLine, *, as_json: bool) -> None:
    """Print a log line on stdout, wrapped between words if stdout is a terminal."""
    if not as_json and sys.stdout.isatty():
        tables.print_line(Text(prefix(line) + log_text(line.text)), on=stdout())
    else:
        print_text(line_json(line) if as_json else prefix(line) + log_text(line.text))


def print_heading(console: Console, attempt: int, *, origin: str) -> None:
    """Print the heading above an attempt's log. `origin`: how its job continued the run; empty for the first job."""
    console.print(Text(f"attempt {attempt}{f', {origin}' if origin else ''}", style="bold"))


def _state_text(job: Job) -> str:
    """Return what a job waits for, or its attempt and how the last attempt ended."""
    attempt = f"attempt {job.attempt} of {job.max_attempts}"
    if job.origin:
        attempt = f"{job.origin}, {attempt} of this job"
    if job.nodes_text:
        others = f"(why the others wait: trainyard why {job.run_id})" if job.has_waiting_nodes else "still running"
        attempt = f"{attempt}, {job.nodes_text} {others}"
    last = job.attempts[-1] if job.attempts else None
    ended = f"; attempt {last.number} ended: {last.reason or last.exit_code}" if last and last.stopped_at else ""
    if job.state == "RUNNABLE":
        return f"waits in queue {job.queue} for an instance, {attempt}{ended} (details: trainyard why {job.run_id})"
    if job.state == "PENDING" and job.depends_on:
        return f"waits for another run to end (details: trainyard why {job.run_id})"
    if job.ended:
        took = duration((job.stopped_at - job.created_at).total_seconds()) if job.stopped_at else "unknown time"
        has_reason = job.state == "FAILED" and job.reason not in ("", EXITED_REASON)
        return f"{took} after its submission, {attempt}{f': {job.reason}' if has_reason else ''}"
    return f"{attempt}{ended if job.state in ('SUBMITTED', 'PENDING', 'STARTING') else ''}"
