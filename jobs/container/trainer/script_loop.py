"""`trainyard.Run` inside the platform: makes a custom training loop resumable, like the Trainer of our kinds.

It uses the same components, and calls them at each step like a Trainer calls its callbacks.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jobs.container.saving import shards
from jobs.container.saving.snapshot import Snapshot, random_state, set_random_state
from jobs.container.trainer.components import Components, Saves
from jobs.container.trainer.heartbeat import Heartbeats
from jobs.container.trainer.script_platform import at_exit, current_platform
from jobs.core.errors import TrainyardError

log = logging.getLogger("trainyard")

_STATE = "state.pt"


@dataclass
class _Progress:
    """The progress of the loop, with the attribute names of a Trainer's state, arguments and control."""

    output_dir: str
    max_steps: float
    global_step: int = 0
    epoch: float = 0.0
    should_save: bool = False
    should_training_stop: bool = False


class ScriptLoop(Components):
    """One rank's part of a custom loop. All ranks call the same methods in the same order."""

    def __init__(self, *, total_steps: int | None, samples_per_step: int, saves: Saves) -> None:
        platform = current_platform()
        platform.begin()
        resume = platform.resume
        super().__init__(
            platform.rank,
            platform.s3,
            platform.arguments,
            accelerator=platform.accelerator,
            resume=resume,
            saves=saves,
            heartbeats=Heartbeats(platform.rank, compiles=False, is_patient=True),
            samples_per_step=samples_per_step,
            logs_all=True,
        )
        self._platform = platform
        self._folder = resume.folder if resume else None
        self._state: Any = None
        self._snapshot, self._shard_writer = Snapshot(), shards.ShardWriter(platform.rank)
        self._sharded: set[str] = set()
        """Names of the restored objects that were saved in shards. They are saved in shards again."""
        self._copies: bool | None = None
        self._saved_step: int | None = None
        self._has_loaded = self._has_begun = False
        self._progress = _Progress(
            output_dir=str(platform.rank.scratch / "own-loop"),
            max_steps=total_steps or math.inf,
            global_step=resume.step if resume else 0,
        )
        # An attempt that resumes after the last step logs nothing, but its result is the run's result.
        self._logged = self.metrics.logged_before()
        self._callbacks = self.callbacks()
        for part in (self.heartbeats, self.metrics, *self.saves):
            part.on_train_begin(self._progress, self._progress, self._progress)
        self._begin_step()
        at_exit(self.finish)
        self._is_over = False
        self._progress.should_training_stop = self.rungs is not None and self.rungs.was_stopped(
            self._progress.global_step
        )

    @property
    def steps_done(self) -> int:
        self._load()
        return self._progress.global_step

    @property
    def state(self) -> Any:
        """The state from which the attempt resumes, on the CPU; None in a new run."""
        self._load()
        if self._folder is not None and self._state is None:
            # The run's own file, verified by the manifest's hash. It may contain anything that the script saved.
            self._state = torch.load(self._folder / _STATE, map_location="cpu", weights_only=False)
        return self._state

    def restore(self, objects: Mapping[str, Any]) -> int:
        """Load the saved states into the objects, restore this rank's random state, and return the steps done.

        Raises TrainyardError if an object cannot be saved or loaded, so that the script fails before its first step.
        """
        refuse_unknown_shards(objects)
        refuse_unloadable(objects)
        self._load()
        if self._folder is None:
            return 0
        saved, self._sharded = self.state, shards.saved_names(self._folder / shards.FOLDER)
        known = {*saved, *self._sharded}
        missing = sorted(set(objects) - known)
        if missing:
            raise TrainyardError(
                f"checkpoint step-{self.steps_done} has no '{missing[0]}'; it has {', '.join(sorted(known))}",
                next_step="restore the objects that the script saves, under the same names",
            )
        for name in set(objects) - self._sharded:
            objects[name].load_state_dict(saved[name])
        if parts := self._sharded & set(objects):
            shards.load(self._folder / shards.FOLDER, objects, parts)
        path = self._folder / _random_file(self.rank.rank)
        if path.exists():
            set_random_state(torch.load(path, map_location="cpu", weights_only=False))
        return self._progress.global_step

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: float(_detached(value)) for name, value in values.items()}
        self._logged |= numbers
        self.metrics.logged(step, numbers, total_steps=self._progress.max_steps)
        progress = self._progress
        if self.rungs is not None and step < progress.max_steps and self.rungs.is_stopped(step, numbers):
            progress.should_save = progress.should_training_stop = True

    def step(self, step: int | None) -> None:
        """Count a step that has ended, and agree with the other ranks whether to save or to stop."""
        progress = self._progress
        if not self._has_begun:
            self._begin(step)
        progress.global_step = progress.global_step + 1 if step is None else step
        progress.should_save = False
        for part in self._callbacks:
            part.on_step_end(progress, progress, progress)
        if not progress.should_save:
            self._begin_step()

    def _begin_step(self) -> None:
        for part in self.saves:
            part.on_step_begin(self._progress, self._progress, self._progress)

    def _load(self) -> None:
        """Record that the script uses the state of an earlier attempt, and log the start."""
        if not self._has_loaded:
            self._has_loaded = True
            self._platform.log_start(self._progress.global_step)

    def _begin(self, step: int | None) -> None:
        """Detect from the loop's first step whether it resumes or starts over."""
        self._has_begun, progress = True, self._progress
        if self._folder is not None and not (self._has_loaded and (step is None or step > progress.global_step)):
            progress.global_step, self._logged = 0, {}
            self.metrics.start_over()
            self._has_loaded = False
            self._platform.warn_starts_over(
                "step = run.restore(model=model, optimizer=optimizer), and count from there"
            )
        self._load()

    def should_save(self) -> bool:
        return self._progress.should_save

    def should_stop(self) -> bool:
        if self.shutdown.reason:
            saved = f"saved step {self._saved_step}" if self._saved_step is not None else "nothing new saved"
            self._platform.report_stopped(f"{self.shutdown.reason}; {saved}")
        elif self.rungs is not None and self._progress.should_training_stop:
            self.rungs.report_stop()
        return self._progress.should_training_stop

    def save(self, step: int, objects: Mapping[str, Any]) -> None:
        """Write the objects' states and each rank's random state. The upload runs in the background.

        Raises TrainyardError, on all ranks, if an object is sharded in a way that cannot be saved.
        """
        refuse_unknown_shards(objects)
        progress, rank = self._progress, self.rank
        progress.global_step = step
        self.heartbeats.saving()
        self.uploads.begin()
        folder = Path(progress.output_dir) / f"checkpoint-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(random_state(), folder / _random_file(rank.rank))
        self._write(folder, objects)
        self.uploads.on_save(progress, progress, progress)
        self.heartbeats.saved()
        self._saved_step = step
        if progress.should_training_stop:
            # The script is about to leave the loop, so complete its last checkpoint first.
            self.uploads.finish()
            rank.once(f"saved/{step}", lambda: True)
        progress.should_save = False
        self._begin_step()

    def busy(self, seconds: float) -> None:
        self.heartbeats.busy(seconds)

    def finish(self) -> None:
        """Upload everything, at the end of the process or when the script calls `finish`."""
        if self._is_over:
            return
        self._is_over = True
        self.heartbeats.end()
        self.uploads.finish()
        self.metrics.on_train_end(self._progress, self._progress, self._progress)
        if not self.shutdown.reason:
            self.shutdown.stop_listening()
            result = {**self._logged, **self.metrics.throughput.figures}
            self.metrics.result(self._progress.global_step, result)
        self.metrics.close()

    def _write(self, folder: Path, objects: Mapping[str, Any]) -> None:
        """Copy the states, to write them in the background. If memory is short, write them now.

        Rank 0 writes the states that are equal on all ranks, and each rank writes its parts of sharded states.
        """
        rank = self.rank
        states = {name: item if _has_parameters(item) else _state_of(item) for name, item in objects.items()}
        refuse_unknown_shards(states)
        sharded = {name for name, item in states.items() if shards.is_sharded(item)} | (self._sharded & set(states))
        parts = shards.states_of(states, sharded) if sharded else {}
        whole = {name: _state_of(item) for name, item in states.items() if rank.is_first and name not in sharded}
        if not (rank.is_first or parts):
            return
        if self._copies is None:
            own, ranks = [whole, shards.local_parts(parts)], rank.local_world_size if parts else 1
            self._copies = self._snapshot.why_no_room(own, ranks=ranks) is None
        if self._copies:
            whole, parts = self._snapshot.of(whole), self._shard_writer.copy(parts) if parts else {}
        key = f"checkpoint/{self._progress.global_step}/shards"

        def write(target: Path) -> None:
            if rank.is_first:
                torch.save(whole, target / _STATE)
            if parts:
                self._shard_writer.write(parts, target / shards.FOLDER, key=key)

        if self._copies:
            self.uploads.write_first(write)
        else:
            write(folder)


def refuse_unknown_shards(objects: Mapping[str, Any]) -> None:
    """Raise TrainyardError if an object is sharded by FSDP1 or DeepSpeed's ZeRO.

    Rank 0's part would be saved as the whole, and a state_dict that gathers all parts waits for other ranks forever.
    """
    for name, item in objects.items():
        if type(item).__module__.startswith("deepspeed.") or any(
            hasattr(tensor, mark) for tensor in shards.tensors_of(item) for mark in ("_fsdp_flattened", "ds_id")
        ):
            raise TrainyardError(
                f"'{name}' is sharded by FullyShardedDataParallel or DeepSpeed, whose parts trainyard.Run cannot save",
                next_step="shard it with torch.distributed.fsdp.fully_shard (FSDP2), or use a Trainer with "
                "trainyard.Callback (jobs/docs/scripts.md)",
            )


def refuse_unloadable(objects: Mapping[str, Any]) -> None:
    """Raise TrainyardError if an object cannot load a saved state, in the first attempt instead of after a reclaim."""
    for name, item in objects.items():
        if not hasattr(item, "load_state_dict") and not shards.is_sharded(item):
            raise TrainyardError(
                f"'{name}' is a {type(item).__name__}, which trainyard.Run cannot restore: it has no load_state_dict",
                next_step="restore modules and optimizers, and read other saved values from run.state",
            )


def _has_parameters(item: Any) -> bool:
    return isinstance(item, (torch.nn.Module, torch.optim.Optimizer))


def _state_of(item: Any) -> Any:
    return item.state_dict() if hasattr(item, "state_dict") else item


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _random_file(rank: int) -> str:
    return f"random-{rank}.pt"
