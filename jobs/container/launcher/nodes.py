"""Exchange messages between the launchers of a job's nodes: heartbeats, their ranks' progress, and how they ended.

The launchers use a key-value store that the main node's launcher serves, and that the ranks also use for their
rendezvous. AWS Batch watches only the main node, so the launchers detect lost and failed children themselves.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jobs.container.channel import Heartbeat, connect_store, process_states, serve_store
from jobs.container.launcher.outcome import End, retried
from jobs.container.launcher.rendezvous import HEARTBEAT_SECONDS, Rendezvous
from jobs.container.launcher.request import Node
from jobs.container.launcher.utilization import NodeUse
from jobs.container.saving.interruption import Interrupted

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # re-exported from C++

BEAT_SECONDS = 1.0

RENDEZVOUS_START_SECONDS = 120.0
"""Replaces start_timeout_seconds for nodes that have already met on S3 and only need to start."""

_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Order:
    """The main node's order to end the attempt on all nodes."""

    reason: str
    ranks: tuple[int, ...] = ()
    """The ranks that hang. Their nodes log the ranks' stacks."""


class Nodes:
    """One launcher's view of the other nodes. A thread sends heartbeats and stores what it receives in attributes."""

    def __init__(
        self,
        node: Node,
        heartbeats: Callable[[], Mapping[int, Heartbeat]],
        *,
        use: Callable[[], NodeUse | None] = lambda: None,
    ) -> None:
        """`heartbeats` returns the heartbeats of this node's ranks, `use` how busy its accelerators are."""
        self.arrived: set[int] = {node.index}
        """The nodes that have sent a heartbeat, and this one."""
        self.heard_at: dict[int, float] = {}
        """The time of each other node's last heartbeat, by this node's clock. A child receives only the main node's."""
        self.heartbeats: dict[int, Heartbeat] = {}
        """The newest heartbeats of the other nodes' ranks. Set on the main node only."""
        self.states: dict[int, str] = {}
        """The process states of the same ranks, empty if normal. Set on the main node only."""
        self.uses: dict[int, NodeUse] = {}
        """How busy the accelerators of the other nodes are, for nodes that report it. Set on the main node only."""
        self.ends: dict[int, End] = {}
        """How the attempt ended on the other nodes. Set on the main node only."""
        self.healthy: set[int] = set()
        """The other nodes that passed the health check. Set on the main node only."""
        self.may_start = False
        """True once the main node has reported all nodes healthy. Set on a child only."""
        self.order: Order | None = None
        """The main node's order to end. Set on a child only."""
        self._node = node
        self._own_heartbeats = heartbeats
        self._own_use = use
        self._beats: dict[int, bytes] = {}
        self._outbox: dict[str, str] = {}
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._number = 0
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._exchange, name="nodes", daemon=True)

    def wait(self, timeout_seconds: float) -> list[int]:
        """Wait for the other nodes; a child waits for the main node only. Returns the nodes that are still missing."""
        expected = set(range(self._node.nnodes)) if self._node.is_main else {0, self._node.index}
        deadline = time.monotonic() + timeout_seconds
        while expected - self.arrived and time.monotonic() < deadline:
            if self._failure is not None:
                raise self._failure
            time.sleep(0.05)
        return sorted(expected - self.arrived)

    def send_end(self, end: End) -> None:
        """Send how the attempt ended on this node: a report from a child, an order to end from the main node."""
        if self._node.is_main:
            self.order_end(Order(reason=end.reason or ""))
        else:
            self._send(f"end/{self._node.index}", asdict(end))

    def send_healthy(self) -> None:
        """Report that this node is healthy. The main node's report means that all are and may start their ranks."""
        self._send("start" if self._node.is_main else f"well/{self._node.index}", {})

    def order_end(self, order: Order) -> None:
        """Order all children to end the attempt. For the main node only."""
        self._send("order", asdict(order))

    def __enter__(self) -> "Nodes":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until all messages are sent, for at most five seconds."""
        self._closed.set()
        self._wake.set()
        self._thread.join(_CLOSE_SECONDS)

    def _send(self, key: str, content: Mapping[str, Any]) -> None:
        self._outbox[key] = json.dumps(content)  # replaces an unsent message of the same kind
        self._wake.set()

    def _exchange(self) -> None:
        store = None
        while store is None and not self._closed.wait(0.05):
            try:
                store = self._connect()
            except Exception as error:  # noqa: BLE001, PERF203 - a child tries again until the main node listens
                if self._node.is_main:
                    self._failure = error
                    return
        # A broken store stays broken. The heartbeats then stop, and the launchers act on that.
        with contextlib.suppress(Exception):
            while store is not None:
                last = self._closed.is_set()
                for key in list(self._outbox):
                    store.set(key, self._outbox.pop(key))
                if last:
                    return
                self._send_heartbeat(store)
                self._read_store(store)
                self._wake.wait(BEAT_SECONDS)
                self._wake.clear()

    def _connect(self) -> "Store":
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # re-exported from C++

        # Torch's rendezvous uses the same server later.
        open_store = serve_store if self._node.is_main else connect_store
        return PrefixStore("nodes", open_store(self._node.main_address, self._node.port))

    def _send_heartbeat(self, store: "Store") -> None:
        self._number += 1
        heartbeats, use = self._own_heartbeats(), self._own_use()
        content = {
            "number": self._number,
            "heartbeats": [asdict(heartbeat) for heartbeat in heartbeats.values()],
            "states": list(process_states(heartbeats).items()),
            "use": asdict(use) if use else None,
        }
        store.set(f"beat/{self._node.index}", json.dumps(content))

    def _read_store(self, store: "Store") -> None:
        others = [index for index in range(self._node.nnodes) if index] if self._node.is_main else [0]
        for index in others:
            if store.check([f"beat/{index}"]):
                self._receive(index, store.get(f"beat/{index}"))
            if index and index not in self.ends and store.check([f"end/{index}"]):
                content = json.loads(store.get(f"end/{index}"))
                self.ends[index] = End(**{**content, "lines": tuple(content["lines"])})
            if index and index not in self.healthy and store.check([f"well/{index}"]):
                self.healthy.add(index)
        if not self._node.is_main:
            self.may_start = self.may_start or store.check(["start"])
        if not self._node.is_main and self.order is None and store.check(["order"]):
            content = json.loads(store.get("order"))
            self.order = Order(reason=content["reason"], ranks=tuple(content["ranks"]))

    def _receive(self, index: int, beat: bytes) -> None:
        self.arrived.add(index)
        if self._beats.get(index) == beat:
            return
        self._beats[index] = beat
        self.heard_at[index] = time.monotonic()
        if self._node.is_main:
            content = json.loads(beat)
            heartbeats = {item["rank"]: Heartbeat(**item) for item in content["heartbeats"]}
            self.heartbeats |= heartbeats
            if content["use"]:
                self.uses[index] = NodeUse(**content["use"])
            states = dict(content["states"])
            self.states |= {rank: states.get(rank, "") for rank in heartbeats}


def wait_for_all(nodes: Nodes, rendezvous: Rendezvous | None, *, start_timeout_seconds: float) -> End | None:
    """Wait until all nodes have arrived. If some do not, notify the others and return how the attempt ends."""
    patience_seconds = start_timeout_seconds if rendezvous is None else RENDEZVOUS_START_SECONDS
    try:
        absent = _missing(nodes, rendezvous, patience_seconds)
    except Interrupted as interruption:
        nodes.send_end(retried(str(interruption), "ended"))
        raise
    if not absent:
        return None
    named = ", ".join(f"node {index}" for index in absent)
    ended = rendezvous.end_of_run() if rendezvous is not None else None
    end = ended or retried(f"{named} did not arrive within {patience_seconds:g} s", "lost")
    nodes.send_end(end)
    return end


def _missing(nodes: Nodes, rendezvous: Rendezvous | None, patience_seconds: float) -> list[int]:
    """Return the nodes that have not arrived in time, or before another node ended the run."""
    if rendezvous is None:
        return nodes.wait(patience_seconds)
    deadline = time.monotonic() + patience_seconds
    while absent := nodes.wait(HEARTBEAT_SECONDS):
        if time.monotonic() >= deadline or rendezvous.run_has_ended():
            break
    return absent
