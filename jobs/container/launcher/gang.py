"""A gang: children of an array job, each a job of one node on Spot, that meet through S3 and train as one of several.

AWS Batch has jobs of several nodes On-Demand only. Here each node is started, reclaimed and started again for itself.
They wait for each other (jobs.container.launcher.gang_folder) until all are there, or for so long that fewer may begin;
the first of them is the main node, and from there on all is as in Batch's own jobs of several nodes. When one is taken
away all save, leave with 75, and meet again in their next attempts.
"""

import contextlib
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType

from typing_extensions import Self

from jobs.aws import s3 as object_store
from jobs.container.batch_job import job_id
from jobs.container.instance import InstanceMetadata, own_address
from jobs.container.launcher.gang_folder import Ended, GangFolder, Meeting, Member, View
from jobs.container.launcher.outcome import End, retried
from jobs.container.launcher.request import Gang, Launch, Node
from jobs.container.rank import one_line
from jobs.container.saving import interruption as shutdown
from jobs.container.store import LOOPBACK
from jobs.core.errors import INTERRUPTED_EXIT_CODE, TrainyardError
from jobs.core.queues import Capacity

log = logging.getLogger("trainyard")

BEAT_SECONDS = 5.0
"""The time between two heartbeats of a node that waits."""

LOOK_SECONDS = 15.0
"""The time between two looks of the main node for latecomers, each a heartbeat of its own."""

_LAST_LOOK_SECONDS = 5.0

_SAY_SECONDS = 60.0
"""The time between two lines that say for whom a node waits."""

_WORD_SECONDS = 1.0
"""The time between two looks for the main node's word."""

_SILENT_SECONDS = 45.0
"""The time without a heartbeat from the main node after which its word is not waited for any more."""

_PORTS = range(20_000, 30_000)
"""Ports below those that Linux gives to outgoing connections, which come and go."""


class GangMember:
    """One node of a gang in this attempt, from before it meets the others to its end: a context manager."""

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
        """The meeting that it has come to; None: it still waits."""
        self.gang = gang
        self._ended: Ended | None = None
        self._folder = folder
        self._beat_seconds = beat_seconds
        self._port = _hold_port(address)
        self._member = Member(
            index=gang.index,
            nonce=secrets.token_hex(8),
            address=address,
            port=self._port.getsockname()[1],
            capacity=capacity,
            is_last=gang.is_last,
        )

    @classmethod
    def of(cls, launch: Launch, gang: Gang) -> Self:
        """Return this node as a member of its gang, reached by the others at an address that they share."""
        with shutdown.signals_held_back():
            import torch.distributed  # noqa: F401 - it takes long, and who has met the others is not to be waited for
        s3 = object_store.connect()
        metadata = InstanceMetadata.of(os.environ, on_instance=launch.on_instance)
        folder = GangFolder(s3, launch.run, job_id())
        return cls(gang, folder, own_address(metadata, s3.meta.endpoint_url), capacity=launch.capacity)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        """Leave. A failure of its own would be the same in each attempt, so it ends the run for all."""
        if isinstance(error, Exception):
            self.failed(one_line(error))
        self._port.close()
        self._folder.leave(self._member)

    @property
    def waited_seconds(self) -> float:
        """The time that all its nodes waited before the meeting, added up."""
        return self.meeting.waited_seconds if self.meeting is not None else 0.0

    def meet(self) -> Meeting | End:
        """Wait for the others. Returns those with whom it trains, or how the attempt ends without."""
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
        """Return what this node is among those of a meeting."""
        nnodes = len(meeting.members)
        if nnodes == 1:
            return Node(index=0, nnodes=1, main_address=LOOPBACK, port=0)
        main = meeting.members[0]
        index = [member.nonce for member in meeting.members].index(self._member.nonce)
        return Node(index=index, nnodes=nnodes, main_address=main.address, port=main.port)

    def look(self) -> View:
        """Give a heartbeat, and return what the others have left."""
        return self._folder.look(self._member)

    def latecomers(self) -> list[int]:
        """Return the nodes that wait, if more could train with them than do now.

        Of those that train now only the ones count that Batch starts again.
        """
        train = self.meeting.members if self.meeting is not None else []
        wait = sorted(self.look().waiting.keys() - {member.index for member in train})
        again = sum(not member.is_last for member in train)
        return wait if self.gang.most(again + len(wait)) > len(train) else []

    def is_over(self) -> bool:
        """Return True if somebody has ended the run since the meeting."""
        with contextlib.suppress(TrainyardError):  # whoever cannot hear it is lost, which others find
            self._ended = self.look().ended
        return self._ended is not None

    def over(self) -> End | None:
        """Return how the attempt ends where `is_over` has found that the run has."""
        return _over(self._ended) if self._ended is not None else None

    def followed(self, end: End) -> End:
        """Return how the attempt ends on a node that is not the main one, whose own ranks ended with `end`.

        It follows the main node's word, so that all are started again or none is.
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
        """Give the main node's word. Raises TrainyardError where S3 does not take that the run is done."""
        if code == INTERRUPTED_EXIT_CODE:
            return  # that it leaves says so
        try:
            self._folder.end(Ended(code=code, reason=reason))
        except TrainyardError as error:
            if code == 0:
                raise
            log.warning("warning: the other nodes do not hear of it: %s", error.args[0])

    def failed(self, reason: str) -> None:
        """Give the word of a node that is not started again: the others need not come again either."""
        self.end(1, f"node {self.gang.index}: {reason}")

    def _word(self) -> Ended | str:
        """Wait for the main node's word on the run. Returns it, or what became of that node."""
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
        """Return a meeting of all that may still come or, once it is late, of as many as may train; None: not yet."""
        is_whole = len(view.waiting) == self.gang.size - len(view.without_return)
        count = self.gang.most(len(view.waiting)) if is_whole or is_late else 0
        if not count:
            return None
        members = [view.waiting[index] for index in sorted(view.waiting)][:count]
        waited = sum((view.now - (member.since or view.now)).total_seconds() for member in members)
        return Meeting(number=view.newest_number + 1, members=members, waited_seconds=waited)

    def _met(self, meeting: Meeting) -> Meeting:
        self.meeting = meeting
        self._port.close()  # as main node it listens there in a moment
        named = ", ".join(str(member.index) for member in meeting.members)
        log.info("gang: meeting %s, of the nodes %s of %s", meeting.number, named, self.gang.size)
        return meeting


class Latecomers:
    """The main node's watch over its gang while the ranks run: a context manager.

    It gives the main node's heartbeats, and looks for nodes that come late. Without those heartbeats latecomers would
    begin something of their own, and the other nodes would no longer wait for the main node's word on the run.
    """

    def __init__(
        self, member: GangMember, ask_to_stop: Callable[[str], None], *, look_seconds: float = LOOK_SECONDS
    ) -> None:
        """`ask_to_stop` is called once, from a thread, with the reason."""
        self._member = member
        self._ask_to_stop = ask_to_stop
        self._look_seconds = look_seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="latecomers", daemon=True)

    def __enter__(self) -> "Latecomers":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(_LAST_LOOK_SECONDS)

    def _watch(self) -> None:
        is_asked = False
        while not self._closed.wait(self._look_seconds):
            reason = self._reason()
            if reason is not None and not is_asked:
                is_asked = True
                self._ask_to_stop(reason)

    def _reason(self) -> str | None:
        try:
            late = self._member.latecomers()
        except Exception as error:  # noqa: BLE001 - whatever it is, this node's heartbeat is missing
            # Those that have come late must take it for lost soon: it may not go on.
            return f"the other nodes hear nothing of this one: {next(iter(error.args), type(error).__name__)}"
        if not late:
            return None
        named = ", ".join(f"node {index}" for index in late)
        return f"{named} of {self._member.gang.size} came late, and the nodes meet again"


def _hold_port(address: str) -> socket.socket:
    """Return a socket that holds a free port of this machine's: nobody else gets it until the socket is closed."""
    numbers = list(_PORTS)
    random.shuffle(numbers)
    for number in numbers:
        held = socket.socket()
        try:
            held.bind((address, number))
        except OSError:
            held.close()
        else:
            return held
    raise OSError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free")


def _named(indices: Iterable[int]) -> str:
    return ", ".join(f"node {index}" for index in sorted(indices))


def _over(ended: Ended) -> End:
    log.info("gang: the run has ended, with exit code %s", ended.code)
    return End(code=ended.code, reason=ended.reason and f"the run has ended: {ended.reason}", cause="done")
