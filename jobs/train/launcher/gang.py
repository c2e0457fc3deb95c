"""A gang: children of an array job, each a job of one node on Spot, that meet through S3 and train as one of several.

AWS Batch has jobs of several nodes On-Demand only. Here each node is started, reclaimed and started again for itself.
They wait for each other (jobs.train.launcher.gang_folder) until all are there, or for so long that fewer may begin; the
first of them is the main node, and from there on all is as in Batch's own jobs of several nodes. When one is taken away
all save, leave with 75, and meet again in their next attempts.
"""

import contextlib
import logging
import secrets
import time
from collections.abc import Iterable
from types import TracebackType

from typing_extensions import Self

from jobs.contract.errors import INTERRUPTED_EXIT_CODE, TrainyardError
from jobs.contract.queues import Capacity
from jobs.train.launcher.gang_address import hold_port
from jobs.train.launcher.gang_folder import Ended, GangFolder, Meeting, Member, View
from jobs.train.launcher.outcome import End, retried
from jobs.train.launcher.request import Gang, Node
from jobs.train.rank import one_line

log = logging.getLogger("trainyard")

BEAT_SECONDS = 5.0
"""Between two signs of life while it waits."""

_SAY_SECONDS = 60.0
"""Between two lines that say for whom it waits."""

_WORD_SECONDS = 1.0
"""Between two looks for the main node's word."""

_SILENT_SECONDS = 45.0
"""Without a sign of life from the main node, after which its word is not waited for any more."""


class GangMember:
    """This attempt of one node, from before it meets the others to its end: a context manager."""

    def __init__(
        self,
        gang: Gang,
        folder: GangFolder,
        address: str,
        *,
        capacity: Capacity | None = None,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self.meeting: Meeting | None = None
        """The one that it has come to."""
        self.gang = gang
        self._ended: Ended | None = None
        self._folder = folder
        self._beat_seconds = beat_seconds
        self._port = hold_port()
        self._member = Member(
            index=gang.index,
            nonce=secrets.token_hex(8),
            address=address,
            port=self._port.getsockname()[1],
            capacity=capacity,
            is_last=gang.is_last,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        """A failure of its own would be the same in each attempt: it ends the run for all."""
        if isinstance(error, Exception):
            self.failed(one_line(error))
        self._port.close()
        self._folder.leave(self._member)

    @property
    def waited_seconds(self) -> float:
        """Before the meeting, of all its nodes."""
        return self.meeting.waited_seconds if self.meeting is not None else 0.0

    def meet(self) -> Meeting | End:
        """Waits for the others: with whom it trains, or how the attempt ends without."""
        gang = self.gang
        log.info(
            "gang: this is node %s of %s, at %s; it waits for the others, %.0f s at most",
            gang.index,
            gang.size,
            self._member.address,
            gang.wait_seconds,
        )
        since = told_at = time.monotonic()
        while True:
            view = self.look()
            self._member.since = self._member.since or view.now
            now = time.monotonic()
            if view.ended is not None:
                return _over(view.ended)
            if view.meeting is not None and view.meeting.has(self._member):
                return self._met(view.meeting)
            absent = _named(index for index in range(gang.size) if index not in view.waiting)
            least = f", and at least {gang.sizes[0]} are needed" if gang.sizes[0] < gang.size else ""
            if view.goes_on:
                since = now
            elif not gang.most(gang.size - len(view.without_return)):
                # Not 1: Spot may be why, and then the run moves to On-Demand once its nodes have all ended so.
                spent = f"{_named(view.without_return)} of {gang.size} used up all attempts{least}"
                return End(code=INTERRUPTED_EXIT_CODE, reason=f"{spent}. Next: trainyard resume", cause="lost")
            elif proposal := self._proposal(view, is_late=now - since >= gang.wait_seconds):
                self._folder.propose(proposal)
                continue  # of all that are proposed at once, one counts
            elif now - since >= gang.wait_seconds:
                return retried(f"{absent} of {gang.size} did not come within {gang.wait_seconds:.0f} s{least}", "lost")
            if now - told_at >= _SAY_SECONDS:
                told_at = now
                log.info("gang: waiting for %s", "those that train already" if view.goes_on else absent)
            time.sleep(self._beat_seconds)

    def node(self, meeting: Meeting) -> Node:
        """What this one is there."""
        nnodes = len(meeting.members)
        if nnodes == 1:
            return Node(index=0, nnodes=1, main_address="localhost", port=0)
        main = meeting.members[0]
        index = [member.nonce for member in meeting.members].index(self._member.nonce)
        return Node(index=index, nnodes=nnodes, main_address=main.address, port=main.port)

    def look(self) -> View:
        """A sign of life, and what the others have left."""
        return self._folder.look(self._member)

    def latecomers(self) -> list[int]:
        """Of those that wait, the ones with which more could train than do now: of these, whom Batch starts again."""
        train = self.meeting.members if self.meeting is not None else []
        wait = sorted(self.look().waiting.keys() - {member.index for member in train})
        again = sum(not member.is_last for member in train)
        return wait if self.gang.most(again + len(wait)) > len(train) else []

    def is_over(self) -> bool:
        """Whether somebody has ended the run since the meeting."""
        with contextlib.suppress(TrainyardError):  # whoever cannot hear it is lost, which others find
            self._ended = self.look().ended
        return self._ended is not None

    def over(self) -> End | None:
        """How the attempt ends where `is_over` has found that the run has."""
        return _over(self._ended) if self._ended is not None else None

    def followed(self, end: End) -> End:
        """How the attempt ends on a node that is not the main one: with that one's word, so that all are started again
        or none is. `end` is how its own ranks ended.
        """
        if end.cause == "lost":  # the main node is, or this one, which then reaches nobody
            return self.over() or end
        word = self._word()
        if isinstance(word, Ended):
            return end if end.code == word.code else _over(word)
        if end.code == INTERRUPTED_EXIT_CODE:
            return end
        return retried(f"{word}: {end.reason}" if end.reason else word, end.cause)

    def end(self, code: int, reason: str | None) -> None:
        """The main node's word. Raises TrainyardError where S3 does not take that the run is done."""
        if code == INTERRUPTED_EXIT_CODE:
            return  # that it leaves says so
        try:
            self._folder.end(Ended(code=code, reason=reason))
        except TrainyardError as error:
            if code == 0:
                raise
            log.warning("warning: the other nodes do not hear of it: %s", error.args[0])

    def failed(self, reason: str) -> None:
        """The word of a node which is not started again: the others need not come again either."""
        self.end(1, f"node {self.gang.index}: {reason}")

    def _word(self) -> Ended | str:
        """The main node's on the run; else what became of that node."""
        while True:
            try:
                view = self.look()
            except TrainyardError as error:
                return f"the main node cannot be heard: {error.args[0]}"
            if view.ended is not None:
                return view.ended
            if view.main_silent_seconds is None or view.meeting != self.meeting:
                return "the main node ended the attempt"
            if view.main_silent_seconds >= _SILENT_SECONDS:
                return "the main node is lost"
            time.sleep(_WORD_SECONDS)

    def _proposal(self, view: View, *, is_late: bool) -> Meeting | None:
        """Of all that may still come, or of as many as may train, once it is late."""
        is_whole = len(view.waiting) == self.gang.size - len(view.without_return)
        count = self.gang.most(len(view.waiting)) if is_whole or is_late else 0
        if not count:
            return None
        members = [view.waiting[index] for index in sorted(view.waiting)][:count]
        waited = sum((view.now - (member.since or view.now)).total_seconds() for member in members)
        number = view.meeting.number + 1 if view.meeting is not None else 1
        return Meeting(number=number, members=members, waited_seconds=waited)

    def _met(self, meeting: Meeting) -> Meeting:
        self.meeting = meeting
        self._port.close()  # as main node it listens there in a moment
        named = ", ".join(str(member.index) for member in meeting.members)
        log.info("gang: meeting %s, of the nodes %s of %s", meeting.number, named, self.gang.size)
        return meeting


def _named(indices: Iterable[int]) -> str:
    return ", ".join(f"node {index}" for index in sorted(indices))


def _over(ended: Ended) -> End:
    log.info("gang: the run has ended, with exit code %s", ended.code)
    return End(code=ended.code, reason=ended.reason and f"the run has ended: {ended.reason}", cause="done")
