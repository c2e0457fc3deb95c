"""A barrier before each step, at which those that wait for too long can say for whom they wait.

It uses the launcher's store, which works where what is checked does not.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jobs.train.rank import Rank, fail_now

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # re-exported from C++

_SHOWN = 8
"""The number of ranks that a message names one by one."""


class Barrier:
    """All ranks go through the same steps; one that takes too long ends the process of each rank that waits."""

    def __init__(self, rank: Rank, *, timeout_seconds: float) -> None:
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._number = 0
        self._waiting: tuple[float, str, Sequence[int]] | None = None
        self._thread = threading.Thread(target=self._watch, name="barrier", daemon=True)
        self._thread.start()

    @contextmanager
    def step(self, name: str, peers: Sequence[int]) -> Iterator[None]:
        """Run a block that ends only when all `peers` have come to it: a collective, a look into the store."""
        self._number += 1
        self._rank.store.set(f"{_key(self._rank.rank)}/step", name)
        self._rank.store.add(_key(self._rank.rank), 1)
        self._waiting = time.monotonic(), name, peers
        try:
            yield
        finally:
            self._waiting = None

    def all_here(self) -> None:
        """Return when every rank has come."""
        peers = range(self._rank.world_size)
        with self.step("the start", peers):
            for peer in peers:
                self._rank.store.get(f"{_key(peer)}/step")

    def _watch(self) -> None:
        store = self._rank.connect_store()
        while True:
            time.sleep(min(1.0, self._timeout_seconds / 4))
            waiting = self._waiting
            if waiting is None:
                continue
            since, name, peers = waiting
            if time.monotonic() - since > self._timeout_seconds:
                fail_now(self._explain(store, name, peers))

    def _explain(self, store: "Store", name: str, peers: Sequence[int]) -> str:
        seen = {peer: _last_seen(store, peer) for peer in peers}
        absent = {peer: last for peer, (number, last) in seen.items() if number < self._number}
        waited = f"within {self._timeout_seconds:g} s"
        if not absent:
            return (
                f"{name}: all of its {len(peers)} ranks arrived, but it did not end {waited}: what connects them "
                "hangs. Next: see the driver's log of their nodes; the same job on fewer ranks tells which"
            )
        per_node = self._rank.local_world_size
        names = [
            f"rank {peer} (node {peer // per_node}, {f'last at {last}' if last else 'never seen'})"
            for peer, last in list(absent.items())[:_SHOWN]
        ]
        more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
        return (
            f"{name}: {', '.join(names)}{more} did not arrive {waited}. Next: see what that rank logged, its card and "
            "its node"
        )


def _key(rank: int) -> str:
    return f"barrier/{rank}"


def _last_seen(store: "Store", rank: int) -> tuple[int, str]:
    """Return the number and the name of the step where a rank is; 0 where it never came."""
    number = store.add(_key(rank), 0)
    return number, store.get(f"{_key(rank)}/step").decode() if number else ""
