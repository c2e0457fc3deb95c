"""Ranks of one node as torchrun starts them, but forked from one process that has imported their modules.

    python -m tests.support.container.forked_ranks NPROC MODULE [ARGUMENT …]

Torchrun would import PyTorch, and each rank PyTorch, transformers and possibly optimum-habana: up to seven seconds of
CPU each. A function `preload` of MODULE imports its other modules before the fork.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C++

from jobs.container.accelerator import imports_without_gc
from tests.support.container.warm_ranks import run_module

HOST = "127.0.0.1"


def main(nproc: int, module: str, argv: Sequence[str]) -> int:
    """Return 0 if all ranks have succeeded, else 1."""
    with imports_without_gc():
        preload = getattr(importlib.import_module(module), "preload", None)
        if preload is not None:
            preload()
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    place = {
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "GROUP_RANK": 0,
        "MASTER_ADDR": HOST,
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    ranks = []
    for number in range(nproc):
        sys.stdout.flush()
        rank = os.fork()
        if rank == 0:
            variables = {**place, "RANK": number, "LOCAL_RANK": number}
            os.environ.update({name: str(value) for name, value in variables.items()})
            with contextlib.suppress(AttributeError):
                sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # TextIO does not declare it
            run_module(module, argv)
        ranks.append(rank)
    ends = [os.waitpid(rank, 0)[1] for rank in ranks]
    return int(any(ends))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
