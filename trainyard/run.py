"""Run: makes a custom training loop interruptible and resumable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from trainyard.script import is_here, number_of

if TYPE_CHECKING:
    from types import TracebackType

    from jobs.container.trainer.script_loop import ScriptLoop


class Run:
    """This run, for a custom training loop. All ranks create one and call the same methods in the same order.

    Example:
        with trainyard.Run(total_steps=1000, samples_per_step=64) as run:
            step = run.restore(model=model, optimizer=optimizer)
            while step < 1000 and not run.should_stop():
                loss = train_step(model, optimizer)
                step += 1
                run.step(step)
                run.log(step, loss=loss)
                if run.should_save():
                    run.save(step, model=model, optimizer=optimizer)
    """

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
        """Describe the loop and how often to save.

        Args:
            total_steps: Steps of the whole training. If given, progress shows the total, and the last step is saved.
            samples_per_step: Samples in a step over all ranks, for the samples per second in the metrics. Default: 1.
            save_every_steps: Interval between checkpoints. Default: auto, the interval that costs the least time by
                Young's formula, given how long saves take and `mean_hours_between_reclaims`.
            mean_hours_between_reclaims: Mean time between reclaims of one instance. Default: 6 hours.
            keep: Number of newest checkpoints to keep. Default: 2.
            keep_every_steps: Also keep the first checkpoint at or after each multiple of this. Not set by default.

        Example:
            run = trainyard.Run(total_steps=1000, samples_per_step=64)
        """
        self._loop: ScriptLoop | None = None
        if is_here():
            from jobs.container.trainer.components import Saves
            from jobs.container.trainer.script_loop import ScriptLoop

            saves = Saves(
                every_steps=save_every_steps,
                mean_hours_between_reclaims=mean_hours_between_reclaims,
                keep=keep,
                keep_every_steps=keep_every_steps,
            )
            self._loop = ScriptLoop(total_steps=total_steps, samples_per_step=samples_per_step, saves=saves)

    @property
    def state(self) -> dict[str, Any] | None:
        """The state that an earlier attempt saved last, by name, on the CPU. None in a new run.

        Objects with a `state_dict` are saved as that. Saving in this attempt does not change this state. It excludes
        sharded objects, which `restore` loads.

        Example:
            if run.state is not None:
                sampler.position = run.state["position"]
        """
        return self._loop.state if self._loop else None

    @property
    def steps_done(self) -> int:
        """The last completed step. It starts at the step of `state`, or at 0 in a new run.

        Example:
            progress = run.steps_done / total_steps
        """
        return self._loop.steps_done if self._loop else 0

    def restore(self, **objects: Any) -> int:
        """Load the saved state into each object (`load_state_dict`) and return the number of steps done.

        Also restores this rank's random state. In a new run it changes nothing and returns 0. All ranks call it. Shards
        can be loaded with any number of ranks. Pass an optimizer together with its model.

        Example:
            step = run.restore(model=model, optimizer=optimizer)
        """
        return self._loop.restore(objects) if self._loop else 0

    def step(self, step: int | None = None) -> None:
        """Report that step `step`, by default the next one, has ended. Then check `should_save` and `should_stop`.

        Example:
            optimizer.step()
            run.step(step)
        """
        if self._loop:
            self._loop.step(step)

    def should_save(self) -> bool:
        """Return whether to save this step. The answer is the same on all ranks.

        Example:
            if run.should_save():
                run.save(step, model=model, optimizer=optimizer)
        """
        return self._loop.should_save() if self._loop else False

    def save(self, step: int, **objects: Any) -> None:
        """Save the objects, or their `state_dict` if they have one, and each rank's random state. All ranks call it.

        Only rank 0's states are saved: with DistributedDataParallel, a model is equal on all ranks. The loop waits only
        for a copy in memory. Writing and uploading run in the background.

        If a state contains DTensors (FSDP2, tensor parallelism), each rank saves its parts in the format of
        torch.distributed.checkpoint. This applies to models, to optimizers given with their models, and to other
        objects whose `state_dict` contains DTensors. FSDP1 and ZeRO raise an error.

        Example:
            run.save(step, model=model, optimizer=optimizer, position={"epoch": epoch})
        """
        if self._loop:
            self._loop.save(step, objects)

    def should_stop(self) -> bool:
        """Return whether to leave the loop, after saving this step if `should_save` returns True.

        True if the instance is being reclaimed or the budget is used up (the next attempt then resumes the run), or if
        successive halving stops this point of a sweep. Code after the loop has a few seconds.

        Example:
            while step < 1000 and not run.should_stop():
                …
        """
        return self._loop.should_stop() if self._loop else False

    def log(self, step: int, **values: SupportsFloat) -> None:
        """Write a step's metrics to metrics.jsonl, TensorBoard and the log. Outside the platform, print them.

        Successive halving compares the points of a sweep by these values.

        Example:
            run.log(step, loss=loss.item(), learning_rate=scheduler.get_last_lr()[0])
        """
        if self._loop:
            self._loop.log(step, values)
        else:
            print(f"step {step}: {', '.join(f'{name} {number_of(value):.4g}' for name, value in values.items())}")

    def busy(self, seconds: float) -> None:
        """Announce that the next step may be this many seconds away, so that the pause does not count as a hang.

        Example:
            run.busy(seconds=1800)
            evaluate(model)
        """
        if self._loop:
            self._loop.busy(seconds)

    def finish(self) -> None:
        """Wait until all checkpoints and metrics are on S3. Called automatically at the end of the script.

        Example:
            run.finish()
            notify("the model is complete")
        """
        if self._loop:
            self._loop.finish()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
