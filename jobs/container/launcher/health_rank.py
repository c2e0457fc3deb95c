"""One card's part in the check of its node's health: multiply matrices, add up among the node's cards, say how fast.

    python -m jobs.container.launcher.health_rank SECONDS RESULT_FILE

The launcher (jobs.container.launcher.health) starts one for each card, as it would ranks, before it starts those.
Values are whole numbers that bfloat16 holds exactly, so a card that computes wrongly is told from one that is slow.
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
"""Rows and columns of the matrices on a card: enough to fill it, at 128 MiB each."""

CPU_SIZE = 512

_ADDENDS = 256
"""The most numbers of one that are added up in a product: bfloat16 holds whole numbers up to there."""

_CHECKED_ROWS = 16
"""Rows of the product that the host computes as well."""

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
        bandwidth, wrong_sum = add_up(accelerator, device, rank=rank, world_size=world_size, seconds=share)
        _write(result_file, {**result, "gigabytes_per_second": bandwidth, "fault": fault or wrong_sum})
    os._exit(0)  # not by way of the process group's end, in which a peer that is gone would be waited for


def multiply(accelerator: Accelerator, device: "torch.device", *, seconds: float) -> tuple[float, str | None]:
    """Return the TFLOP/s of a large multiplication over about `seconds`, and what was wrong with its result."""
    import torch

    size = CPU_SIZE if accelerator.name == "cpu" else CARD_SIZE
    dtype = torch.float32 if accelerator.name == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (size, size), generator=generator, dtype=torch.int8) * 2 - 1
    left = signs.clone()
    left[:, _ADDENDS:] = 0  # so that no sum passes what bfloat16 holds
    ours, theirs = left.to(dtype).to(device), signs.to(dtype).to(device)
    first = (ours @ theirs).cpu()
    expected = left[:_CHECKED_ROWS].float() @ signs.float()
    times = _repeated(accelerator, lambda: ours @ theirs, seconds=seconds)
    last = (ours @ theirs).cpu()
    fault = None
    if not torch.equal(first[:_CHECKED_ROWS].float(), expected) or not torch.equal(first, last):
        fault = "multiplies wrongly"
    count, took = times
    return 2 * size**3 * count / took / 1e12, fault


def add_up(
    accelerator: Accelerator, device: "torch.device", *, rank: int, world_size: int, seconds: float
) -> tuple[float, str | None]:
    """Return the bus bandwidth of an all-reduce in GB/s, as nccl-tests define it, and what was wrong with a sum."""
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

    # All repeat it as often as the slowest has time for.
    wish = torch.tensor([seconds / max(reduce_some(3) / 3, 1e-6)], device=device)
    dist.all_reduce(wish, op=dist.ReduceOp.MIN)
    times = max(1, min(10_000, int(wish.item())))
    took = reduce_some(times)
    bus_bytes = count * 4 * 2 * (world_size - 1) / world_size
    return bus_bytes * times / took / 1e9, None if right else "gets a wrong sum from the others"


def _repeated(accelerator: Accelerator, work: Callable[[], object], *, seconds: float) -> tuple[int, float]:
    """Return how often `work` was done in about `seconds`, and the seconds that it took."""
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
