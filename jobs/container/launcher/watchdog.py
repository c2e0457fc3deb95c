"""Watch for ranks that hang, cards that are idle, and nodes that are lost or have failed.

The watchdog ends the attempt on all nodes and names the cause. The main node decides, because AWS Batch uses its exit
code for the whole job. A child ends only on the main node's order, or when the main node is lost.
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
from jobs.container.launcher.utilization import Cpus

log = logging.getLogger("trainyard")

START_SECONDS = 900.0
"""Minimum limit for phases that are known to be slow: the start, a save, the compilation of graphs."""

_POLL_SECONDS = 1.0

_TRACE_SECONDS = 1.0
"""Time for ranks to print their stacks."""

_KILL_AFTER_SECONDS = 4.0
"""Time between the ranks' SIGTERM and their SIGKILL. A rank that hangs may ignore SIGTERM, and torch waits for 30 s."""

_REPORT_SECONDS = 40.0
"""Time for the other nodes to end their ranks and report it. Torch gives a rank that ignores SIGTERM 30 s."""

_LEAVE_SECONDS = 10.0
"""The same time if the cause is already known, so that the other nodes only have to end their ranks."""

_SILENT_SECONDS = 10.0
"""Time without a heartbeat after which a node counts as lost, once ranks have failed or hang."""

CPU_ONLY_SECONDS = 180.0
"""Time from a script's start without work for a card to the warning about it."""

_NAMED = 8
"""Maximum number of ranks that a message names."""


@dataclass(frozen=True)
class Silence:
    """The limit after which a script without heartbeats hangs: it has printed nothing and written no file."""

    seconds: float
    """The limit. 0 disables it."""
    last_activity: Callable[[], float]
    """Returns when the script last printed or wrote something, by time.monotonic."""


@dataclass(frozen=True)
class Idleness:
    """The limit after which a run is idle: no card of any node has done anything."""

    seconds: float
    """The limit. 0 disables it."""
    idle_seconds: Callable[[], float]
    """Returns how long all cards of all nodes have been idle."""
    warn_of_cpu: bool = False
    """Whether to warn if no card works while the processes use the CPU: a script on an accelerator."""


class Watchdog:
    """One launcher's watch over its ranks, as a context manager. `conclude` then returns how the attempt ended."""

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
        """`nodes` is None on a single node. `last_lines` returns the last lines of ranks of this node, for the log.

        `end_ranks` makes the main thread end the ranks, saved or not. `silence` is given for scripts only.
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
        self._cpus: Cpus | None = None
        """The CPU time since this node's ranks have started, until the warning about it."""
        self._began_at: float | None = None
        self._verdict: End | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # no signal is sent afterwards
            self._closed.set()

    def conclude(self, end: End) -> End:
        """Return how the attempt ended if this node's ranks ended with `end`, and notify the other nodes."""
        if self._verdict is not None and end.cause == "ended":
            end = self._verdict
        if self._nodes is None:
            return end
        if not self._node.is_main:
            self._nodes.send_end(end)
        elif end.cause != "done":
            end = self._over_all_nodes(self._nodes, end)
        return end

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            try:
                verdict, order = self._judge()
                if verdict is not None:
                    self._end(verdict, order)
                    return
            except Exception as error:  # noqa: BLE001, PERF203 - undetected hangs cost money until the time limit
                log.warning("warning: the check for hanging ranks failed: %s: %s", type(error).__name__, error)

    def _end(self, verdict: End, order: Order) -> None:
        self._verdict = replace(verdict, lines=(*verdict.lines, *self._last_lines(order.ranks)))
        if self._nodes is not None and self._node.is_main:
            self._nodes.order_end(order)
        self._request_stacks(order.ranks)
        with self._lock:
            if self._closed.is_set():
                return
            self._end_ranks()
        if not self._closed.wait(_KILL_AFTER_SECONDS):
            for heartbeat in read_heartbeats(self._scratch).values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(heartbeat.pid, signal.SIGKILL)

    def _judge(self) -> tuple[End | None, Order]:
        """Return how the attempt must end now, and the order for the other nodes. None if it may continue."""
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
        self._warn_of_cpu(now, has_ranks=bool(heartbeats))
        hang = self._hangs.look(now, heartbeats, states)
        if hang is None and (idle := self._idle()):
            return End(code=1, reason=idle, cause="idle"), Order(reason=idle, ranks=tuple(sorted(heartbeats)))
        if hang is None:
            return None, Order(reason="")
        # If steps take longer than a node's heartbeat interval, a lost node looks like ranks that hang.
        if self._nodes is not None and (silent := self._silent(self._nodes, now, _SILENT_SECONDS)):
            return retried(silent, "lost"), Order(reason=silent)
        return retried(hang.reason, "hung"), Order(reason=hang.reason, ranks=hang.ranks)

    def _warn_of_cpu(self, now: float, *, has_ranks: bool) -> None:
        """Warn once if a script has used only the CPU for minutes: most often it was written for another accelerator.

        The limit on idle cards would end it only after half an hour.
        """
        if self._idleness is None or not self._idleness.warn_of_cpu or not has_ranks:
            return
        if self._began_at is None:
            self._began_at, self._cpus = now, Cpus()
        if self._cpus is None or now - self._began_at < CPU_ONLY_SECONDS:
            return
        if self._idleness.idle_seconds() >= now - self._began_at and self._cpus.sample().is_busy:
            log.warning(
                "warning: no card has worked in the %.0f minutes since the script started, but the CPU is busy. Unless "
                "the script still prepares data, it trains on the CPU, and you pay for the cards. Next: trainyard "
                "cancel RUN, and see 'From a CUDA script to Gaudi' in jobs/docs/scripts.md",
                (now - self._began_at) / 60,
            )
        self._cpus = None

    def _idle(self) -> str:
        """Return the reason to end the run if its cards have been idle for too long, else an empty string."""
        if self._idleness is None or not self._idleness.seconds:
            return ""
        idle_seconds = self._idleness.idle_seconds()
        if idle_seconds < self._idleness.seconds:
            return ""
        return (
            f"all cards were idle for {idle_seconds / 60:.3g} minutes, the limit of stop_if_idle_minutes; the log has "
            "the stack of each rank. Next: raise stop_if_idle_minutes, or set it to 0 for no limit, and resume the run"
        )

    def _silent(self, nodes: Nodes, now: float, seconds: float) -> str:
        """Return a reason that names the nodes without a heartbeat or a report of their end, or an empty string."""
        lost = [
            f"node {index}"
            for index, heard_at in sorted(nodes.heard_at.items())
            if index not in nodes.ends and seconds and now - heard_at >= seconds
        ]
        return f"{', '.join(lost)} lost: no heartbeat for {seconds:.0f} s" if lost else ""

    def _over_all_nodes(self, nodes: Nodes, own: End) -> End:
        """Return the end of the node that made the others end. When one rank fails, its peers fail, too."""
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
        return retried(f"the connection between nodes broke: {own.reason}", "peers")

    def _request_stacks(self, ranks: Iterable[int]) -> None:
        """Make the given ranks that are on this node print their stacks, if they can."""
        asked = [heartbeat for rank, heartbeat in sorted(read_heartbeats(self._scratch).items()) if rank in ranks]
        for heartbeat in asked:
            with contextlib.suppress(OSError):
                if _catches(heartbeat.pid, signal.SIGUSR1):  # the signal kills a process without a handler
                    os.kill(heartbeat.pid, signal.SIGUSR1)
        if asked:
            time.sleep(_TRACE_SECONDS)


def _catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for the signal (proc(5): SigCgt). Raises OSError if it has ended."""
    [mask] = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line]
    return bool(int(mask, 16) >> (number - 1) & 1)


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A hang that ends the attempt."""

    reason: str
    ranks: tuple[int, ...]
    """The ranks that hang."""


class HangWatch:
    """Decides from heartbeats and a clock alone whether the ranks of a job hang, and which ranks to name.

    During training all ranks wait for the slowest one in every step, so a rank that hangs stops the heartbeats of all.
    They hang if none has sent a heartbeat within the limit. The watch then names the ranks that are behind the others
    or, if none is behind, those whose processes are stopped or blocked in the kernel. Before and after training, and in
    jobs that do not train, a rank may take as long as it needs, and hangs only if its process is stopped. A script
    hangs only if it is silent as well. For a script without heartbeats, silence has a separate limit.
    """

    def __init__(self, *, world_size: int, hang_timeout_seconds: float, silence: Silence | None = None) -> None:
        """`hang_timeout_seconds` of 0 disables the watch."""
        self._world_size = world_size
        self._timeout_seconds = hang_timeout_seconds or math.inf
        self._silence = silence
        self._heartbeats: dict[int, Heartbeat] = {}
        self._newest = -math.inf
        self._stopped_at: dict[int, float] = {}

    def look(self, now: float, heartbeats: Mapping[int, Heartbeat], states: Mapping[int, str]) -> Hang | None:
        """Return the hang, or None if there is none or no rank has sent a heartbeat yet.

        `states` are the states of the ranks' processes (jobs.container.channel).
        """
        if any(self._heartbeats.get(rank) != heartbeat for rank, heartbeat in heartbeats.items()):
            self._newest = now
        self._heartbeats |= heartbeats
        return self._without_step(now, states) or self._stopped(now, states) or self._silent(now)

    def _stopped(self, now: float, states: Mapping[int, str]) -> Hang | None:
        """Return a hang if processes of ranks have been stopped for too long, in any phase."""
        stopped = [rank for rank in sorted(self._heartbeats) if states.get(rank) == STOPPED]
        self._stopped_at = {rank: self._stopped_at.get(rank, now) for rank in stopped}
        named = [rank for rank, at in self._stopped_at.items() if now - at >= self._timeout_seconds]
        if not named:
            return None
        shown = [_text(self._heartbeats[rank], STOPPED) for rank in named]
        return Hang(reason=f"{_list(shown)}: still stopped after {self._timeout_seconds:.0f} s", ranks=tuple(named))

    def _silent(self, now: float) -> Hang | None:
        """Return a hang if a script that sends no heartbeats has been silent for too long."""
        if self._silence is None or not self._silence.seconds or not self._heartbeats:
            return None
        if any(heartbeat.paced for heartbeat in self._heartbeats.values()):
            return None
        silent = now - max(self._silence.last_activity(), self._newest)
        patience = max(heartbeat.patience_seconds for heartbeat in self._heartbeats.values())
        if silent < self._silence.seconds or now - self._newest < patience:
            return None
        reason = f"the script has printed nothing and written no file for {silent:.0f} s"
        return Hang(reason=reason, ranks=tuple(sorted(self._heartbeats)))

    def _without_step(self, now: float, states: Mapping[int, str]) -> Hang | None:
        """Return a hang if ranks that are training have not finished a step for too long."""
        watched = {rank: heartbeat for rank, heartbeat in sorted(self._heartbeats.items()) if heartbeat.paced}
        if not watched or any(heartbeat.place == 0 for heartbeat in self._heartbeats.values()):
            return None  # the ranks of a node may still be preparing their data
        slow = any(heartbeat.slow for heartbeat in watched.values())
        patience = max(heartbeat.patience_seconds for heartbeat in watched.values())
        limit = max(self._timeout_seconds, START_SECONDS if slow else 0.0, patience)
        newest = self._newest if self._silence is None else max(self._newest, self._silence.last_activity())
        if now - newest < limit:
            return None
        furthest = max(heartbeat.place for heartbeat in self._heartbeats.values())
        behind = {rank: heartbeat for rank, heartbeat in watched.items() if heartbeat.place < furthest} or watched
        named = {rank: heartbeat for rank, heartbeat in behind.items() if states.get(rank)} or behind
        absent = [rank for rank in range(self._world_size) if rank not in self._heartbeats]
        shown = [f"rank {rank} never sent a heartbeat" for rank in absent]
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
