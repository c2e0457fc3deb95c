"""The folder on S3 through which the members of a gang meet: `gang/JOB/` among the run's files.

    member-I.json    one `Member`: rewritten while it waits, there for as long as its launcher lives, if that can end
                     it, and for longer where Batch does not start it again
    meeting-K.json   one `Meeting`, written once: of two that propose one, S3 takes the first
    ended.json       one `Ended`: the run is over, for whoever comes later too

Whether somebody is still there is judged by S3's clock alone: by when it took their file, against when it took one's
own. So the clocks of the members may be wrong.
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
from jobs.core.run import GANG

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

FRESH_SECONDS = 30.0
"""The time without a heartbeat after which somebody no longer waits."""

LOST_SECONDS = 180.0
"""The time without a heartbeat after which one that waited is gone for good: one slow request to S3 takes less."""

LEASE_SECONDS = object_store.RETRY_SECONDS + 300.0
"""The time without a heartbeat from its main node after which a meeting is over: until then that may only wait for
S3."""

_LEAVE_SECONDS = 5.0

_ENDED = "ended.json"
_MEMBER = re.compile(r"member-(\d+)\.json")
_MEETING = re.compile(r"meeting-(\d+)\.json")


class Member(BaseModel):
    """One attempt of one child of the array job."""

    index: int
    """The number of the child."""
    nonce: str
    """Tells this attempt from any other."""
    address: str
    port: int
    """The port at which the others reach it if it becomes the main node."""
    capacity: Capacity | None = None
    """The capacity that its instance is paid as, as far as anybody knows."""
    since: datetime | None = None
    """When it came, by S3's clock; None: it has only just come."""
    is_last: bool = False
    """True where Batch does not start it again, unless the run goes on as another job."""
    has_left: bool = False


class Meeting(BaseModel):
    """Members that train together, in the order of their indices: the first is the main node."""

    number: int
    """Counts from 1 within the job."""
    members: list[Member]
    waited_seconds: float = 0.0
    """The time that its members had waited when it was made, added up."""

    @property
    def capacity(self) -> Capacity | None:
        """The capacity that prices all its instances: the dearer one where they differ, which keeps a budget."""
        found = [member.capacity for member in self.members]
        return "on-demand" if "on-demand" in found else found[0]

    def has(self, member: Member) -> bool:
        return any(own.nonce == member.nonce for own in self.members)


class Ended(BaseModel):
    """The end of the run: done, or failed by its own fault."""

    code: int
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class View:
    """What a member found when it looked at the folder."""

    now: datetime
    """The time by S3's clock."""
    waiting: dict[int, Member]
    """The members that wait, by their index; those of the newest meeting wait no longer."""
    meeting: Meeting | None
    """The newest meeting."""
    newest_number: int
    """That of the newest meeting's file, which may be one that cannot be read; 0: there is none."""
    main_silent_seconds: float | None
    """The time since the last heartbeat of the meeting's main node; None: that launcher has ended."""
    ended: Ended | None
    without_return: set[int]
    """Indices of those that have used up their attempts, as far as there is a sign of it."""

    @property
    def goes_on(self) -> bool:
        """True while the meeting may still be training: nobody of it has come again, and its main node lives.

        One of whose nodes has come again is over, for all are needed. So what the lease keeps apart is only a meeting
        and another one of quite other nodes.
        """
        if self.meeting is None or self.main_silent_seconds is None or self.main_silent_seconds >= LEASE_SECONDS:
            return False
        return not any(member.index in self.waiting for member in self.meeting.members)


class GangFolder:
    """The folder as one member sees it. What fails at S3 raises TrainyardError, after ten minutes of further tries.

    A file in it that cannot be read is as if it were not there, with a warning.
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
        """`job_id` is that of the array job; a run that goes on as another job begins with an empty folder."""
        self._fresh_seconds = fresh_seconds
        self._lost_seconds = lost_seconds
        self._s3 = s3
        self._folder = run / GANG.rstrip("/") / (job_id or "local")
        self._seen: dict[str, tuple[str, bytes]] = {}

    def look(self, own: Member) -> View:
        """Give a heartbeat for `own`, and find who else lives."""
        self._write(_name(own), own)
        found = self._list()
        now = found[_name(own)].taken
        meeting = ended = None
        newest_number = 0
        members = []
        for name, item in found.items():
            content = self._content(name, item.etag)
            if content is None:
                continue  # it has left since
            place = self._folder / name
            if _MEMBER.fullmatch(name):
                if (member := read_record(Member, content, place=place)) is not None:
                    members.append((member, (now - item.taken).total_seconds()))
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
            without_return={member.index for member in left if member.is_last} - waiting.keys(),
        )

    def propose(self, meeting: Meeting) -> None:
        """Propose a meeting. The next look finds whether it is this one or another of the same number."""
        place = self._folder / f"meeting-{meeting.number}.json"
        object_store.create(self._s3, place, meeting.model_dump_json().encode())

    def end(self, ended: Ended) -> None:
        self._write(_ENDED, ended)

    def leave(self, member: Member) -> None:
        """Say that the member lives no longer. Where S3 does not answer soon the others find out by themselves."""

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
        """List one page, which holds a thousand: a job has fewer members and attempts."""
        answer = object_store.with_retries(
            f"list {self._folder}",
            lambda: self._s3.list_objects_v2(Bucket=self._folder.bucket, Prefix=f"{self._folder.key}/"),
        )
        return {
            item["Key"].rpartition("/")[2]: _Item(etag=item["ETag"], taken=item["LastModified"])
            for item in answer.get("Contents", [])
        }

    def _content(self, name: str, etag: str) -> bytes | None:
        """Return a file's content, read again only once a heartbeat has rewritten it."""
        if self._seen.get(name, ("", b""))[0] != etag:
            content = object_store.read(self._s3, self._folder / name)
            if content is None:
                return None
            self._seen[name] = etag, content
        return self._seen[name][1]


class _Item(NamedTuple):
    etag: str
    taken: datetime
    """The time at which S3 took it."""


def _name(member: Member) -> str:
    return f"member-{member.index}.json"
