"""Whether a script reads the checkpoints that were put back for it, by the kernel's own account (inotify).

A script that has read one may still start over. One that has read none cannot have resumed.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

_IN_ACCESS, _IN_MODIFY, _IN_CLOSE_NOWRITE, _IN_OPEN = 0x1, 0x2, 0x10, 0x20
_IN_NONBLOCK = 0o4000
_IN_ISDIR = 0x40000000
_EVENT = struct.Struct("iIII")

_LOOKED_AT = {"trainer_state.json", ".complete"}
"""Files that the platform itself reads, to see whether a checkpoint is whole."""


class Reads:
    """Watches the files of checkpoints from now on."""

    def __init__(self, checkpoints: Iterable[Path]) -> None:
        """`checkpoints`: files and folders. `is_known` is False if the system cannot watch them."""
        self.is_known = False
        self._file = -1
        self._names: dict[int, set[str] | None] = {}
        """Per watch the files that count; None: all of the folder."""
        self._opened: set[tuple[int, str]] = set()
        self._modified: set[tuple[int, str]] = set()
        self._has_read = False
        if sys.platform == "linux":
            libc = ctypes.CDLL(None, use_errno=True)
            self._file = libc.inotify_init1(_IN_NONBLOCK | os.O_CLOEXEC)
            self.is_known = self._file >= 0 and all(self._watch(libc, path) for path in checkpoints)

    def any(self) -> bool:
        """Return whether a file was read, or opened and not written to, since this was made."""
        if self._file >= 0 and not self._has_read:
            self._take_news()
            self._has_read = self._has_read or bool(self._opened - self._modified)
        return self._has_read

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _watch(self, libc: ctypes.CDLL, path: Path) -> bool:
        folders = [path, *(each for each in path.rglob("*") if each.is_dir())] if path.is_dir() else [path.parent]
        events = _IN_ACCESS | _IN_MODIFY | _IN_CLOSE_NOWRITE | _IN_OPEN
        for folder in folders:
            watch = libc.inotify_add_watch(self._file, os.fsencode(folder), events)
            if watch < 0:
                return False
            if path.is_dir():
                self._names[watch] = None
            elif (names := self._names.setdefault(watch, set())) is not None:
                names.add(path.name)
        return True

    def _take_news(self) -> None:
        while True:
            try:
                events = os.read(self._file, 1 << 16)
            except BlockingIOError:
                return
            position = 0
            while position < len(events):
                watch, mask, _, length = _EVENT.unpack_from(events, position)
                position += _EVENT.size
                name = os.fsdecode(events[position : position + length].rstrip(b"\0"))
                position += length
                names = self._names.get(watch, set())
                if mask & _IN_ISDIR or name in _LOOKED_AT or not (names is None or name in names):
                    continue
                if mask & (_IN_ACCESS | _IN_CLOSE_NOWRITE):
                    self._has_read = True
                if mask & _IN_OPEN:
                    self._opened.add((watch, name))
                if mask & _IN_MODIFY:
                    self._modified.add((watch, name))
