"""Evaluations in the midst of a training, which neither change its steps nor are lost where an attempt ends in one."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from jobs.train.trainer.metrics import RunMetrics
from jobs.train.trainer.shutdown import Shutdown

if TYPE_CHECKING:
    from jobs.train.rank import Rank


class Evaluations(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Evaluates every so many steps while a Trainer trains; the last step is left to whoever evaluates its result.

    It comes after `shutdown` in the Trainer's list of callbacks.
    """

    def __init__(
        self,
        rank: "Rank",
        every_steps: int,
        evaluate: Callable[[], Mapping[str, Any]],
        metrics: RunMetrics,
        shutdown: Shutdown,
    ) -> None:
        self._rank = rank
        self._every_steps = every_steps
        self._evaluate = evaluate
        self._metrics = metrics
        self._shutdown = shutdown

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        step = state.global_step
        if step and self._is_due(state) and not self._rank.once("evaluated", lambda: self._metrics.evaluated_at(step)):
            self._run(step)  # the attempt before was stopped before it, or in its midst

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_due(state) and not control.should_training_stop and not self._run(state.global_step):
            control.should_save = control.should_training_stop = True

    def _is_due(self, state: Any) -> bool:
        return bool(state.global_step % self._every_steps == 0 and state.global_step < state.max_steps)

    def _run(self, step: int) -> bool:
        values = self._shutdown.evaluated(self._evaluate)
        if values is not None:
            self._metrics.evaluated(step, values)
        return values is not None
