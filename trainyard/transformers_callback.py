"""Callback: one line for whatever is built on the Trainer of Hugging Face's transformers."""

from typing import Any, Literal

from transformers import TrainerCallback

from trainyard.places import is_here


class Callback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Lets the platform interrupt and resume a Trainer. Outside the platform it does nothing.

        trainer = Trainer(…, callbacks=[trainyard.Callback()])
        trainer.train(resume_from_checkpoint=trainyard.checkpoint())

    With it a Spot notice has the training save, train on, and save again before the instance ends, checkpoints are
    written and uploaded while the training goes on, and metrics, progress and heartbeats reach the platform.
    """

    def __new__(cls, *, checkpoint_every_steps: int | Literal["auto"] | None = "auto", **options: Any) -> Any:
        """Return, inside the platform, what does the work there."""
        if cls is Callback and is_here():
            from jobs.container.trainer.accompanied import Saves
            from jobs.container.trainer.attached import AttachedCallback

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
        """Say how often to save, beside what the Trainer's own arguments say, and what stays.

        `checkpoint_every_steps`: auto is what costs least time by Young's formula, from how long a save is seen to take
        and `mean_hours_between_reclaims` of an instance; None: the Trainer's own saves only.
        `keep`: so many of the newest checkpoints stay on S3, the best one where the Trainer loads it at its end, and
        the first at or after each multiple of `keep_every_steps`.
        """
