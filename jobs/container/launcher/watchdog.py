"""The launcher's watch over what nobody else would notice: ranks that hang, nodes that are lost or whose ranks failed.

It ends the attempt for all nodes, saying who was the cause. The main node judges, since AWS Batch takes its exit code
for the job's; a child only ends when it is told to, or when the main node itself is gone.
"""

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jobs.container.channel import STOPPED, Heartbeat, process_states, read_heartbeats
from jobs.container.launcher.nodes import Nodes, Order
from jobs.container.launcher.outcome import End, of_node, retried
from jobs.container.launcher.request import Node

log = logging.getLogger("trainyard")

START_SECONDS = 900.0
"""The limit for what is known to be slow (the start, a save, graphs that are compiled), unless the limit that was asked
for is longer."""

_LOOK_SECONDS = 1.0

_TRACE_SECONDS = 1.0
"""The time that ranks have to print where they are."""

_KILL_AFTER_SECONDS = 4.0
"""The time between the ranks' SIGTERM and their SIGKILL: a rank that hangs may not take the first, and torch waits for
30 s."""

_REPORT_SECONDS = 40.0
"""The time that the other nodes have to end their ranks and say how it went; torch gives a rank that ignores SIGTERM
30 s."""

_LEAVE_SECONDS = 10.0
"""The same where the cause is known: they only need to hear that it is over, and to kill a rank that hangs."""

_SILENT_SECONDS = 10.0
"""The time after which a node that says nothing is taken for lost, once ranks have failed or hang."""

_NAMED = 8
"""The number of ranks that a message names one by one."""


@dataclass(frozen=True)
class Silence:
    """How a script that gives no heartbeats is seen to hang: it prints nothing and writes nothing for too long."""

    seconds: float
    """0: it may be silent as long as it likes."""
    last_sign: Callable[[], float]
    """Returns when it was last seen to do either, on the clock of time.monotonic."""


@dataclass(frozen=True)
class Idleness:
    """How cards are seen to do nothing: of a run that nobody needs any more, or that waits for what never comes."""

    seconds: float
    """0: they may do nothing as long as they like."""
    idle_seconds: Callable[[], float]
    """Returns for how long no card of any node has done anything."""


class Watchdog:
    """One launcher's watch while its ranks run: a context manager. `concluded` then says how the attempt ended."""

    def __init__(
        self,
        scratch: Path,
        *,
        node: Node,
        nodes: Nodes | None,
        nproc_per_node: int,
        hang_timeout_seconds: float,
        last_lines: Callable[[Iterable[int]], tuple[str, ...]],
        end_ranks: Callable[[], None],
        silence: Silence | None = None,
        idleness: Idleness | None = None,
    ) -> None:
        """`nodes` is None where there is one only. `last_lines` returns those of ranks of this node, for the log.

        `end_ranks` makes the main thread end the ranks, saved or not. `silence` is that of a script.
        """
        self._scratch = scratch
        self._node = node
        self._nodes = nodes
        self._last_lines = last_lines
        self._timeout_seconds = hang_timeout_seconds
        self._hangs = HangWatch(
            world_size=node.nnodes * nproc_per_node, hang_timeout_seconds=hang_timeout_seconds, silence=silence
        )
        self._end_ranks = end_ranks
        self._idleness = idleness
        self._verdict: End | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # no signal comes later
            self._closed.set()

    def concluded(self, end: End) -> End:
        """Return how the attempt ended, where this node's ranks ended with `end`, and tell the other nodes."""
        if self._verdict is not None and end.cause == "ended":
            end = self._verdict
        if self._nodes is None:
            return end
        if not self._node.is_main:
            self._nodes.tell(end)
        elif end.cause != "done":
            end = self._over_all_nodes(self._nodes, end)
        return end

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            try:
                verdict, order = self._judge()
                if verdict is not None:
                    self._end(verdict, order)
                    return
            except Exception as error:  # noqa: BLE001, PERF203 - a hang that nobody sees is paid for until the time limit
                log.warning("warning: whether the ranks hang could not be seen: %s: %s", type(error).__name__, error)

    def _end(self, verdict: End, order: Order) -> None:
        self._verdict = replace(verdict, lines=(*verdict.lines, *self._last_lines(order.ranks)))
        if self._nodes is not None and self._node.is_main:
            self._nodes.order_end(order)
        self._ask_where(order.ranks)
        with self._lock:
            if self._closed.is_set():
                return
            self._end_ranks()
        if not self._closed.wait(_KILL_AFTER_SECONDS):
            for heartbeat in read_heartbeats(self._scratch).values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(heartbeat.pid, signal.SIGKILL)

    def _judge(self) -> tuple[End | None, Order]:
        """Return how the attempt is to end now, and what the other nodes are told; None: it goes on."""
        now = time.monotonic()
        heartbeats = read_heartbeats(self._scratch)
        states = process_states(heartbeats)
        if self._nodes is not None:
            order = self._nodes.order
            if order is not None:
                return retried(f"the main node ended the attempt: {order.reason}", "ended"), order
            for index, end in list(self._nodes.ends.items()):
                if end.cause != "done":
                    found = of_node(index, end)
                    return found, Order(reason=found.reason or "")
            silent = self._silent(self._nodes, now, self._timeout_seconds)
            if silent:
                return retried(silent, "lost"), Order(reason=silent)
            if not self._node.is_main:
                return None, Order(reason="")
            heartbeats, states = heartbeats | self._nodes.heartbeats, states | self._nodes.states
        hang = self._hangs.look(now, heartbeats, states)
        if hang is None and (idle := self._idle()):
            return End(code=1, reason=idle, cause="idle"), Order(reason=idle, ranks=tuple(sorted(heartbeats)))
        if hang is None:
            return None, Order(reason="")
        # Where steps take longer than a node's beat, the ranks of a node that is gone gave theirs before its last one.
        if self._nodes is not None and (silent := self._silent(self._nodes, now, _SILENT_SECONDS)):
            return retried(silent, "lost"), Order(reason=silent)
        return retried(hang.reason, "hung"), Order(reason=hang.reason, ranks=hang.ranks)

    def _idle(self) -> str:
        """Say that the cards have done nothing for too long; empty: they have not."""
        if self._idleness is None or not self._idleness.seconds:
            return ""
        idle_seconds = self._idleness.idle_seconds()
        if idle_seconds < self._idleness.seconds:
            return ""
        return (
            f"no card did anything for {idle_seconds / 60:.3g} minutes, which stop_if_idle_minutes allows no longer; "
            "where each rank was stands in the log. Next: give it more minutes, or 0 for no limit, and resume the run"
        )

    def _silent(self, nodes: Nodes, now: float, seconds: float) -> str:
        """Name the nodes that have come, and since then neither beat nor said how they ended; empty: there is none."""
        lost = [
            f"node {index}"
            for index, heard_at in sorted(nodes.heard_at.items())
            if index not in nodes.ends and seconds and now - heard_at >= seconds
        ]
        return f"{', '.join(lost)} lost: no sign of life for {seconds:.0f} s" if lost else ""

    def _over_all_nodes(self, nodes: Nodes, own: End) -> End:
        """Return the cause among the ends of all nodes: where one rank fails, others do, on its node and elsewhere."""
        nodes.order_end(Order(reason=own.reason or ""))
        is_known = own.cause in ("killed", "hung", "lost", "ended", "idle")
        deadline = time.monotonic() + (_LEAVE_SECONDS if is_known else _REPORT_SECONDS)
        silent = ""
        while time.monotonic() < deadline and len(nodes.ends) < self._node.nnodes - 1:
            silent = silent or self._silent(nodes, time.monotonic(), _SILENT_SECONDS)
            if silent:
                break
            time.sleep(0.1)
        named = [of_node(index, end) for index, end in sorted(nodes.ends.items())]
        if own.cause in ("hung", "idle"):
            return replace(own, lines=(*own.lines, *(line for end in named for line in end.lines)))
        if is_known:
            return own
        if killed := [end for end in named if end.cause == "killed"]:
            return killed[0]
        if silent:
            return retried(silent if own.cause == "peers" else f"{silent}; {own.reason}", "lost")
        if at_fault := [end for end in [own, *named] if end.cause == "own"]:
            return at_fault[0]
        return retried(f"what connects the nodes broke: {own.reason}", "peers")

    def _ask_where(self, ranks: Iterable[int]) -> None:
        """Have the named ranks that are on this node print where they are, if they can."""
        asked = [heartbeat for rank, heartbeat in sorted(read_heartbeats(self._scratch).items()) if rank in ranks]
        for heartbeat in asked:
            with contextlib.suppress(OSError):
                if _catches(heartbeat.pid, signal.SIGUSR1):  # jobs.container.rank; what does not would die of it
                    os.kill(heartbeat.pid, signal.SIGUSR1)
        if asked:
            time.sleep(_TRACE_SECONDS)


def _catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler of the signal (proc(5): SigCgt). Raises OSError where it has ended."""
    [mask] = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line]
    return bool(int(mask, 16) >> (number - 1) & 1)


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A hang that was found, for which the attempt has to end."""

    reason: str
    ranks: tuple[int, ...]
    """The ranks that it names."""


class HangWatch:
    """Judges by the heartbeats of a job's ranks and a clock, nothing else, whether they hang and which is named.

    In a training all ranks wait for the slowest in every step, so that one which hangs stops the heartbeats of all.
    They hang when none of them has given a heartbeat for the limit; those are named that are behind the others or,
    where all are at the same place, those whose process the kernel holds. Before a training and after it, and in jobs
    that do not train, a rank may work or wait for others as long as it takes: there one hangs whose process is stopped.
    A script hangs only where it is silent as well, and without heartbeats where it is silent for its own limit.
    """

    def __init__(self, *, world_size: int, hang_timeout_seconds: float, silence: Silence | None = None) -> None:
        """Where `hang_timeout_seconds` is 0, nothing counts as hung."""
        self._world_size = world_size
        self._timeout_seconds = hang_timeout_seconds or math.inf
        self._silence = silence
        self._heartbeats: dict[int, Heartbeat] = {}
        self._newest = -math.inf
        self._stopped_at: dict[int, float] = {}

    def look(self, now: float, heartbeats: Mapping[int, Heartbeat], states: Mapping[int, str]) -> Hang | None:
        """Return the hang that is found; None where all goes on, or nobody has given a heartbeat yet.

        `states` are those of the ranks' processes (jobs.container.channel).
        """
        if any(self._heartbeats.get(rank) != heartbeat for rank, heartbeat in heartbeats.items()):
            self._newest = now
        self._heartbeats |= heartbeats
        return self._pace(now, states) or self._stop(now, states) or self._be_silent(now)

    def _stop(self, now: float, states: Mapping[int, str]) -> Hang | None:
        """Find ranks whose processes are stopped, whatever they do."""
        stopped = [rank for rank in sorted(self._heartbeats) if states.get(rank) == STOPPED]
        self._stopped_at = {rank: self._stopped_at.get(rank, now) for rank in stopped}
        named = [rank for rank, at in self._stopped_at.items() if now - at >= self._timeout_seconds]
        if not named:
            return None
        shown = [_text(self._heartbeats[rank], STOPPED) for rank in named]
        return Hang(reason=f"{_list(shown)}: no sign of life for {self._timeout_seconds:.0f} s", ranks=tuple(named))

    def _be_silent(self, now: float) -> Hang | None:
        """Find a script that gives no heartbeats, and no other sign either."""
        if self._silence is None or not self._silence.seconds or not self._heartbeats:
            return None
        if any(heartbeat.paced for heartbeat in self._heartbeats.values()):
            return None
        silent = now - max(self._silence.last_sign(), self._newest)
        patience = max(heartbeat.patience_seconds for heartbeat in self._heartbeats.values())
        if silent < self._silence.seconds or now - self._newest < patience:
            return None
        reason = f"the script has printed nothing and written no file for {silent:.0f} s"
        return Hang(reason=reason, ranks=tuple(sorted(self._heartbeats)))

    def _pace(self, now: float, states: Mapping[int, str]) -> Hang | None:
        """Find ranks that train and have finished nothing for too long."""
        watched = {rank: heartbeat for rank, heartbeat in sorted(self._heartbeats.items()) if heartbeat.paced}
        if not watched or any(heartbeat.place == 0 for heartbeat in self._heartbeats.values()):
            return None  # those of one node may still prepare what they train on
        slow = any(heartbeat.slow for heartbeat in watched.values())
        patience = max(heartbeat.patience_seconds for heartbeat in watched.values())
        limit = max(self._timeout_seconds, START_SECONDS if slow else 0.0, patience)
        newest = self._newest if self._silence is None else max(self._newest, self._silence.last_sign())
        if now - newest < limit:
            return None
        furthest = max(heartbeat.place for heartbeat in self._heartbeats.values())
        behind = {rank: heartbeat for rank, heartbeat in watched.items() if heartbeat.place < furthest} or watched
        named = {rank: heartbeat for rank, heartbeat in behind.items() if states.get(rank)} or behind
        absent = [rank for rank in range(self._world_size) if rank not in self._heartbeats]
        shown = [f"rank {rank} gave no sign at all" for rank in absent]
        if not shown:
            shown = [_text(heartbeat, states.get(rank, "")) for rank, heartbeat in named.items()]
        return Hang(reason=f"{_list(shown)}: no step for {limit:.0f} s", ranks=tuple(named))


def _list(shown: list[str]) -> str:
    more = f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
    return f"{'; '.join(shown[:_NAMED])}{more}"


def _text(heartbeat: Heartbeat, state: str) -> str:
    held = f"{state}, " if state else ""
    step = f" after step {heartbeat.step}" if heartbeat.place else ""
    return f"rank {heartbeat.rank} of node {heartbeat.node} ({held}last seen {heartbeat.doing}{step})"
