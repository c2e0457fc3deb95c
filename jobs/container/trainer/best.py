"""The best evaluation of a training: which it was, when the training has done enough, and the model of it at the end.

What evaluations found lies in the log of the Trainer's state (`log_history` of trainer_state.json), and so in every
checkpoint. All here follows from that alone, however often the run was interrupted.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs.container.saving.stored_checkpoints import IncompleteError, fetch
from jobs.core.errors import TrainyardError
from jobs.core.run import CHECKPOINTS
from jobs.core.words import result_label
from jobs.spec.recipe import SMALLER_IS_BETTER

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

    from jobs.container.rank import Rank

log = logging.getLogger("trainyard")


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best of some evaluations."""

    step: int
    value: float
    since: int
    """The number of evaluations after it, none of them better."""


class BestEvaluation:
    """Tells from a Trainer's log which evaluation was the best by a metric."""

    def __init__(self, metric: str, *, patience: int | None = None) -> None:
        """`patience`: the training has done enough after so many evaluations that are no better than the best."""
        self.metric = metric
        self.patience = patience

    def of(self, history: Sequence[Mapping[str, Any]]) -> Best | None:
        """Return the best of the evaluations in a log; None where there is none, or no value was a number."""
        sign = -1 if self.metric in SMALLER_IS_BETTER else 1
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

    def is_enough(self, history: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the training is to stop."""
        best = self.of(history)
        return self.patience is not None and best is not None and best.since >= self.patience


def take_best(trainer: Any, best: BestEvaluation, rank: "Rank", s3: "S3Client | None") -> int:
    """Give the Trainer's model the weights of the best evaluation. Return its step.

    All ranks call it, once their uploads are finished; `s3` is needed on the first of each node. Where no evaluation
    found a number the model stays what it is. Raises TrainyardError where the checkpoint cannot be used.
    """
    last = int(trainer.state.global_step)
    # Rank 0 answers once its own uploads are finished, that is once the checkpoint is complete for every node.
    step = int(rank.once("best/step", lambda: best.step(trainer.state.log_history) or last))
    if step == last:
        return step

    def fetched() -> str:
        assert s3 is not None  # noqa: S101 - it is there on the first rank of each node
        folder = rank.scratch / "best"
        remote = rank.run / CHECKPOINTS / f"step-{step}"
        try:
            fetch(s3, remote, folder)
        except IncompleteError as error:
            raise TrainyardError(
                f"the best evaluation was after step {step}, and its checkpoint {remote} cannot be used: {error}",
                next_step="submit the run again; without metric_for_best_model it leaves the last step's model",
            ) from error
        return str(folder)

    trainer.state.best_model_checkpoint = rank.once_per_node("best/files", fetched)
    trainer._load_best_model()  # noqa: SLF001 - what it does itself where it chooses
    if rank.is_first:
        log.info("model: that of step %s, which has the best %s", step, result_label(best.metric))
    return step
