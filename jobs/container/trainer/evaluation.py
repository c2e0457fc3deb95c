"""Evaluations in the midst of a training, which neither change its steps nor are lost where an attempt ends in one.

What they found lies in the Trainer's own log of its state, and so in every checkpoint (jobs/container/trainer/best.py).
"""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from jobs.container.callback import Callback
from jobs.container.saving.metrics import RunMetrics
from jobs.container.saving.stop import Shutdown
from jobs.container.trainer.best import BestEvaluation
from jobs.container.trainer.halving import Rungs
from jobs.container.trainer.trainer import TrainedEnoughError
from jobs.core.words import counted, result_label

if TYPE_CHECKING:
    from jobs.container.rank import Rank

log = logging.getLogger("trainyard")


def stretches(every: int | Literal["epoch"], *, batch: int, epoch: int) -> Callable[[int], bool]:
    """Return what says of a step whether an evaluation is due after it.

    `batch` is the number of sequences in a step, `epoch` that in a pass over the training data.
    """
    if every == "epoch":
        return lambda step: step * batch // epoch > (step - 1) * batch // epoch
    return lambda step: step % every == 0


class Evaluations(Callback):
    """Evaluates now and then while a Trainer trains.

    The last step is left to whoever evaluates its result, unless the best of all evaluations is wanted.
    """

    def __init__(
        self,
        rank: "Rank",
        ends_stretch: Callable[[int], bool],
        evaluate: Callable[[], Mapping[str, Any]],
        metrics: RunMetrics,
        shutdown: Shutdown,
        *,
        best: BestEvaluation | None = None,
        rungs: Rungs | None = None,
    ) -> None:
        """`ends_stretch` says of a step whether an evaluation is due after it."""
        self._rank = rank
        self._ends_stretch = ends_stretch
        self._evaluate = evaluate
        self._metrics = metrics
        self._shutdown = shutdown
        self._best = best
        self._rungs = rungs

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Make up for an evaluation before or in the midst of which the last attempt was stopped.

        Raises TrainedEnoughError where no step is left: a Trainer that has begun does one before it asks.
        """
        step = state.global_step
        if step and self._is_due(state) and not any(is_evaluation(entry, step) for entry in state.log_history):
            # It may have ended after the checkpoint was saved, and before the next one.
            values = self._rank.once("evaluated", lambda: self._metrics.evaluated_at(step))
            if values is None:
                self._run(state)
            else:
                self._note(state, values)
        if self._best is not None and self._best.is_enough(state.log_history):
            raise TrainedEnoughError
        if self._rungs is not None and (self._rungs.was_out(step) or self._is_out(state)):
            self._rungs.leave()
            raise TrainedEnoughError

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._is_due(state) or self._shutdown.reason:
            return
        if not self._run(state):
            control.should_training_stop = True
            if not self._shutdown.leaves_with_save_under_way:
                control.should_save = True
            return
        if self._best is not None:
            self._judge(self._best, state, control)
        if self._rungs is not None and not control.should_training_stop and self._is_out(state):
            self._rungs.leave()
            control.should_save = control.should_training_stop = True

    def _is_out(self, state: Any) -> bool:
        """Return whether the run is a point of a sweep that the evaluation of this step stops."""
        step = state.global_step
        if self._rungs is None or step >= state.max_steps:
            return False
        found = [entry for entry in state.log_history if is_evaluation(entry, step)]
        return bool(found) and self._rungs.is_out(step, found[-1])

    def _judge(self, best: BestEvaluation, state: Any, control: Any) -> None:
        """Have the checkpoint of the best evaluation saved, and stop where there was no better one for long enough."""
        found = best.of(state.log_history)
        if found is not None and found.step == state.global_step:
            control.should_save = True
        elif best.is_enough(state.log_history):
            control.should_save = control.should_training_stop = True
            if self._rank.is_first and found is not None:
                log.info(
                    "early stopping: %s was best after step %s (%.4g), and no better in %s since",
                    result_label(best.metric),
                    found.step,
                    found.value,
                    counted(found.since, "evaluation"),
                )

    def _is_due(self, state: Any) -> bool:
        if state.global_step >= state.max_steps:
            return self._best is not None
        return self._ends_stretch(state.global_step)

    def _run(self, state: Any) -> bool:
        values = self._shutdown.evaluated(self._evaluate)
        if values is None:
            return False
        # All ranks judge by the values of one, however their own were rounded.
        if self._best is not None:
            values = self._rank.once(f"evaluation/{state.global_step}", lambda: values)
        self._metrics.evaluated(state.global_step, values)
        self._note(state, values)
        return True

    def _note(self, state: Any, values: Mapping[str, Any]) -> None:
        state.log_history.append({"step": state.global_step, **values})


def is_evaluation(entry: Mapping[str, Any], step: int) -> bool:
    """Return whether an entry in the log of a Trainer's state is of an evaluation at this step."""
    return entry.get("step") == step and any(name.startswith("eval_") for name in entry)
