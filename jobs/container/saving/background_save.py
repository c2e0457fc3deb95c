"""Save while the training goes on: it stands still for a copy of model and optimizer in the host's memory only.

The copy is made at the end of a step. A thread writes it to disk as the Trainer would, and then uploads everything that
was saved (jobs/container/saving/checkpoint.py). One save is under way at a time, and the next one waits for it.
Scheduler, random state and counters are small: the Trainer itself writes them, so the folder holds what it always does.

The Trainer writes everything itself, while the training waits, if memory is short, with DeepSpeed and FSDP, for
adapters of peft, which are small, and if its class saves models in its own way.
"""

import contextlib
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from jobs.core.errors import TrainyardError
from jobs.core.locations import S3Location
from jobs.core.run import CHECKPOINTS

if TYPE_CHECKING:
    from jobs.container.saving.checkpoint import CheckpointUploads

log = logging.getLogger("trainyard")

_THREADS = 4
"""The most threads that copy at once; more do not raise the memory's speed."""


class BackgroundSave:
    """Leaves model and optimizer to the thread that uploads a checkpoint."""

    def __init__(self, run: S3Location, uploads: "CheckpointUploads") -> None:
        self._run = run
        self._uploads = uploads
        self._snapshot = Snapshot()
        self._writes_a_copy: bool | None = None
        self.has_copied = False
        """True while a save must not write model and optimizer, because their copy is written later."""

    def settle(self) -> None:
        """Wait until the last checkpoint is written and on S3."""
        self._uploads.finish()

    @contextlib.contextmanager
    def copied_state(self, trainer: Any) -> Iterator[None]:
        """Copy model and optimizer for the thread; the block writes the rest of the checkpoint."""
        self._uploads.begin()  # the new copy takes the place of the one that is being written
        with _explained_writes(Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}", self._run):
            self._copy(trainer)
            try:
                yield
            finally:
                self.has_copied = False

    def save_scheduler(self, trainer: Any, folder: Path) -> None:
        """Write the scheduler alone, as the Trainer does beside the optimizer."""
        from transformers.trainer import SCHEDULER_NAME  # loaded by now, without `datasets`: see accelerator.py

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer has to be saved too: it will be
            torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)

    def _copy(self, trainer: Any) -> None:
        if not trainer.args.should_save or self._writes_a_copy is False:
            return
        from transformers.trainer import OPTIMIZER_NAME

        # As variables tied weights are one object, which a detached state does not show.
        state = {"model": trainer.model.state_dict(keep_vars=True), "optimizer": trainer.optimizer.state_dict()}
        if self._writes_a_copy is None:
            reason = _why_no_copy(trainer) or self._snapshot.why_no_room(state)
            self._writes_a_copy = reason is None
            if reason is not None:
                log.info("checkpoints: the training waits until they are written: %s", reason)
                return
        copy = self._snapshot.of(state)

        def write(folder: Path) -> None:
            with _explained_writes(folder, self._run):
                trainer._save(str(folder), state_dict=copy["model"])  # noqa: SLF001 - what save_model calls
                torch.save(copy["optimizer"], folder / OPTIMIZER_NAME)

        self._uploads.write_first(write)
        self.has_copied = True


def _why_no_copy(trainer: Any) -> str | None:
    """Return why the Trainer has to write its model itself, or None if it writes the state that it is given."""
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return "each rank has a part of them"
    if getattr(trainer.model, "peft_config", None):
        return "they are adapters, which are small"
    owner = next(part for part in type(trainer).__mro__ if "_save" in vars(part))
    if not owner.__module__.startswith(("transformers.", "optimum.")):
        return f"{owner.__name__} writes them in its own way"
    return None


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
    # "[enforce fail at inline_container.cc:…]": PyTorch's writer of archives, after a write that the system refused.
    parts = ("file write failed", "no space left", "file too large", "pytorchstreamwriter", "inline_container")
    return isinstance(error, OSError) or any(part in str(error).lower() for part in parts)


class Snapshot:
    """Copies of a state in the host's memory. Each copy takes the place of the one before."""

    def __init__(self) -> None:
        self._copies: list[torch.Tensor] = []

    def why_no_room(self, state: Any) -> str | None:
        """Return why a copy of `state` does not fit into memory with as much again to spare, or None if it does."""
        needed, available = sum(tensor.nbytes for tensor in _distinct(state).values()), available_bytes()
        if available is None or 2 * needed <= available:
            return None
        return f"a copy needs {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are available"

    def of(self, state: Any) -> Any:
        """Return `state`, any nesting of dictionaries, lists and tuples, with a copy in the place of each tensor.

        A tensor that it holds twice, such as tied weights, is one in the copy too.
        """
        tensors = _distinct(state)
        if [(copy.shape, copy.dtype) for copy in self._copies] != [
            (each.shape, each.dtype) for each in tensors.values()
        ]:
            self._copies = []  # its memory first
            self._copies = [torch.empty(each.shape, dtype=each.dtype) for each in tensors.values()]
        copies = dict(zip(tensors, self._copies, strict=True))
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda key: _copy(tensors[key], copies[key]), copies))
        return tree_map_only(torch.Tensor, lambda tensor: copies[id(tensor)], state)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return how much memory this container may still take, or None if the system does not say (it is not Linux)."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    [of_host] = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = root / "sys/fs/cgroup"
    try:
        most, taken = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no group, or "max": no limit
        return of_host
    # Cached files count as taken, and are dropped when the memory is needed.
    return min(of_host, most - taken + int(counts.get("inactive_file", 0)))


def _distinct(state: Any) -> dict[int, torch.Tensor]:
    return {id(leaf): leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)}


def _copy(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    if tensor.device.type == "cpu":
        # NumPy, because PyTorch shares each copy among all its threads, which takes seconds if the cores are busy.
        np.copyto(_bytes(copy), _bytes(tensor))
    else:
        copy.copy_(tensor.detach())


def _bytes(tensor: torch.Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    array: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array
