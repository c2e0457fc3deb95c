"""Which cause is found where several ranks or nodes end, and what a watchdog does about those that hang or idle."""

import dataclasses
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from jobs.train.channel import Heartbeat, HeartbeatFile, read_heartbeats
from jobs.train.launcher import watchdog
from jobs.train.launcher.nodes import Nodes
from jobs.train.launcher.outcome import End, Failure, line_of_lost_peers, outcome, retried
from jobs.train.launcher.request import Node
from jobs.train.launcher.utilization import NodeUse
from jobs.train.launcher.watchdog import Idleness, Watchdog
from tests.support.train.launching import PATIENCE_SECONDS

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
        """As jobs.train.launcher.utilization has it."""
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


@pytest.mark.parametrize(
    ("second", "lacked_memory", "code", "expected"),
    [
        (Failure(-9, 2, "", False), True, 1, "rank 2 of node 1 was killed (SIGKILL), as it seems for want of memory. "),
        (Failure(-9, 2, "", False), None, 1, "rank 2 of node 1 was killed (SIGKILL), as it seems for want of memory. "),
        (Failure(-9, 2, "", False), False, 75, "rank 2 of node 1 was killed (SIGKILL), not for want of memory"),
        (Failure(-11, 2, "", False), False, 1, "rank 2 of node 1 was ended by SIGSEGV"),
        (Failure(-6, 2, "", False), False, 1, "rank 2 of node 1 was ended by SIGABRT"),
        (Failure(-6, 2, "ncclRemoteError: A call", False), False, 75, "rank 2 of node 1 lost its peers: ncclRemoteErr"),
        (Failure(1, 0, "KeyError: 'x'", False), False, 1, "rank 2 of node 1: KeyError: 'x'"),
        (
            Failure(1, 0, "it ended with exit code 1", False, "no rows in train.csv"),
            False,
            1,
            "rank 2 of node 1: it ended with exit code 1; it wrote last: no rows in train.csv",
        ),
    ],
)
def test_a_rank_that_dies_is_named_with_its_node_and_its_last_lines(
    second: Failure, lacked_memory: bool | None, code: int, expected: str
) -> None:
    failures = {1: Failure(1, 1, "RuntimeError: Connection closed by peer", False), 2: second}
    end = outcome(
        failures,
        node=1,
        last_lines=lambda ranks: tuple(f"lines of {rank}" for rank in ranks),
        lacked_memory=lacked_memory,
    )
    assert (end.code, (end.reason or "")[: len(expected)], end.lines) == (code, expected, ("lines of 2",))


@pytest.mark.parametrize(
    "said",
    [
        # PyTorch's watchdog and what it throws: ProcessGroupNCCL.cpp, NCCLUtils.cpp; NCCL's text of a code: init.cc.
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600081 ms",
        "NCCL error: remote process exited or there was a network error, NCCL version 2.20.5",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        # HCL, which HCCL is built on, at commit 54fed3a of github.com/HabanaAI/HCL: hcl/src/hlcp/coordinator.cpp,
        "[CORD] peer disconnected 10.0.1.7:39102",
        # hcl/src/hccl/network_utils.cpp,
        "socket recv: Remote peer unexpectedly closed connection while I was waiting for a blocking message",
        # hcl/src/ibverbs/hcl_ibv_eq.cpp, where a NIC has sent in vain,
        "[qpc] [TMR] max-retry-cnt exceeded",
        "[qpc] [req RX] max-retry-cnt exceeded",
        "[qpc] [res RX] max-retry-cnt exceeded",
        # and hcl/src/platform/gen2_arch_common/hcl_device.cpp.
        "Failed to synchronize remote ranks",
    ],
)
def test_a_rank_that_says_of_nccl_or_hccl_that_its_peers_are_gone_is_started_again(said: str) -> None:
    lines = ["step 41", f"[2026-11-25 10:15:00] ERROR {said}", "frame #3: <unknown function>", "Aborted"]
    line = line_of_lost_peers(lines)
    assert line == lines[1]
    aborted = Failure(-6, 1, line, False)
    end = outcome({3: aborted}, node=0, last_lines=lambda _: (), lacked_memory=False)
    assert end == End(code=75, reason=f"rank 3 of node 0 lost its peers: {line}", cause="peers")
    # Of one that says it and ends by an error, the node that it lost decides
    assert outcome({3: aborted._replace(code=1)}, node=0, last_lines=lambda _: (), lacked_memory=False).cause == "peers"


def test_an_abort_for_another_reason_is_no_lost_peer() -> None:
    assert line_of_lost_peers(["double free or corruption (out)", "Aborted"]) is None


def test_a_rank_that_fails_is_the_cause_though_its_peers_abort_first() -> None:
    aborted = Failure(-6, 1, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", False)
    failures = {0: aborted, 1: Failure(1, 2, "KeyError: 'x'", False), 2: aborted}
    end = outcome(failures, node=0, last_lines=lambda _: (), lacked_memory=False)
    assert end == End(code=1, reason="rank 1 of node 0: KeyError: 'x'", cause="own")


def test_what_one_node_cannot_have_now_is_no_word_of_all_of_them() -> None:
    failed = Failure(75, 1, "checkpoint step-8 did not arrive as it is, twice", True)
    end = outcome({2: failed}, node=1, last_lines=lambda _: (), lacked_memory=False)
    assert end == End(code=75, reason=f"rank 2 of node 1: {failed.message}", cause="ended")
    saved = Failure(75, 1, "SIGTERM; saved step 8", False)
    end = outcome({2: saved}, node=1, last_lines=lambda _: (), lacked_memory=False)
    assert end == End(code=75, reason=saved.message, cause="done")


def test_a_mistake_that_any_rank_would_meet_is_told_without_one() -> None:
    mistake = Failure(1, 1, "the hub cannot be reached: connection refused. Next: try again", True)
    end = outcome({0: mistake, 1: mistake}, node=0, last_lines=lambda _: ("lines",), lacked_memory=False)
    assert end == End(code=1, reason=mistake.message, cause="own")


def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    main = TwoNodes(tmp_path / "0").nodes[0]
    with main:
        assert main.meet(0.3) == [1]
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


@pytest.mark.parametrize(
    ("main", "child", "expected"),
    [(PEERS, KILLED, KILLED.reason), (OWN, PEERS, OWN.reason), (OWN, SIGTERM, OWN.reason)],
)
def test_the_first_cause_is_found_where_ranks_of_both_nodes_fail(
    tmp_path: Path, main: End, child: End, expected: str
) -> None:
    two = TwoNodes(tmp_path)
    with two.running(1):
        found: list[End] = []
        concluding = threading.Thread(target=lambda: found.append(two.watchdogs[0].concluded(main)))
        concluding.start()
        two.wait_until_ended(1)
        two.watchdogs[1].concluded(child)
        concluding.join(PATIENCE_SECONDS)
    assert [(end.code, end.reason) for end in found] == [(1, expected)]


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


@pytest.mark.parametrize("reason", ["rank 0 of node 0 was ended by SIGABRT", "rank 0 of node 0 lost its peers: what"])
def test_a_node_that_is_silent_is_the_cause_of_an_abort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(watchdog, "_SILENT_SECONDS", 2.0)
    aborted = End(code=1, reason=reason, cause="own" if "SIGABRT" in reason else "peers")
    two = TwoNodes(tmp_path)
    with two.running():
        two.nodes[1].__exit__()
        found = two.watchdogs[0].concluded(aborted)
    assert (found.code, found.cause, (found.reason or "")[:12]) == (75, "lost", "node 1 lost:")


def test_a_node_that_is_silent_is_the_cause_of_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_SILENT_SECONDS", 2.0)
    two = TwoNodes(tmp_path, hang_timeout_seconds=10)
    for rank in range(2):  # no step for longer than the node is silent
        HeartbeatFile(two.scratch[rank], 0).write(dataclasses.replace(TRAINING, rank=rank, node=rank, pid=NOBODY))
    with two.running(0):
        time.sleep(2.5)
        two.nodes[1].__exit__()
        two.wait_until_ended(0)
        found = two.watchdogs[0].concluded(SIGTERM)
    assert (found.cause, (found.reason or "")[:12]) == ("lost", "node 1 lost:")


def idle_for(seconds: float) -> NodeUse:
    return NodeUse(utilization_percent=0.0, memory_percent=40.0, idle_seconds=seconds)


def test_nodes_whose_cards_all_do_nothing_end_for_good_and_none_does_while_one_works(tmp_path: Path) -> None:
    two = TwoNodes(tmp_path, idle_limit_seconds=1800)
    two.uses = [idle_for(4000), idle_for(1)]
    with two.running(0, 1):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while two.nodes[0].uses != {1: idle_for(1)}:
            assert time.monotonic() < deadline
            time.sleep(0.01)
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


@pytest.mark.parametrize("tool", ["echo 'Thread 7 (idle): wait (queue.py:171)'", "exit 1"], ids=["py-spy", "no ptrace"])
def test_a_rank_says_where_it_is_by_py_spy_and_one_that_could_not_say_it_does_not_die_of_being_asked(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainyard")
    program = tmp_path / "py-spy"
    program.write_text(f'#!/bin/sh\necho "$*" >{tmp_path}/asked\n{tool}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    two = TwoNodes(tmp_path / "nodes")
    with subprocess.Popen(["sleep", "60"]) as deaf:
        HeartbeatFile(two.scratch[0], 0).write(dataclasses.replace(TRAINING, pid=deaf.pid))
        two.watchdogs[0]._ask_where([TRAINING.rank])
        assert deaf.poll() is None
        deaf.kill()
    assert (tmp_path / "asked").read_text() == f"dump --subprocesses --pid {deaf.pid}\n"
    line = f"rank {TRAINING.rank} of node {TRAINING.node} is here: Thread 7 (idle): wait (queue.py:171)"
    assert (line in caplog.messages) == tool.startswith("echo")
