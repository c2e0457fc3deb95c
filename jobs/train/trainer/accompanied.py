"""What accompanies the training of a script, whether a Trainer (`attached`) or a loop (`own_loop`) trains."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jobs.train.stored_checkpoints import Retention, Throughput
from jobs.train.trainer.callback import callbacks_in_order
from jobs.train.trainer.checkpoint import CheckpointUploads
from jobs.train.trainer.checkpoint_interval import asking_for_saves
from jobs.train.trainer.halving import Rungs
from jobs.train.trainer.heartbeat import Heartbeats
from jobs.train.trainer.metrics import RunMetrics
from jobs.train.trainer.platform import Platform
from jobs.train.trainer.shutdown import Shutdown


@dataclass(frozen=True, kw_only=True)
class Saves:
    """How often to save and which checkpoints stay, as the script sets it."""

    every_steps: int | Literal["auto"] | None = "auto"
    """None: only the Trainer's own saves."""
    mean_hours_between_reclaims: float = 6.0
    keep: int = 2
    keep_every_steps: int | None = None


class Accompanied:
    """One rank's heartbeats, metrics, checkpoints and notices."""

    def __init__(
        self,
        platform: Platform,
        saves: Saves,
        *,
        compiles: bool,
        samples_per_step: int,
        best: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`best` returns the step of the checkpoint that the Trainer loads at its end."""
        rank, resume, accelerator = platform.rank, platform.resume, platform.accelerator
        self.platform = platform
        self.heartbeats = Heartbeats(rank, compiles=compiles, is_patient=True)
        self.metrics = RunMetrics(
            rank,
            platform.s3 if rank.is_first else None,
            resumed_from_step=resume.step if resume else 0,
            throughput=resume.throughput if resume else Throughput(),
            samples_per_step=samples_per_step,
            warmup_steps=accelerator.warmup_steps,
            changed=resume.changed if resume else None,
            logs_all=True,
            memory=accelerator.memory,
            shape=lambda: self.heartbeats.training_shape,
            saving_seconds=lambda: self.heartbeats.saving_seconds,
        )
        self.uploads = CheckpointUploads(
            rank,
            platform.s3,
            platform.arguments,
            self.metrics,
            Retention(newest=saves.keep, every_steps=saves.keep_every_steps),
            waits=self.heartbeats.still,
            best=best,
        )
        self.shutdown = Shutdown(rank, self.uploads)
        self.rungs = Rungs.of(rank, platform.s3, self.heartbeats)
        self.saves = asking_for_saves(
            saves.every_steps,
            rank,
            mean_hours_between_reclaims=saves.mean_hours_between_reclaims,
            warmup_steps=accelerator.warmup_steps,
            complete_seconds=lambda: self.uploads.seconds,
        )

    def callbacks(self, *, own: Sequence[Any] = (), further: Sequence[Any] = ()) -> list[Any]:
        """Return all callbacks in their order. `own` are the script's."""
        return callbacks_in_order(
            heartbeats=self.heartbeats,
            own=own,
            metrics=self.metrics,
            uploads=self.uploads,
            shutdown=self.shutdown,
            further=further,
            saves=self.saves,
        )
