"""The interval between checkpoints where a recipe says `auto`: as often as a save is worth the time that it takes.

Young's formula (CACM 17:9, 1974): where a save takes C and instances are taken away every M on average, the least time
is lost with a save every sqrt(2 * C * M). C is measured at each save, up to the time at which all is copied, though the
training may go on beside that; M is `mean_hours_between_reclaims`, which is of one instance: the reclaim of any node
ends the attempt for all, so that on n of them there is one every M / n. Where a notice comes first the training saves
by itself, so that M is of those that come without. A save is not over until it is complete on S3, and the next one
would wait for that: they are at least so far apart.
"""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jobs.contract.words import counted
from jobs.train.trainer.callback import Callback

if TYPE_CHECKING:
    from jobs.train.rank import Rank

log = logging.getLogger("trainyard")

LEAST_SECONDS = 60.0
MOST_SECONDS = 1800.0
LEAST_STALLS = 10
"""At most a tenth of the time is spent on saving, however often instances are taken away."""

WITHOUT_NOTICE = 1 / 4
"""The share of reclaims that are assumed to come without a notice: EC2 says that it may come too late, not how often. A
cautious guess, as the time between two reclaims is."""

TIMED_STEPS = 5
"""The number of steps that are timed before the first save, after those that warm up."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The time between two checkpoints, and why it is so long."""

    seconds: float
    reason: str


def interval(
    *, stall_seconds: float, mean_seconds_between_reclaims: float, nnodes: int = 1, complete_seconds: float = 0.0
) -> Interval:
    """Return the interval by Young's formula, within the bounds. The mean is that of each of the `nnodes`."""
    young = math.sqrt(2 * stall_seconds * mean_seconds_between_reclaims / nnodes / WITHOUT_NOTICE)
    of_each = f" of each of {nnodes} nodes" if nnodes > 1 else ""
    formula = (
        f"a save holds the training up for at most {stall_seconds:.2f} s, and a reclaim{of_each} every "
        f"{mean_seconds_between_reclaims / 3600:g} h is assumed, 1 in {1 / WITHOUT_NOTICE:.0f} without notice: "
        f"by Young's formula {young:.0f} s"
    )
    if young > MOST_SECONDS:
        seconds, bound = MOST_SECONDS, f", at most {MOST_SECONDS:.0f} s"
    elif young < LEAST_SECONDS:
        seconds, bound = LEAST_SECONDS, f", at least {LEAST_SECONDS:.0f} s"
    else:
        seconds, bound = young, ""
    if seconds < LEAST_STALLS * stall_seconds:
        seconds, bound = LEAST_STALLS * stall_seconds, f", at least {LEAST_STALLS} times a save"
    if seconds < complete_seconds:
        seconds, bound = complete_seconds, ", at least until the checkpoint before is complete"
    return Interval(seconds=seconds, reason=formula + bound)


class RegularSaves(Callback):
    """Asks for a save every so many steps, and at the last one."""

    def __init__(self, every: int) -> None:
        self._every = every

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._every == 0 or state.global_step >= state.max_steps:
            control.should_save = True


class ChosenSaves(Callback):
    """Asks the Trainer to save: after a few timed steps, then as often as that save has shown to be worth it, and last.

    Rank 0 chooses for all, at the end of the step after each save.
    """

    def __init__(
        self,
        rank: "Rank",
        *,
        mean_hours_between_reclaims: float,
        warmup_steps: int,
        complete_seconds: Callable[[], float],
        copying_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`complete_seconds` returns how long the last save took that is complete.

        `copying_seconds` returns how long the last one copied, where the next step begins before that is done.
        """
        self._rank = rank
        self._complete_seconds = complete_seconds
        self._copying_seconds = copying_seconds
        self._mean_seconds = mean_hours_between_reclaims * 3600
        self._untimed_steps = warmup_steps
        self._step_seconds: deque[float] = deque(maxlen=50)
        self._evaluated_seconds: deque[float] = deque(maxlen=50)
        """The times of steps whose end had an evaluation in it: longer than what the formula is about."""
        self._has_evaluated = False
        self._ended_at: float | None = None
        """When the step before ended; None: there was none, or a save."""
        self._save_started: float | None = None
        self._stall_seconds: float | None = None
        """For how long the save stopped the training that was at the step before; None: there was none."""
        self._next_save: int | None = None
        self._said: int | None = None

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        # A resumed attempt warms up and measures again: it may run on another instance.
        self._next_save = state.global_step + self._untimed_steps + TIMED_STEPS

    def on_step_begin(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        if self._save_started is not None:
            self._stall_seconds, self._save_started = time.monotonic() - self._save_started, None

    def on_prediction_step(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._has_evaluated = True

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.monotonic()
        if self._stall_seconds is not None:
            self._choose(self._stall_seconds, saved=state.global_step - 1)
            self._stall_seconds = None
        if self._untimed_steps:
            self._untimed_steps -= 1
        elif self._ended_at is not None:
            # From end to end: between a step's begin and its end an HPU is only told what to do.
            (self._evaluated_seconds if self._has_evaluated else self._step_seconds).append(now - self._ended_at)
        self._ended_at, self._has_evaluated = now, False
        if state.global_step == self._next_save or state.global_step >= state.max_steps:
            control.should_save = True
            self._save_started = now
            self._ended_at = None

    def _choose(self, stall_seconds: float, *, saved: int) -> None:
        self._next_save = self._rank.once(
            f"next-save/{saved}",
            lambda: saved + self._steps_after(max(stall_seconds, self._copying_seconds()), measured_at=saved),
        )

    def _steps_after(self, stall_seconds: float, *, measured_at: int) -> int:
        timed = self._step_seconds or self._evaluated_seconds
        if not timed:  # a loop of one's own has saved by itself, before a step was timed
            return self._untimed_steps + TIMED_STEPS
        chosen = interval(
            stall_seconds=stall_seconds,
            mean_seconds_between_reclaims=self._mean_seconds,
            nnodes=self._rank.nnodes,
            complete_seconds=self._complete_seconds(),
        )
        # The mean: where a host runs ahead of its card, few steps are those that wait for it.
        step_seconds = statistics.fmean(timed)
        steps = max(1, round(chosen.seconds / step_seconds))
        # Said again only where it has become another one.
        if self._said is None or abs(steps - self._said) > self._said / 5:
            measured = f", after one at step {measured_at} to measure a save" if self._said is None else ""
            self._said = steps
            every = f"{counted(steps, 'step')} ({steps * step_seconds:.0f} s){measured}"
            log.info("checkpoints: every %s: %s", every, chosen.reason)
        return steps


def asking_for_saves(
    every: int | Literal["auto"] | None,
    rank: "Rank",
    *,
    mean_hours_between_reclaims: float,
    warmup_steps: int,
    complete_seconds: Callable[[], float],
    copying_seconds: Callable[[], float] = lambda: 0.0,
) -> list[Any]:
    """Return the callback that asks for saves: every so many steps, or as often as is worth it; None: there is none."""
    if every is None:
        return []
    if every != "auto":
        return [RegularSaves(every)]
    return [
        ChosenSaves(
            rank,
            mean_hours_between_reclaims=mean_hours_between_reclaims,
            warmup_steps=warmup_steps,
            complete_seconds=complete_seconds,
            copying_seconds=copying_seconds,
        )
    ]
