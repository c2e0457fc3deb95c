"""Choose the interval between checkpoints for `auto`: the interval that costs the least time.

Young's formula (CACM 17:9, 1974): if a save takes C and instances are reclaimed every M on average, saving every
sqrt(2 * C * M) loses the least time. C is how long the training waited for the last save. M is
`mean_hours_between_reclaims` of one instance divided by the number of nodes, because the reclaim of any node ends the
attempt for all of them. Only reclaims without a notice count: after a notice the training saves anyway.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jobs.container.rank import Callback
from jobs.core.words import counted

if TYPE_CHECKING:
    from jobs.container.rank import Rank

log = logging.getLogger("trainyard")

MIN_SECONDS = 60.0
MAX_SECONDS = 1800.0
MIN_STALLS = 10
"""Minimum interval in stalls, so that saves take at most a tenth of the time."""

WITHOUT_NOTICE = 1 / 4
"""Share of reclaims without a notice. This is a guess: EC2's guide does not document how often a notice is late."""

TIMED_STEPS = 5
"""Number of steps that are timed between the warm-up steps and the first save."""


def interval_seconds(
    *, stall_seconds: float, mean_seconds_between_reclaims: float, complete_seconds: float = 0.0
) -> float:
    """Return the interval by Young's formula, within the bounds and no shorter than `complete_seconds`.

    `complete_seconds` is how long a save takes until it is complete; the next save would wait for it.
    """
    young = math.sqrt(2 * stall_seconds * mean_seconds_between_reclaims / WITHOUT_NOTICE)
    return max(min(max(young, MIN_SECONDS), MAX_SECONDS), MIN_STALLS * stall_seconds, complete_seconds)


class RegularSaves(Callback):
    """Requests a save after each step that is due and at the last step."""

    def __init__(self, is_due: Callable[[int], bool]) -> None:
        self._is_due = is_due

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_due(state.global_step) or state.global_step >= state.max_steps:
            control.should_save = True


class ChosenSaves(Callback):
    """Requests a save after a few timed steps, then at the interval computed from its cost, and at the last step.

    Rank 0 chooses the interval for all ranks at the end of the step after each save.
    """

    def __init__(
        self,
        rank: "Rank",
        *,
        mean_hours_between_reclaims: float,
        warmup_steps: int,
        complete_seconds: Callable[[], float],
    ) -> None:
        """`complete_seconds` returns how long the last complete save took."""
        self._rank = rank
        self._mean_seconds = mean_hours_between_reclaims * 3600 / rank.nnodes
        self._warmup_steps = warmup_steps
        self._complete_seconds = complete_seconds
        self._timed_from = self._next_save = 0
        self._timed_at: float | None = None
        """When the step `_timed_from` ended."""
        self._step_seconds: float | None = None
        self._save_began: float | None = None
        self._stall_seconds: float | None = None
        self._logged = 0

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        # A resumed attempt warms up and measures again: it may run on another instance.
        self._timed_from = state.global_step + max(1, self._warmup_steps)
        self._next_save = self._timed_from + TIMED_STEPS

    def on_step_begin(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        if self._save_began is not None:
            self._stall_seconds, self._save_began = time.monotonic() - self._save_began, None

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        now, step = time.monotonic(), state.global_step
        if self._stall_seconds is not None:
            stall_seconds, self._stall_seconds = self._stall_seconds, None
            self._next_save = self._rank.once(f"next-save/{step - 1}", lambda: step - 1 + self._steps(stall_seconds))
            self._timed_from, self._timed_at = step, now
        elif step == self._timed_from:
            self._timed_at = now
        if step == self._next_save or step >= state.max_steps:
            control.should_save = True
            self._save_began = now
            # Measured between ends of steps, because within a step an HPU only receives its work.
            if self._timed_at is not None and step > self._timed_from:
                self._step_seconds = (now - self._timed_at) / (step - self._timed_from)

    def _steps(self, stall_seconds: float) -> int:
        if self._step_seconds is None:  # a custom loop saved before a step was timed
            return self._warmup_steps + TIMED_STEPS
        seconds = interval_seconds(
            stall_seconds=stall_seconds,
            mean_seconds_between_reclaims=self._mean_seconds,
            complete_seconds=self._complete_seconds(),
        )
        steps = max(1, round(seconds / self._step_seconds))
        if abs(steps - self._logged) > self._logged / 5:
            self._logged = steps
            every = f"{counted(steps, 'step')} ({steps * self._step_seconds:.0f} s)"
            log.info("checkpoints: every %s: a save holds up the training for %.2f s", every, stall_seconds)
        return steps
