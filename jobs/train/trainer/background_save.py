"""Save while the training goes on: it stands still for a copy in the host's memory at most.

What is large, the model and the optimizer's state, is copied at the end of a step. A thread writes the copy to disk, as
the Trainer would, which leaves Python's lock to the training, and then has all that was saved uploaded
(jobs/train/trainer/checkpoint.py). One save is under way at a time; the next one waits for it. The rest (scheduler,
random state, counters) is small, and written while the training waits, so the folder holds what it always does.

Nothing but the optimizer changes the weights of our own kinds, so there the next forward and backward pass go on beside
the copy, and the optimizer's step waits for it. A script may change them anywhere: it waits for the copy. So does an
accelerator, from whose memory the copy is made at once.

All tensors of the copy lie in one buffer, which is taken once and used again: for BERT-base with AdamW 1.3 GB. New
memory takes longer to touch than to copy into, seconds where the system has to make room for it, so a thread does that
beforehand.

DeepSpeed writes through its own engine, while the training waits; so does the Trainer where memory is short, and one of
a class that writes what it is then and not what it is given.
"""

import contextlib
import itertools
import logging
import os
import shutil
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from jobs.contract.errors import TrainyardError
from jobs.contract.locations import S3Location
from jobs.contract.run import CHECKPOINTS

if TYPE_CHECKING:
    from jobs.train.trainer.checkpoint import CheckpointUploads

log = logging.getLogger("trainyard")

_ALIGNMENT_BYTES = 64

_THREADS = 4
"""The most that copy at once; more than the memory's own speed is not to be had."""


class BackgroundSave:
    """Leaves the writing of model and optimizer to the thread that uploads a checkpoint.

    Where the disk is full, it says what that means for the run.
    """

    def __init__(self, run: S3Location, uploads: "CheckpointUploads", *, only_optimizer_changes_weights: bool) -> None:
        """`only_optimizer_changes_weights`: between two of its steps all parameters stay as they are."""
        self._run = run
        self._uploads = uploads
        self._copies_beside_training = only_optimizer_changes_weights
        self._snapshot: Snapshot | None = None
        self._has_looked = False
        self._names: frozenset[str] | None = None
        self.has_copied = False
        """True while a save need not write model and optimizer, for a copy of them is written later."""

    @property
    def copying_seconds(self) -> float:
        """Time that the last copy took, which is waited for; 0: there was none."""
        return self._snapshot.finish() if self._snapshot is not None else 0.0

    def make_room(self, trainer: Any) -> None:
        """Take the memory for copies, once; none is taken where the training waits until all is written."""
        if self._has_looked:
            return
        self._has_looked = True
        if not trainer.args.should_save or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            return
        try:
            writes_a_copy, self._names = _writes_a_copy(trainer), _names_of_adapters(trainer.model)
        except _ComputedWeightsError:
            writes_a_copy = False
        if not writes_a_copy:
            log.info("checkpoints: the training waits until they are written: %s writes them", type(trainer).__name__)
            return
        state = self._large_state(trainer)
        needed, available = bytes_of(state), available_bytes()
        if available is None or 2 * needed <= available:  # as much again for whatever else needs some
            self._snapshot = Snapshot(state)
            optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate's has one within
            if self._copies_beside_training and isinstance(optimizer, torch.optim.Optimizer):
                optimizer.register_step_pre_hook(self._wait_for_copy)
            else:
                self._copies_beside_training = False
            return
        log.info(
            "checkpoints: the training waits until they are written: a copy needs %.1f GB of memory, and %.1f GB "
            "are available",
            needed / 1e9,
            available / 1e9,
        )

    def settle(self) -> None:
        """Wait until the last checkpoint is written, and on S3."""
        self._uploads.finish()

    @contextlib.contextmanager
    def copied_state(self, trainer: Any) -> Iterator[None]:
        """Copy model and optimizer, and leave the copy to be written.

        The block writes the rest of the checkpoint while threads copy. With its end all is copied, or goes on to be
        until the optimizer's next step.
        """
        self._uploads.begin()  # the copy that it writes lies where the next one is to lie
        with _explained_writes(Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}", self._run):
            self._begin_to_copy(trainer)
            try:
                yield
            finally:
                self.has_copied = False
                if self._snapshot is not None and not self._copies_beside_training:
                    self._snapshot.finish()

    def save_scheduler(self, trainer: Any, folder: Path) -> None:
        """Write the scheduler alone, as the Trainer does beside the optimizer."""
        from transformers.trainer import SCHEDULER_NAME  # by then it was loaded, without `datasets`: see accelerator.py

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer has to be saved too: it will be
            torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)

    def _begin_to_copy(self, trainer: Any) -> None:
        if self._snapshot is None:
            return
        from transformers.trainer import OPTIMIZER_NAME

        snapshot, state = self._snapshot, self._large_state(trainer)
        if self._copies_beside_training:
            state["model"] = _with_copied_buffers(state["model"])
        copy = snapshot.begin(state)

        def write(folder: Path) -> None:
            snapshot.finish()
            with _explained_writes(folder, self._run):
                trainer._save(str(folder), state_dict=copy["model"])  # noqa: SLF001 - what save_model calls
                torch.save(copy["optimizer"], folder / OPTIMIZER_NAME)

        self._uploads.write_first(write)
        self.has_copied = True

    def _wait_for_copy(self, *_: Any) -> None:
        if self._snapshot is not None:
            self._snapshot.finish()

    def _large_state(self, trainer: Any) -> dict[str, Any]:
        # As variables tied weights are one object, which a detached state does not show.
        model = trainer.model.state_dict(keep_vars=True)
        if self._names is not None:
            model = {name: weights for name, weights in model.items() if name in self._names}
        return {"model": model, "optimizer": trainer.optimizer.state_dict()}


def _with_copied_buffers(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's state with copies of what a forward pass may change: all but parameters."""
    copies = {
        id(each): each.clone()
        for each in model.values()
        if isinstance(each, torch.Tensor) and not isinstance(each, torch.nn.Parameter)
    }
    return {name: copies.get(id(each), each) for name, each in model.items()}


def _writes_a_copy(trainer: Any) -> bool:
    """Return whether the Trainer's own `_save` writes the state that it is given, as that of transformers does."""
    owner = next(part for part in type(trainer).__mro__ if "_save" in vars(part))
    return owner.__module__.startswith(("transformers.", "optimum."))


class _ComputedWeightsError(Exception):
    """Adapters of which other weights are saved than the model's state holds: those of a learned prompt, for one."""


def _names_of_adapters(model: Any) -> frozenset[str] | None:
    """Return which weights of a model with adapters of peft are saved: those of the adapters, not the model below.

    None for any other model, which is saved whole. Raises _ComputedWeightsError.
    """
    if not getattr(model, "peft_config", None):
        return None
    from peft import get_peft_model_state_dict

    state = model.state_dict(keep_vars=True)
    names = {id(weights): name for name, weights in state.items()}
    saved = [
        weights
        for adapter in model.peft_config
        for weights in get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter).values()
    ]
    if not all(id(weights) in names for weights in saved):
        raise _ComputedWeightsError
    return frozenset(names[id(weights)] for weights in saved)


@contextlib.contextmanager
def _explained_writes(folder: Path, run: S3Location) -> Iterator[None]:
    """Say what a failed write means for the run. `folder` is checkpoint-N, below one that exists in scratch."""
    try:
        yield
    except Exception as error:
        # OSError of Python's own writes, RuntimeError of torch.save, SafetensorError (an Exception) of safetensors.
        if not _is_failed_write(error):
            raise
        scratch = folder.parent.parent
        free = shutil.disk_usage(scratch).free
        raise TrainyardError(
            f"checkpoint {folder.name.replace('checkpoint', 'step')} could not be written to {scratch} "
            f"({free / 1e9:.1f} GB free): {str(error).splitlines()[0]}; the last complete one in {run / CHECKPOINTS} "
            "is untouched",
            next_step="give the instance a larger volume and submit again",
        ) from error


def _is_failed_write(error: Exception) -> bool:
    if isinstance(error, OSError):
        return True
    # "[enforce fail at inline_container.cc:…]": PyTorch's writer of archives, after a write that the system refused.
    parts = ("file write failed", "no space left", "file too large", "pytorchstreamwriter", "inline_container")
    return any(part in str(error).lower() for part in parts)


class Snapshot:
    """A buffer for copies of a state. Each copy takes the place of the one before."""

    def __init__(self, state: Any) -> None:
        """`state` is as large as those that will be copied."""
        self._room = np.empty(bytes_of(state), np.uint8)
        # NumPy fills without Python's lock: nobody waits for it but the first copy.
        self._touching = threading.Thread(target=self._room.fill, args=(0,), name="snapshot", daemon=True)
        self._touching.start()
        self._began = 0.0
        self._copying: list[Future[float]] = []

    def of(self, state: Any) -> Any:
        """Return `state`, any nesting of dictionaries, lists and tuples, with a copy in the place of each tensor.

        What it holds twice, as tied weights, its copy does too.
        """
        copy = self.begin(state)
        self.finish()
        return copy

    def begin(self, state: Any) -> Any:
        """Return what `of` does, which is a copy once `finish` has returned. Until then nobody may change `state`."""
        self._touching.join()
        self._began = time.monotonic()
        tensors = _distinct(state)
        ends = list(itertools.accumulate(map(_room_of, tensors.values())))
        if ends and self._room.nbytes < ends[-1]:
            self._room = np.empty(ends[-1], np.uint8)
        copies = {
            key: self._place(tensor, end - _room_of(tensor))
            for (key, tensor), end in zip(tensors.items(), ends, strict=True)
        }
        self._copying = _begin_to_copy([(tensor, copies[key]) for key, tensor in tensors.items()])
        return _with(copies, state)

    def finish(self) -> float:
        """Wait, in any thread, until all is copied that was begun, and return the seconds that it took."""
        return max((part.result() - self._began for part in self._copying), default=0.0)

    def _place(self, tensor: torch.Tensor, start: int) -> torch.Tensor:
        """Return a place for the tensor's copy, with a storage of its own.

        Those that share a storage would be taken for parts of one tensor where they are written.
        """
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return torch.frombuffer(self._room, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)


def bytes_of(state: Any) -> int:
    """Return the size of the buffer that a copy of `state` needs."""
    return sum(map(_room_of, _distinct(state).values()))


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return how much memory this container may still take: the host's, or less where it has a limit.

    None where the system does not say.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    [of_host] = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    groups = root / "sys/fs/cgroup"
    for limit, used, reclaimable in (
        (groups / "memory.max", groups / "memory.current", groups / "memory.stat"),
        *((groups / "memory" / name for name in ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")),),
    ):
        try:
            most, taken = int(limit.read_text()), int(used.read_text())
            counts = dict(line.split() for line in reclaimable.read_text().splitlines())
        except (OSError, ValueError):  # another version of cgroups, or "max": no limit
            continue
        # Files that were written count as taken, and are dropped when the memory is needed.
        return min(of_host, most - taken + int(counts.get("inactive_file", 0)))
    return of_host


def _distinct(state: Any) -> dict[int, torch.Tensor]:
    return {id(tensor): tensor for tensor in _tensors(state)}


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _tensors(value)


def _with(copies: dict[int, torch.Tensor], state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return copies[id(state)]
    if isinstance(state, dict):
        return {key: _with(copies, value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_with(copies, value) for value in state)
    return state


def _room_of(tensor: torch.Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _begin_to_copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Future[float]]:
    """Copy what an accelerator holds, and return what copies the rest: at which time of the clock each was done."""
    for tensor, copy in pairs:
        if tensor.device.type != "cpu":
            copy.copy_(tensor.detach())
    # One iterator for all threads: each takes the next when it is done with one, the largest first.
    on_cpu = [pair for pair in pairs if pair[0].device.type == "cpu"]
    here = iter(sorted(on_cpu, key=lambda pair: -pair[0].nbytes))

    def copy_the_next_ones() -> float:
        # NumPy, for PyTorch shares each copy among all its threads, which takes seconds where the cores are busy.
        for tensor, copy in here:
            np.copyto(_bytes(copy), _bytes(tensor))
        return time.monotonic()

    threads = min(_THREADS, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(threads)
    parts = [pool.submit(copy_the_next_ones) for _ in range(threads)]
    pool.shutdown(wait=False)
    return parts


def _bytes(tensor: torch.Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    array: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array
