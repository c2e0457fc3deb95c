"""The launcher's watch over what nobody else would notice: ranks that hang, nodes that are lost or whose ranks failed.

It ends the attempt for all nodes, saying who was the cause. The main node judges, since AWS Batch takes its exit code
for the job's; a child only ends when it is told to, or when the main node itself is gone.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from jobs.train.channel import process_states, read_heartbeats
from jobs.train.launcher.hang import HangWatch
from jobs.train.launcher.nodes import Nodes, Order
from jobs.train.launcher.outcome import End, of_node, retried
from jobs.train.launcher.request import Node

log = logging.getLogger("trainyard")

_LOOK_SECONDS = 1.0

_TRACE_SECONDS = 1.0
"""That ranks have to print where they are."""

_KILL_AFTER_SECONDS = 4.0
"""Between the ranks' SIGTERM and their SIGKILL: a rank that hangs may not take the first, and torch waits for 30 s."""

_REPORT_SECONDS = 40.0
"""That the other nodes have to end their ranks and say how it went; torch gives a rank that ignores SIGTERM 30."""

_LEAVE_SECONDS = 10.0
"""The same where the cause is known: they only need to hear that it is over, and to kill a rank that hangs."""

_SILENT_SECONDS = 10.0
"""After which a node that says nothing is taken for lost, once ranks have failed or hang."""


class Watchdog:
    """Of one launcher, while its ranks run: a context manager. `concluded` then says how the attempt ended."""

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
    ) -> None:
        """`nodes`: None where there is one only. `last_lines` of ranks, if they are this node's, for the log.

        `end_ranks` makes the main thread end them, saved or not.
        """
        self._scratch = scratch
        self._node = node
        self._nodes = nodes
        self._last_lines = last_lines
        self._timeout_seconds = hang_timeout_seconds
        self._hangs = HangWatch(world_size=node.nnodes * nproc_per_node, hang_timeout_seconds=hang_timeout_seconds)
        self._end_ranks = end_ranks
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
        """How the attempt ended: `end` is how this node's ranks did. Tells the other nodes."""
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
            verdict, order = self._judge()
            if verdict is not None:
                self._end(verdict, order)
                return

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
            for sign in read_heartbeats(self._scratch).values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(sign.pid, signal.SIGKILL)

    def _judge(self) -> tuple[End | None, Order]:
        """How the attempt is to end now, and what the other nodes are told; None: it goes on."""
        now = time.monotonic()
        signs = read_heartbeats(self._scratch)
        states = process_states(signs)
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
            signs, states = signs | self._nodes.signs, states | self._nodes.states
        hang = self._hangs.look(now, signs, states)
        if hang is None:
            return None, Order(reason="")
        # Where steps are longer than beats, the ranks of a node that is gone gave their last sign before its last beat.
        if self._nodes is not None and (silent := self._silent(self._nodes, now, _SILENT_SECONDS)):
            return retried(silent, "lost"), Order(reason=silent)
        return retried(hang.reason, "hung"), Order(reason=hang.reason, ranks=hang.ranks)

    def _silent(self, nodes: Nodes, now: float, seconds: float) -> str:
        """Of nodes that have come, and neither beat nor said how they ended; empty: there is none."""
        lost = [
            f"node {index}"
            for index, heard_at in sorted(nodes.heard_at.items())
            if index not in nodes.ends and seconds and now - heard_at >= seconds
        ]
        return f"{', '.join(lost)} lost: no sign of life for {seconds:.0f} s" if lost else ""

    def _over_all_nodes(self, nodes: Nodes, own: End) -> End:
        """The cause among the ends of all nodes: where one rank fails, others do, on its node and elsewhere."""
        nodes.order_end(Order(reason=own.reason or ""))
        is_known = own.cause in ("killed", "hung", "lost", "ended")
        deadline = time.monotonic() + (_LEAVE_SECONDS if is_known else _REPORT_SECONDS)
        silent = ""
        while time.monotonic() < deadline and len(nodes.ends) < self._node.nnodes - 1:
            silent = silent or self._silent(nodes, time.monotonic(), _SILENT_SECONDS)
            if silent:
                break
            time.sleep(0.1)
        named = [of_node(index, end) for index, end in sorted(nodes.ends.items())]
        if own.cause == "hung":
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
        """Those of this node that are named print where they are, if they can."""
        named = [sign for rank, sign in sorted(read_heartbeats(self._scratch).items()) if rank in ranks]
        for sign in named:
            with contextlib.suppress(ProcessLookupError):
                os.kill(sign.pid, signal.SIGUSR1)  # jobs.train.rank
        if named:
            time.sleep(_TRACE_SECONDS)
