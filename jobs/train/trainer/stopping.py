"""The ranks' part in an ending that was announced: save, and stop where that is asked for, all at the same step.

From its first step on an attempt listens (jobs.train.launcher.endings); what came before is quickly done again. An
evaluation is left in its midst, for it may be longer than what time is left: the next attempt makes up for it.
"""

import contextlib
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import TrainerCallback

from jobs.contract.errors import TrainyardError
from jobs.train.channel import RequestFiles
from jobs.train.trainer.agreement import Agreement
from jobs.train.trainer.metrics import RunMetrics

if TYPE_CHECKING:
    from jobs.train.rank import Rank

log = logging.getLogger("trainyard")


class Stopping(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Listens on every rank. After the training `reason` says why it stopped before its end, if it did."""

    def __init__(self, rank: "Rank") -> None:
        self.reason: str | None = None
        self._rank = rank
        self._files = RequestFiles(rank.scratch)
        self._agreement = Agreement(rank)
        self._listens = self._evaluates = self._save_is_due = False

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._listens:
            self._listens = True
            self._files.listen(self._rank.local_rank)
        if state.global_step >= state.max_steps:
            control.should_save = True  # Trainer of transformers before 4.46 left that out
            return
        decision = self._agreement.boundary()
        if self._save_is_due or decision is not None:
            self._save_is_due = False
            control.should_save = True
        if decision is not None and decision.request == "stop":
            self.reason = decision.reason
            control.should_training_stop = True
        if decision is not None and self._rank.is_first:
            log.info("%s: saving step %s", decision.reason, state.global_step)

    def on_prediction_step(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        if not self._evaluates:
            return
        decision = self._agreement.boundary()
        if decision is None:
            return
        if decision.request == "save":
            self._save_is_due = True  # at the next step
        else:
            self.reason = decision.reason
            raise _EvaluationLeftError

    def evaluated(self, evaluate: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """What `evaluate` finds; None where it was left because the attempt ends, for which `reason` is then set.

        It takes nothing of the training's chance: a run that makes up for an evaluation later has the same weights.
        """
        self._agreement.begin_stretch()
        self._evaluates = self._listens
        try:
            with _chance_kept():
                return evaluate()
        except _EvaluationLeftError:
            return None
        finally:
            self._evaluates = False
            self._agreement.begin_stretch()

    def close(self) -> None:
        """From now on nobody listens: SIGTERM ends the ranks at once. `reason` is set where it came just before."""
        decision = self._agreement.last()
        if decision is not None and decision.request == "stop":
            self.reason = decision.reason
        else:
            self._files.stop_listening(self._rank.local_rank)


class StopOnNan(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Ends the run where the loss is no number any more. It looks where the Trainer fetches it anyway: to be logged."""

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Mapping[str, Any], **_: Any) -> None:
        loss = float(logs.get("loss", 0.0))
        if not math.isfinite(loss):
            raise TrainyardError(
                f"the loss at step {state.global_step} is {loss}, and stop_on_nan is set",
                next_step="submit again with a lower learning_rate or more warm-up, and look at the data",
            )


class _EvaluationLeftError(Exception):
    """All ranks leave their evaluation, at the same batch."""


class Evaluations(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Evaluates every so many steps while a Trainer trains; the last step is left to whoever evaluates its result.

    Comes after `stopping` in the Trainer's list of callbacks.
    """

    def __init__(
        self,
        rank: "Rank",
        every_steps: int,
        evaluate: Callable[[], Mapping[str, Any]],
        metrics: RunMetrics,
        stopping: Stopping,
    ) -> None:
        self._rank = rank
        self._every_steps = every_steps
        self._evaluate = evaluate
        self._metrics = metrics
        self._stopping = stopping

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
        values = self._stopping.evaluated(self._evaluate)
        if values is not None:
            self._metrics.evaluated(step, values)
        return values is not None


@contextlib.contextmanager
def _chance_kept() -> Iterator[None]:
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
