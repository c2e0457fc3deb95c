"""Check one card of a node: multiply matrices, and all-reduce with the node's other cards.

    python -m jobs.container.launcher.health_rank SECONDS RESULT_FILE

The launcher (jobs.container.launcher.health) starts one process per card before it starts the ranks. All values are
whole numbers that bfloat16 represents exactly, so any deviation means that the card computes wrongly.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.container.accelerator import Accelerator, of_rank
from jobs.container.rank import LAUNCHER_PID_VARIABLE, die_with_parent

if TYPE_CHECKING:
    import torch

CARD_SIZE = 8192
"""Rows and columns of the matrices on a card: enough to keep it busy. Each matrix has 128 MiB."""

CPU_SIZE = 512

_ADDENDS = 256
"""Maximum number of ones that a product adds up. bfloat16 represents whole numbers exactly up to this number."""

_CHECKED_ROWS = 16
"""Rows of the product that the host computes as well, for comparison."""

_MESSAGE_BYTES = {"hpu": 64 << 20, "cuda": 64 << 20, "cpu": 4 << 20}


def main() -> None:
    seconds, result_file = float(sys.argv[1]), Path(sys.argv[2])
    die_with_parent(int(os.environ[LAUNCHER_PID_VARIABLE]))
    accelerator = of_rank(os.environ)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = accelerator.device(int(os.environ["LOCAL_RANK"]))
    share = seconds / 2 if world_size > 1 else seconds
    teraflops, fault = multiply(accelerator, device, seconds=share)
    result = {"teraflops": teraflops, "fault": fault}
    _write(result_file, result)
    if world_size > 1:
        bandwidth, wrong_sum = all_reduce(accelerator, device, rank=rank, world_size=world_size, seconds=share)
        _write(result_file, {**result, "gigabytes_per_second": bandwidth, "fault": fault or wrong_sum})
    os._exit(0)  # skips the shutdown of the process group, which would wait for a peer that is gone


def multiply(accelerator: Accelerator, device: "torch.device", *, seconds: float) -> tuple[float, str | None]:
    """Return the TFLOP/s of a matrix multiplication over about `seconds`, and what is wrong with it, or None."""
    import torch

    size = CPU_SIZE if accelerator.name == "cpu" else CARD_SIZE
    dtype = torch.float32 if accelerator.name == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (size, size), generator=generator, dtype=torch.int8) * 2 - 1
    left = signs.clone()
    left[:, _ADDENDS:] = 0  # so that bfloat16 represents every sum exactly
    a, b = left.to(dtype).to(device), signs.to(dtype).to(device)
    first = (a @ b).cpu()
    expected = left[:_CHECKED_ROWS].float() @ signs.float()
    count, took = _repeated(accelerator, lambda: a @ b, seconds=seconds)
    last = (a @ b).cpu()
    fault = None
    if not torch.equal(first[:_CHECKED_ROWS].float(), expected) or not torch.equal(first, last):
        fault = "returns wrong products"
    return 2 * size**3 * count / took / 1e12, fault


def all_reduce(
    accelerator: Accelerator, device: "torch.device", *, rank: int, world_size: int, seconds: float
) -> tuple[float, str | None]:
    """Return the bus bandwidth of an all-reduce in GB/s, as nccl-tests define it, and what is wrong, or None."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(accelerator.backend)
    count = _MESSAGE_BYTES[accelerator.name] // 4
    probe = torch.full((count,), float(rank + 1), device=device)
    dist.all_reduce(probe)
    accelerator.synchronize()
    right = bool((probe.cpu() == world_size * (world_size + 1) / 2).all())
    message = torch.zeros(count, device=device)

    def reduce_some(times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(message)
        accelerator.synchronize()
        return time.perf_counter() - started

    # All ranks repeat the all-reduce as often as the slowest rank can within the time.
    possible = torch.tensor([seconds / max(reduce_some(3) / 3, 1e-6)], device=device)
    dist.all_reduce(possible, op=dist.ReduceOp.MIN)
    times = max(1, min(10_000, int(possible.item())))
    took = reduce_some(times)
    bus_bytes = count * 4 * 2 * (world_size - 1) / world_size
    return bus_bytes * times / took / 1e9, None if right else "receives a wrong sum from the others"


def _repeated(accelerator: Accelerator, work: Callable[[], object], *, seconds: float) -> tuple[int, float]:
    """Repeat `work` for about `seconds`. Returns the number of repetitions and the seconds that they took."""
    work()
    accelerator.synchronize()
    started = time.perf_counter()
    count, at_once = 0, 1
    while True:
        for _ in range(at_once):
            work()
        accelerator.synchronize()
        count += at_once
        took = time.perf_counter() - started
        if took >= seconds:
            return count, took
        at_once = min(64, 2 * at_once)


def _write(file: Path, result: Mapping[str, object]) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.replace(file)


if __name__ == "__main__":
    main()
