"""Read and write the folder on S3 through which nodes meet: `rendezvous/JOB/` among the run's files.

    member-I.json    one `Member`: rewritten while the node waits, and deleted when its launcher ends, unless that was
                     its last attempt
    meeting-K.json   one `Meeting`, written once: if two nodes propose one, S3 keeps the first
    ended.json       one `Ended`: the run is over, also for nodes that start later

Only S3's clock decides whether a node is alive, because the nodes' clocks may be wrong: a node compares the times at
which S3 stored the other node's file and its own.
"""

import contextlib
import re
import threading
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel

from jobs.aws import s3 as object_store
from jobs.core.locations import S3Location
from jobs.core.queues import Capacity
from jobs.core.records import read_record
from jobs.core.run import RENDEZVOUS

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

FRESH_SECONDS = 30.0
"""Time without a heartbeat after which a node no longer counts as waiting."""

LOST_SECONDS = 180.0
"""Time without a heartbeat after which a waiting node is gone for good. One slow request to S3 takes less."""

LEASE_SECONDS = object_store.RETRY_SECONDS + 300.0
"""Time without a heartbeat from its main node after which a meeting is over. Until then the main node may be waiting
for S3."""

_LEAVE_SECONDS = 5.0

_ENDED = "ended.json"
_MEMBER = re.compile(r"member-(\d+)\.json")
_MEETING = re.compile(r"meeting-(\d+)\.json")


class Member(BaseModel):
    """One attempt of one child of the array job."""

    index: int
    """The number of the child."""
    nonce: str
    """A random value that identifies this attempt."""
    address: str
    port: int
    """The port at which the other nodes reach this one if it becomes the main node."""
    capacity: Capacity | None = None
    """How its instance is billed, if known."""
    since: datetime | None = None
    """When the node arrived, by S3's clock. None before its first look."""
    is_last: bool = False
    """Whether this is the last attempt that Batch allows the child. A run that moves to another job gets new ones."""
    has_left: bool = False


class Meeting(BaseModel):
    """Members that train together, ordered by index. The first is the main node."""

    number: int
    """The number of the meeting within the job, from 1."""
    members: list[Member]
    waited_seconds: float = 0.0
    """The time that its members had waited when it was proposed, summed over all of them."""

    @property
    def capacity(self) -> Capacity | None:
        """How all its instances are priced: On-Demand if any of them is, so that the budget is not exceeded."""
        found = [member.capacity for member in self.members]
        return "on-demand" if "on-demand" in found else found[0]

    def has(self, member: Member) -> bool:
        return any(own.nonce == member.nonce for own in self.members)


class Ended(BaseModel):
    """The end of the run: it succeeded, or failed with its own error."""

    code: int
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class View:
    """The state of the folder, as one member read it."""

    now: datetime
    """The time, by S3's clock."""
    waiting: dict[int, Member]
    """The waiting members by index, without those of the newest meeting."""
    meeting: Meeting | None
    """The newest meeting."""
    newest_number: int
    """The number of the newest meeting file, readable or not. 0 if there is none."""
    main_silent_seconds: float | None
    """Time since the last heartbeat of the meeting's main node. None if that launcher has ended."""
    ended: Ended | None
    exhausted: set[int]
    """Indices of the members that are known to have used up their attempts."""

    @property
    def is_training(self) -> bool:
        """True while the meeting may still be training: its main node is alive, and none of its nodes waits again.

        A meeting needs all its nodes, so it is over once one of them waits again. The lease therefore matters only if
        all nodes of the next meeting are different ones.
        """
        if self.meeting is None or self.main_silent_seconds is None or self.main_silent_seconds >= LEASE_SECONDS:
            return False
        return not any(member.index in self.waiting for member in self.meeting.members)


class RendezvousFolder:
    """The folder, as one member reads and writes it.

    If S3 fails, methods retry for ten minutes and then raise TrainyardError. Unreadable files are ignored with a
    warning.
    """

    def __init__(
        self,
        s3: "S3Client",
        run: S3Location,
        job_id: str | None,
        *,
        fresh_seconds: float = FRESH_SECONDS,
        lost_seconds: float = LOST_SECONDS,
    ) -> None:
        """`job_id` is the array job. A run that continues as another job starts with an empty folder."""
        self._fresh_seconds = fresh_seconds
        self._lost_seconds = lost_seconds
        self._s3 = s3
        self._folder = run / RENDEZVOUS.rstrip("/") / (job_id or "local")
        self._seen: dict[str, tuple[str, bytes]] = {}

    def look(self, own: Member) -> View:
        """Write a heartbeat for `own`, and return which members are alive."""
        self._write(_name(own), own)
        found = self._list()
        now = found[_name(own)].stored_at
        meeting = ended = None
        newest_number = 0
        members = []
        for name, item in found.items():
            content = self._content(name, item.etag)
            if content is None:
                continue  # deleted since it was listed
            place = self._folder / name
            if _MEMBER.fullmatch(name):
                if (member := read_record(Member, content, place=place)) is not None:
                    members.append((member, (now - item.stored_at).total_seconds()))
            elif match := _MEETING.fullmatch(name):
                newest_number = max(newest_number, int(match[1]))
                other = read_record(Meeting, content, place=place)
                if other is not None and (meeting is None or other.number > meeting.number):
                    meeting = other
            elif name == _ENDED:
                ended = read_record(Ended, content, place=place)
        alive = [(member, age) for member, age in members if not member.has_left]
        outside = [(member, age) for member, age in alive if not (meeting and meeting.has(member))]
        waiting = {member.index: member for member, age in outside if age < self._fresh_seconds}
        main_silent_seconds = next(
            (age for member, age in alive if meeting and member.nonce == meeting.members[0].nonce), None
        )
        left = [member for member, age in outside if age >= self._lost_seconds]
        left += [member for member, _ in members if member.has_left]
        if meeting is not None and (main_silent_seconds is None or main_silent_seconds >= LEASE_SECONDS):
            left += meeting.members
        return View(
            now=now,
            waiting=waiting,
            meeting=meeting,
            newest_number=newest_number,
            main_silent_seconds=main_silent_seconds,
            ended=ended,
            exhausted={member.index for member in left if member.is_last} - waiting.keys(),
        )

    def propose(self, meeting: Meeting) -> None:
        """Propose a meeting. The next look shows whether S3 kept it or another proposal with the same number."""
        place = self._folder / f"meeting-{meeting.number}.json"
        object_store.create(self._s3, place, meeting.model_dump_json().encode())

    def end(self, ended: Ended) -> None:
        self._write(_ENDED, ended)

    def leave(self, member: Member) -> None:
        """Record that the member is gone. If S3 does not answer soon, the others notice the missing heartbeats."""

        def leave() -> None:
            with contextlib.suppress(Exception):
                if member.is_last:
                    self._write(_name(member), member.model_copy(update={"has_left": True}))
                else:
                    self._s3.delete_object(Bucket=self._folder.bucket, Key=(self._folder / _name(member)).key)

        leaving = threading.Thread(target=leave, name="leave", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_SECONDS)

    def _write(self, name: str, content: BaseModel) -> None:
        object_store.write(self._s3, self._folder / name, content.model_dump_json().encode())

    def _list(self) -> "dict[str, _Item]":
        """List one page of a thousand files. A job has fewer members and meetings."""
        answer = object_store.with_retries(
            f"list {self._folder}",
            lambda: self._s3.list_objects_v2(Bucket=self._folder.bucket, Prefix=f"{self._folder.key}/"),
        )
        return {
            item["Key"].rpartition("/")[2]: _Item(etag=item["ETag"], stored_at=item["LastModified"])
            for item in answer.get("Contents", [])
        }

    def _content(self, name: str, etag: str) -> bytes | None:
        """Return a file's content, from memory unless the file has changed."""
        if self._seen.get(name, ("", b""))[0] != etag:
            content = object_store.read(self._s3, self._folder / name)
            if content is None:
                return None
            self._seen[name] = etag, content
        return self._seen[name][1]


class _Item(NamedTuple):
    etag: str
    stored_at: datetime
    """The time at which S3 stored the file."""


def _name(member: Member) -> str:
    return f"member-{member.index}.json"
