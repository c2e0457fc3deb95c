"""The cause of an end among several ranks and nodes, and how the watchdog ends hanging or idle ones."""

import dataclasses
import os
import re
import signal
import socket
import subprocess
import threading
import time
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
from jobs.container.launcher.watchdog import START_SECONDS, HangWatch, Idleness, Silence, Watchdog, _catches
from tests.support.container.launching import PATIENCE_SECONDS, Run, two_nodes
from tests.support.container.listeners import open_to_the_network
from tests.support.waiting import wait_until

NOBODY = 2**30
"""A process id that does not exist."""

TRAINING = Heartbeat(rank=0, node=0, pid=1, number=9, place=9, step=42, doing="training", slow=False)


def last_lines(own: int, ranks: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"rank {rank} of node {own} wrote last: ..." for rank in ranks if rank == own)


class TwoNodes:
    """The watchdogs of two nodes on one machine. The test plays the ranks."""

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
        """The same as in jobs.container.launcher.utilization."""
        known = [self.uses[index], *self.nodes[index].uses.values()]
        return min(use.idle_seconds if use else 0.0 for use in known)

    @contextmanager
    def running(self, *indices: int) -> Iterator[None]:
        """Connect the launchers of both nodes, and run the watchdogs of the given ones."""
        with ExitStack() as stack:
            for nodes in self.nodes:
                stack.enter_context(nodes)
            assert [nodes.wait(PATIENCE_SECONDS) for nodes in self.nodes] == [[], []]
            for index in indices:
                stack.enter_context(self.watchdogs[index])
            yield

    def wait_until_ended(self, index: int) -> None:
        assert self.are_ended[index].wait(PATIENCE_SECONDS)


SIGTERM = retried("SIGTERM", "ended")
"""The end of ranks that the launcher has ended."""

PEERS = End(code=1, reason="RuntimeError: Connection closed by peer", cause="peers")
OWN = End(code=1, reason="ValueError: no such label", cause="own")
KILLED = End(code=1, reason="rank 1 of node 1 was killed (SIGKILL)", cause="killed", lines=last_lines(1, [1]))


ABORTED = Failure(-6, 1, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", False)
LOST = Failure(1, 1, "RuntimeError: Connection closed by peer", False)
KILLED_BY_SIGKILL = {1: LOST, 2: Failure(-9, 2, "", False)}
MISTAKE = Failure(1, 1, "the hub cannot be reached: connection refused. Next: try again", True)
WITHOUT_WORDS = Failure(1, 2, "it ended with exit code 1", False, "no rows in train.csv")
RANK = "rank 2 of node 1"
LACK = f"{RANK} was killed (SIGKILL), probably out of memory. Next: lower max_batch_size_per_rank"


@pytest.mark.parametrize(
    ("failures", "out_of_memory", "code", "reason", "cause"),
    [
        (KILLED_BY_SIGKILL, True, 1, LACK, "killed"),
        (KILLED_BY_SIGKILL, None, 1, LACK, "killed"),
        (KILLED_BY_SIGKILL, False, 75, f"{RANK} was killed (SIGKILL), not by the OOM killer", "killed"),
        ({1: LOST, 2: Failure(-11, 2, "", False)}, False, 1, f"{RANK} was ended by SIGSEGV", "killed"),
        ({1: LOST, 2: Failure(-6, 2, "", False)}, False, 1, f"{RANK} was ended by SIGABRT", "own"),
        ({2: ABORTED}, False, 75, f"{RANK} lost its peers: {ABORTED.message}", "peers"),
        ({2: LOST}, False, 1, f"{RANK}: {LOST.message}", "peers"),
        (
            {0: ABORTED, 1: LOST, 2: WITHOUT_WORDS},
            *(False, 1, f"{RANK}: it ended with exit code 1; its last line: no rows in train.csv", "own"),
        ),
        ({2: Failure(-15, 1, "", False)}, False, 75, "the ranks received SIGTERM", "ended"),
        # A missing download on one node does not speak for all nodes
        ({2: Failure(75, 1, "step-8 did not arrive", True)}, False, 75, f"{RANK}: step-8 did not arrive", "ended"),
        ({2: Failure(75, 1, "SIGTERM; saved step 8", False)}, False, 75, "SIGTERM; saved step 8", "done"),
        # The reason of an error that every rank would have names no rank
        ({0: MISTAKE, 2: MISTAKE}, False, 1, MISTAKE.message, "own"),
    ],
)
def test_the_cause_among_failed_ranks_is_named(
    *, failures: dict[int, Failure], out_of_memory: bool | None, code: int, reason: str, cause: Any
) -> None:
    end = outcome(failures, node=1, last_lines=partial(last_lines, 1), out_of_memory=out_of_memory)
    lines = last_lines(1, [2]) if reason.startswith(RANK) and cause != "ended" else ()
    assert end == End(code=code, reason=reason, cause=cause, lines=lines)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # PyTorch's watchdog, NCCL (ProcessGroupNCCL.cpp, NCCLUtils.cpp) and HCL (github.com/HabanaAI/HCL, 54fed3a).
        ("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)", True),
        ("ncclRemoteError: A call failed possibly due to a network error or a remote process exiting", True),
        ("[CORD] peer disconnected 10.0.1.7:39102", True),
        ("[qpc] [res RX] max-retry-cnt exceeded", True),
        ("double free or corruption (out)", False),
    ],
)
def test_lines_that_report_lost_peers_are_recognized(line: str, expected: bool) -> None:
    lines = ["step 41", f"ERROR {line}", "frame #3: <unknown function>", "Aborted"]
    assert line_of_lost_peers(lines) == (lines[1] if expected else None)


def test_a_node_that_does_not_arrive_is_named(tmp_path: Path) -> None:
    main = TwoNodes(tmp_path / "0").nodes[0]
    with main:
        end = wait_for_all(main, None, start_timeout_seconds=0.3)
    assert end == retried("node 1 did not arrive within 0.3 s", "lost")
    late, child = TwoNodes(tmp_path / "1").nodes
    with child:
        assert child.wait(0.3) == [0]
        with late:
            assert child.wait(PATIENCE_SECONDS) == []


@pytest.mark.parametrize(
    ("child", "code", "reason"),
    [
        (OWN, 1, "node 1: ValueError: no such label"),
        (KILLED, 1, "rank 1 of node 1 was killed (SIGKILL)"),
        (PEERS, 75, "the connection between nodes broke: "),
        (SIGTERM, 75, "node 1: SIGTERM"),
    ],
)
def test_the_end_of_a_child_ends_the_main_node(tmp_path: Path, child: End, code: int, reason: str) -> None:
    two = TwoNodes(tmp_path)
    with two.running(0):
        # WHEN the ranks of the child end, THEN those of the main node are ended, and the child is the cause
        two.watchdogs[1].conclude(child)
        two.wait_until_ended(0)
        found = two.watchdogs[0].conclude(SIGTERM)
    assert (found.code, (found.reason or "")[: len(reason)], found.lines) == (code, reason, child.lines)


@pytest.mark.parametrize(("main", "child", "expected"), [(PEERS, KILLED, KILLED.reason), (OWN, PEERS, OWN.reason)])
def test_the_first_cause_is_found_if_both_nodes_fail(tmp_path: Path, main: End, child: End, expected: str) -> None:
    two = TwoNodes(tmp_path)
    with two.running(1), ThreadPoolExecutor() as pool:
        found = pool.submit(two.watchdogs[0].conclude, main)
        two.wait_until_ended(1)
        two.watchdogs[1].conclude(child)
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
        child = two.watchdogs[1].conclude(SIGTERM)
        main = two.watchdogs[0].conclude(SIGTERM)
    reason = "rank 1 of node 1 (last seen training after step 42): no step for 8 s"
    assert main == End(code=75, reason=reason, cause="hung", lines=last_lines(1, [1]))
    assert child.reason == f"the main node ended the attempt: {reason}"


def test_each_node_ends_if_the_other_is_silent(tmp_path: Path) -> None:
    for index in range(2):
        two = TwoNodes(tmp_path / str(index), hang_timeout_seconds=2)
        with two.running(index):
            two.nodes[1 - index].__exit__()  # its launcher is silent from now on
            two.wait_until_ended(index)
            found = two.watchdogs[index].conclude(SIGTERM)
        assert found.code == 75
        assert (found.reason or "").startswith(f"node {1 - index} lost: no heartbeat for 2 s")


def test_a_silent_node_is_the_cause_of_an_abort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_SILENT_SECONDS", 2.0)
    two = TwoNodes(tmp_path)
    with two.running():
        two.nodes[1].__exit__()
        found = two.watchdogs[0].conclude(End(code=1, reason="rank 0 of node 0 was ended by SIGABRT", cause="own"))
    assert (found.code, found.cause, (found.reason or "")[:12]) == (75, "lost", "node 1 lost:")


def idle_for(seconds: float) -> NodeUse:
    return NodeUse(utilization_percent=0.0, memory_percent=40.0, idle_seconds=seconds)


def test_a_run_ends_only_if_the_cards_of_all_nodes_are_idle(tmp_path: Path) -> None:
    two = TwoNodes(tmp_path, idle_limit_seconds=1800)
    two.uses = [idle_for(4000), idle_for(1)]
    with two.running(0, 1):
        wait_until(lambda: two.nodes[0].uses, lambda uses: uses == {1: idle_for(1)})
        assert not two.are_ended[0].wait(1.5)
        two.uses[1] = idle_for(2000)
        for index in (0, 1):
            two.wait_until_ended(index)
        child = two.watchdogs[1].conclude(SIGTERM)
        end = two.watchdogs[0].conclude(SIGTERM)
    assert (end.code, end.cause) == (1, "idle")
    assert (end.reason or "").startswith("all cards were idle for 33.3 minutes, the limit of stop_if_idle_minutes")
    assert child.code == 75
    assert "the main node ended the attempt: all cards were idle" in (child.reason or "")


@pytest.mark.parametrize(
    ("idle_seconds", "works", "warns"), [(200.0, True, True), (10.0, True, False), (200.0, False, False)]
)
def test_a_script_that_uses_only_the_cpu_is_reported_within_minutes(
    idle_seconds: float, works: bool, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog = TwoNodes(tmp_path).watchdogs[0]
    watchdog._idleness = Idleness(1800, lambda: idle_seconds, warn_of_cpu=True)
    watchdog._warn_of_cpu(0.0, has_ranks=False)  # the instance still prepares packages and inputs
    watchdog._warn_of_cpu(100.0, has_ranks=True)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        if not works:
            time.sleep(0.5)
    watchdog._warn_of_cpu(279.0, has_ranks=True)
    assert not caplog.records
    for _ in range(2):
        watchdog._warn_of_cpu(281.0, has_ranks=True)
    expected = "warning: no card has worked in the 3 minutes since the script started, but the CPU is busy. Unless"
    assert [record.getMessage().startswith(expected) for record in caplog.records] == [True] * warns


def test_a_rank_without_a_stack_handler_gets_no_sigusr1(tmp_path: Path) -> None:
    two = TwoNodes(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as deaf:
        HeartbeatFile(two.scratch[0], 0).write(dataclasses.replace(TRAINING, pid=deaf.pid))
        two.watchdogs[0]._request_stacks([TRAINING.rank])
        assert deaf.poll() is None
        deaf.kill()
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    assert _catches(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert not _catches(os.getpid(), signal.SIGUSR1)


STARTING = Heartbeat(rank=0, node=0, pid=1, number=1, place=1, step=0, doing="starting", slow=True)
WORKING = Heartbeat(rank=0, node=0, pid=1, number=0, place=0, step=0, doing="working", paced=False)


class Job:
    """Heartbeats of two ranks in a real folder, with a simulated clock."""

    def __init__(self, scratch: Path, hang_timeout_seconds: float = 120, silence: Silence | None = None) -> None:
        self.scratch = scratch
        self.now = 0.0
        self.watch = HangWatch(world_size=2, hang_timeout_seconds=hang_timeout_seconds, silence=silence)
        self.files = [HeartbeatFile(scratch, rank) for rank in range(2)]

    def write(self, rank: int, sign: Heartbeat, **changed: Any) -> None:
        self.files[rank].write(dataclasses.replace(sign, rank=rank, **changed))

    def reason(self, *, after_seconds: float, states: dict[int, str] | None = None) -> str | None:
        """Return the reason of a hang after this time without further heartbeats, or None."""
        self.watch.look(self.now, read_heartbeats(self.scratch), states or {})
        self.now += after_seconds
        hang = self.watch.look(self.now, read_heartbeats(self.scratch), states or {})
        return hang.reason if hang else None


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_outside_training_a_rank_hangs_only_if_it_is_stopped(job: Job) -> None:
    assert job.reason(after_seconds=1e6) is None
    ending = dataclasses.replace(TRAINING, doing="ending", paced=False)
    for first, second, state in (
        (WORKING, WORKING, "last seen working"),
        (STARTING, WORKING, "last seen working"),
        (ending, ending, "last seen ending after step 42"),
    ):
        job.write(0, first)
        job.write(1, second)
        assert job.reason(after_seconds=1e6) is None
        assert job.reason(after_seconds=119, states={1: "stopped"}) is None
        reason = job.reason(after_seconds=1, states={1: "stopped"})
        assert reason == f"rank 1 of node 0 (stopped, {state}): still stopped after 120 s"
        # After a resumed process is stopped again, its time starts over
        assert job.reason(after_seconds=1) is None
        assert job.reason(after_seconds=119, states={1: "stopped"}) is None


def test_start_save_and_compilation_have_the_longer_limit(job: Job) -> None:
    job.write(0, STARTING)
    assert job.reason(after_seconds=START_SECONDS - 1) is None
    # The other rank has not sent any heartbeat
    assert job.reason(after_seconds=1) == "rank 1 never sent a heartbeat: no step for 900 s"
    # A slow phase of one rank also counts for those that wait for it, and their time starts when it ends
    job.write(0, TRAINING, doing="saving", slow=True)
    job.write(1, TRAINING)
    assert job.reason(after_seconds=500) is None
    job.write(0, TRAINING, number=10)
    assert job.reason(after_seconds=119) is None
    assert job.reason(after_seconds=1) is not None


def test_ranks_behind_are_named_else_held_ranks_else_all(job: Job) -> None:
    rank = "rank {} of node 0 (last seen training after step 42)"
    for number in range(2):
        job.write(number, TRAINING)
    assert job.reason(after_seconds=119) is None
    assert job.reason(after_seconds=1) == f"{rank.format(0)}; {rank.format(1)}: no step for 120 s"
    stopped = "rank 1 of node 0 (stopped, last seen training after step 42): no step for 120 s"
    assert job.reason(after_seconds=0, states={1: "stopped"}) == stopped
    job.write(0, TRAINING, number=10, place=10)
    assert job.reason(after_seconds=120) == f"{rank.format(1)}: no step for 120 s"
    # A new heartbeat ends the hang
    job.write(1, TRAINING, number=10, place=10)
    assert job.reason(after_seconds=119) is None


def test_zero_disables_the_watch_and_a_long_limit_covers_start(tmp_path: Path) -> None:
    off, patient = Job(tmp_path, 0), Job(tmp_path, 5000)
    for rank in range(2):
        off.write(rank, STARTING)
    assert off.reason(after_seconds=1e6) is None
    assert patient.reason(after_seconds=4999) is None
    assert patient.reason(after_seconds=1) is not None


def test_a_rank_gets_exactly_the_busy_time_it_requested(job: Job, tmp_path: Path) -> None:
    job.write(0, TRAINING, doing="busy", patience_seconds=5000)
    job.write(1, TRAINING)
    assert job.reason(after_seconds=4999) is None
    assert (job.reason(after_seconds=1) or "").endswith("no step for 5000 s")
    job.write(0, TRAINING, number=10)
    assert job.reason(after_seconds=120) is not None, "its next step ends it"


def test_a_busy_script_may_be_silent_for_its_requested_time(tmp_path: Path) -> None:
    job = Job(tmp_path, silence=Silence(100, lambda: 0.0))
    job.write(0, WORKING, number=1, doing="busy", patience_seconds=5000)
    assert job.reason(after_seconds=4999) is None
    assert job.reason(after_seconds=1) == "the script has printed nothing and written no file for 5000 s"
    job.write(0, WORKING, number=2)
    assert job.reason(after_seconds=99) is None
    assert job.reason(after_seconds=1) == "the script has printed nothing and written no file for 100 s"


def test_a_stopped_rank_ends_the_attempt_and_is_named(run: Run, recipe: tuple[str, ...]) -> None:
    # No checkpoint, because a rank has more time to save one.
    flags = (*recipe, "--epochs=1000", "--checkpoint-every-steps=100000")
    launched = run.start(*flags, nproc=2, options=["--hang-timeout-seconds=15"])
    launched.wait_for_line("[progress] 4/")
    assert open_to_the_network(launched.process.pid) == []

    # A rank that receives SIGUSR1, as the launcher sends it to a hanging rank, prints its stack and continues.
    hanging = launched.ranks()[1]
    hanging.send_signal(signal.SIGUSR1)
    launched.wait_for_line("[rank 1]   File ")
    time.sleep(1)  # until it has printed all of it
    hanging.suspend()

    assert launched.wait() == 75
    assert re.fullmatch(
        r"interrupted: rank 1 of node 0 \(.*last seen \w.* after step \d+\): (no step for|still stopped after) 15 s; "
        r"if retried, it starts over: no checkpoint was saved\n",
        launched.lines[-1],
    ), launched.output
    # The other rank has no heartbeats either, but is not the cause.
    prefix = "rank 1 of node 0 wrote last: "
    assert [line for line in launched.lines[-11:-1] if line.startswith(prefix)] == [
        line.replace("[rank 1] ", prefix) for line in launched.lines if line.startswith("[rank 1] ")
    ][-10:]
    assert "of node 0 wrote last" not in launched.output.replace(prefix, "")
    assert run.recorded_attempt(1).reason == launched.lines[-1].removeprefix("interrupted: ").rstrip()
    assert run.receipt().state == "interrupted"
    run.wait_until_gone()
    assert not list(run.scratch.iterdir())


def test_a_lost_node_ends_the_attempt_and_is_named(run: Run, recipe: tuple[str, ...]) -> None:
    nodes = [run.start(*recipe, "--epochs=400", **node) for node in two_nodes()]
    nodes[0].wait_for_line("[progress] 4/")
    # Several nodes listen on the address that they know, here loopback.
    assert [open_to_the_network(node.process.pid) for node in nodes] == [[], []]

    assert nodes[1].kill() == -signal.SIGKILL

    assert nodes[0].wait() == 75
    assert re.fullmatch(
        r"interrupted: node 1 lost: no heartbeat for \d+ s; "
        r"if retried, it (starts over: no checkpoint was saved|resumes from the newest checkpoint)\n",
        nodes[0].lines[-1],
    ), nodes[0].output
    assert run.receipt().state == "interrupted"
    run.wait_until_gone()
