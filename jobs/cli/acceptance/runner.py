"""Runs the steps of the acceptance in order and always undoes them afterwards, last first.

The record is saved before and after every step, so that the same command can continue after any interruption. A meter
counts the cost while the steps run, and stops them at the limit.
"""

import signal
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from jobs.cli.emulator import INTERRUPTS
from jobs.core.acceptance import (
    FAILED,
    NOT_REACHED,
    STEPS,
    AcceptanceRecord,
    Evidence,
    Outcome,
    StepRecord,
    claims_of,
    outcome_of,
)
from jobs.core.errors import ConfigurationError, TrainyardError
from jobs.core.words import usd

Ending = Literal["done", "failed", "stopped", "interrupted"]


class LimitReachedError(TrainyardError):
    """The limit is reached, or the cost is unknown: everything must be removed."""


class State:
    """The record of an acceptance run, and its file."""

    def __init__(self, path: Path, record: AcceptanceRecord) -> None:
        self.path = path
        self.record = record

    @classmethod
    def open(cls, path: Path, new: AcceptanceRecord) -> "State":
        """Return the recorded run with the limit and `keep` of `new`, or `new` if there is no file.

        Raises ConfigurationError if this release cannot read the file.
        """
        try:
            record: AcceptanceRecord | None = AcceptanceRecord.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            record = new.model_copy(update={"steps": [StepRecord(name=name) for name in STEPS]})
        except (OSError, ValidationError):
            record = None
        if record is None or [step.name for step in record.steps] != list(STEPS):
            raise ConfigurationError(
                f"{path} is not the state of an acceptance run of this release",
                next_step="list what it left with: aws resourcegroupstaggingapi get-resources --tag-filters "
                f"Key=trainyard:stage,Values={new.stage}; then delete the file",
            )
        return cls(path, record.model_copy(update={"max_usd": new.max_usd, "keep": new.keep}))

    def save(self) -> None:
        """Write the record atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(self.record.model_dump_json(indent=2) + "\n", encoding="utf-8")
        part.replace(self.path)


class Ids(UserDict[str, str]):
    """Ids of the resources that a step has created. Each is saved before the step continues."""

    def __init__(self, state: State, step: StepRecord) -> None:
        super().__init__()
        self.data = step.ids
        self._state = state

    def __setitem__(self, key: str, value: str) -> None:
        super().__setitem__(key, value)
        self._state.save()

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._state.save()


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step with its cost, how to run it, and how to undo it."""

    name: str
    usd: float = 0.0
    """Maximum cost."""
    run: Callable[[Ids], Sequence[Evidence]]
    """Uses the recorded ids to find what an earlier start created."""
    undo: Callable[[Ids], None] = lambda _ids: None
    """May run after any part of `run`, and more than once."""
    sets_up: bool = False
    """Whether later steps need what this step creates. After an undo, the step is repeated for the remaining ones."""


def run_steps(
    steps: Sequence[Step],
    state: State,
    *,
    say: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> Ending:
    """Run the steps that are not done, undo them, and return how that ended. The record has the details.

    `check` is called between steps, and stops the run by raising LimitReachedError.
    """
    ending: Ending = "done"
    try:
        for step in _remaining(steps, state):
            check()
            if not _run(step, state, say=say):
                ending = "failed"
                break
    except LimitReachedError as error:
        ending = "stopped"
        say(str(error))
    except KeyboardInterrupt:
        ending = "interrupted"
        say("interrupted: removing everything that was created; a second Ctrl-C is ignored")
    with _ignored_interrupts():
        undone = [_undo(step, state, say=say) for step in reversed(steps)]
    return ending if ending != "done" or all(undone) else "failed"


def _remaining(steps: Sequence[Step], state: State) -> Iterator[Step]:
    """Yield the steps that are not done, preceded by steps that they need and that were undone."""
    missing = [step for step in steps if not state.record.step(step.name).done]
    for step in steps:
        if step in missing or (step.sets_up and missing and not state.record.step(step.name).needs_undo):
            yield step


def _run(step: Step, state: State, *, say: Callable[[str], None]) -> bool:
    """Run and record a step. Returns whether it finished."""
    record = state.record.step(step.name)
    say(f"{step.name}{' again, because the next steps need it' if record.done else ''}")
    record.started_at, record.ended_at, record.error = _now(), None, ""
    record.needs_undo, record.undo_error = True, ""
    record.outcome = record.outcome if record.done else NOT_REACHED
    state.save()

    def end(outcome: Outcome, error: str = "") -> None:
        record.ended_at, record.outcome, record.error = _now(), outcome, error
        state.save()

    try:
        evidence = list(step.run(Ids(state, record)))
    except LimitReachedError as error:
        end(NOT_REACHED, str(error))
        raise
    except KeyboardInterrupt:
        end(NOT_REACHED, "interrupted")
        raise
    except Exception as error:  # noqa: BLE001 - the steps must be undone after any error
        end(FAILED, _text(error))
        say(f"{step.name} failed: {record.error}")
        return False
    expected = [claim.name for claim in claims_of(step.name)]
    assert [found.claim for found in evidence] == expected, f"{step.name} has to prove {expected}"  # noqa: S101 - a defect
    record.evidence = evidence
    end(outcome_of(evidence))
    for found in evidence:
        say(f"  {found.outcome}: {found.text}")
    return True


def _undo(step: Step, state: State, *, say: Callable[[str], None]) -> bool:
    """Undo a step that has started. Returns whether everything was removed."""
    record = state.record.step(step.name)
    if not record.needs_undo:
        return True
    record.undo_error = ""
    try:
        step.undo(Ids(state, record))
    except Exception as error:  # noqa: BLE001 - the other steps must be undone too
        record.undo_error = _text(error)
        say(f"{step.name} could not be undone: {record.undo_error}")
    record.needs_undo = bool(record.undo_error)
    state.save()
    return not record.needs_undo


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, TrainyardError) else f"{type(error).__name__}: {error}"


def _now() -> datetime:
    return datetime.now(timezone.utc)


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C during the block, which would leave resources behind."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


LOOK = timedelta(seconds=30)

SILENCE = timedelta(minutes=5)
"""If EC2 has not answered for this long, the cost is unknown, which counts as the limit."""

UNDO = timedelta(minutes=15)
"""Time that removing everything takes. The cost of the running instances for this time is reserved."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """An instance that costs money."""

    id: str
    launched_at: datetime
    usd_per_hour: float


@dataclass(kw_only=True)
class Meter:
    """Counts the cost of the run, at most every half minute.

    Counts the instances with the stage's tag at today's prices, including Image Builder's, and the stage's idle costs.
    Storage, requests and transfer, some cents here, are left out. It is an estimate: AWS's bill comes a day late.
    """

    limit_usd: float
    spent_usd: float
    """Cost up to `until`, from earlier starts of the run."""
    until: datetime
    instances: Callable[[], list[Running]]
    idle_usd_per_hour: Callable[[], float]
    keep: Callable[[datetime, float], None]
    """Records the cost up to a time."""
    now: Callable[[], datetime] = _now
    _alive: Mapping[str, Running] = field(default_factory=dict)
    _answered_at: datetime | None = None
    _looked_at: datetime | None = None

    def look(self) -> None:
        """Add the cost since the last look. If EC2 does not answer, the next look adds it."""
        now = self._looked_at = self.now()
        self._answered_at = self._answered_at or now
        try:
            found = {instance.id: instance for instance in self.instances()}
        except Exception:  # noqa: BLE001 - denied, throttled or unreachable: `check` ends the run if that lasts
            return
        self._answered_at = now
        spent = self.idle_usd_per_hour() * _hours(now - self.until)
        # An instance that is gone may have run until just now.
        for instance in {**self._alive, **found}.values():
            since = self.until if instance.id in self._alive else max(self.until, instance.launched_at)
            spent += instance.usd_per_hour * _hours(now - since)
        self.spent_usd += spent
        self._alive, self.until = found, now
        self.keep(now, self.spent_usd)

    def look_if_due(self) -> None:
        """Count again if the last count is at least half a minute old."""
        if self._looked_at is None or self.now() - self._looked_at >= LOOK:
            self.look()

    @property
    def reserve_usd(self) -> float:
        """Return the cost of removing everything."""
        an_hour = sum(instance.usd_per_hour for instance in self._alive.values()) + self.idle_usd_per_hour()
        return an_hour * _hours(UNDO)

    def check(self) -> None:
        """Raise LimitReachedError if the limit is reached or the cost is unknown."""
        self.look_if_due()
        silent = self.now() - (self._answered_at or self.now())
        if silent >= SILENCE:
            raise LimitReachedError(
                f"EC2 has not answered for {silent.total_seconds() / 60:.0f} minutes, so the cost is unknown",
                next_step="run the same command again once AWS answers",
            )
        if self.spent_usd + self.reserve_usd >= self.limit_usd:
            raise LimitReachedError(
                f"the limit of {usd(self.limit_usd)} is reached: {usd(self.spent_usd)} spent, {usd(self.reserve_usd)} "
                "reserved for removing everything",
                next_step="continue with a higher --max-usd",
            )


def _hours(time: timedelta) -> float:
    return time / timedelta(hours=1)
