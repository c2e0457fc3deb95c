"""Runs steps one after the other, and undoes what they have made, last first, however they ended."""

import signal
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal

from jobs.cli.acceptance.state import State
from jobs.cli.embedded import INTERRUPTS
from jobs.contract.acceptance import FAILED, NOT_REACHED, Evidence, StepRecord, claims_of, outcome_of
from jobs.contract.errors import TrainyardError

Ending = Literal["done", "failed", "stopped", "interrupted"]

EXIT_CODES: Mapping[Ending, int] = {"done": 0, "failed": 1, "stopped": 1, "interrupted": 130}


class LimitReachedError(TrainyardError):
    """The money is used up, or nobody can tell how much is: what is there has to go."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Something to do, what it may cost, and how what it made goes away again."""

    name: str
    usd: float = 0.0
    """The most that it may cost."""
    run: Callable[[MutableMapping[str, str]], Sequence[Evidence]]
    """It gets the ids that it has written down, by which it finds what an earlier start of it made."""
    undo: Callable[[MutableMapping[str, str]], None] = lambda _ids: None
    """It may come after any part of `run`, and again after itself."""
    sets_up: bool = False
    """Whether later steps stand on it: once it is undone, it is done again for those that are still to come."""


def run_steps(
    steps: Sequence[Step],
    state: State,
    *,
    say: Callable[[str], None],
    stops: Callable[[], None] = lambda: None,
    now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
) -> Ending:
    """Run what is not done yet, undo all of it, and return how that ended. The record has the rest.

    `stops`: called between steps; it raises LimitReachedError where there shall be no more.
    """
    ending: Ending = "done"
    try:
        for step in _still_to_do(steps, state):
            stops()
            _run(step, state, say=say, now=now)
    except LimitReachedError as error:
        ending = "stopped"
        say(str(error))
    except KeyboardInterrupt:
        ending = "interrupted"
        say("interrupted: what was made is taken away; a second Ctrl-C is not heard")
    except _FailedError:
        ending = "failed"
    with _deaf_to_interrupts():
        undone = [_undo(step, state, say=say) for step in reversed(steps)]
    return ending if ending != "done" or all(undone) else "failed"


class _FailedError(Exception):
    """A step failed, as its record says."""


def _still_to_do(steps: Sequence[Step], state: State) -> Iterator[Step]:
    """Yield the steps that are not done, and before them what they stand on, where that is gone."""
    missing = [step for step in steps if not state.record.step(step.name).done]
    for step in steps:
        record = state.record.step(step.name)
        if step in missing or (step.sets_up and missing and not record.undo_due):
            yield step


def _run(step: Step, state: State, *, say: Callable[[str], None], now: Callable[[], datetime]) -> None:
    record = state.record.step(step.name)
    again = record.done

    def begin(_: object) -> None:
        record.begun_at, record.ended_at = now(), None
        record.undo_due, record.undo_error, record.error = True, "", ""
        record.outcome = record.outcome if again else NOT_REACHED

    def end(_: object) -> None:
        record.ended_at = now()

    def fail(error: str, *, failed: bool) -> Callable[[object], None]:
        def change(_: object) -> None:
            record.ended_at, record.error = now(), error
            record.outcome = FAILED if failed else NOT_REACHED

        return change

    say(f"{step.name}{' again, which what follows stands on' if again else ''}")
    state.change(begin)
    try:
        evidence = list(step.run(state.ids(step.name)))
    except LimitReachedError as error:
        state.change(fail(str(error), failed=False))
        raise
    except KeyboardInterrupt:
        state.change(fail("interrupted", failed=False))
        raise
    except Exception as error:
        text = str(error) if isinstance(error, TrainyardError) else f"{type(error).__name__}: {error}"
        state.change(fail(text, failed=True))
        say(f"{step.name} failed: {text}")
        raise _FailedError from error
    _check_evidence(step, evidence)
    state.change(end)
    state.change(lambda _: _keep(record, evidence))
    for found in evidence:
        say(f"  {found.outcome}: {found.text}")


def _keep(record: StepRecord, evidence: list[Evidence]) -> None:
    record.evidence, record.outcome = evidence, outcome_of(evidence)


def _check_evidence(step: Step, evidence: Sequence[Evidence]) -> None:
    expected, found = [claim.name for claim in claims_of(step.name)], [one.claim for one in evidence]
    assert found == expected, f"{step.name} speaks of {found}, and should of {expected}"  # noqa: S101 - a defect here


def _undo(step: Step, state: State, *, say: Callable[[str], None]) -> bool:
    """Undo a step that has begun, once; return whether nothing of it is left."""
    record = state.record.step(step.name)
    if not record.undo_due:
        return True
    error = ""
    try:
        step.undo(state.ids(step.name))
    except Exception as raised:  # noqa: BLE001 - the others have to be undone too
        error = str(raised) if isinstance(raised, TrainyardError) else f"{type(raised).__name__}: {raised}"
        say(f"{step.name} could not be undone: {error}")

    def change(_: object) -> None:
        record.undo_due, record.undo_error = bool(error), error

    state.change(change)
    return not error


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C for the block: it would only leave behind what the block takes away."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
