"""Callback: makes anything built on the Trainer of Hugging Face's transformers interruptible and resumable."""

from typing import Any, Literal

from transformers import TrainerCallback

from trainyard.script import is_here


class Callback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Lets the platform interrupt and resume a Trainer. Outside the platform it does nothing.

    After a Spot notice the training saves, continues, and saves again before the instance ends. Checkpoints are written
    and uploaded in the background. Metrics, progress and heartbeats reach the platform.

    Example:
        trainer = Trainer(…, callbacks=[trainyard.Callback()])
        trainer.train(resume_from_checkpoint=trainyard.checkpoint())
    """

    def __new__(cls, *, checkpoint_every_steps: int | Literal["auto"] | None = "auto", **options: Any) -> Any:
        """Return the callback that does the work, inside the platform."""
        if cls is Callback and is_here():
            from jobs.container.trainer.components import Saves
            from jobs.container.trainer.script_trainer import AttachedCallback

            return AttachedCallback(Saves(every_steps=checkpoint_every_steps, **options))
        return super().__new__(cls)

    def __init__(
        self,
        *,
        checkpoint_every_steps: int | Literal["auto"] | None = "auto",
        mean_hours_between_reclaims: float = 6.0,
        keep: int = 2,
        keep_every_steps: int | None = None,
    ) -> None:
        """Set how often to save, in addition to the Trainer's own arguments, and which checkpoints to keep.

        Args:
            checkpoint_every_steps: Interval between checkpoints. Default: auto, the interval that costs the least time
                by Young's formula, given how long saves take and `mean_hours_between_reclaims`. None saves only when
                the Trainer does.
            mean_hours_between_reclaims: Mean time between reclaims of one instance. Default: 6 hours.
            keep: Number of newest checkpoints to keep on S3. Default: 2. The best checkpoint is also kept if the
                Trainer loads it at its end.
            keep_every_steps: Also keep the first checkpoint at or after each multiple of this. Not set by default.

        Example:
            trainyard.Callback(checkpoint_every_steps=500, keep=3)
        """
