"""Run: what a training loop of one's own asks of the platform."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from trainyard.places import is_here, number_of

if TYPE_CHECKING:
    from types import TracebackType

    from jobs.container.trainer.own_loop import OwnLoop


class Run:
    """This run, for a loop of one's own. All ranks make one, and call the same methods in the same order."""

    def __init__(
        self,
        *,
        total_steps: int | None = None,
        samples_per_step: int = 1,
        save_every_steps: int | Literal["auto"] = "auto",
        mean_hours_between_reclaims: float = 6.0,
        keep: int = 2,
        keep_every_steps: int | None = None,
    ) -> None:
        """Say what is known of the loop.

        `total_steps`: with it the progress shows how far it is, and the last step is saved.
        `samples_per_step`: over all ranks, for the speed in the metrics.
        `save_every_steps`: auto is what costs least time by Young's formula, from how long a save is seen to take and
        `mean_hours_between_reclaims` of an instance.
        `keep`: so many of the newest checkpoints stay, and the first at or after each multiple of `keep_every_steps`.
        """
        self._loop: OwnLoop | None = None
        if is_here():
            from jobs.container.trainer.accompanied import Saves
            from jobs.container.trainer.own_loop import OwnLoop

            saves = Saves(
                every_steps=save_every_steps,
                mean_hours_between_reclaims=mean_hours_between_reclaims,
                keep=keep,
                keep_every_steps=keep_every_steps,
            )
            self._loop = OwnLoop(total_steps=total_steps, samples_per_step=samples_per_step, saves=saves)

    @property
    def state(self) -> dict[str, Any] | None:
        """What `save` was given last by an earlier attempt, by name, on the CPU: of what has a `state_dict` that.

        It is what this attempt goes on from, whatever it has saved since; None in a new run.
        """
        return self._loop.state if self._loop else None

    @property
    def steps_done(self) -> int:
        """The step of `state`, or the last one since; 0 in a new run."""
        return self._loop.steps_done if self._loop else 0

    def restore(self, **objects: Any) -> int:
        """Give each its saved state (`load_state_dict`), go on with the random numbers, return the steps done.

        Raises an error inside the platform if one is sharded (FSDP, ZeRO): see `save`.
        """
        return self._loop.restore(objects) if self._loop else 0

    def step(self, step: int | None = None) -> None:
        """Say that a step has ended: `step`, or the next one. After it `should_save` and `should_stop` tell."""
        if self._loop:
            self._loop.step(step)

    def should_save(self) -> bool:
        """Return whether this step is to be saved: on all ranks at the same step."""
        return self._loop.should_save() if self._loop else False

    def save(self, step: int, **objects: Any) -> None:
        """Save these under their names (of what has one, its `state_dict`), and each rank's random numbers.

        All ranks call it; the states of rank 0 are saved, as those of a model in DistributedDataParallel are equal. The
        loop waits for a copy in memory only.

        What is sharded (FSDP, ZeRO) is an error inside the platform: give the full state, gathered on all ranks.
        """
        if self._loop:
            self._loop.save(step, objects)

    def should_stop(self) -> bool:
        """Return whether to leave the loop, after the save of this step: the instance is being taken, or the budget
        ends, and the run goes on in its next attempt; or it is a point of a sweep that successive halving stops. What
        comes after the loop has some seconds.
        """
        return self._loop.should_stop() if self._loop else False

    def log(self, step: int, **values: SupportsFloat) -> None:
        """Write metrics of a step: into metrics.jsonl, TensorBoard's events and the log. Outside, print them.

        A point of a sweep with successive halving is compared by what is logged here.
        """
        if self._loop:
            self._loop.log(step, values)
        else:
            print(f"step {step}: {', '.join(f'{name} {number_of(value):.4g}' for name, value in values.items())}")

    def busy(self, seconds: float) -> None:
        """Say that what comes next, until the next step, may take so long and is no hang."""
        if self._loop:
            self._loop.busy(seconds)

    def finish(self) -> None:
        """Have all checkpoints and metrics on S3; the end of the script does it too."""
        if self._loop:
            self._loop.finish()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
