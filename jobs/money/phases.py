"""The phases of a run, computed from the records of its attempts: time and cost of each phase.

waiting    nodes of a node group waited for each other
starting   from an attempt's start to its first step: container, inputs, checkpoint, model
compiling  extra time of steps in which a graph was compiled for a new batch shape (HPUs, torch_compile)
working    steps, evaluations and the last uploads; all of a job that does not train
saving     the training was paused to save a checkpoint or the final model
idle       other time after the first step in which no card was busy: slow input, a hang, a slow upload
lost       steps that a later attempt had to repeat, at the attempt's mean time per step; for a script that loads its
           checkpoints itself, the time after its last checkpoint, and steps that it saved again
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, get_args

from jobs.core.records import Attempt
from jobs.money.budget import attempt_usd_per_hour

PhaseName = Literal["waiting", "starting", "compiling", "working", "saving", "idle", "lost"]
PHASES: tuple[PhaseName, ...] = get_args(PhaseName)
UNPRODUCTIVE = tuple(name for name in PHASES if name != "working")
"""Phases without lasting progress."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase of an attempt, as a period."""

    attempt: int
    name: PhaseName
    started_at: datetime
    ended_at: datetime
    instance_seconds: float
    usd: float
    """Cost at the recorded price of the attempt's capacity."""


def ended_at(attempt: Attempt) -> datetime:
    """Return the end of an attempt; never before its start, even if its machine's clock was set back."""
    return max(attempt.started_at, attempt.finished_at or attempt.last_seen_at)


def lost_steps(attempt: Attempt, later: Sequence[Attempt]) -> int:
    """Return how many steps of the attempt a later attempt had to repeat, as far as known."""
    began = min((each.start_step for each in later), default=attempt.last_step)
    return max(0, attempt.last_step - max(began, attempt.start_step))


def phases(attempts: Sequence[Attempt]) -> list[Phase]:
    """Return the phases of the attempts, given in order. Phases without any time are omitted."""
    trains = any(attempt.training_started_at for attempt in attempts)
    found: list[Phase] = []
    for number, attempt in enumerate(attempts, 1):
        found += _phases(attempt, attempts[number:], trains=trains)
    return found


def usd_by_phase(attempts: Sequence[Attempt]) -> dict[PhaseName, float]:
    """Return the cost of each phase over all attempts."""
    total = dict.fromkeys(PHASES, 0.0)
    for phase in phases(attempts):
        total[phase.name] += phase.usd
    return total


def _lost_seconds(attempt: Attempt, later: Sequence[Attempt], worked: float) -> float:
    """Return how much of an attempt's working time was lost."""
    if attempt.restored_step is not None and later:  # a script's work after its last save is lost
        kept = (attempt.saved_at - attempt.started_at).total_seconds() if attempt.saved_at else 0.0
    else:
        kept = worked
    kept = min(worked, max(0.0, kept))
    made = attempt.last_step - attempt.start_step
    again = kept * lost_steps(attempt, later) / made if made > 0 else 0.0
    return worked - kept + again


def _phases(attempt: Attempt, later: Sequence[Attempt], *, trains: bool) -> list[Phase]:
    start, end = attempt.started_at, ended_at(attempt)
    first_step = min(end, max(start, attempt.training_started_at or (end if trains else start)))
    seconds = (end - first_step).total_seconds()
    compiling = min(seconds, attempt.compiling_seconds)
    saving = min(seconds - compiling, attempt.saving_seconds)
    lost = _lost_seconds(attempt, later, seconds - compiling - saving)
    # Cards are also idle while a graph is compiled or the training waits for a save.
    unexplained = attempt.cards.idle_seconds - compiling - saving if attempt.cards else 0.0
    idle = max(0.0, min(unexplained, seconds - compiling - saving - lost))
    price = attempt_usd_per_hour(attempt) / 3600
    waited = attempt.waited_instance_seconds
    # Each phase is drawn as one period, even if it was spread over the attempt.
    parts: list[tuple[PhaseName, float]] = [
        ("starting", (first_step - start).total_seconds()),
        ("compiling", compiling),
        ("working", seconds - compiling - saving - idle - lost),
        ("saving", saving),
        ("idle", idle),
        ("lost", lost),
    ]
    begins = [start + timedelta(seconds=sum(taken for _, taken in parts[:number])) for number in range(len(parts))]
    periods: list[tuple[PhaseName, datetime, datetime, float]] = [
        ("waiting", start - timedelta(seconds=waited / attempt.nnodes), start, waited),
        *(
            (name, begin, until, taken * attempt.nnodes)
            for (name, taken), begin, until in zip(parts, begins, [*begins[1:], end], strict=True)
        ),
    ]
    return [
        Phase(
            attempt=attempt.number,
            name=name,
            started_at=begin,
            ended_at=finish,
            instance_seconds=taken,
            usd=taken * price,
        )
        for name, begin, finish, taken in periods
        if taken >= 1e-6  # times have microsecond resolution
    ]
