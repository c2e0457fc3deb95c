"""Run steps one after the other, and undo what they have made, last first, however they ended.

The record is on disk before and after every step, so that the same command continues after any end.
"""

import signal
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
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

Ending = Literal["done", "failed", "stopped", "interrupted"]


class LimitReachedError(TrainyardError):
    """The money is used up, or nobody knows how much is: what is there has to go."""


class State:
    """The record and its file."""

    def __init__(self, path: Path, record: AcceptanceRecord) -> None:
        self.path = path
        self.record = record

    @classmethod
    def open(cls, path: Path, new: AcceptanceRecord) -> "State":
        """Return the run in the file, with the new one's limit, or the new one.

        Raises ConfigurationError if the file is not of this release.
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
                next_step=f"see what it left: aws resourcegroupstaggingapi get-resources --tag-filters "
                f"Key=trainyard:stage,Values={new.stage}; then remove the file",
            )
        return cls(path, record.model_copy(update={"max_usd": new.max_usd, "keep": new.keep}))

    def save(self) -> None:
        """Write the record: whole, or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(self.record.model_dump_json(indent=2) + "\n", encoding="utf-8")
        part.replace(self.path)


class Ids(UserDict[str, str]):
    """The ids of what a step has made. Each is on disk before the step continues."""

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
    """Something to do, what it may cost, and how what it made goes away again."""

    name: str
    usd: float = 0.0
    """The most that it may cost."""
    run: Callable[[Ids], Sequence[Evidence]]
    """It gets the ids that it has recorded, by which it finds what an earlier start of it made."""
    undo: Callable[[Ids], None] = lambda _ids: None
    """It may run after any part of `run`, and again after itself."""
    sets_up: bool = False
    """Whether later steps need what it made: once that is undone, the step repeats for those still to come."""


def run_steps(
    steps: Sequence[Step],
    state: State,
    *,
    say: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> Ending:
    """Run what is not done yet, undo all of it, and return how that ended. The record has the rest.

    `check`: called between steps; it raises LimitReachedError to stop.
    """
    ending: Ending = "done"
    try:
        for step in _still_to_do(steps, state):
            check()
            if not _run(step, state, say=say):
                ending = "failed"
                break
    except LimitReachedError as error:
        ending = "stopped"
        say(str(error))
    except KeyboardInterrupt:
        ending = "interrupted"
        say("interrupted: what was made is taken away; a second Ctrl-C is ignored")
    with _ignored_interrupts():
        undone = [_undo(step, state, say=say) for step in reversed(steps)]
    return ending if ending != "done" or all(undone) else "failed"


def _still_to_do(steps: Sequence[Step], state: State) -> Iterator[Step]:
    """Yield the steps that are not done, and before them those that they need and that were undone."""
    missing = [step for step in steps if not state.record.step(step.name).done]
    for step in steps:
        if step in missing or (step.sets_up and missing and not state.record.step(step.name).needs_undo):
            yield step


def _run(step: Step, state: State, *, say: Callable[[str], None]) -> bool:
    """Run a step and record it; return whether it reached its end."""
    record = state.record.step(step.name)
    say(f"{step.name}{' again, for the steps that follow' if record.done else ''}")
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
    except Exception as error:  # noqa: BLE001 - what was made has to be undone, whatever went wrong
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
    """Undo a step that has begun, once; return whether nothing of it is left."""
    record = state.record.step(step.name)
    if not record.needs_undo:
        return True
    record.undo_error = ""
    try:
        step.undo(Ids(state, record))
    except Exception as error:  # noqa: BLE001 - the others have to be undone too
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
    """Ignore Ctrl-C for the block: it would only leave behind what the block takes away."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
