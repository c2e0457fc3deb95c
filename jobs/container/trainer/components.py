"""The components that every training shares: a recipe's (`training`), a script's Trainer, and a script's loop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jobs.container.accelerator import Accelerator
from jobs.container.saving.interval import ChosenSaves, RegularSaves
from jobs.container.saving.manifest import Decisive, Retention, Throughput
from jobs.container.saving.metrics import RunMetrics
from jobs.container.saving.resume import Resume
from jobs.container.saving.stop import Shutdown
from jobs.container.saving.upload import CheckpointUploads
from jobs.container.trainer.halving import Rungs
from jobs.container.trainer.heartbeat import Heartbeats

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

    from jobs.container.rank import Rank


@dataclass(frozen=True, kw_only=True)
class Saves:
    """How often to save, and which checkpoints to keep."""

    every_steps: int | Literal["auto"] | None = "auto"
    """None saves only when the Trainer does."""
    mean_hours_between_reclaims: float = 6.0
    keep: int = 2
    keep_every_steps: int | None = None


class Components:
    """One rank's heartbeats, metrics, checkpoint uploads, shutdown, and sweep rungs."""

    def __init__(
        self,
        rank: "Rank",
        s3: "S3Client | None",
        arguments: Decisive,
        *,
        accelerator: Accelerator,
        resume: Resume | None,
        saves: Saves,
        heartbeats: Heartbeats,
        samples_per_step: int,
        samples_per_epoch: int | None = None,
        logs_all: bool = False,
        report: Callable[[Mapping[str, Any]], None] = lambda _: None,
        best: Callable[[], int | None] = lambda: None,
        saved: Callable[[int, Path], None] = lambda _step, _folder: None,
    ) -> None:
        """For `best` and `saved` see CheckpointUploads, for the other arguments RunMetrics."""
        self.rank, self.s3, self.accelerator, self.resume = rank, s3, accelerator, resume
        self.heartbeats = heartbeats
        self.metrics = RunMetrics(
            rank,
            s3 if rank.is_first else None,
            resumed_from_step=resume.step if resume else 0,
            throughput=resume.throughput if resume else Throughput(),
            samples_per_step=samples_per_step,
            samples_per_epoch=samples_per_epoch,
            warmup_steps=accelerator.warmup_steps,
            changed=resume.changed if resume else None,
            logs_all=logs_all,
            memory=accelerator.memory,
            shape=lambda: heartbeats.training_shape,
            saving_seconds=lambda: heartbeats.saving_seconds,
            report=report,
        )
        self.uploads = CheckpointUploads(
            rank,
            s3,
            arguments,
            self.metrics,
            Retention(newest=saves.keep, every_steps=saves.keep_every_steps),
            waits=heartbeats.keep_alive,
            best=best,
            saved=saved,
        )
        self.shutdown = Shutdown(rank, self.uploads)
        self.rungs = Rungs.of(rank, s3, heartbeats)
        self.saves: list[Any] = []
        """Callbacks that request saves; empty if only the Trainer does."""
        if saves.every_steps == "auto":
            self.saves = [
                ChosenSaves(
                    rank,
                    mean_hours_between_reclaims=saves.mean_hours_between_reclaims,
                    warmup_steps=accelerator.warmup_steps,
                    complete_seconds=lambda: self.uploads.seconds,
                )
            ]
        elif saves.every_steps is not None:
            every = saves.every_steps
            self.saves = [RegularSaves(lambda step: step % every == 0)]

    def callbacks(self, *, own: Sequence[Any] = (), further: Sequence[Any] = ()) -> list[Any]:
        """Return all callbacks in the order in which they are called.

        - The heartbeats are first, so that the other callbacks' time counts as time between steps.
        - `own`, the script's callbacks, come next: the platform decides last on saving and stopping.
        - Metrics come before uploads, so that the last step is counted if a failed save ends the training.
        - The shutdown comes before `further` callbacks, such as evaluations, which check whether it stops the training.
        - The saves are last, so that other work at the end of a step does not count as part of a save.
        """
        return [self.heartbeats, *own, self.metrics, self.uploads, self.shutdown, *further, *self.saves]
