"""When ranks count as hung, and which cause is found where several ranks or nodes end."""

import dataclasses
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jobs.train.channel import Heartbeat, HeartbeatFile, process_states, read_heartbeats
from jobs.train.launcher import watchdog
from jobs.train.launcher.nodes import Nodes
from jobs.train.launcher.outcome import End, Failure, outcome, retried
from jobs.train.launcher.request import Node
from jobs.train.launcher.watchdog import START_SECONDS, HangWatch, Watchdog
from tests.support.train.launching import PATIENCE_SECONDS

NOBODY = 2**30
"""No process has that number."""

STARTING = Heartbeat(rank=0, node=0, pid=1, number=1, place=1, step=0, doing="starting", slow=True)
WORKING = Heartbeat(rank=0, node=0, pid=1, number=0, place=0, step=0, doing="working", paced=False)
TRAINING = dataclasses.replace(STARTING, number=9, place=9, step=42, doing="training", slow=False)


class Job:
    """Heartbeats of two ranks in a real folder, looked at by a clock of our own."""

    def __init__(self, scratch: Path, hang_timeout_seconds: float = 120) -> None:
        self.scratch = scratch
        self.now = 0.0
        self.watch = HangWatch(world_size=2, hang_timeout_seconds=hang_timeout_seconds)
        self.files = [HeartbeatFile(scratch, rank) for rank in range(2)]

    def give(self, rank: int, sign: Heartbeat, **changed: Any) -> None:
        self.files[rank].write(dataclasses.replace(sign, rank=rank, **changed))

    def reason(self, *, after_seconds: float, states: dict[int, str] | None = None) -> str | None:
        """Of a hang, when so much time has passed and nobody has given another sign."""
        self.watch.look(self.now, read_heartbeats(self.scratch), states or {})
        self.now += after_seconds
        hang = self.watch.look(self.now, read_heartbeats(self.scratch), states or {})
        return hang.reason if hang else None


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_who_prepares_ends_or_waits_for_one_that_prepares_may_take_its_time_but_not_be_stopped(job: Job) -> None:
    assert job.reason(after_seconds=1e6) is None
    ending = dataclasses.replace(TRAINING, doing="ending", paced=False)
    for first, second, state in (
        (WORKING, WORKING, "last seen working"),
        (STARTING, WORKING, "last seen working"),
        (ending, ending, "last seen ending after step 42"),
    ):
        job.give(0, first)
        job.give(1, second)
        assert job.reason(after_seconds=1e6) is None
        assert job.reason(after_seconds=119, states={1: "stopped"}) is None
        reason = job.reason(after_seconds=1, states={1: "stopped"})
        assert reason == f"rank 1 of node 0 (stopped, {state}): no sign of life for 120 s"
        # One that goes on is looked at anew when it is stopped again
        assert job.reason(after_seconds=1) is None
        assert job.reason(after_seconds=119, states={1: "stopped"}) is None


def test_the_start_a_save_and_a_compilation_have_the_longer_limit(job: Job) -> None:
    job.give(0, STARTING)
    assert job.reason(after_seconds=START_SECONDS - 1) is None
    # One of the two has not come as far as that
    assert job.reason(after_seconds=1) == "rank 1 gave no sign at all: no step for 900 s"
    # What is slow for one is for the others that wait for it, and their time begins when it has ended
    job.give(0, TRAINING, doing="saving", slow=True)
    job.give(1, TRAINING)
    assert job.reason(after_seconds=500) is None
    job.give(0, TRAINING, number=10)
    assert job.reason(after_seconds=119) is None
    assert job.reason(after_seconds=1) is not None


def test_those_behind_are_named_else_those_that_are_held_else_all(job: Job) -> None:
    rank = "rank {} of node 0 (last seen training after step 42)"
    for number in range(2):
        job.give(number, TRAINING)
    assert job.reason(after_seconds=119) is None
    assert job.reason(after_seconds=1) == f"{rank.format(0)}; {rank.format(1)}: no step for 120 s"
    stopped = "rank 1 of node 0 (stopped, last seen training after step 42): no step for 120 s"
    assert job.reason(after_seconds=0, states={1: "stopped"}) == stopped
    job.give(0, TRAINING, number=10, place=10)
    assert job.reason(after_seconds=120) == f"{rank.format(1)}: no step for 120 s"
    # As soon as there is a sign all is well
    job.give(1, TRAINING, number=10, place=10)
    assert job.reason(after_seconds=119) is None


def test_zero_turns_the_watch_off_and_a_longer_limit_holds_for_the_start_too(tmp_path: Path) -> None:
    off, patient = Job(tmp_path, 0), Job(tmp_path, 5000)
    for rank in range(2):
        off.give(rank, STARTING)
    assert off.reason(after_seconds=1e6) is None
    assert patient.reason(after_seconds=4999) is None
    assert patient.reason(after_seconds=1) is not None


def test_a_process_that_is_held_is_told_from_one_that_waits(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    signs = {0: dataclasses.replace(TRAINING, pid=process.pid)}
    assert process_states(signs) == {}
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while process_states(signs) != {0: "stopped"}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert process_states(signs) == {}


def last_lines(own: int, ranks: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"rank {rank} of node {own} wrote last: ..." for rank in ranks if rank == own)


class TwoNodes:
    """Their launchers' watchdogs, on one machine; what ranks would do is for the test to say."""

    def __init__(self, folder: Path, *, hang_timeout_seconds: float = 0) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.scratch = [folder / "main", folder / "child"]
        self.nodes: list[Nodes] = []
        self.watchdogs: list[Watchdog] = []
        self.are_ended = [threading.Event(), threading.Event()]
        for index, scratch in enumerate(self.scratch):
            scratch.mkdir(parents=True)
            node = Node(index=index, nnodes=2, main_address="localhost", port=port)
            self.nodes.append(Nodes(node, partial(read_heartbeats, scratch)))
            self.watchdogs.append(
                Watchdog(
                    scratch,
                    node=node,
                    nodes=self.nodes[index],
                    nproc_per_node=1,
                    hang_timeout_seconds=hang_timeout_seconds,
                    last_lines=partial(last_lines, index),
                    end_ranks=self.are_ended[index].set,
                )
            )

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
        (Failure(-9, 2, "", False), False, 75, "rank 2 of node 1 was killed (SIGKILL), not for want of memory; "),
        (Failure(-11, 2, "", False), False, 1, "rank 2 of node 1 was ended by SIGSEGV"),
        (Failure(1, 0, "KeyError: 'x'", False), False, 1, "rank 2 of node 1: KeyError: 'x'"),
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
        (SIGTERM, 75, "node 1: SIGTERM; a next attempt resumes from the newest checkpoint"),
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
    resumes = "a next attempt resumes from the newest checkpoint"
    assert main == End(code=75, reason=f"{reason}; {resumes}", cause="hung", lines=last_lines(1, [1]))
    assert child.reason == f"the main node ended the attempt: {reason}; {resumes}"


def test_each_side_ends_where_the_other_is_silent(tmp_path: Path) -> None:
    for index in range(2):
        two = TwoNodes(tmp_path / str(index), hang_timeout_seconds=2)
        with two.running(index):
            two.nodes[1 - index].__exit__()  # its launcher says nothing any more
            two.wait_until_ended(index)
            found = two.watchdogs[index].concluded(SIGTERM)
        assert found.code == 75
        assert (found.reason or "").startswith(f"node {1 - index} lost: no sign of life for 2 s; ")


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
