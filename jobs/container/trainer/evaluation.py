"""Evaluate during a training, choose the best evaluation, and stop early.

Evaluations do not change the training's steps, and none is lost if an attempt ends during it. Their results are in the
Trainer's log of its state (`log_history` in trainer_state.json), and so in every checkpoint. The choice of the best and
early stopping follow from that log alone, however often the run was interrupted.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jobs.container.rank import Callback
from jobs.container.saving.manifest import IncompleteError, fetch
from jobs.container.saving.metrics import RunMetrics
from jobs.container.saving.stop import Shutdown
from jobs.container.trainer.halving import Rungs
from jobs.container.trainer.trainer import TrainedEnoughError
from jobs.core.errors import TrainyardError
from jobs.core.run import CHECKPOINTS
from jobs.core.words import counted, result_label, smaller_is_better

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

    from jobs.container.rank import Rank

log = logging.getLogger("trainyard")


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best of several evaluations."""

    step: int
    value: float
    since: int
    """Number of evaluations since, none of which was better."""


class BestEvaluation:
    """Finds the best evaluation by a metric in a Trainer's log."""

    def __init__(self, metric: str, *, patience: int | None = None) -> None:
        """`patience` is the number of evaluations without an improvement after which to stop."""
        self.metric = metric
        self.patience = patience

    def of(self, history: Sequence[Mapping[str, Any]]) -> Best | None:
        """Return the best evaluation in a log, or None if there is none or no value is a finite number."""
        sign = -1 if smaller_is_better(self.metric) else 1
        best: Best | None = None
        for entry in history:
            if self.metric not in entry:
                continue
            value = math.nan if entry[self.metric] is None else float(entry[self.metric])
            if math.isfinite(value) and (best is None or sign * value > sign * best.value):
                best = Best(step=int(entry["step"]), value=value, since=0)
            elif best is not None:
                best = Best(step=best.step, value=best.value, since=best.since + 1)
        return best

    def step(self, history: Sequence[Mapping[str, Any]]) -> int | None:
        """Return the step of the best evaluation."""
        best = self.of(history)
        return best.step if best is not None else None

    def is_exhausted(self, history: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the patience is exhausted, so that the training should stop."""
        best = self.of(history)
        return self.patience is not None and best is not None and best.since >= self.patience


def load_best_weights(trainer: Any, best: BestEvaluation, rank: "Rank", s3: "S3Client | None") -> int:
    """Load the weights of the best evaluation into the Trainer's model, and return its step.

    All ranks call it after their uploads are finished. The first rank of each node needs `s3`. If no evaluation found a
    finite number, the model is unchanged. Raises TrainyardError if the checkpoint cannot be used.
    """
    last = int(trainer.state.global_step)
    # Rank 0 chooses after its own uploads are finished, so the checkpoint is complete for every node.
    step = int(rank.once("best/step", lambda: best.step(trainer.state.log_history) or last))
    if step == last:
        return step

    def fetched() -> str:
        assert s3 is not None  # noqa: S101 - set on the first rank of each node
        folder = rank.scratch / "best"
        remote = rank.run / CHECKPOINTS / f"step-{step}"
        try:
            fetch(s3, remote, folder)
        except IncompleteError as error:
            raise TrainyardError(
                f"the best evaluation was after step {step}, and its checkpoint {remote} cannot be used: {error}",
                next_step="submit the run again; without metric_for_best_model it ends with the last step's model",
            ) from error
        return str(folder)

    trainer.state.best_model_checkpoint = rank.once_per_node("best/files", fetched)
    trainer._load_best_model()  # noqa: SLF001 - the Trainer calls it with load_best_model_at_end
    if rank.is_first:
        log.info("model: step %s, which has the best %s", step, result_label(best.metric))
    return step


def due_every(every: int | Literal["epoch"], *, batch: int, epoch: int) -> Callable[[int], bool]:
    """Return a function that takes a step and returns whether an evaluation or a save is due.

    `batch` is the number of sequences in a step, and `epoch` is the number in a pass over the training data.
    """
    if every == "epoch":
        return lambda step: step * batch // epoch > (step - 1) * batch // epoch
    return lambda step: step % every == 0


class Evaluations(Callback):
    """Evaluates at the given steps of a training.

    The caller of the training evaluates its last step, unless the best of all evaluations is wanted.
    """

    def __init__(
        self,
        rank: "Rank",
        is_due: Callable[[int], bool],
        evaluate: Callable[[], Mapping[str, Any]],
        metrics: RunMetrics,
        shutdown: Shutdown,
        *,
        best: BestEvaluation | None = None,
        rungs: Rungs | None = None,
    ) -> None:
        """`is_due` takes a step and returns whether an evaluation is due after it."""
        self._rank = rank
        self._is_step_due = is_due
        self._evaluate = evaluate
        self._metrics = metrics
        self._shutdown = shutdown
        self._best = best
        self._rungs = rungs

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Run the evaluation that the last attempt did not finish.

        Raises TrainedEnoughError if no step is left, because a Trainer does a step before it checks.
        """
        step = state.global_step
        if step and self._is_due(state) and not any(is_evaluation(entry, step) for entry in state.log_history):
            # The last attempt may have finished the evaluation after this checkpoint and before the next one.
            values = self._rank.once("evaluated", lambda: self._metrics.evaluated_at(step))
            if values is None:
                self._run(state)
            else:
                self._note(state, values)
        if self._best is not None and self._best.is_exhausted(state.log_history):
            raise TrainedEnoughError
        if self._rungs is not None and (self._rungs.was_stopped(step) or self._is_stopped(state)):
            self._rungs.report_stop()
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
        if self._rungs is not None and not control.should_training_stop and self._is_stopped(state):
            self._rungs.report_stop()
            control.should_save = control.should_training_stop = True

    def _is_stopped(self, state: Any) -> bool:
        """Return whether the run is a point of a sweep that stops after this step's evaluation."""
        step = state.global_step
        if self._rungs is None or step >= state.max_steps:
            return False
        found = [entry for entry in state.log_history if is_evaluation(entry, step)]
        return bool(found) and self._rungs.is_stopped(step, found[-1])

    def _judge(self, best: BestEvaluation, state: Any, control: Any) -> None:
        """Save the checkpoint of the best evaluation, and stop if the patience is exhausted."""
        found = best.of(state.log_history)
        if found is not None and found.step == state.global_step:
            control.should_save = True
        elif best.is_exhausted(state.log_history):
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
        return self._is_step_due(state.global_step)

    def _run(self, state: Any) -> bool:
        values = self._shutdown.evaluated(self._evaluate)
        if values is None:
            return False
        # All ranks use rank 0's values, because theirs may be rounded differently.
        if self._best is not None:
            values = self._rank.once(f"evaluation/{state.global_step}", lambda: values)
        self._metrics.evaluated(state.global_step, values)
        self._note(state, values)
        return True

    def _note(self, state: Any, values: Mapping[str, Any]) -> None:
        state.log_history.append({"step": state.global_step, **values})


def is_evaluation(entry: Mapping[str, Any], step: int) -> bool:
    """Return whether an entry in a Trainer's log is an evaluation at this step."""
    return entry.get("step") == step and any(name.startswith("eval_") for name in entry)
