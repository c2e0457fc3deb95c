"""When ranks count as hung, and which of them is named: from their signs of life and a clock, nothing else.

In a training all ranks wait for the slowest in every step, so that one which hangs stops the signs of all. They hang
when none of them has given a sign for the limit; those are named that are behind the others or, where all are at the
same place, those whose process the kernel holds. Before a training and after it, and in jobs that do not train, a rank
may work or wait for others as long as it takes: there one hangs whose process is stopped.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jobs.train.channel import STOPPED, Heartbeat

START_SECONDS = 900.0
"""For what is known to be slow: the start, a save, graphs that are compiled. Or the limit, where that is longer."""

_NAMED = 8
"""Ranks that a message names one by one."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Found: why an attempt has to end."""

    reason: str
    ranks: tuple[int, ...]
    """Those that it names."""


class HangWatch:
    """Looks at the signs of a job's ranks, again and again."""

    def __init__(self, *, world_size: int, hang_timeout_seconds: float) -> None:
        """`hang_timeout_seconds`: 0: nothing counts as hung."""
        self._world_size = world_size
        self._timeout_seconds = hang_timeout_seconds or math.inf
        self._signs: dict[int, Heartbeat] = {}
        self._newest = -math.inf
        self._stopped_at: dict[int, float] = {}

    def look(self, now: float, signs: Mapping[int, Heartbeat], states: Mapping[int, str]) -> Hang | None:
        """None: all goes on, or nobody has given a sign yet. `states`: of their processes (jobs.train.channel)."""
        if any(self._signs.get(rank) != sign for rank, sign in signs.items()):
            self._newest = now
        self._signs |= signs
        return self._pace(now, states) or self._stop(now, states)

    def _stop(self, now: float, states: Mapping[int, str]) -> Hang | None:
        """Of ranks that are stopped, whatever they do."""
        stopped = [rank for rank in sorted(self._signs) if states.get(rank) == STOPPED]
        self._stopped_at = {rank: self._stopped_at.get(rank, now) for rank in stopped}
        named = [rank for rank, at in self._stopped_at.items() if now - at >= self._timeout_seconds]
        if not named:
            return None
        shown = [_text(self._signs[rank], STOPPED) for rank in named]
        return Hang(reason=f"{_list(shown)}: no sign of life for {self._timeout_seconds:.0f} s", ranks=tuple(named))

    def _pace(self, now: float, states: Mapping[int, str]) -> Hang | None:
        """Of ranks that train."""
        watched = {rank: sign for rank, sign in sorted(self._signs.items()) if sign.paced}
        if not watched or any(sign.place == 0 for sign in self._signs.values()):
            return None  # those of one node may still prepare what they train on
        slow = any(sign.slow for sign in watched.values())
        limit = max(self._timeout_seconds, START_SECONDS) if slow else self._timeout_seconds
        if now - self._newest < limit:
            return None
        furthest = max(sign.place for sign in self._signs.values())
        behind = {rank: sign for rank, sign in watched.items() if sign.place < furthest} or watched
        named = {rank: sign for rank, sign in behind.items() if states.get(rank)} or behind
        shown = [f"rank {rank} gave no sign at all" for rank in range(self._world_size) if rank not in self._signs]
        if not shown:
            shown = [_text(sign, states.get(rank, "")) for rank, sign in named.items()]
        return Hang(reason=f"{_list(shown)}: no step for {limit:.0f} s", ranks=tuple(named))


def _list(shown: list[str]) -> str:
    more = f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
    return f"{'; '.join(shown[:_NAMED])}{more}"


def _text(sign: Heartbeat, state: str) -> str:
    held = f"{state}, " if state else ""
    step = f" after step {sign.step}" if sign.place else ""
    return f"rank {sign.rank} of node {sign.node} ({held}last seen {sign.doing}{step})"
