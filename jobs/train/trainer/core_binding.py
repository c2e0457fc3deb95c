"""Each rank of an HPU on cores of its own, of one socket: the host hands a card its work step by step in lazy mode.

optimum-habana's launcher does so for the cards of one node (`mpirun --bind-to core --map-by socket:PE=N --rank-by
core`, with N the node's cores for each rank: optimum/habana/distributed/distributed_runner.py); torchrun binds none.
Here it is done when the training begins: the rank that tokenizes before that takes all cores. That command, too, takes
it that the first cards are at the first socket; the gain could not be measured here [?].
"""

import contextlib
import logging
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from jobs.contract.words import counted

log = logging.getLogger("trainyard")

TOPOLOGY = Path("/sys/devices/system")


def bind_to_cores(local_rank: int, nproc_per_node: int, *, topology: Path = TOPOLOGY) -> None:
    """Bind this process, with the threads that it has and starts, to its rank's share of the node's cores.

    Where the shares would be less than a core, or Linux does not tell its cores, it may run on all, as before.
    """
    if sys.platform != "linux":
        return
    share = cores_of_rank(local_rank, nproc_per_node, allowed=os.sched_getaffinity(0), topology=topology)
    if not share:
        return
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread.name), share)
    if local_rank == 0:
        log.info("cores: %s for each rank of a node, on one socket", counted(len(share), "CPU"))


def cores_of_rank(local_rank: int, nproc_per_node: int, *, allowed: Collection[int], topology: Path) -> set[int]:
    """Return the CPUs of a rank, whole cores of one NUMA node; none where there are too few cores, or one rank.

    The first ranks are on the first node, as `--rank-by core` has it.
    """
    nodes = [cores for cores in _cores_of_nodes(topology, allowed) if cores]
    if nproc_per_node == 1 or not nodes:
        return set()
    ranks_per_node = -(-nproc_per_node // len(nodes))
    node, place = divmod(local_rank, ranks_per_node)
    share = len(nodes[node]) // ranks_per_node
    return set().union(*nodes[node][place * share : (place + 1) * share])


def _cores_of_nodes(topology: Path, allowed: Collection[int]) -> Iterator[list[set[int]]]:
    """Yield the cores of each NUMA node, each as the CPUs that it is to Linux, of those that are allowed."""
    for node in sorted(topology.glob("node/node[0-9]*"), key=lambda path: int(path.name.removeprefix("node"))):
        cores: dict[int, set[int]] = {}
        for cpu in sorted(_cpus(node / "cpulist") & set(allowed)):
            siblings = _cpus(topology / f"cpu/cpu{cpu}/topology/thread_siblings_list") or {cpu}
            cores.setdefault(min(siblings), set()).add(cpu)
        yield list(cores.values())


def _cpus(file: Path) -> set[int]:
    """Return the numbers in a list of the kernel's: 0-23,48-71 (Documentation/admin-guide/cputopology.rst)."""
    try:
        text = file.read_text().strip()
    except OSError:
        return set()
    spans = [part.partition("-") for part in text.split(",") if part]
    return {cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)}
