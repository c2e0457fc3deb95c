"""Which documents were there before, by 64 bits of their content, in 8 bytes each."""

import numpy as np

_RECENT = 1 << 18
"""Kept in a set, which is ten times as large and quick to add to; then they join those that are sorted."""


class SeenDocuments:
    """Remembers at most so many documents; later ones are compared with those only.

    Two documents that differ are taken for equal with a probability of about n² / 2⁶⁵: one in 3,700 for 100 million.
    """

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._recent: set[int] = set()
        self._sorted: list[np.ndarray[tuple[int], np.dtype[np.uint64]]] = []
        self._count = 0

    @property
    def is_full(self) -> bool:
        return self._count >= self._at_most

    def is_new(self, hashed: int) -> bool:
        """Whether it was not there before; it is from now on, as long as there is room."""
        if hashed in self._recent:
            return False
        value = np.uint64(hashed)
        for known in self._sorted:
            place = int(known.searchsorted(value))
            if place < len(known) and known[place] == value:
                return False
        if not self.is_full:
            self._count += 1
            self._recent.add(hashed)
            if len(self._recent) >= _RECENT:
                self._sort()
        return True

    def _sort(self) -> None:
        """The recent ones become a sorted array; arrays of like size are merged, so that there are few of them."""
        newest = np.sort(np.fromiter(self._recent, dtype=np.uint64, count=len(self._recent)))
        self._recent = set()
        while self._sorted and len(self._sorted[-1]) <= len(newest):
            newest = np.sort(np.concatenate([self._sorted.pop(), newest]), kind="stable")
        self._sorted.append(newest)
