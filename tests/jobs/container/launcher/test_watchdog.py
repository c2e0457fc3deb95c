"""Which cause is found where several ranks or nodes end, and what a watchdog does about those that hang or idle."""

import dataclasses
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jobs.container.channel import Heartbeat, HeartbeatFile, read_heartbeats
from jobs.container.launcher import watchdog
from jobs.container.launcher.nodes import Nodes, wait_for_all
from jobs.container.launcher.outcome import End, Failure, line_of_lost_peers, outcome, retried
from jobs.container.launcher.request import Node
from jobs.container.launcher.utilization import NodeUse
from jobs.container.launcher.watchdog import Idleness, Watchdog, _catches
from tests.support.container.launching import PATIENCE_SECONDS
from tests.support.waiting import wait_until

NOBODY = 2**30
"""No process has that number."""

TRAINING = Heartbeat(rank=0, node=0, pid=1, number=9, place=9, step=42, doing="training", slow=False)


def last_lines(own: int, ranks: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"rank {rank} of node {own} wrote last: ..." for rank in ranks if rank == own)


class TwoNodes:
    """Their launchers' watchdogs, on one machine; what ranks would do is for the test to say."""

    def __init__(self, folder: Path, *, hang_timeout_seconds: float = 0, idle_limit_seconds: float = 0) -> None:
        self.uses: list[NodeUse | None] = [None, None]
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.scratch = [folder / "main", folder / "child"]
        self.nodes: list[Nodes] = []
        self.watchdogs: list[Watchdog] = []
        self.are_ended = [threading.Event(), threading.Event()]
        for index, scratch in enumerate(self.scratch):
            scratch.mkdir(parents=True)
            node = Node(index=index, nnodes=2, main_address="127.0.0.1", port=port)
            self.nodes.append(Nodes(node, partial(read_heartbeats, scratch), use=partial(self.use, index)))
            self.watchdogs.append(
                Watchdog(
                    scratch,
                    node=node,
                    nodes=self.nodes[index],
                    nproc_per_node=1,
                    hang_timeout_seconds=hang_timeout_seconds,
                    last_lines=partial(last_lines, index),
                    end_ranks=self.are_ended[index].set,
                    idleness=Idleness(idle_limit_seconds, partial(self.idle_seconds, index)),
                )
            )

    def use(self, index: int) -> NodeUse | None:
        return self.uses[index]

    def idle_seconds(self, index: int) -> float:
        """As jobs.container.launcher.utilization has it."""
        known = [self.uses[index], *self.nodes[index].uses.values()]
        return min(use.idle_seconds if use else 0.0 for use in known)

    @contextmanager
    def running(self, *indices: int) -> Iterator[None]:
        """The launchers have met, and watch; of those nodes that are named."""
        with ExitStack() as stack:
            for nodes in self.nodes:
                stack.enter_context(nodes)
            assert [nodes.meet(PATIENCE_SECONDS) for nodes in self.nodes] == [[], []]
            for index in indices:
                stack.enter_context(self.watchdogs[index])
            yield

    def wait_until_ended(self, index: int) -> None:
        assert self.are_ended[index].wait(PATIENCE_SECONDS)


SIGTERM = retried("SIGTERM", "ended")
"""How ranks end that the launcher ends."""

PEERS = End(code=1, reason="RuntimeError: Connection closed by peer", cause="peers")
OWN = End(code=1, reason="ValueError: no such label", cause="own")
KILLED = End(code=1, reason="rank 1 of node 1 was killed (SIGKILL)", cause="killed", lines=last_lines(1, [1]))


ABORTED = Failure(-6, 1, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", False)
LOST = Failure(1, 1, "RuntimeError: Connection closed by peer", False)
KILLED_BY_SIGKILL = {1: LOST, 2: Failure(-9, 2, "", False)}
MISTAKE = Failure(1, 1, "the hub cannot be reached: connection refused. Next: try again", True)
WITHOUT_WORDS = Failure(1, 2, "it ended with exit code 1", False, "no rows in train.csv")
RANK = "rank 2 of node 1"
LACK = f"{RANK} was killed (SIGKILL), as it seems for want of memory. Next: lower max_batch_size_per_rank"


@pytest.mark.parametrize(
    ("failures", "lacked_memory", "code", "reason", "cause"),
    [
        (KILLED_BY_SIGKILL, True, 1, LACK, "killed"),
        (KILLED_BY_SIGKILL, None, 1, LACK, "killed"),
        (KILLED_BY_SIGKILL, False, 75, f"{RANK} was killed (SIGKILL), not for want of memory", "killed"),
        ({1: LOST, 2: Failure(-11, 2, "", False)}, False, 1, f"{RANK} was ended by SIGSEGV", "killed"),
        ({1: LOST, 2: Failure(-6, 2, "", False)}, False, 1, f"{RANK} was ended by SIGABRT", "own"),
        ({2: ABORTED}, False, 75, f"{RANK} lost its peers: {ABORTED.message}", "peers"),
        ({2: LOST}, False, 1, f"{RANK}: {LOST.message}", "peers"),
        (
            {0: ABORTED, 1: LOST, 2: WITHOUT_WORDS},
            *(False, 1, f"{RANK}: it ended with exit code 1; it wrote last: no rows in train.csv", "own"),
        ),
        ({2: Failure(-15, 1, "", False)}, False, 75, "the ranks got SIGTERM", "ended"),
        # What one node cannot have now is no word of all of them
        ({2: Failure(75, 1, "step-8 did not arrive", True)}, False, 75, f"{RANK}: step-8 did not arrive", "ended"),
        ({2: Failure(75, 1, "SIGTERM; saved step 8", False)}, False, 75, "SIGTERM; saved step 8", "done"),
        # A mistake that any rank would meet is told without one
        ({0: MISTAKE, 2: MISTAKE}, False, 1, MISTAKE.message, "own"),
    ],
)
def test_the_cause_is_found_and_named_among_ranks_that_end(
    *, failures: dict[int, Failure], lacked_memory: bool | None, code: int, reason: str, cause: Any
) -> None:
    end = outcome(failures, node=1, last_lines=partial(last_lines, 1), lacked_memory=lacked_memory)
    lines = last_lines(1, [2]) if reason.startswith(RANK) and cause != "ended" else ()
    assert end == End(code=code, reason=reason, cause=cause, lines=lines)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        # PyTorch's watchdog, NCCL (ProcessGroupNCCL.cpp, NCCLUtils.cpp) and HCL (github.com/HabanaAI/HCL, 54fed3a).
        ("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)", True),
        ("ncclRemoteError: A call failed possibly due to a network error or a remote process exiting", True),
        ("[CORD] peer disconnected 10.0.1.7:39102", True),
        ("[qpc] [res RX] max-retry-cnt exceeded", True),
        ("double free or corruption (out)", False),
    ],
)
def test_lines_that_say_that_peers_are_gone_are_told_from_others(said: str, expected: bool) -> None:
    lines = ["step 41", f"ERROR {said}", "frame #3: <unknown function>", "Aborted"]
    assert line_of_lost_peers(lines) == (lines[1] if expected else None)


def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    main = TwoNodes(tmp_path / "0").nodes[0]
    with main:
        end = wait_for_all(main, None, start_timeout_seconds=0.3)
    assert end == retried("node 1 did not come within 0.3 s", "lost")
    late, child = TwoNodes(tmp_path / "1").nodes
    with child:
        assert child.meet(0.3) == [0]
        with late:
            assert child.meet(PATIENCE_SECONDS) == []


@pytest.mark.parametrize(
    ("child", "code", "reason"),
    [
        (OWN, 1, "node 1: ValueError: no such label"),
        (KILLED, 1, "rank 1 of node 1 was killed (SIGKILL)"),
        (PEERS, 75, "what connects the nodes broke: "),
        (SIGTERM, 75, "node 1: SIGTERM"),
    ],
)
def test_how_a_child_ended_decides_for_the_main_node(tmp_path: Path, child: End, code: int, reason: str) -> None:
    two = TwoNodes(tmp_path)
    with two.running(0):
        # WHEN the ranks of the child end, THEN those of the main node are ended and the child is the cause
        two.watchdogs[1].concluded(child)
        two.wait_until_ended(0)
        found = two.watchdogs[0].concluded(SIGTERM)
    assert (found.code, (found.reason or "")[: len(reason)], found.lines) == (code, reason, child.lines)


@pytest.mark.parametrize(("main", "child", "expected"), [(PEERS, KILLED, KILLED.reason), (OWN, PEERS, OWN.reason)])
def test_the_first_cause_is_found_where_ranks_of_both_nodes_fail(
    tmp_path: Path, main: End, child: End, expected: str
) -> None:
    two = TwoNodes(tmp_path)
    with two.running(1), ThreadPoolExecutor() as pool:
        found = pool.submit(two.watchdogs[0].concluded, main)
        two.wait_until_ended(1)
        two.watchdogs[1].concluded(child)
        end = found.result(PATIENCE_SECONDS)
    assert (end.code, end.reason) == (1, expected)


def test_a_hang_on_a_child_ends_both_nodes(tmp_path: Path) -> None:
    two = TwoNodes(tmp_path, hang_timeout_seconds=8)
    for rank, place in enumerate((10, 9)):
        file = HeartbeatFile(two.scratch[rank], 0)
        file.write(dataclasses.replace(TRAINING, rank=rank, node=rank, place=place, pid=NOBODY))
    with two.running(0, 1):
        two.wait_until_ended(0)
        two.wait_until_ended(1)
        child = two.watchdogs[1].concluded(SIGTERM)
        main = two.watchdogs[0].concluded(SIGTERM)
    reason = "rank 1 of node 1 (last seen training after step 42): no step for 8 s"
    assert main == End(code=75, reason=reason, cause="hung", lines=last_lines(1, [1]))
    assert child.reason == f"the main node ended the attempt: {reason}"


def test_each_side_ends_where_the_other_is_silent(tmp_path: Path) -> None:
    for index in range(2):
        two = TwoNodes(tmp_path / str(index), hang_timeout_seconds=2)
        with two.running(index):
            two.nodes[1 - index].__exit__()  # its launcher says nothing any more
            two.wait_until_ended(index)
            found = two.watchdogs[index].concluded(SIGTERM)
        assert found.code == 75
        assert (found.reason or "").startswith(f"node {1 - index} lost: no sign of life for 2 s")


def test_a_node_that_is_silent_is_the_cause_of_an_abort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_SILENT_SECONDS", 2.0)
    two = TwoNodes(tmp_path)
    with two.running():
        two.nodes[1].__exit__()
        found = two.watchdogs[0].concluded(End(code=1, reason="rank 0 of node 0 was ended by SIGABRT", cause="own"))
    assert (found.code, found.cause, (found.reason or "")[:12]) == (75, "lost", "node 1 lost:")


def idle_for(seconds: float) -> NodeUse:
    return NodeUse(utilization_percent=0.0, memory_percent=40.0, idle_seconds=seconds)


def test_nodes_whose_cards_all_do_nothing_end_for_good_and_none_does_while_one_works(tmp_path: Path) -> None:
    two = TwoNodes(tmp_path, idle_limit_seconds=1800)
    two.uses = [idle_for(4000), idle_for(1)]
    with two.running(0, 1):
        wait_until(lambda: two.nodes[0].uses, lambda uses: uses == {1: idle_for(1)})
        assert not two.are_ended[0].wait(1.5)
        two.uses[1] = idle_for(2000)
        for index in (0, 1):
            two.wait_until_ended(index)
        child = two.watchdogs[1].concluded(SIGTERM)
        end = two.watchdogs[0].concluded(SIGTERM)
    assert (end.code, end.cause) == (1, "idle")
    assert (end.reason or "").startswith("no card did anything for 33.3 minutes, which stop_if_idle_minutes allows no")
    assert child.code == 75
    assert "the main node ended the attempt: no card did anything" in (child.reason or "")


def test_a_rank_that_could_not_say_where_it_is_does_not_die_of_being_asked(tmp_path: Path) -> None:
    two = TwoNodes(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as deaf:
        HeartbeatFile(two.scratch[0], 0).write(dataclasses.replace(TRAINING, pid=deaf.pid))
        two.watchdogs[0]._ask_where([TRAINING.rank])
        assert deaf.poll() is None
        deaf.kill()
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    assert _catches(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert not _catches(os.getpid(), signal.SIGUSR1)
