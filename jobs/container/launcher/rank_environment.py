"""The environment of a node's ranks: what libraries read while they are imported, and what holds for one launch."""

import os
from pathlib import Path

import psutil

from jobs.container import libfabric
from jobs.container.accelerator import Accelerator
from jobs.container.instance import address_towards, cpus
from jobs.container.launcher.request import Launch, Node
from jobs.container.rank import ALLOW_CHANGES_VARIABLE, LAUNCHER_PID_VARIABLE, SCRATCH_VARIABLE
from jobs.container.start_up import LAUNCHED_AT_VARIABLE
from jobs.container.store import loopback_sockets, sockets_of_interface

_NCCL_DUMP = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
"""Where NCCL has lost a peer, PyTorch's watchdog gives the ranks four times as long to dump what they know before it
ends its own (ProcessGroupNCCL.cpp, getDumpTimeout), by its default 60 s, for which the other nodes are paid
(`python -m tests.benchmarks.lost_peer --device cuda`). Nothing of theirs is read."""


RECIPES_MB = 8 * 1024
"""A GB for each of eight cards: what the bridge's own example gives a worker."""


def rank_environment(launch: Launch, accelerator: Accelerator, scratch: Path) -> dict[str, str]:
    """Return all variables that the launcher sets for its ranks, beside those that torchrun sets."""
    share = str(max(1, cpus() // launch.nproc_per_node))
    return {
        # Each rank's share of the cores; PyTorch takes them all for each of its processes, and torch.compile up to 32.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", share),
        "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", share),
        # The one rank of a node that tokenizes turns it on for that time (jobs.container.data.labelled_tokens).
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # transformers looks for TensorFlow and Flax otherwise, and loads what it finds.
        "USE_TF": "0",
        "USE_FLAX": "0",
        # Releases of datasets before 4 run the code of a data set on the hub otherwise.
        "HF_DATASETS_TRUST_REMOTE_CODE": "0",
        SCRATCH_VARIABLE: str(scratch),
        "TMPDIR": str(scratch),  # PyTorch leaves folders in there
        LAUNCHER_PID_VARIABLE: str(os.getpid()),
        LAUNCHED_AT_VARIABLE: str(psutil.Process().create_time()),
        ALLOW_CHANGES_VARIABLE: str(int(launch.options.allow_changes)),
        **(loopback_sockets() if launch.node.nnodes == 1 else _sockets_towards(launch.node)),
        **accelerator.environment,
        **_unless_said(_recipes(scratch) if accelerator.name == "hpu" else {}),
        **libfabric.environment(accelerator.name, nnodes=launch.node.nnodes),
        **_unless_said(_NCCL_DUMP if accelerator.backend == "nccl" else {}),
    }


def _recipes(scratch: Path) -> dict[str, str]:
    """Return the variable by which the HPUs of a node share compiled graphs: each would compile all of them itself.

    A folder, whether to empty it first, and its size in MB: the format that Habana's bridge checks it against.
    """
    return {"PT_HPU_RECIPE_CACHE_CONFIG": f"{scratch / 'recipes'},false,{RECIPES_MB}"}


def _sockets_towards(node: Node) -> dict[str, str]:
    """Return the variables by which the ranks of several nodes meet on the one interface that leads to the main node.

    Of the main node that is the one with its own address. Where no interface has the address, or there is no way, they
    choose for themselves.
    """
    try:
        own = address_towards(node.main_address, node.port)
    except OSError:
        return {}
    carriers = [name for name, found in psutil.net_if_addrs().items() if own in (one.address for one in found)]
    chosen = sockets_of_interface(carriers[0]) if carriers else {}
    return _unless_said(chosen)


def _unless_said(chosen: dict[str, str]) -> dict[str, str]:
    """Return those that neither the image nor the job's environment has."""
    return {name: value for name, value in chosen.items() if name not in os.environ}
