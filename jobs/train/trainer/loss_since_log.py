"""A checkpoint between two log lines keeps what the Trainer has summed up for the next one.

It logs the mean loss of the steps since the line before. What it keeps in a checkpoint does not hold their sum, so the
first line after a resume would be the mean of fewer steps, and the curve another one than that of an uninterrupted run.
"""

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs.train.rank import Rank
    from jobs.train.trainer.checkpoint import Resume


def keeping_loss_since_log(trainer_class: type[Any], rank: "Rank", resume: "Resume | None") -> type[Any]:
    """The Trainer class that does; `resume` is the checkpoint it goes on from."""
    name = _name(rank.rank)

    class LossKeepingTrainer(trainer_class):  # type: ignore[misc]  # the class is chosen at run time
        _sum_since_log: Any = None
        _before = _kept(rank, resume) if resume else None

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            if self._before is not None:
                self._globalstep_last_logged = self._before["logged_step"]
                loss, self._before = loss + self._before["sum"], None
            return loss

        def _maybe_log_save_evaluate(self, tr_loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._sum_since_log = tr_loss
            return super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            saved = super()._save_checkpoint(*args, **kwargs)
            if self.state.global_step > self._globalstep_last_logged:
                content = {"logged_step": self._globalstep_last_logged, "sum": float(self._sum_since_log)}
                folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
                (folder / name).write_text(json.dumps(content))
            return saved

    return LossKeepingTrainer


def _name(rank: int | str) -> str:
    return f"loss-since-log-{rank}.json"


def _kept(rank: "Rank", resume: "Resume") -> dict[str, Any] | None:
    """The rank's own; on another number of ranks the mean of all, for what is logged is a mean over the ranks."""
    which: int | str = rank.rank if resume.world_size == rank.world_size else "*"
    kept = [json.loads(path.read_bytes()) for path in sorted(resume.folder.glob(_name(which)))]
    return {**kept[0], "sum": statistics.fmean(each["sum"] for each in kept)} if kept else None
