"""Save in the background: the training waits only while model and optimizer are copied to host memory.

The copy is made at the end of a step. A thread writes it to disk as the Trainer would, and uploads the whole checkpoint
(jobs/container/saving/upload.py). One save runs at a time, and the next one waits for it. Scheduler, random state and
counters are small: the Trainer writes them itself, so the folder has the usual contents.

With FSDP2 and sharded state dictionaries, each rank copies and writes its own parts.

The Trainer writes everything itself, while the training waits, if memory is short, if DeepSpeed or another kind of FSDP
shards the model, if only peft adapters (which are small) are saved, or if its class overrides how models are saved.
"""

import contextlib
import logging
import os
import random
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from jobs.container.saving.shards import ShardWriter, local_parts, states_of
from jobs.core.errors import TrainyardError
from jobs.core.locations import S3Location
from jobs.core.run import CHECKPOINTS

if TYPE_CHECKING:
    from jobs.container.saving.upload import CheckpointUploads


log = logging.getLogger("trainyard")

_THREADS = 4
"""The most threads that copy at once. More threads do not increase the memory bandwidth."""


class BackgroundSave:
    """Lets the thread that uploads a checkpoint also write model and optimizer."""

    def __init__(self, run: S3Location, uploads: "CheckpointUploads", shards: ShardWriter | None = None) -> None:
        """`shards` writes this rank's part of sharded saves."""
        self._run = run
        self._uploads = uploads
        self._shards = shards
        self._snapshot = Snapshot()
        self._writes_a_copy: bool | None = None
        self.has_copied = False
        """True while a save must not write model and optimizer, because the thread writes their copy later."""

    def settle(self) -> None:
        """Wait until the last checkpoint is on S3."""
        self._uploads.finish()

    @contextlib.contextmanager
    def copied_state(self, trainer: Any) -> Iterator[None]:
        """Copy model and optimizer for the thread. The block writes the rest of the checkpoint."""
        self._uploads.begin()  # the new copy overwrites the one that is being written
        with _explained_writes(Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}", self._run):
            self._copy(trainer)
            try:
                yield
            finally:
                self.has_copied = False

    def save_scheduler(self, trainer: Any, folder: Path) -> None:
        """Write the scheduler alone, as the Trainer does beside the optimizer."""
        if not trainer.args.should_save:
            return
        from transformers.trainer import SCHEDULER_NAME  # loaded by now, without `datasets`: see accelerator.py

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns that the optimizer must be saved too; it will be
            torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)

    def _copy(self, trainer: Any) -> None:
        shards = self._shards if saves_shards(trainer) else None
        if self._writes_a_copy is False or not (shards or trainer.args.should_save):
            return
        reason = _why_no_copy(trainer) if self._writes_a_copy is None else None
        state: dict[str, Any] = {}
        if reason is None and shards:
            state = states_of({"model": trainer.model, "optimizer": trainer.optimizer}, FSDP_FOLDERS)
        elif reason is None:
            # With keep_vars, tied weights are one object. Detached tensors would not show that they are tied.
            state = {"model": trainer.model.state_dict(keep_vars=True), "optimizer": trainer.optimizer.state_dict()}
        if self._writes_a_copy is None:
            ranks = shards.rank.local_world_size if shards else 1
            reason = reason or self._snapshot.why_no_room(local_parts(state), ranks=ranks)
            self._writes_a_copy = reason is None
            if reason is not None:
                log.info("checkpoints: the training waits until they are written: %s", reason)
                return
        step = trainer.state.global_step
        copy = shards.copy(state) if shards else self._snapshot.of(state)

        def write(folder: Path) -> None:
            from transformers.trainer import OPTIMIZER_NAME

            with _explained_writes(folder, self._run):
                if shards:
                    for name, place in FSDP_FOLDERS.items():
                        shards.write({name: copy[name]}, folder / place, key=f"checkpoint/{step}/{name}")
                    return
                trainer._save(str(folder), state_dict=copy["model"])  # noqa: SLF001 - save_model calls it
                torch.save(copy["optimizer"], folder / OPTIMIZER_NAME)

        self._uploads.write_first(write)
        self.has_copied = True


FSDP_FOLDERS = {"model": "pytorch_model_fsdp_0", "optimizer": "optimizer_0"}
"""Where accelerate saves and loads a sharded model and its optimizer (accelerate/utils/fsdp_utils.py)."""


def saves_shards(trainer: Any) -> bool:
    """Return whether a Trainer saves an FSDP2 model in shards, which it does not do for peft's adapters."""
    if not trainer.is_fsdp_enabled or getattr(trainer.model, "peft_config", None):
        return False
    plugin = trainer.accelerator.state.fsdp_plugin
    return getattr(plugin, "fsdp_version", 1) == 2 and "SHARDED_STATE_DICT" in str(plugin.state_dict_type)


def _why_no_copy(trainer: Any) -> str | None:
    """Return why the Trainer must write its model itself, or None if it can write a given state."""
    if saves_shards(trainer):
        return None
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return "each rank has only a part of them"
    if getattr(trainer.model, "peft_config", None):
        return "they are adapters, which are small"
    owner = next(part for part in type(trainer).__mro__ if "_save" in vars(part))
    if not owner.__module__.startswith(("transformers.", "optimum.")):
        return f"{owner.__name__} overrides how they are saved"
    return None


@contextlib.contextmanager
def _explained_writes(folder: Path, run: S3Location) -> Iterator[None]:
    """Turn a failed write into a TrainyardError that explains it. `folder` is checkpoint-N in a folder in scratch."""
    try:
        yield
    except Exception as error:
        # OSError from Python itself, RuntimeError from torch.save, SafetensorError (an Exception) from safetensors.
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
    # "[enforce fail at inline_container.cc:…]": PyTorch's archive writer, after the system has refused a write.
    parts = ("file write failed", "no space left", "file too large", "pytorchstreamwriter", "inline_container")
    return isinstance(error, OSError) or any(part in str(error).lower() for part in parts)


class Snapshot:
    """Copies of a state in host memory. Each copy reuses the memory of the one before."""

    def __init__(self) -> None:
        self._copies: list[torch.Tensor] = []

    def why_no_room(self, state: Any, *, ranks: int = 1) -> str | None:
        """Return why a copy of `state` needs too much memory (twice its size must be free), or None if it fits.

        `ranks` is the number of ranks on this node that make such a copy.
        """
        needed = ranks * sum(tensor.nbytes for tensor in _distinct(state).values())
        available = available_bytes()
        if available is None or 2 * needed <= available:
            return None
        return f"a copy needs {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are available"

    def of(self, state: Any) -> Any:
        """Return `state`, any nesting of dictionaries, lists and tuples, with each tensor replaced by a copy.

        A tensor that appears twice, such as tied weights, is also one tensor in the copy.
        """
        tensors = _distinct(state)
        if [(copy.shape, copy.dtype) for copy in self._copies] != [
            (each.shape, each.dtype) for each in tensors.values()
        ]:
            self._copies = []  # free their memory first
            self._copies = [torch.empty(each.shape, dtype=each.dtype) for each in tensors.values()]
        copies = dict(zip(tensors, self._copies, strict=True))
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda key: _copy(tensors[key], copies[key]), copies))
        return tree_map_only(torch.Tensor, lambda tensor: copies[id(tensor)], state)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory that this container may still use, or None if the system does not report it (not Linux)."""
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
    # Cached files count as used, but are dropped when the memory is needed.
    return min(of_host, most - taken + int(counts.get("inactive_file", 0)))


def _distinct(state: Any) -> dict[int, torch.Tensor]:
    return {id(leaf): leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)}


def _copy(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    if tensor.device.type == "cpu":
        # NumPy, because PyTorch splits each copy among all its threads, which takes seconds if the cores are busy.
        np.copyto(_bytes(copy), _bytes(tensor))
    else:
        copy.copy_(tensor.detach())


def _bytes(tensor: torch.Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    array: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array


def random_state() -> dict[str, Any]:
    """Return the random state of this process: Python, NumPy, and PyTorch on the CPU and its CUDA device."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the random state of this process to a value of `random_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


@contextlib.contextmanager
def random_state_preserved() -> Iterator[None]:
    """Restore the random state of Python, NumPy and PyTorch's CPU generator after the block."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
