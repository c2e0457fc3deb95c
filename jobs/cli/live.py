"""The live view of a job that runs: a progress bar, the log above it, and the changes of its state."""

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from jobs.cli.tables import duration, stderr, stdout
from jobs.client.job import Job
from jobs.client.logs import LogLine
from jobs.contract.display import json_text
from jobs.contract.errors import Detached
from jobs.contract.log_lines import Progress as ProgressLine

_TAIL_LINES = 15


class LiveView:
    """Shows what `jobs.client.follow.follow` yields, until it is closed.

    On a terminal, lines of progress feed a bar and the other lines pass above it. Elsewhere every line is printed.
    """

    def __init__(self, *, show_log: bool, as_json: bool = False, log_to: TextIO | None = None) -> None:
        """`log_to`: where the log's lines go; stdout by default."""
        self._show_log = show_log
        self._log = log_to or sys.stdout
        self._as_json = as_json
        self._console = stderr()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._attempt = 0
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines of the log that were no progress."""

    def __enter__(self) -> "LiveView":
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                console=self._console,
                # Where stdout is a file or a pipe, the log belongs there and not above the bar.
                redirect_stdout=sys.stdout.isatty(),
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, event: Job | LogLine) -> None:
        if isinstance(event, LogLine):
            self._line(event)
        else:
            self._state(event)

    def _state(self, job: Job) -> None:
        self._console.print(Text(f"[{job.state}] {_state_words(job)}", style="bold"))

    def _line(self, line: LogLine) -> None:
        progress = ProgressLine.parse(line.text)
        if progress is None:
            self.tail.append(line.text)
        elif self._bar is not None:
            self._advance(self._bar, progress, line.attempt)
            return
        if not self._show_log:
            return
        if self._as_json:
            print(line_json(line), file=self._log, flush=True)
        elif self._bar is not None and self._log.isatty():
            text = Text(prefix(line)) + Text.from_ansi(line.text)
            self._bar.console.print(text, soft_wrap=True)
        else:
            print(prefix(line) + line.text, file=self._log, flush=True)

    def _advance(self, bar: Progress, progress: ProgressLine, attempt: int) -> None:
        if self._task is None or attempt != self._attempt:
            if self._task is not None:
                bar.remove_task(self._task)
            self._attempt = attempt
            self._task = bar.add_task(f"attempt {attempt}", total=progress.total_steps, note="")
        bar.update(self._task, completed=progress.step, total=progress.total_steps, note=progress.note)


@contextmanager
def detaching(run_id: str) -> Iterator[None]:
    """Turns Ctrl-C into Detached, which says how to come back."""
    try:
        yield
    except KeyboardInterrupt:
        raise Detached(
            f"detached from {run_id}; it goes on",
            next_step=f"trainyard logs {run_id} --follow, or trainyard cancel {run_id}",
        ) from None


def prefix(line: LogLine) -> str:
    """Return the words that say which node logged a line, where there are several."""
    return "" if line.node is None else f"[node {line.node}] "


def line_json(line: LogLine) -> str:
    """One line as one JSON object."""
    return json_text(
        {"time": line.time.isoformat(), "attempt": line.attempt, "node": line.node, "text": line.text},
    )


def print_line(line: LogLine, *, as_json: bool) -> None:
    if not as_json and sys.stdout.isatty():
        stdout().print(Text(prefix(line)) + Text.from_ansi(line.text), soft_wrap=True)
    else:
        print(line_json(line) if as_json else prefix(line) + line.text)


def print_heading(console: Console, attempt: int, *, origin: str) -> None:
    console.print(Text(f"attempt {attempt}{f', {origin}' if origin else ''}", style="bold"))


def _state_words(job: Job) -> str:
    of = f"attempt {job.attempt} of {job.max_attempts}"
    if job.origin:
        of = f"{job.origin}, {of} there"
    if job.nodes_text:
        of = f"{of}, {job.nodes_text} (what keeps the others: trainyard why {job.run_id})"
    last = job.attempts[-1] if job.attempts else None
    again = f"; attempt {last.number} ended: {last.reason or last.exit_code}" if last and last.stopped_at else ""
    if job.state == "RUNNABLE":
        return f"waits in {job.queue} for an instance, {of}{again} (what keeps it: trainyard why {job.run_id})"
    if job.state == "PENDING" and job.depends_on:
        return f"waits for another run to end (for which: trainyard why {job.run_id})"
    if job.ended:
        took = duration((job.stopped_at - job.created_at).total_seconds()) if job.stopped_at else "?"
        return f"after {took}, {of}{f': {job.reason}' if job.reason and job.state == 'FAILED' else ''}"
    return f"{of}{again if job.state in ('SUBMITTED', 'PENDING', 'STARTING') else ''}"
