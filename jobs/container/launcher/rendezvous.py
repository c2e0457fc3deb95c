"""Let Spot nodes meet on S3: children of an array job that then train as one job of several nodes.

AWS Batch runs multi-node jobs On-Demand only. Here, each node is a separate child that Batch starts and retries. The
nodes wait for each other (jobs.container.launcher.rendezvous_folder) until all have arrived, or until fewer may start.
The first node becomes the main node; from then on everything works as in Batch's multi-node jobs. When a node is
reclaimed, all nodes save, exit with 75, and meet again in their next attempts.
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
from jobs.container.channel import LOOPBACK
from jobs.container.environment import job_id
from jobs.container.instance import InstanceMetadata, own_address
from jobs.container.launcher.outcome import End, retried
from jobs.container.launcher.rendezvous_folder import Ended, Meeting, Member, RendezvousFolder, View
from jobs.container.launcher.request import Launch, Node, NodeGroup
from jobs.container.rank import one_line
from jobs.container.saving import interruption as shutdown
from jobs.core.errors import INTERRUPTED_EXIT_CODE, TrainyardError
from jobs.core.queues import Capacity

log = logging.getLogger("trainyard")

HEARTBEAT_SECONDS = 5.0
"""Interval between two heartbeats of a waiting node."""

LATECOMER_SECONDS = 15.0
"""Interval at which the main node checks for late nodes. Each check is also its heartbeat."""

_LAST_LOOK_SECONDS = 5.0

_LOG_SECONDS = 60.0
"""Interval between two log lines that name the missing nodes."""

_DECISION_POLL_SECONDS = 1.0
"""Interval at which the other nodes check for the main node's decision."""

_SILENT_SECONDS = 45.0
"""Time without a heartbeat from the main node after which the other nodes stop waiting for its decision."""

_PORTS = range(20_000, 30_000)
"""Ports below those that Linux assigns to outgoing connections."""


class Rendezvous:
    """One node's part in the rendezvous, from before the nodes meet until the attempt ends. A context manager."""

    def __init__(
        self,
        group: NodeGroup,
        folder: RendezvousFolder,
        address: str,
        *,
        capacity: Capacity | None = None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self.meeting: Meeting | None = None
        """The meeting this node takes part in, or None while it waits."""
        self.group = group
        self._ended: Ended | None = None
        self._folder = folder
        self._heartbeat_seconds = heartbeat_seconds
        self._port = _reserve_port(address)
        self._member = Member(
            index=group.index,
            nonce=secrets.token_hex(8),
            address=address,
            port=self._port.getsockname()[1],
            capacity=capacity,
            is_last=group.is_last,
        )

    @classmethod
    def of(cls, launch: Launch, group: NodeGroup) -> Self:
        """Return the rendezvous of this node, at an address that the other nodes can reach."""
        with shutdown.signals_held_back():
            import torch.distributed  # noqa: F401 - slow, and nodes that have met should not wait for this import
        s3 = object_store.connect()
        metadata = InstanceMetadata.of(os.environ, on_instance=launch.on_instance)
        folder = RendezvousFolder(s3, launch.run, job_id())
        return cls(group, folder, own_address(metadata, s3.meta.endpoint_url), capacity=launch.capacity)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        """Leave the rendezvous. An error would recur in every attempt, so it ends the run for all nodes."""
        if isinstance(error, Exception):
            self.fail(one_line(error))
        self._port.close()
        self._folder.leave(self._member)

    @property
    def waited_seconds(self) -> float:
        """The time that the nodes waited before they met, summed over all of them."""
        return self.meeting.waited_seconds if self.meeting is not None else 0.0

    def meet(self) -> Meeting | End:
        """Wait for the other nodes. Returns the meeting, or how the attempt ends without one."""
        group = self.group
        log.info(
            "rendezvous: node %s of %s, at %s, waits up to %.0f s for the others",
            group.index,
            group.size,
            self._member.address,
            group.wait_seconds,
        )
        since = logged_at = time.monotonic()
        while True:
            view = self.look()
            self._member.since = self._member.since or view.now
            now = time.monotonic()
            if view.ended is not None:
                return _end_of_run(view.ended)
            if view.meeting is not None and view.meeting.has(self._member):
                return self._join(view.meeting)
            missing = _named(index for index in range(group.size) if index not in view.waiting)
            minimum = f", and at least {group.sizes[0]} are needed" if group.sizes[0] < group.size else ""
            if view.is_training:
                since = now
            elif not group.most(group.size - len(view.exhausted)):
                # Not 1: if Spot is the reason, the run moves to On-Demand once all its nodes have ended with 75.
                reason = f"{_named(view.exhausted)} of {group.size} used up all attempts{minimum}"
                return End(code=INTERRUPTED_EXIT_CODE, reason=f"{reason}. Next: trainyard resume", cause="lost")
            elif proposal := self._proposal(view, is_late=now - since >= group.wait_seconds):
                self._folder.propose(proposal)
                continue  # if several nodes propose at once, S3 keeps one proposal
            elif now - since >= group.wait_seconds:
                return retried(
                    f"{missing} of {group.size} did not arrive within {group.wait_seconds:.0f} s{minimum}", "lost"
                )
            if now - logged_at >= _LOG_SECONDS:
                logged_at = now
                log.info("rendezvous: waiting for %s", "the nodes that are training" if view.is_training else missing)
            time.sleep(self._heartbeat_seconds)

    def node(self, meeting: Meeting) -> Node:
        """Return this node's place among the nodes of a meeting."""
        nnodes = len(meeting.members)
        if nnodes == 1:
            return Node(index=0, nnodes=1, main_address=LOOPBACK, port=0)
        main = meeting.members[0]
        index = [member.nonce for member in meeting.members].index(self._member.nonce)
        return Node(index=index, nnodes=nnodes, main_address=main.address, port=main.port)

    def look(self) -> View:
        """Write a heartbeat, and return the state of the folder."""
        return self._folder.look(self._member)

    def latecomers(self) -> list[int]:
        """Return the waiting nodes if a new meeting would train on more nodes than now, else none.

        Of the nodes that are training, only those that Batch would restart count.
        """
        training = self.meeting.members if self.meeting is not None else []
        waiting = sorted(self.look().waiting.keys() - {member.index for member in training})
        returning = sum(not member.is_last for member in training)
        return waiting if self.group.most(returning + len(waiting)) > len(training) else []

    def run_has_ended(self) -> bool:
        """Return True if a node has ended the run since the meeting."""
        with contextlib.suppress(TrainyardError):  # if S3 does not answer, other nodes will count this one as lost
            self._ended = self.look().ended
        return self._ended is not None

    def end_of_run(self) -> End | None:
        """Return how the attempt ends if `run_has_ended` found the run over, else None."""
        return _end_of_run(self._ended) if self._ended is not None else None

    def agreed_end(self, end: End) -> End:
        """Return how the attempt ends on a node other than the main one, whose ranks ended with `end`.

        The main node decides, so that Batch retries either all nodes or none.
        """
        if end.cause == "lost":  # either the main node is lost, or this node cannot reach anyone
            return self.end_of_run() or end
        decision = self._decision()
        if isinstance(decision, Ended):
            return end if end.code == decision.code else _end_of_run(decision)
        if end.code == INTERRUPTED_EXIT_CODE:
            return end
        return retried(f"{decision}: {end.reason}" if end.reason else decision, end.cause)

    def end_run(self, code: int, reason: str | None) -> None:
        """Publish the end of the run for all nodes. Raises TrainyardError if a success cannot be published."""
        if code == INTERRUPTED_EXIT_CODE:
            return  # the other nodes see that this one leaves
        try:
            self._folder.end(Ended(code=code, reason=reason))
        except TrainyardError as error:
            if code == 0:
                raise
            log.warning("warning: the other nodes were not notified of the end: %s", error.args[0])

    def fail(self, reason: str) -> None:
        """End the run for all nodes because this node failed with an error that a retry would repeat."""
        self.end_run(1, f"node {self.group.index}: {reason}")

    def _decision(self) -> Ended | str:
        """Wait until the main node ends the run, or is gone. Returns the end, or what happened to the main node."""
        while True:
            try:
                view = self.look()
            except TrainyardError as error:
                return f"the main node cannot be reached: {error.args[0]}"
            if view.ended is not None:
                return view.ended
            if view.main_silent_seconds is None or view.meeting != self.meeting:
                return "the main node ended the attempt"
            if view.main_silent_seconds >= _SILENT_SECONDS:
                return "the main node is lost"
            time.sleep(_DECISION_POLL_SECONDS)

    def _proposal(self, view: View, *, is_late: bool) -> Meeting | None:
        """Return a meeting of all nodes that can still come or, if late, of as many as may train. None if too few."""
        is_whole = len(view.waiting) == self.group.size - len(view.exhausted)
        count = self.group.most(len(view.waiting)) if is_whole or is_late else 0
        if not count:
            return None
        members = [view.waiting[index] for index in sorted(view.waiting)][:count]
        waited = sum((view.now - (member.since or view.now)).total_seconds() for member in members)
        return Meeting(number=view.newest_number + 1, members=members, waited_seconds=waited)

    def _join(self, meeting: Meeting) -> Meeting:
        self.meeting = meeting
        self._port.close()  # the main node is about to listen on it
        named = ", ".join(str(member.index) for member in meeting.members)
        log.info("rendezvous: meeting %s of nodes %s of %s", meeting.number, named, self.group.size)
        return meeting


class LatecomerWatch:
    """Watches for late nodes while the main node's ranks run. A context manager.

    Each check is also the main node's heartbeat. Without it, late nodes would start a separate meeting, and the other
    nodes would stop waiting for the main node's decision.
    """

    def __init__(
        self, rendezvous: Rendezvous, ask_to_stop: Callable[[str], None], *, look_seconds: float = LATECOMER_SECONDS
    ) -> None:
        """`ask_to_stop` is called once, from a thread, with the reason."""
        self._rendezvous = rendezvous
        self._ask_to_stop = ask_to_stop
        self._look_seconds = look_seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="latecomers", daemon=True)

    def __enter__(self) -> Self:
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
            late = self._rendezvous.latecomers()
        except Exception as error:  # noqa: BLE001 - any error means that the heartbeat is missing
            # Late nodes would soon count this node as lost, so it must not continue.
            return f"this node's heartbeat does not reach the others: {next(iter(error.args), type(error).__name__)}"
        if not late:
            return None
        return f"{_named(late)} of {self._rendezvous.group.size} arrived late, so all nodes meet again"


def _reserve_port(address: str) -> socket.socket:
    """Return a socket bound to a free port of this machine. The port stays reserved until the socket is closed."""
    numbers = list(_PORTS)
    random.shuffle(numbers)
    for number in numbers:
        reserved = socket.socket()
        try:
            reserved.bind((address, number))
        except OSError:
            reserved.close()
        else:
            return reserved
    raise OSError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free")


def _named(indices: Iterable[int]) -> str:
    return ", ".join(f"node {index}" for index in sorted(indices))


def _end_of_run(ended: Ended) -> End:
    log.info("rendezvous: the run has ended, with exit code %s", ended.code)
    return End(code=ended.code, reason=ended.reason and f"the run has ended: {ended.reason}", cause="done")
