"""Nodes that are separate Batch jobs meet on S3 and train as one job."""

import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs.aws import s3 as object_store
from jobs.container.environment import job_id
from jobs.container.instance import InstanceMetadata, own_address
from jobs.container.launcher.outcome import End, retried
from jobs.container.launcher.rendezvous import LatecomerWatch, Rendezvous
from jobs.container.launcher.rendezvous_folder import Ended, Meeting, Member, RendezvousFolder
from jobs.container.launcher.request import Node, NodeGroup, parse
from jobs.core.errors import ConfigurationError, TrainyardError, UsageError
from jobs.core.locations import S3Location
from tests.support.container.launching import PATIENCE_SECONDS, Run
from tests.support.container.listeners import open_to_the_network
from tests.support.container.metadata_service import MetadataService
from tests.support.container.node_groups import JOB, child
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


BEAT_SECONDS = 0.1
FRESH_SECONDS = 5.0


class Nodes:
    """The launchers of a group's nodes, reduced to the rendezvous: each is a waiting thread."""

    def __init__(self, s3: "S3Client", run: S3Location, *sizes: int) -> None:
        """`sizes` are the numbers of nodes that may train. The last one is all of them."""
        self.s3 = s3
        self.run = run
        self.sizes = sizes
        self._pool = ThreadPoolExecutor()
        self._attempts: list[Attempt] = []

    def close(self) -> None:
        """End the run, so that no node waits any longer."""
        self.folder().end(Ended(code=1, reason="the test has ended"))
        for attempt in self._attempts:
            attempt.leave()
        self._pool.shutdown()

    def folder(self, job: str = JOB) -> RendezvousFolder:
        return RendezvousFolder(self.s3, self.run, job, fresh_seconds=FRESH_SECONDS)

    def start(
        self, index: int, wait_seconds: float = PATIENCE_SECONDS, job: str = JOB, *, is_last: bool = False
    ) -> "Attempt":
        group = NodeGroup(
            index=index, size=self.sizes[-1], sizes=self.sizes, wait_seconds=wait_seconds, is_last=is_last
        )
        member = Rendezvous(group, self.folder(job), "127.0.0.1", heartbeat_seconds=BEAT_SECONDS)
        self._attempts.append(Attempt(member, self._pool.submit(member.meet)))
        return self._attempts[-1]

    def meet(self, *indices: int, wait_seconds: float = PATIENCE_SECONDS) -> "list[Attempt]":
        """Start nodes and return them once they have met."""
        attempts = [self.start(index, wait_seconds) for index in indices]
        assert {attempt.nodes for attempt in attempts} == {indices}
        return attempts

    def wait_until_waiting(self, index: int) -> None:
        place = self.run / "rendezvous" / JOB
        wait_until(lambda: object_store.sizes(self.s3, place), lambda names: f"member-{index}.json" in names)


class Attempt:
    """One attempt of one node."""

    def __init__(self, member: Rendezvous, found: "Future[Meeting | End]") -> None:
        self.member = member
        self.found = found

    @property
    def meeting(self) -> Meeting:
        found = self.found.result(PATIENCE_SECONDS)
        assert isinstance(found, Meeting), found
        return found

    @property
    def end(self) -> End:
        found = self.found.result(PATIENCE_SECONDS)
        assert isinstance(found, End), found
        return found

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(member.index for member in self.meeting.members)

    @property
    def node(self) -> Node:
        return self.member.node(self.meeting)

    def leave(self) -> None:
        """Leave as after exit code 75 or Batch's SIGTERM."""
        self.member.__exit__(None, None, None)


NewNodes = Callable[..., Nodes]


@pytest.fixture
def new_nodes(s3: "S3Client", tmp_path: Path) -> Iterator[NewNodes]:
    run = S3Location("runs", f"research/{tmp_path.name}-{uuid.uuid4().hex}/")
    with ExitStack() as stack:

        def new(*sizes: int) -> Nodes:
            nodes = Nodes(s3, run, *sizes)
            stack.callback(nodes.close)
            return nodes

        yield new


def test_all_nodes_meet_again_after_one_is_lost(new_nodes: NewNodes) -> None:
    nodes = new_nodes(3)
    first = nodes.meet(0, 1, 2)
    # They keep Batch's numbers, and agree on the address of the main node
    assert [(attempt.node.index, attempt.node.nnodes) for attempt in first] == [(0, 3), (1, 3), (2, 3)]
    assert len({(attempt.node.main_address, attempt.node.port) for attempt in first}) == 1
    assert {attempt.meeting.number for attempt in first} == {1}

    # WHEN node 1 is lost and retried, while the others still train
    again = nodes.start(1)
    nodes.wait_until_waiting(1)
    time.sleep(5 * BEAT_SECONDS)
    assert not again.found.done()
    # and the others end and are retried
    for attempt in (first[0], first[2]):
        attempt.leave()
    others = [nodes.start(0), nodes.start(2)]
    # THEN all meet a second time, without the lost attempt
    assert {attempt.meeting.number for attempt in (again, *others)} == {2}
    assert again.node.index == 1
    assert not any(member.nonce == first[1].meeting.members[1].nonce for member in again.meeting.members)


def test_nodes_meet_despite_unreadable_files_and_two_proposals(
    new_nodes: NewNodes, s3: "S3Client", caplog: pytest.LogCaptureFixture
) -> None:
    nodes = new_nodes(2)
    place = nodes.run / "rendezvous" / JOB
    names = ("member-7.json", "meeting-1.json", "ended.json")
    for name, content in zip(names, (b'{"index": 7, "no', b"[]", b"{}"), strict=True):
        object_store.write(s3, place / name, content)
    found = nodes.meet(0, 1)
    assert {attempt.meeting.number for attempt in found} == {2}
    warnings = {f"warning: {place / name} cannot be read and is skipped" for name in names}
    assert sorted(message for message in caplog.messages if "cannot be read" in message) == sorted(warnings)
    # Of two meetings with the same number the first one counts
    late = Member(index=1, nonce="late", address="127.0.0.1", port=1)
    nodes.folder().propose(Meeting(number=2, members=[late]))
    assert nodes.folder().look(late).meeting == found[0].meeting


def test_missing_nodes_are_named_and_fewer_may_start(new_nodes: NewNodes) -> None:
    # No other node arrives
    alone = new_nodes(2, 4).start(1, wait_seconds=0.5)
    reason = "node 0, node 2, node 3 of 4 did not arrive within 0 s, and at least 2 are needed"
    assert alone.end == retried(reason, "lost")
    alone.leave()

    # Three nodes do not divide this batch: two start, the third waits
    nodes = new_nodes(2, 4)
    third = nodes.start(3)
    nodes.wait_until_waiting(3)
    pair = nodes.meet(0, 2, wait_seconds=3)
    assert [attempt.node.index for attempt in pair] == [0, 1]
    assert pair[0].meeting.waited_seconds >= 2
    assert pair[0].member.latecomers() == []

    # With the fourth there are enough: the main node asks once that all save and meet again
    fourth = nodes.start(1)
    nodes.wait_until_waiting(1)
    asked: list[str] = []
    with LatecomerWatch(pair[0].member, asked.append, look_seconds=0.05):
        wait_until(lambda: asked, bool)
        time.sleep(0.3)
    assert asked == ["node 1, node 3 of 4 arrived late, so all nodes meet again"]
    for attempt in pair:
        attempt.leave()
    whole = [nodes.start(0), fourth, nodes.start(2), third]
    assert [attempt.nodes for attempt in whole] == [(0, 1, 2, 3)] * 4


def test_nodes_do_not_wait_for_one_without_attempts_left(new_nodes: NewNodes) -> None:
    [alone] = new_nodes(1, 2).meet(1, wait_seconds=0)
    assert alone.node == Node(index=0, nnodes=1, main_address="127.0.0.1", port=0)
    alone.leave()
    nodes = new_nodes(2, 3)
    in_vain = nodes.start(0, wait_seconds=0, is_last=True)
    assert in_vain.end.code == 75
    in_vain.leave()
    # Fewer start at once without it
    pair = nodes.start(1), nodes.start(2, is_last=True)
    assert [attempt.nodes for attempt in pair] == [(1, 2)] * 2
    # WHEN one of those is lost, THEN there are too few
    pair[0].leave()
    reason = "node 0, node 2 of 3 used up all attempts, and at least 2 are needed. Next: trainyard resume"
    assert nodes.start(1).end == End(code=75, reason=reason, cause="lost")


def test_a_late_node_does_not_stop_nodes_on_their_last_attempt(new_nodes: NewNodes) -> None:
    nodes = new_nodes(2, 3)
    pair = [nodes.start(index, wait_seconds=0.5, is_last=True) for index in range(2)]
    assert [attempt.nodes for attempt in pair] == [(0, 1)] * 2
    nodes.start(2)
    nodes.wait_until_waiting(2)
    assert pair[0].member.latecomers() == []


def test_nodes_do_not_wait_for_one_that_was_lost_waiting(new_nodes: NewNodes) -> None:
    nodes = new_nodes(2)
    one, lost = (Member(index=i, nonce=f"{i}", address="127.0.0.1", port=1, is_last=i == 1) for i in range(2))
    assert not nodes.folder().look(lost).exhausted
    silent = RendezvousFolder(nodes.s3, nodes.run, JOB, fresh_seconds=0).look(one)
    assert (set(silent.waiting), silent.exhausted) == (set(), set()), "the node may only be waiting for S3"
    gone = RendezvousFolder(nodes.s3, nodes.run, JOB, fresh_seconds=0, lost_seconds=0).look(one)
    assert gone.exhausted == {1}


PEERS = End(code=1, reason="RuntimeError: Connection closed by peer", cause="peers")
DONE = End(code=0, reason=None, cause="done")
SAVED = End(code=75, reason="SIGTERM; saved step 7", cause="done")


@pytest.mark.parametrize(
    ("code", "own", "expected"),
    [
        (0, PEERS, DONE),
        (1, PEERS, PEERS),
        (1, SAVED, End(code=1, reason="the run has ended: node 2: no such label", cause="done")),
        (75, SAVED, SAVED),
        (75, PEERS, retried(f"the main node ended the attempt: {PEERS.reason}", "peers")),
        (75, DONE, retried("the main node ended the attempt", "done")),
    ],
)
def test_all_nodes_end_as_the_main_node_decides(new_nodes: NewNodes, code: int, own: End, expected: End) -> None:
    nodes = new_nodes(2)
    main, other = nodes.meet(0, 1)
    with ThreadPoolExecutor() as pool:
        followed = pool.submit(other.member.agreed_end, own)
        time.sleep(0.2)
        assert not followed.done()
        main.member.end_run(code, "node 2: no such label" if code else None)
        main.leave()
        assert followed.result(PATIENCE_SECONDS) == expected
    other.leave()
    # A retried node ends at once, too. A resumed run is another job and starts over
    if code != 75:
        again = nodes.start(1)
        assert again.end.code == code
        again.leave()
        assert nodes.start(1, wait_seconds=0, job="9e3a").end.code == 75


def test_a_waiting_node_learns_that_the_main_node_ended_the_run(new_nodes: NewNodes) -> None:
    main, other = new_nodes(2).meet(0, 1)
    lost = retried("node 0 did not arrive within 120 s", "lost")
    assert not other.member.run_has_ended()
    assert other.member.agreed_end(lost) == lost
    main.member.end_run(1, "budget: used up")
    assert other.member.run_has_ended()
    assert other.member.agreed_end(lost) == End(code=1, reason="the run has ended: budget: used up", cause="done")


def test_a_node_that_fails_before_the_meeting_ends_the_run(new_nodes: NewNodes) -> None:
    nodes = new_nodes(2)
    other = nodes.start(0)
    with pytest.raises(TrainyardError), nodes.start(1).member:
        raise TrainyardError("no HPU found", next_step="none")
    assert other.end == End(code=1, reason="the run has ended: node 1: no HPU found. Next: none", cause="done")


def test_a_nodes_address_comes_from_ec2_or_its_route_to_s3(s3: "S3Client") -> None:
    with MetadataService() as service:
        metadata = InstanceMetadata.of(service.environment, on_instance=True)
        assert own_address(metadata, s3.meta.endpoint_url) == "127.0.0.1"
        service.news["/latest/meta-data/local-ipv4"] = "10.1.2.3"
        assert own_address(metadata, s3.meta.endpoint_url) == "10.1.2.3"
    assert own_address(None, "https://127.0.0.2") == "127.0.0.1"


FINETUNING = ("finetune-classification", "--model=m", "--train-data=t.jsonl")
SCRIPT = ("script", "--code=s3://runs/research/code.tar.gz", "--command=train.py")


def asked(*options: str, kind: tuple[str, ...] = FINETUNING, batch: int = 32, **environment: Any) -> NodeGroup:
    flags = (*options, *kind, *([f"--global-batch-size={batch}"] if kind == FINETUNING else []))
    argv = ["--instance-type=dl1.24xlarge", "--nproc-per-node=2", *flags]
    launch = parse(argv, {"TRAINYARD_RUN_URI": "s3://runs/research/a/", **environment})
    assert launch.group is not None
    return launch.group


@pytest.mark.parametrize(
    "kind",
    [
        ("prepare-corpus", '--data=["a.jsonl"]'),
        ("train-tokenizer", "--corpus=run://corpus"),
        ("tokenize", "--corpus=run://corpus", "--tokenizer=run://tokenizer"),
        ("notebook",),
    ],
)
def test_a_kind_with_one_process_is_refused_with_several(kind: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=f"{kind[0]} runs in one process, not 2\\nNext: --nproc-per-node=1"):
        asked(kind=kind)


def test_a_node_group_is_read_from_batch_and_the_batch_size() -> None:
    assert job_id({"AWS_BATCH_JOB_ID": "8d2f:3"}) == job_id({"AWS_BATCH_JOB_ID": "8d2f#3"}) == "8d2f"
    child: dict[str, Any] = {"AWS_BATCH_JOB_ARRAY_INDEX": "3", "AWS_BATCH_JOB_ARRAY_SIZE": "4"}
    assert asked("--rendezvous-min-nnodes=1", **child) == NodeGroup(index=3, size=4, sizes=(1, 2, 4), wait_seconds=900)
    group = asked("--rendezvous-min-nnodes=2", "--rendezvous-wait-seconds=60", batch=24, **child)
    assert group == NodeGroup(index=3, size=4, sizes=(2, 3, 4), wait_seconds=60)
    assert [group.most(count) for count in range(5)] == [0, 0, 2, 3, 4]
    attempts = [
        asked("--rendezvous-min-nnodes=4", "--rendezvous-attempts=3", AWS_BATCH_JOB_ATTEMPT=n, **child) for n in "23"
    ]
    assert [group.is_last for group in attempts] == [False, True]
    for least in (0, 5):
        with pytest.raises(UsageError, match=rf"--rendezvous-min-nnodes is {least}; it must be from 1 to 4"):
            asked(f"--rendezvous-min-nnodes={least}", **child)
    with pytest.raises(UsageError, match="global_batch_size 12 is not divisible by 8 ranks"):
        asked("--rendezvous-min-nnodes=1", batch=12, **child)
    assert asked("--rendezvous-min-nnodes=4", kind=SCRIPT, **child).sizes == (4,)
    with pytest.raises(UsageError, match="its checkpoints need the same number of ranks"):
        asked("--rendezvous-min-nnodes=2", kind=SCRIPT, **child)
    with pytest.raises(ConfigurationError, match="AWS_BATCH_JOB_ARRAY_INDEX is not set"):
        asked("--rendezvous-min-nnodes=1")


@pytest.mark.timeout(600)
def test_a_node_starts_alone_then_two_train_and_meet_again(run: Run, recipe: tuple[str, ...]) -> None:
    # WHEN one of two nodes has waited in vain for the other, THEN it starts alone
    alone = child(run, 1, *recipe, attempt=1, options=("--rendezvous-wait-seconds=1",))
    alone.wait_for_line("[progress] 4/")
    [rank] = alone.ranks()
    rank.suspend()  # as in a long training, because late nodes are looked for only every 15 s
    # WHEN the other node arrives, THEN the training node saves and ends with 75
    late = child(run, 0, *recipe, attempt=1)
    reason = "node 0 of 2 arrived late, so all nodes meet again"
    alone.wait_for_line(reason)
    rank.resume()
    assert alone.wait() == 75
    first = re.fullmatch(rf"interrupted: ({reason}; saved step (\d+))\n", alone.lines[-1])
    assert first, alone.output

    # WHEN it is retried, THEN both resume from there, with the late node as main node
    nodes = [late, child(run, 1, *recipe, attempt=2)]
    late.wait_for_line(f"start: resumed from checkpoint step-{first[2]}")
    late.wait_for_line("[progress] 24/")
    assert [open_to_the_network(node.process.pid) for node in nodes] == [[], []]
    # WHEN the other node receives SIGTERM, THEN both save and end with 75
    nodes[1].process.send_signal(signal.SIGTERM)
    assert [node.wait() for node in nodes] == [75, 75]
    assert nodes[0].lines[-1] == nodes[1].lines[-1]
    second = re.fullmatch(r"interrupted: (SIGTERM; saved step (\d+))\n", nodes[0].lines[-1])
    assert second, nodes[0].output
    run.wait_until_gone()

    # WHEN both are retried, THEN they continue together
    nodes = [child(run, index, *recipe, attempt=attempt) for index, attempt in enumerate((2, 3))]
    assert [node.wait() for node in nodes] == [0, 0]
    assert f"start: resumed from checkpoint step-{second[2]}\n" in nodes[0].lines
    receipt = run.receipt()
    assert receipt.state == "succeeded"
    assert [(attempt.number, attempt.job_id, attempt.nnodes) for attempt in receipt.attempts] == [
        (1, JOB, 1),
        (2, JOB, 2),
        (3, JOB, 2),
    ]
    assert [attempt.reason for attempt in receipt.attempts] == [first[1], second[1], None]
    assert not [name for name in run.keys("rendezvous/") if "member" in name]
    assert "[W" not in nodes[1].output
    # AND each of the 48 steps was trained once, on one node or on two
    losses = [line for line in run.metrics() if "loss" in line]
    assert [line["step"] for line in losses] == list(range(4, 49, 4))
    assert [line["epoch"] for line in losses] == pytest.approx([step / 12 for step in range(4, 49, 4)])
    assert [line["step"] for line in run.metrics() if "eval_accuracy" in line] == [48]
