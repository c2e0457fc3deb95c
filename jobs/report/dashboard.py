"""Render the page of all runs of a stage: what runs, waits and fails, and what it costs this month."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from jobs.core.instance_types import instance_type
from jobs.core.output import Progress
from jobs.core.records import Attempt, Receipt
from jobs.core.retries import is_reclaim
from jobs.core.words import FREE_HERE, counted, figure, result_label, time_left
from jobs.money.estimate import forecast, seconds_per_step
from jobs.money.receipt import cards_name
from jobs.report.curves import capitalized
from jobs.report.rendering import render
from jobs.runs.job import Job

REFRESH_SECONDS = 30
"""Seconds after which the page asks for newer content."""

FAILURE_DAYS = 7
"""Age of the failures that are grouped by cause."""

WAITING = ("SUBMITTED", "PENDING", "RUNNABLE")
"""Batch's states of jobs that wait."""

_GROUPS = {
    **dict.fromkeys(WAITING, "waiting"),
    **dict.fromkeys(("STARTING", "RUNNING"), "running"),
}
"""What the page calls Batch's states. Other states keep their names."""

_RANK = re.compile(r"^rank \d+ of node \d+: ")

_WARN_SHARE = 0.8
"""Share of a budget from which its bar is coloured, as for the budget's first alert."""


@dataclass(frozen=True, kw_only=True)
class ShownRun:
    """A run with what is known about it. None stands for unknown."""

    job: Job
    receipt: Receipt | None = None
    usd: float | None = None
    metric: tuple[str, float] | None = None
    progress: Progress | None = None
    """The newest progress in its log."""
    points: tuple[int, int] | None = None
    """Of a sweep: how many points need no more work, and how many there are."""
    ended_by: str = ""
    """Why it ended, if its records have a better reason than Batch."""
    working: Sequence[Attempt] = ()
    """Its attempts that are running now; of a sweep, those of its points."""

    @property
    def state(self) -> str:
        return _GROUPS.get(self.job.state, self.job.state.lower())


@dataclass(frozen=True, kw_only=True)
class MonthlyCost:
    """What a team's runs, or all runs of the stage, have cost this month."""

    name: str
    usd: float | None
    """None if the runs' receipts may not be read."""
    is_partial: bool = False
    """Whether the costs of some runs are unknown and missing."""
    budget_usd: float | None = None
    is_stopped: bool = False
    """Whether new work is refused because the budget is used up."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why runs wait, or have failed, with these runs, the newest first."""

    text: str
    runs: Sequence[Job]
    next_step: str = ""


@dataclass(frozen=True, kw_only=True)
class Board:
    """Everything that the page shows."""

    stage: str
    emulated: bool
    now: datetime
    runs: Sequence[ShownRun]
    """The newest first."""
    teams: Sequence[str]
    costs: Sequence[MonthlyCost]
    """The stage, then its teams."""
    waiting: Sequence[Reason]
    unknown: Sequence[str] = ()
    """What could not be read, and why."""


class _Row(NamedTuple):
    """A run in the table."""

    run: ShownRun
    submitter: str
    share: float | None
    """Progress from 0 to 1."""
    text: str
    """Progress, result, or reason of the end."""
    usd: str
    reclaims: int
    age: str


def dashboard_page(board: Board, *, query: str) -> str:
    """Return the page as one HTML file. `query` ends the addresses of the other pages on its server."""
    note = f"{capitalized(FREE_HERE)}." if board.emulated else "Estimates from receipts; AWS's bill may differ."
    return render(
        "dashboard.html",
        charts={},
        now=board.now,
        live=True,
        refresh_seconds=REFRESH_SECONDS,
        scripts=("page.js", "dashboard.js"),
        query=query,
        board=board,
        figures=[*_counts(board), *_cards(board.runs)],
        bars=[_bar(cost) for cost in board.costs],
        note=note,
        failures=failures(board.runs, since=board.now - timedelta(days=FAILURE_DAYS)),
        failure_days=FAILURE_DAYS,
        rows=[_row(run, board.now) for run in board.runs],
    )


def _counts(board: Board) -> Iterator[tuple[str, str]]:
    """Yield figures with their labels."""
    for state in ("running", "waiting"):
        yield str(sum(run.state == state for run in board.runs)), state
    since = board.now - timedelta(days=FAILURE_DAYS)
    failed = sum(run.state == "failed" and _ended_at(run) >= since for run in board.runs)
    yield str(failed), f"failed in {FAILURE_DAYS} days"


def _cards(runs: Sequence[ShownRun]) -> Iterator[tuple[str, str]]:
    """Yield how busy the cards of all running attempts are, for each kind of card."""
    by_name: dict[str, list[tuple[int, float | None]]] = {}
    for attempt in (attempt for run in runs for attempt in run.working):
        row = instance_type(attempt.instance_type)
        # An emulated attempt runs on the CPUs of this machine.
        in_instance = row.accelerators if row.accelerator == attempt.accelerator else 0
        count = attempt.nnodes * in_instance or attempt.world_size
        busy = attempt.cards.utilization_percent if attempt.cards else None
        by_name.setdefault(cards_name(attempt), []).append((count, busy))
    for name, found in by_name.items():
        measured = [(count, busy) for count, busy in found if busy is not None]
        cards = sum(count for count, _ in measured)
        others = sum(count for count, busy in found if busy is None)
        if measured:
            percent = sum(count * busy for count, busy in measured) / cards
            yield f"{percent:.0f} %", f"of {counted(cards, name[:-1])} busy"
        if others:
            yield str(others), f"{name} in use, not measured"


def _bar(cost: MonthlyCost) -> tuple[MonthlyCost, str, float, str]:
    """Return the cost as text, its share of the budget in percent, and the class of its bar."""
    if cost.usd is None:
        return cost, "unknown", 0.0, ""
    spent = f"{'at least ' if cost.is_partial else ''}{_dollars(cost.usd)}"
    if cost.budget_usd is None:
        return cost, f"{spent} USD", 0.0, ""
    share = cost.usd / cost.budget_usd
    kind = "over" if share >= 1 or cost.is_stopped else "high" if share >= _WARN_SHARE else ""
    stopped = ", stopped" if cost.is_stopped else ""
    return cost, f"{spent} of {_dollars(cost.budget_usd)} USD{stopped}", min(100.0, 100 * share), kind


def _dollars(usd: float) -> str:
    return f"{usd:,.0f}" if usd >= 100 or usd == round(usd) else f"{usd:.2f}"


def failures(runs: Sequence[ShownRun], *, since: datetime) -> list[Reason]:
    """Return why runs have failed since then, the most frequent cause first.

    Reasons that differ only in numbers count as one cause, because they name ranks, steps and sizes.
    """
    causes: dict[str, list[ShownRun]] = {}
    for run in runs:
        if run.state == "failed" and _ended_at(run) >= since:
            causes.setdefault(re.sub(r"\d[\d.,:]*", "0", cause(run)), []).append(run)
    found = [Reason(text=cause(each[0]), runs=[run.job for run in each]) for each in causes.values()]
    return sorted(found, key=lambda reason: -len(reason.runs))


def cause(run: ShownRun) -> str:
    """Return why a run failed: the first sentence of the reason, without the rank that failed."""
    job = run.job
    last = job.attempts[-1] if job.attempts else None
    if last is not None and is_reclaim(last.reason or job.reason, last.exit_code):
        return f"EC2 reclaimed the instance in the last of {counted(job.max_attempts, 'attempt')}"
    code = f" (exit code {last.exit_code})" if last is not None and last.exit_code is not None else ""
    reason = run.ended_by or f"{(last.reason if last else '') or job.reason or 'no reason given'}{code}"
    return _RANK.sub("", reason.partition("\n")[0].partition(". ")[0])


def _ended_at(run: ShownRun) -> datetime:
    return run.job.stopped_at or run.job.created_at


def _row(run: ShownRun, now: datetime) -> _Row:
    share: float | None = None
    text = ""
    if run.state == "running":
        share, text = _progress(run, now)
    elif run.state == "waiting" and run.job.depends_on and run.job.state == "PENDING":
        text = "waits for another run"
    elif run.state == "failed":
        text = cause(run)
    elif run.state == "cancelled":
        text = run.job.reason
    elif run.metric is not None:
        text = f"{result_label(run.metric[0])} {figure(run.metric[1])}"
    if run.points and run.state != "running":
        text = f"{run.points[0]} of {run.points[1]} points{f', {text}' if text else ''}"
    usd = "" if run.usd is None else "<0.01" if 0 < run.usd < 0.005 else f"{run.usd:.2f}"
    submitter = run.job.submitter.rpartition("/")[2]
    return _Row(run, submitter, share, text, usd, _reclaims(run), _age(now - run.job.created_at))


def _progress(run: ShownRun, now: datetime) -> tuple[float | None, str]:
    """Return the progress of a running run, from 0 to 1 if known, and as text."""
    if run.points:
        done, points = run.points
        return done / max(1, points), f"{done} of {points} points"
    progress, receipt = run.progress, run.receipt
    if progress is None:
        step = receipt.attempts[-1].last_step if receipt else 0
        return None, f"step {step:,}" if step else ""
    left = progress.time_left
    if not left and receipt is not None:
        pace = seconds_per_step(receipt.attempts[-1], progress, at=now)
        seconds = forecast(receipt.attempts, progress, pace, now=now).seconds_left
        left = "" if seconds is None else time_left(seconds)
    share = min(1.0, progress.step / max(1, progress.total_steps))
    return share, f"{100 * share:.0f} %{f', {left} left' if left else ''}"


def _reclaims(run: ShownRun) -> int:
    """Return how often EC2 has reclaimed an instance of the run. Batch knows only those of the newest job."""
    by_batch = sum(is_reclaim(attempt.reason, attempt.exit_code) for attempt in run.job.attempts)
    recorded = sum("Spot" in (attempt.reason or "") for attempt in run.receipt.attempts) if run.receipt else 0
    return max(by_batch, recorded)


def _age(since: timedelta) -> str:
    minutes = since.total_seconds() / 60
    return f"{minutes:.0f} min" if minutes < 60 else f"{minutes / 60:.0f} h" if minutes < 48 * 60 else f"{since.days} d"
