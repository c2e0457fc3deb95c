"""Which of the things in a script's folder of checkpoints are complete.

A checkpoint is what lies right below the folder, a file or a folder. One is complete
- where it has got its name by a rename (what is being written has another one, here or elsewhere on the disk);
- a folder, where it holds a file called `.complete`;
- a folder `checkpoint-N` of a Trainer of transformers, where its trainer_state.json, which is written last, is whole,
  and each rank's random state is there;
- a file, where no process has it open, and it has stayed as it was for two seconds of the script's life, or until its
  good end: whoever wrote it has come to the end of it.

What begins with a dot, or ends in .tmp, .part or .incomplete, is being written.
"""

import contextlib
import ctypes
import json
import os
import re
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

MARKER = ".complete"

QUIET_SECONDS = 2.0

_TRAINER_FOLDER = re.compile(r"checkpoint-(\d+)")
_TRAINER_STATE = "trainer_state.json"
_UNFINISHED = (".tmp", ".part", ".incomplete")

_IN_MOVED_TO = 0x80
_IN_NONBLOCK = 0o4000
_EVENT = struct.Struct("iIII")

Script = Literal["lives", "done", "ended"]
"""It goes on, has come to its end, or was ended: what it was writing then is not whole."""

State = tuple[tuple[str, int, int, int], ...]
"""Names, sizes, times and inodes of the files of a checkpoint."""


def trainer_step(name: str) -> int | None:
    """Return the step of a folder that a Trainer of transformers has named; None: it is called otherwise."""
    match = _TRAINER_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def state_of(path: Path) -> State:
    """Return what tells a checkpoint from the same one later. What vanishes meanwhile is left out."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    found = []
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            stat = file.stat()
            found.append((os.path.relpath(file, path.parent), stat.st_size, stat.st_mtime_ns, stat.st_ino))
    return tuple(found)


class Renames:
    """The names that something in a folder has got by a rename, since this was made: the kernel's word (inotify)."""

    def __init__(self, folder: Path) -> None:
        """Where the system has no such thing, nothing is ever seen."""
        self._file = -1
        if sys.platform == "linux":
            libc = ctypes.CDLL(None, use_errno=True)
            self._file = libc.inotify_init1(_IN_NONBLOCK | os.O_CLOEXEC)
            if self._file >= 0 and libc.inotify_add_watch(self._file, os.fsencode(folder), _IN_MOVED_TO) < 0:
                self.close()

    def news(self) -> set[str]:
        """Return the names since the last call."""
        names: set[str] = set()
        while self._file >= 0:
            try:
                events = os.read(self._file, 1 << 16)
            except BlockingIOError:
                break
            position = 0
            while position < len(events):
                _, _, _, length = _EVENT.unpack_from(events, position)
                position += _EVENT.size
                names.add(os.fsdecode(events[position : position + length].rstrip(b"\0")))
                position += length
        return names

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@dataclass
class _Seen:
    state: State
    renamed: bool
    """True where it has been as it is since it got its name."""
    since: float = field(default_factory=time.monotonic)


class CompleteCheckpoints:
    """Looks now and then at a folder of checkpoints; `find` gives those that are complete."""

    def __init__(self, folder: Path, *, ranks: int = 1, trainer_only: bool = False) -> None:
        """`ranks` are those of this node. `trainer_only`: nothing but folders of a Trainer counts."""
        self._ranks = ranks
        self._folder = folder
        self._trainer_only = trainer_only
        self._renames = Renames(folder)
        self._seen: dict[str, _Seen] = {}

    def find(self, script: Script) -> Iterator[tuple[Path, State]]:
        """Give each complete checkpoint with its state, the oldest first; `script` says how the script is by now."""
        renamed = self._renames.news()
        found: list[tuple[int, Path, State]] = []
        for path in self._candidates():
            state = state_of(path)
            seen = self._seen.get(path.name)
            if seen is None or seen.state != state or path.name in renamed:
                self._seen[path.name] = seen = _Seen(state, renamed=path.name in renamed)
            quiet = script == "lives" and time.monotonic() - seen.since >= QUIET_SECONDS
            if state and self._is_complete(path, renamed=seen.renamed, quiet=quiet or script == "done"):
                found.append((max(time_ns for _, _, time_ns, _ in state), path, state))
        for _, path, state in sorted(found):
            yield path, state

    def close(self) -> None:
        self._renames.close()

    def _candidates(self) -> list[Path]:
        with contextlib.suppress(FileNotFoundError):
            return [
                path
                for path in self._folder.iterdir()
                if not path.name.startswith(".")
                and not path.name.endswith(_UNFINISHED)
                and (trainer_step(path.name) is not None or not self._trainer_only)
            ]
        return []

    def _is_complete(self, path: Path, *, renamed: bool, quiet: bool) -> bool:
        if path.is_file():
            return renamed or (quiet and not _is_open(path))
        if renamed or (path / MARKER).exists():
            return True
        return trainer_step(path.name) is not None and _is_whole(path, ranks=self._ranks, quiet=quiet)


def _is_whole(folder: Path, *, ranks: int, quiet: bool) -> bool:
    """Return whether a Trainer has written all of a checkpoint: its state comes last, beside what other ranks write."""
    try:
        json.loads((folder / _TRAINER_STATE).read_bytes())
    except (OSError, ValueError):
        return False
    states = list(folder.glob("rng_state_*.pth"))
    # A state with a number is of several ranks; where none but the script knows how many, they are given some time.
    return not states or (len(states) >= ranks and (ranks > 1 or quiet))


def _is_open(path: Path) -> bool:
    """Return whether a process of this user has the file open."""
    try:
        wanted = path.stat()
    except FileNotFoundError:
        return False
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for link in folder.iterdir():
                with contextlib.suppress(OSError):
                    opened = link.stat()
                    if (opened.st_dev, opened.st_ino) == (wanted.st_dev, wanted.st_ino):
                        return True
    return False
