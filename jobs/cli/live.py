"""The live view of a job that runs: a progress bar, the log above it, and the changes of its state."""

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
from jobs.cli.plain import print_text
from jobs.cli.tables import stderr, stdout
from jobs.core.errors import Detached
from jobs.core.output import Progress as ProgressLine
from jobs.core.records import Receipt
from jobs.core.retries import EXITED_REASON
from jobs.core.words import cost_label, duration, json_text, log_text, printable
from jobs.money.estimate import forecast, money_text, time_text
from jobs.money.receipt import cards_text
from jobs.runs.job import Job
from jobs.runs.logs import LogLine

SAY_SECONDS = 60.0
"""Where there is no terminal, a line about cards and money comes as often as that."""

_TAIL_LINES = 15


class LiveView:
    """Shows what `jobs.runs.follow.follow` yields, until it is closed.

    On a terminal, lines of progress and the receipt feed a panel and the other lines pass above it. Elsewhere every
    line is printed, and now and then one on stderr with how busy the cards are and what it costs.
    """

    def __init__(
        self, *, show_log: bool, emulated: bool = False, as_json: bool = False, log_to: TextIO | None = None
    ) -> None:
        """`log_to`: where the log's lines go; stdout by default. `emulated`: nothing is paid for here."""
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
        self._said_at = time.monotonic()
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines of the log that were no progress."""

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
                # Where stdout is a file or a pipe, the log belongs there and not above the panel.
                redirect_stdout=sys.stdout.isatty(),
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, event: Job | LogLine | Receipt) -> None:
        if isinstance(event, LogLine):
            self._line(event)
        elif isinstance(event, Receipt):
            self._receipt = event
            self._say_now_and_then()
        else:
            self._state(event)

    def _panel(self) -> Group:
        """Return what stands below the log: the bar, what the job says of its step, its cards, and its money."""
        lines = [self._progress.note] if self._progress and self._progress.note else []
        lines += self._figures()
        return Group(
            *([self._bar] if self._bar and self._bar.tasks else []), *(Text(printable(line)) for line in lines)
        )

    def _figures(self) -> list[str]:
        """Return how busy the cards are, what it costs, and how long it still takes; what is known of that."""
        if self._receipt is None or self._receipt.state != "running":
            return []
        found = forecast(self._receipt.attempts, self._progress, self._pace, now=datetime.now(timezone.utc))
        money = f"{f'{cost_label(emulated=True)} ' if self._emulated else ''}{money_text(found)}"
        told = self._progress is not None and self._progress.time_left  # our own kinds say it themselves
        money = "; ".join(filter(None, (money, "" if told else time_text(found))))
        return [text for text in (cards_text(self._receipt), money) if text]

    def _say_now_and_then(self) -> None:
        if self._live is not None or self._as_json or time.monotonic() - self._said_at < SAY_SECONDS:
            return
        self._said_at = time.monotonic()
        for line in self._figures():
            self._console.print(Text(line), soft_wrap=True)

    def _state(self, job: Job) -> None:
        self._console.print(Text(f"[{job.state}] {_state_words(job)}", style="bold"))

    def _line(self, line: LogLine) -> None:
        progress = ProgressLine.parse(line.text)
        if progress is None:
            self.tail.append(line.text)
        else:
            self._note(progress, line)
            if self._bar is not None:
                self._advance(self._bar, progress, line.attempt)
                return
        if not self._show_log:
            return
        if self._as_json:
            print_text(line_json(line), to=self._log)
        elif self._bar is not None and self._log.isatty():
            tables.print_line(Text(prefix(line) + log_text(line.text)), on=self._console)
        else:
            print_text(prefix(line) + log_text(line.text), to=self._log)

    def _note(self, progress: ProgressLine, line: LogLine) -> None:
        """Keep how far it is, and its pace since this attempt's first line of progress."""
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
    """Turns Ctrl-C and SIGTERM into Detached, which says how to come back."""
    before = signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    try:
        yield
    except KeyboardInterrupt:
        raise Detached(
            f"detached from {run_id}; it goes on",
            next_step=f"trainyard logs {run_id} --follow, or trainyard cancel {run_id}",
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def prefix(line: LogLine) -> str:
    """Return the words that say which node, or which worker of a sweep, logged a line, where there are several."""
    return "" if line.node is None else f"[{'worker' if line.of_sweep else 'node'} {line.node}] "


def line_json(line: LogLine) -> str:
    """One line as one JSON object."""
    return json_text(
        {"time": line.time.isoformat(), "attempt": line.attempt, "node": line.node, "text": line.text},
    )


def print_line(line: LogLine, *, as_json: bool) -> None:
    if not as_json and sys.stdout.isatty():
        tables.print_line(Text(prefix(line) + log_text(line.text)), on=stdout())
    else:
        print_text(line_json(line) if as_json else prefix(line) + log_text(line.text))


def print_heading(console: Console, attempt: int, *, origin: str) -> None:
    console.print(Text(f"attempt {attempt}{f', {origin}' if origin else ''}", style="bold"))


def _state_words(job: Job) -> str:
    of = f"attempt {job.attempt} of {job.max_attempts}"
    if job.origin:
        of = f"{job.origin}, {of} there"
    if job.nodes_text:
        others = f"(what keeps the others: trainyard why {job.run_id})" if job.has_waiting_nodes else "still running"
        of = f"{of}, {job.nodes_text} {others}"
    last = job.attempts[-1] if job.attempts else None
    again = f"; attempt {last.number} ended: {last.reason or last.exit_code}" if last and last.stopped_at else ""
    if job.state == "RUNNABLE":
        return f"waits in queue {job.queue} for an instance, {of}{again} (what keeps it: trainyard why {job.run_id})"
    if job.state == "PENDING" and job.depends_on:
        return f"waits for another run to end (for which: trainyard why {job.run_id})"
    if job.ended:
        took = duration((job.stopped_at - job.created_at).total_seconds()) if job.stopped_at else "?"
        tells = job.state == "FAILED" and job.reason not in ("", EXITED_REASON)
        return f"{took} after its submission, {of}{f': {job.reason}' if tells else ''}"
    return f"{of}{again if job.state in ('SUBMITTED', 'PENDING', 'STARTING') else ''}"
