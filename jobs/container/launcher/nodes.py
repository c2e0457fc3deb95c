"""What the launchers of a job's nodes tell each other: that they live, how far their ranks are, and how they ended.

They talk over a store that the main node's launcher keeps, the one in which the ranks meet too. AWS Batch itself
watches only the main node: a child that is lost, or whose job has failed, it leaves to us.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jobs.container.channel import Heartbeat, process_states
from jobs.container.launcher import gang as gangs
from jobs.container.launcher.gang import GangMember
from jobs.container.launcher.outcome import End, retried
from jobs.container.launcher.request import Node
from jobs.container.launcher.utilization import NodeUse
from jobs.container.saving.interruption import Interrupted
from jobs.container.store import connect_store, serve_store

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # re-exported from C++

BEAT_SECONDS = 1.0

GANG_MEETING_SECONDS = 120.0
"""The limit in place of start_timeout_seconds where the nodes have met already, on S3: they only begin."""

_GOODBYE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Order:
    """The main node's word that it ends the attempt for all."""

    reason: str
    ranks: tuple[int, ...] = ()
    """The ranks that hang, which are asked where."""


class Nodes:
    """One launcher's view of the others. A thread beats and listens; what it heard lies in the attributes."""

    def __init__(
        self,
        node: Node,
        heartbeats: Callable[[], Mapping[int, Heartbeat]],
        *,
        use: Callable[[], NodeUse | None] = lambda: None,
    ) -> None:
        """`heartbeats` returns those of this node's own ranks, `use` how busy its accelerators are."""
        self.here: set[int] = {node.index}
        """The nodes that have come."""
        self.heard_at: dict[int, float] = {}
        """When each other node beat last, by this node's clock; a child hears the main node only."""
        self.heartbeats: dict[int, Heartbeat] = {}
        """The newest of the other nodes' ranks, as far as this node hears of them."""
        self.states: dict[int, str] = {}
        """The states of those ranks' processes, where there is something to say."""
        self.uses: dict[int, NodeUse] = {}
        """How busy the accelerators of the other nodes are, of those that know; known to the main node."""
        self.ends: dict[int, End] = {}
        """How the attempt ended on the other nodes; known to the main node."""
        self.well: set[int] = set()
        """The other nodes whose health was checked and is well; known to the main node."""
        self.may_start = False
        """True once the main node has said that all nodes are well; known to a child."""
        self.order: Order | None = None
        """The main node's word; known to a child."""
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

    def meet(self, timeout_seconds: float) -> list[int]:
        """Wait for the others, a child for the main node only. Returns those that did not come in that time."""
        expected = set(range(self._node.nnodes)) if self._node.is_main else {0, self._node.index}
        deadline = time.monotonic() + timeout_seconds
        while expected - self.here and time.monotonic() < deadline:
            if self._failure is not None:
                raise self._failure
            time.sleep(0.05)
        return sorted(expected - self.here)

    def tell(self, end: End) -> None:
        """Tell how the attempt ended on this node. A child's word is a report; the main node's is an order to end."""
        if self._node.is_main:
            self.order_end(Order(reason=end.reason or ""))
        else:
            self._send(f"end/{self._node.index}", asdict(end))

    def tell_well(self) -> None:
        """Tell that this node is well; the main node tells that all are, and the children start their ranks."""
        self._send("start" if self._node.is_main else f"well/{self._node.index}", {})

    def order_end(self, order: Order) -> None:
        """Give the main node's word to all children."""
        self._send("order", asdict(order))

    def __enter__(self) -> "Nodes":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave once what is to be told has been told, if anybody still takes it."""
        self._closed.set()
        self._wake.set()
        self._thread.join(_GOODBYE_SECONDS)

    def _send(self, key: str, content: Mapping[str, Any]) -> None:
        self._outbox[key] = json.dumps(content)  # the last word of a kind counts
        self._wake.set()

    def _exchange(self) -> None:
        store = None
        while store is None and not self._closed.wait(0.05):
            try:
                store = self._connect()
            except Exception as error:  # noqa: BLE001, PERF203 - a child tries again: the main node is not there yet
                if self._node.is_main:
                    self._failure = error
                    return
        # Once it is broken a store stays so; then there are no beats any more, which is what the launcher acts on.
        with contextlib.suppress(Exception):
            while store is not None:
                last = self._closed.is_set()
                for key in list(self._outbox):
                    store.set(key, self._outbox.pop(key))
                if last:
                    return
                self._beat(store)
                self._listen(store)
                self._wake.wait(BEAT_SECONDS)
                self._wake.clear()

    def _connect(self) -> "Store":
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # re-exported from C++

        # Torch's own rendezvous, which comes later, uses the same server.
        reach = serve_store if self._node.is_main else connect_store
        return PrefixStore("nodes", reach(self._node.main_address, self._node.port))

    def _beat(self, store: "Store") -> None:
        self._number += 1
        heartbeats, use = self._own_heartbeats(), self._own_use()
        content = {
            "number": self._number,
            "heartbeats": [asdict(heartbeat) for heartbeat in heartbeats.values()],
            "states": list(process_states(heartbeats).items()),
            "use": asdict(use) if use else None,
        }
        store.set(f"beat/{self._node.index}", json.dumps(content))

    def _listen(self, store: "Store") -> None:
        others = [index for index in range(self._node.nnodes) if index] if self._node.is_main else [0]
        for index in others:
            if store.check([f"beat/{index}"]):
                self._hear(index, store.get(f"beat/{index}"))
            if index and index not in self.ends and store.check([f"end/{index}"]):
                content = json.loads(store.get(f"end/{index}"))
                self.ends[index] = End(**{**content, "lines": tuple(content["lines"])})
            if index and index not in self.well and store.check([f"well/{index}"]):
                self.well.add(index)
        if not self._node.is_main:
            self.may_start = self.may_start or store.check(["start"])
        if not self._node.is_main and self.order is None and store.check(["order"]):
            content = json.loads(store.get("order"))
            self.order = Order(reason=content["reason"], ranks=tuple(content["ranks"]))

    def _hear(self, index: int, beat: bytes) -> None:
        self.here.add(index)
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


def wait_for_all(nodes: Nodes, gang: GangMember | None, *, start_timeout_seconds: float) -> End | None:
    """Wait until all nodes have come. Returns how the attempt ends where they do not; the others are told."""
    patience_seconds = start_timeout_seconds if gang is None else GANG_MEETING_SECONDS
    try:
        absent = _absent(nodes, gang, patience_seconds)
    except Interrupted as interruption:
        nodes.tell(retried(str(interruption), "ended"))
        raise
    if not absent:
        return None
    missing = ", ".join(f"node {index}" for index in absent)
    over = gang.over() if gang is not None else None
    end = over or retried(f"{missing} did not come within {patience_seconds:g} s", "lost")
    nodes.tell(end)
    return end


def _absent(nodes: Nodes, gang: GangMember | None, patience_seconds: float) -> list[int]:
    """Return the nodes that have not come in time. A gang's main node may end the run before it waits for them."""
    if gang is None:
        return nodes.meet(patience_seconds)
    deadline = time.monotonic() + patience_seconds
    while absent := nodes.meet(gangs.BEAT_SECONDS):
        if time.monotonic() >= deadline or gang.is_over():
            break
    return absent
