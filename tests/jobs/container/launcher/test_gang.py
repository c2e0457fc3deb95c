"""Nodes that are jobs of their own meet through S3, and train as one job."""

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from jobs.aws import s3 as object_store
from jobs.container.batch_job import job_id
from jobs.container.instance import InstanceMetadata, own_address
from jobs.container.launcher.gang import GangMember, Latecomers
from jobs.container.launcher.gang_folder import Ended, GangFolder, Meeting, Member
from jobs.container.launcher.outcome import End, retried
from jobs.container.launcher.request import Gang, Node, parse
from jobs.core.errors import ConfigurationError, TrainyardError, UsageError
from jobs.core.locations import S3Location
from tests.support.container.gangs import JOB
from tests.support.container.launching import PATIENCE_SECONDS
from tests.support.container.metadata_service import MetadataService
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

BEAT_SECONDS = 0.1
FRESH_SECONDS = 5.0


class Nodes:
    """The launchers of a gang's nodes, as far as they meet: each a thread that waits."""

    def __init__(self, s3: "S3Client", run: S3Location, *sizes: int) -> None:
        """`sizes`: on how many nodes it may train; the last is all of them."""
        self.s3 = s3
        self.run = run
        self.sizes = sizes
        self._pool = ThreadPoolExecutor()
        self._attempts: list[Attempt] = []

    def close(self) -> None:
        """Whoever still waits hears that it is over."""
        self.folder().end(Ended(code=1, reason="the test has ended"))
        for attempt in self._attempts:
            attempt.leave()
        self._pool.shutdown()

    def folder(self, job: str = JOB) -> GangFolder:
        return GangFolder(self.s3, self.run, job, fresh_seconds=FRESH_SECONDS)

    def start(
        self, index: int, wait_seconds: float = PATIENCE_SECONDS, job: str = JOB, *, is_last: bool = False
    ) -> "Attempt":
        gang = Gang(index=index, size=self.sizes[-1], sizes=self.sizes, wait_seconds=wait_seconds, is_last=is_last)
        member = GangMember(gang, self.folder(job), "127.0.0.1", beat_seconds=BEAT_SECONDS)
        self._attempts.append(Attempt(member, self._pool.submit(member.meet)))
        return self._attempts[-1]

    def meet(self, *indices: int, wait_seconds: float = PATIENCE_SECONDS) -> "list[Attempt]":
        """Those of one meeting."""
        attempts = [self.start(index, wait_seconds) for index in indices]
        assert {attempt.nodes for attempt in attempts} == {indices}
        return attempts

    def wait_until_waiting(self, index: int) -> None:
        place = self.run / "gang" / JOB
        wait_until(lambda: object_store.sizes(self.s3, place), lambda names: f"member-{index}.json" in names)


class Attempt:
    """One start of one node."""

    def __init__(self, member: GangMember, found: "Future[Meeting | End]") -> None:
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
        """With 75, or as Batch's SIGTERM makes it."""
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


def test_all_meet_and_again_where_one_was_lost(new_nodes: NewNodes) -> None:
    nodes = new_nodes(3)
    first = nodes.meet(0, 1, 2)
    # They are numbered as Batch has numbered them, and agree on where the main node is
    assert [(attempt.node.index, attempt.node.nnodes) for attempt in first] == [(0, 3), (1, 3), (2, 3)]
    assert len({(attempt.node.main_address, attempt.node.port) for attempt in first}) == 1
    assert {attempt.meeting.number for attempt in first} == {1}

    # WHEN node 1 is lost without a word and started again, while the others still think that they train
    again = nodes.start(1)
    nodes.wait_until_waiting(1)
    time.sleep(5 * BEAT_SECONDS)
    assert not again.found.done()
    # and those end, and are started again
    for attempt in (first[0], first[2]):
        attempt.leave()
    others = [nodes.start(0), nodes.start(2)]
    # THEN they meet a second time, without the one that was lost
    assert {attempt.meeting.number for attempt in (again, *others)} == {2}
    assert again.node.index == 1
    assert not any(member.nonce == first[1].meeting.members[1].nonce for member in again.meeting.members)


def test_files_that_cannot_be_read_and_a_second_proposal_keep_nobody_from_meeting(
    new_nodes: NewNodes, s3: "S3Client", caplog: pytest.LogCaptureFixture
) -> None:
    nodes = new_nodes(2)
    place = nodes.run / "gang" / JOB
    names = ("member-7.json", "meeting-1.json", "ended.json")
    for name, content in zip(names, (b'{"index": 7, "no', b"[]", b"{}"), strict=True):
        object_store.write(s3, place / name, content)
    found = nodes.meet(0, 1)
    assert {attempt.meeting.number for attempt in found} == {2}
    warnings = {f"warning: {place / name} cannot be read and is skipped" for name in names}
    assert sorted(message for message in caplog.messages if "cannot be read" in message) == sorted(warnings)
    # Of two meetings of one number the first counts
    late = Member(index=1, nonce="late", address="127.0.0.1", port=1)
    nodes.folder().propose(Meeting(number=2, members=[late]))
    assert nodes.folder().look(late).meeting == found[0].meeting


def test_those_that_lack_are_named_and_fewer_begin_where_they_may(new_nodes: NewNodes) -> None:
    # Nobody comes
    alone = new_nodes(2, 4).start(1, wait_seconds=0.5)
    reason = "node 0, node 2, node 3 of 4 did not come within 0 s, and at least 2 are needed"
    assert alone.end == retried(reason, "lost")
    alone.leave()

    # Three do not work on this batch: two begin, the third waits
    nodes = new_nodes(2, 4)
    third = nodes.start(3)
    nodes.wait_until_waiting(3)
    pair = nodes.meet(0, 2, wait_seconds=3)
    assert [attempt.node.index for attempt in pair] == [0, 1]
    assert pair[0].meeting.waited_seconds >= 2
    assert pair[0].member.latecomers() == []

    # With the fourth there are enough: the main node has all save and meet again, which it asks for once
    fourth = nodes.start(1)
    nodes.wait_until_waiting(1)
    asked: list[str] = []
    with Latecomers(pair[0].member, asked.append, look_seconds=0.05):
        wait_until(lambda: asked, bool)
        time.sleep(0.3)
    assert asked == ["node 1, node 3 of 4 came late, and the nodes meet again"]
    for attempt in pair:
        attempt.leave()
    whole = [nodes.start(0), fourth, nodes.start(2), third]
    assert [attempt.nodes for attempt in whole] == [(0, 1, 2, 3)] * 4


def test_one_that_has_used_up_its_attempts_is_not_waited_for(new_nodes: NewNodes) -> None:
    [alone] = new_nodes(1, 2).meet(1, wait_seconds=0)
    assert alone.node == Node(index=0, nnodes=1, main_address="127.0.0.1", port=0)
    alone.leave()
    nodes = new_nodes(2, 3)
    in_vain = nodes.start(0, wait_seconds=0, is_last=True)
    assert in_vain.end.code == 75
    in_vain.leave()
    # Fewer begin at once without it
    pair = nodes.start(1), nodes.start(2, is_last=True)
    assert [attempt.nodes for attempt in pair] == [(1, 2)] * 2
    # WHEN one of those was lost without a word, THEN they are too few
    pair[0].leave()
    reason = "node 0, node 2 of 3 used up all attempts, and at least 2 are needed. Next: trainyard resume"
    assert nodes.start(1).end == End(code=75, reason=reason, cause="lost")


def test_a_late_one_does_not_end_those_that_could_not_begin_again(new_nodes: NewNodes) -> None:
    nodes = new_nodes(2, 3)
    pair = [nodes.start(index, wait_seconds=0.5, is_last=True) for index in range(2)]
    assert [attempt.nodes for attempt in pair] == [(0, 1)] * 2
    nodes.start(2)
    nodes.wait_until_waiting(2)
    assert pair[0].member.latecomers() == []


def test_nor_is_one_waited_for_that_was_lost_while_it_waited(new_nodes: NewNodes) -> None:
    nodes = new_nodes(2)
    one, lost = (Member(index=i, nonce=f"{i}", address="127.0.0.1", port=1, is_last=i == 1) for i in range(2))
    assert not nodes.folder().look(lost).without_return
    silent = GangFolder(nodes.s3, nodes.run, JOB, fresh_seconds=0).look(one)
    assert (set(silent.waiting), silent.without_return) == (set(), set()), "it may only wait for S3"
    gone = GangFolder(nodes.s3, nodes.run, JOB, fresh_seconds=0, lost_seconds=0).look(one)
    assert gone.without_return == {1}


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
def test_the_main_nodes_word_is_that_of_all(new_nodes: NewNodes, code: int, own: End, expected: End) -> None:
    nodes = new_nodes(2)
    main, other = nodes.meet(0, 1)
    with ThreadPoolExecutor() as pool:
        followed = pool.submit(other.member.followed, own)
        time.sleep(0.2)
        assert not followed.done()
        main.member.end(code, "node 2: no such label" if code else None)
        main.leave()
        assert followed.result(PATIENCE_SECONDS) == expected
    other.leave()
    # Whoever is started again ends so too, at once; a resumed run, which is another job, starts over
    if code != 75:
        again = nodes.start(1)
        assert again.end.code == code
        again.leave()
        assert nodes.start(1, wait_seconds=0, job="9e3a").end.code == 75


def test_whoever_waits_for_the_main_nodes_ranks_hears_that_it_has_ended_the_run(new_nodes: NewNodes) -> None:
    main, other = new_nodes(2).meet(0, 1)
    lost = retried("node 0 did not come within 120 s", "lost")
    assert not other.member.is_over()
    assert other.member.followed(lost) == lost
    main.member.end(1, "budget: used up")
    assert other.member.is_over()
    assert other.member.followed(lost) == End(code=1, reason="the run has ended: budget: used up", cause="done")


def test_one_that_fails_before_it_meets_the_others_ends_the_run(new_nodes: NewNodes) -> None:
    nodes = new_nodes(2)
    other = nodes.start(0)
    with pytest.raises(TrainyardError), nodes.start(1).member:
        raise TrainyardError("no HPU found", next_step="none")
    assert other.end == End(code=1, reason="the run has ended: node 1: no HPU found. Next: none", cause="done")


def test_a_node_is_reached_where_ec2_says_or_where_it_reaches_s3(s3: "S3Client") -> None:
    with MetadataService() as service:
        metadata = InstanceMetadata.of(service.environment, on_instance=True)
        assert own_address(metadata, s3.meta.endpoint_url) == "127.0.0.1"
        service.news["/latest/meta-data/local-ipv4"] = "10.1.2.3"
        assert own_address(metadata, s3.meta.endpoint_url) == "10.1.2.3"
    assert own_address(None, "https://127.0.0.2") == "127.0.0.1"


FINETUNING = ("finetune-classification", "--model=m", "--train-data=t.jsonl")
SCRIPT = ("script", "--code=s3://runs/research/code.tar.gz", "--command=train.py")


def asked(*options: str, kind: tuple[str, ...] = FINETUNING, batch: int = 32, **environment: Any) -> Gang:
    flags = (*options, *kind, *([f"--global-batch-size={batch}"] if kind == FINETUNING else []))
    argv = ["--instance-type=dl1.24xlarge", "--nproc-per-node=2", *flags]
    launch = parse(argv, {"TRAINYARD_RUN_URI": "s3://runs/research/a/", **environment})
    assert launch.gang is not None
    return launch.gang


@pytest.mark.parametrize(
    "kind",
    [
        ("prepare-corpus", '--data=["a.jsonl"]'),
        ("train-tokenizer", "--corpus=run://corpus"),
        ("tokenize", "--corpus=run://corpus", "--tokenizer=run://tokenizer"),
        ("notebook",),
    ],
)
def test_what_is_one_process_is_refused_with_several(kind: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=f"{kind[0]} is one process, not 2\\nNext: --nproc-per-node=1"):
        asked(kind=kind)


def test_what_batch_tells_a_child_and_on_how_many_nodes_a_batch_divides() -> None:
    assert job_id({"AWS_BATCH_JOB_ID": "8d2f:3"}) == job_id({"AWS_BATCH_JOB_ID": "8d2f#3"}) == "8d2f"
    child: dict[str, Any] = {"AWS_BATCH_JOB_ARRAY_INDEX": "3", "AWS_BATCH_JOB_ARRAY_SIZE": "4"}
    assert asked("--gang-min-nnodes=1", **child) == Gang(index=3, size=4, sizes=(1, 2, 4), wait_seconds=900)
    gang = asked("--gang-min-nnodes=2", "--gang-wait-seconds=60", batch=24, **child)
    assert gang == Gang(index=3, size=4, sizes=(2, 3, 4), wait_seconds=60)
    assert [gang.most(count) for count in range(5)] == [0, 0, 2, 3, 4]
    attempts = [asked("--gang-min-nnodes=4", "--gang-attempts=3", AWS_BATCH_JOB_ATTEMPT=n, **child) for n in "23"]
    assert [gang.is_last for gang in attempts] == [False, True]
    for least in (0, 5):
        with pytest.raises(UsageError, match=rf"--gang-min-nnodes is {least}; it goes from 1 to 4"):
            asked(f"--gang-min-nnodes={least}", **child)
    with pytest.raises(UsageError, match="global_batch_size 12 is not divisible by 8 ranks"):
        asked("--gang-min-nnodes=1", batch=12, **child)
    assert asked("--gang-min-nnodes=4", kind=SCRIPT, **child).sizes == (4,)
    with pytest.raises(UsageError, match="its checkpoints are of one number of ranks"):
        asked("--gang-min-nnodes=2", kind=SCRIPT, **child)
    with pytest.raises(ConfigurationError, match="AWS_BATCH_JOB_ARRAY_INDEX is not set"):
        asked("--gang-min-nnodes=1")
