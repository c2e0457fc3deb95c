"""How all ranks come to act on an announced ending at the same boundary: the end of a step, or of a batch evaluated.

Rank 0 decides, some boundaries ahead, and says so in the store of the job: "go on up to boundary 12", in the end "up to
15, and there: stop". A rank passes no boundary before it has read what holds there, so all act at the same one, also
where an accelerator runs behind its host. Each word reaches as far as a tenth of a second: in short steps the store is
not asked at every one.
"""

import json
import time
from typing import TYPE_CHECKING, NamedTuple

from jobs.train.channel import Request, RequestFiles

if TYPE_CHECKING:
    from jobs.train.rank import Rank

_AHEAD_SECONDS = 0.1
_AHEAD_BOUNDARIES = 10
"""At most, in case those that follow take longer."""

_WORDS_KEPT = 100
"""Old words are deleted. No rank is so many behind: the gradients of a step need all of them."""


class Decision(NamedTuple):
    """What all ranks do at one boundary."""

    request: Request
    reason: str


class Agreement:
    """One rank's view of it. All ranks call the same methods in the same order."""

    def __init__(self, rank: "Rank") -> None:
        self._rank = rank
        self._files = RequestFiles(rank.scratch)
        self._taken: set[Request] = set()
        self._told: set[Request] = set()
        self._stretch = -1
        self.begin_stretch()

    def begin_stretch(self) -> None:
        """From here on boundaries are of another kind, and take another time."""
        self._stretch += 1
        self._words = 0
        self._boundary = 0
        self._cleared = 1
        self._at_cleared: Decision | None = None
        self._word_at = time.monotonic()
        self._word_boundary = 0

    def boundary(self) -> Decision | None:
        """What is to be done at this boundary; None: go on."""
        if self._rank.world_size == 1:
            return self._taking(self._asked())
        self._boundary += 1
        if self._boundary > self._cleared:
            self._read_word()
        decision = self._at_cleared if self._boundary == self._cleared else None
        if self._boundary == self._cleared and self._rank.is_first:
            self._taking(decision)
            self._say_word()
        return self._taking(decision)

    def last(self) -> Decision | None:
        """The last boundary of all. Whoever asks to stop after it is too late."""
        if not self._rank.is_first:
            self._pass_on()
        found = self._rank.once("ending/last", lambda: self._asked() if "stop" not in self._taken else None)
        return Decision(*found) if found else None

    def _say_word(self) -> None:
        now = time.monotonic()
        seconds = (now - self._word_at) / max(1, self._boundary - self._word_boundary)
        self._word_at, self._word_boundary = now, self._boundary
        decision = self._asked()
        ahead = 1 if decision else min(max(1, int(_AHEAD_SECONDS / max(seconds, 1e-6))), _AHEAD_BOUNDARIES)
        self._next = (self._cleared + ahead, decision)
        self._rank.store.set(self._key(self._words), json.dumps(self._next))
        if self._words >= _WORDS_KEPT:
            self._rank.store.delete_key(self._key(self._words - _WORDS_KEPT))

    def _read_word(self) -> None:
        if self._rank.is_first:
            self._cleared, self._at_cleared = self._next
        else:
            self._pass_on()
            cleared, decision = json.loads(self._rank.store.get(self._key(self._words)))
            self._cleared, self._at_cleared = cleared, Decision(*decision) if decision else None
        self._words += 1

    def _key(self, word: int) -> str:
        return f"ending/{self._stretch}/{word}"

    def _asked(self) -> Decision | None:
        """On rank 0: what any node's launcher asks for, and was not answered yet."""
        requests: tuple[Request, ...] = ("stop", "save")
        for request in requests:
            if request in self._taken:
                continue
            reason = self._files.reason(request)
            if reason is None and self._rank.nnodes > 1 and self._rank.store.check([f"ending/asked/{request}"]):
                reason = self._rank.store.get(f"ending/asked/{request}").decode()
            if reason is not None:
                return Decision(request, reason)
        return None

    def _pass_on(self) -> None:
        """On another node's first rank: tell rank 0 what the launcher of its node asks for."""
        if self._rank.nnodes == 1 or not self._rank.is_first_on_node:
            return
        requests: tuple[Request, ...] = ("stop", "save")
        for request in requests:
            reason = self._files.reason(request)
            if reason is not None and request not in self._told:
                self._told.add(request)
                self._rank.store.set(f"ending/asked/{request}", reason)

    def _taking(self, decision: Decision | None) -> Decision | None:
        if decision is not None:
            self._taken.add(decision.request)
        return decision
