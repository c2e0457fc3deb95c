"""A copy of a training's state in the host's memory: it is written to disk while the training goes on.

All its tensors lie in one buffer, which is taken once and used again: for BERT-base with AdamW 1.3 GB. New memory takes
longer to touch than to copy into, seconds where the system has to make room for it, so a thread does that beforehand.
"""

import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

_ALIGNMENT_BYTES = 64

_THREADS = 4
"""At most; more than the memory's own speed is not to be had."""


class Snapshot:
    """The buffer. Each copy takes the place of the one before."""

    def __init__(self, state: Any) -> None:
        """`state` is as large as those that will be copied."""
        self._room = np.empty(bytes_of(state), np.uint8)
        # NumPy fills without Python's lock: nobody waits for it but the first copy.
        self._touching = threading.Thread(target=self._room.fill, args=(0,), name="snapshot", daemon=True)
        self._touching.start()

    def of(self, state: Any) -> Any:
        """`state`, any nesting of dictionaries, lists and tuples, with a copy in the place of each tensor.

        What it holds twice, as tied weights, its copy does too.
        """
        self._touching.join()
        tensors = _distinct(state)
        ends = list(itertools.accumulate(map(_room_of, tensors.values())))
        if ends and self._room.nbytes < ends[-1]:
            self._room = np.empty(ends[-1], np.uint8)
        copies = {
            key: self._place(tensor, end - _room_of(tensor))
            for (key, tensor), end in zip(tensors.items(), ends, strict=True)
        }
        _copy_all([(tensor, copies[key]) for key, tensor in tensors.items()])
        return _with(copies, state)

    def _place(self, tensor: torch.Tensor, start: int) -> torch.Tensor:
        """A storage of its own: who writes tensors takes those that share one for parts of one."""
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return torch.frombuffer(self._room, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)


def bytes_of(state: Any) -> int:
    """Of the buffer that a copy needs."""
    return sum(map(_room_of, _distinct(state).values()))


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this container may still take: the host's, or less by its limit. None: the system does not say."""
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


def _copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    here = [pair for pair in pairs if pair[0].device.type == "cpu"]
    for tensor, copy in pairs:
        if tensor.device.type != "cpu":
            copy.copy_(tensor.detach())
    threads = min(_THREADS, os.cpu_count() or 1)

    def part(number: int) -> None:
        # NumPy, for PyTorch shares each copy among all its threads, which takes seconds where the cores are busy.
        for tensor, copy in here[number::threads]:
            np.copyto(_bytes(copy), _bytes(tensor))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(part, range(threads)))


def _bytes(tensor: torch.Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    array: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array
