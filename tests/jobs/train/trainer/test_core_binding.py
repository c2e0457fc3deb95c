"""Cores for each rank of an HPU: shares as mpirun would make them, and a process with threads that keeps to its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.train.trainer.core_binding import cores_of_rank

TWO_SOCKETS = ["0-23,48-71", "24-47,72-95"]
"""Linux's numbers on two sockets of 24 cores with two CPUs each, as a DL1 has them by its 96 vCPUs."""

BOUND = """
import json, os, sys, threading
from pathlib import Path
from jobs.train.trainer.core_binding import bind_to_cores

ending = threading.Event()
threading.Thread(target=ending.wait).start()
bind_to_cores(int(sys.argv[1]), int(sys.argv[2]), topology=Path(sys.argv[3]))
threading.Thread(target=ending.wait).start()
print(json.dumps([sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]))
ending.set()
"""


def topology(folder: Path, nodes: list[str], siblings: dict[int, str]) -> Path:
    for number, cpus in enumerate(nodes):
        node = folder / f"node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cpus}\n")
    for cpu, listed in siblings.items():
        core = folder / f"cpu/cpu{cpu}/topology"
        core.mkdir(parents=True)
        (core / "thread_siblings_list").write_text(f"{listed}\n")
    return folder


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    return topology(tmp_path, TWO_SOCKETS, {cpu: f"{cpu % 48},{cpu % 48 + 48}" for cpu in range(96)})


def test_eight_ranks_get_six_whole_cores_each_and_four_a_socket(two_sockets: Path) -> None:
    shares = [cores_of_rank(rank, 8, allowed=range(96), topology=two_sockets) for rank in range(8)]
    assert shares[0] == {*range(6), *range(48, 54)}
    assert shares[3] == {*range(18, 24), *range(66, 72)}
    assert shares[4] == {*range(24, 30), *range(72, 78)}
    assert sorted(cpu for share in shares for cpu in share) == list(range(96))


@pytest.mark.parametrize(
    ("ranks", "allowed"),
    [(1, range(96)), (8, range(3)), (8, ())],
    ids=["one rank has all cores", "less than a core each", "none is known"],
)
def test_they_share_all_cores_where_shares_make_no_sense(two_sockets: Path, ranks: int, allowed: range) -> None:
    assert cores_of_rank(0, ranks, allowed=allowed, topology=two_sockets) == set()


def test_of_what_the_container_may_use(two_sockets: Path) -> None:
    # Cores 0 and 1 of the one socket and none of the other: the ranks divide what is left.
    shares = [cores_of_rank(rank, 2, allowed=[0, 1, 48, 49], topology=two_sockets) for rank in range(2)]
    assert shares == [{0, 48}, {1, 49}]


def test_all_threads_of_a_process_keep_to_its_share(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    assert len(cpus) > 1, "this test takes two CPUs"
    listed = topology(tmp_path, [",".join(map(str, cpus))], {cpu: str(cpu) for cpu in cpus})
    command = [sys.executable, "-c", BOUND, "1", str(len(cpus)), str(listed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout) == [[cpus[1]]] * 3
