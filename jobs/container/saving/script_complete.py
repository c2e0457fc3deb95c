"""Which of the files and folders in a script's folder of checkpoints are complete.

A checkpoint is a file or a folder right below that folder. It is complete

- if it got its name by a rename;
- a folder, if it holds a file called `.complete`;
- a folder `checkpoint-N` of a Trainer of transformers, if its trainer_state.json, which is written last, is whole, and
  the random state of each rank is there;
- one that is written in place, if it has not changed for ten seconds (longer if it is large) or the script has ended
  well; a folder also once a newer one has begun. A script that renames or marks its folders has to do so with all.

Names that begin with a dot, or end in .tmp, .part or .incomplete, are unfinished. A symbolic link is no checkpoint.
"""

import contextlib
import ctypes
import json
import os
import re
import stat
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

MARKER = ".complete"

QUIET_SECONDS = 10.0

_PREPARED_BYTES_PER_SECOND = 100e6
"""A writer may need this long to prepare its next file, so a large checkpoint has to be left alone for longer."""

_TRAINER_FOLDER = re.compile(r"checkpoint-(\d+)")
_TRAINER_STATE = "trainer_state.json"
_TRAINER_FILES = (_TRAINER_STATE, "training_args.bin", "optimizer.pt", "scheduler.pt")

_NUMBER = re.compile(r"\d+")
_POINTER_BYTES = 256

_PART_OF = re.compile(r"\d+-of-(\d+)")
"""The parts of a model that is saved as several files: model-00001-of-00003.safetensors."""
_SHARD = re.compile(r"(^|/)__\d+_\d+\.distcp$|zero_pp_rank_\d+_mp_rank_\d+|_rank\d+\.(bin|pt)$")
"""One rank's part of a state: of torch.distributed.checkpoint, DeepSpeed's ZeRO, Accelerate's FSDP."""
_UNFINISHED = (".tmp", ".part", ".incomplete")

_IN_MOVED_TO = 0x80
_IN_NONBLOCK = 0o4000
_EVENT = struct.Struct("iIII")

Script = Literal["lives", "done", "ended"]
"""The script runs, has ended well, or was ended: what it was writing then is not whole."""

State = tuple[tuple[str, int, int, int], ...]
"""Names, sizes, times and inodes of the files of a checkpoint."""


def trainer_step(name: str) -> int | None:
    """Return the step of a folder that a Trainer of transformers has named, or None for any other name."""
    match = _TRAINER_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def is_unfinished(name: str) -> bool:
    return name.startswith(".") or name.endswith(_UNFINISHED)


def state_of(path: Path) -> State:
    """Return a value that changes if any file or link of a checkpoint does. Files that vanish are left out."""
    found = []
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            state = file.lstat()
            if not stat.S_ISDIR(state.st_mode):
                found.append((os.path.relpath(file, path.parent), state.st_size, state.st_mtime_ns, state.st_ino))
    return tuple(found)


class Renames:
    """The names in a folder that files and folders have got by a rename, as the kernel reports them (inotify)."""

    def __init__(self, folder: Path) -> None:
        """Watch `folder` from now on. Systems other than Linux report nothing."""
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
    """True if it has not changed since it got its name by a rename."""
    since: float = field(default_factory=time.monotonic)

    def is_quiet(self) -> bool:
        size = sum(bytes_ for _, bytes_, _, _ in self.state)
        return time.monotonic() - self.since >= max(QUIET_SECONDS, size / _PREPARED_BYTES_PER_SECOND)


class CompleteCheckpoints:
    """Looks now and then at a folder of checkpoints; `find` yields the complete ones."""

    def __init__(self, folder: Path, *, ranks: int = 1, trainer_only: bool = False) -> None:
        """`ranks`: the number on this node. `trainer_only`: only folders of a Trainer count."""
        self._ranks = ranks
        self._folder = folder
        self._trainer_only = trainer_only
        self._renames = Renames(folder)
        self._seen: dict[str, _Seen] = {}
        self._restored: dict[str, State] = {}
        self._marks = False
        """True once the script has renamed or marked a folder: then a folder without is not whole."""
        self.in_place: set[str] = set()
        """The names of the folders that counted because they were left alone or a newer one had begun."""

    def find(self, script: Script) -> Iterator[tuple[Path, State]]:
        """Yield each complete checkpoint with its state, the oldest first."""
        renamed = self._renames.news()
        candidates = self.candidates()
        looked: list[tuple[Path, _Seen]] = []
        for path in candidates:
            state = state_of(path)
            seen = self._seen.get(path.name)
            if seen is None or seen.state != state or path.name in renamed:
                self._seen[path.name] = seen = _Seen(state, renamed=path.name in renamed)
            looked.append((path, seen))
            self._marks = self._marks or (path.is_dir() and _is_marked(path, seen))
        found = [
            (max(time_ns for _, _, time_ns, _ in seen.state), path, seen.state)
            for path, seen in looked
            if seen.state and self._is_complete(path, seen, candidates, script)
        ]
        for _, path, state in sorted(found):
            yield path, state

    def states(self) -> list[State]:
        """Return the state of each candidate at the last look, complete or not."""
        return [seen.state for seen in self._seen.values()]

    def restored(self, path: Path) -> None:
        """Note a checkpoint of an earlier attempt, which was put back by a rename of ours."""
        self._renames.news()
        self._restored[path.name] = state_of(path)
        self._seen[path.name] = _Seen(state_of(path), renamed=False)

    def close(self) -> None:
        self._renames.close()

    def candidates(self) -> list[Path]:
        """Return the files and folders that may be checkpoints, without links and unfinished names."""
        with contextlib.suppress(FileNotFoundError):
            return [
                path
                for path in self._folder.iterdir()
                if not path.is_symlink()
                and not is_unfinished(path.name)
                and (trainer_step(path.name) is not None or not self._trainer_only)
            ]
        return []

    def _is_complete(self, path: Path, seen: _Seen, candidates: list[Path], script: Script) -> bool:
        left_alone = script == "done" or (script == "lives" and seen.is_quiet())
        if seen.state == self._restored.get(path.name):
            return True
        if path.is_file():
            return seen.renamed or left_alone
        if _is_marked(path, seen):
            return True
        if trainer_step(path.name) is not None and _is_of_a_trainer(path):
            return _is_whole(path, ranks=self._ranks, quiet=left_alone)
        if _lacks_parts(seen.state) or (self._marks and script != "done"):
            return False
        if not left_alone and not self._has_newer(path, candidates):
            return False
        self.in_place.add(path.name)
        return True

    def _has_newer(self, path: Path, candidates: list[Path]) -> bool:
        """Return whether another folder whose name differs in its number was begun after the last change in this one.

        Restored folders do not count: their times come from the clock of another machine.
        """
        newest = max(_times(path), default=0)
        others = (
            state_of(other)
            for other in candidates
            if other != path and other.name not in self._restored and _kind(other.name) == _kind(path.name)
        )
        return any(state and min(time_ns for _, _, time_ns, _ in state) > newest for state in others)


def _is_marked(folder: Path, seen: _Seen) -> bool:
    return seen.renamed or (folder / MARKER).exists()


def _kind(name: str) -> str:
    """Return a name without its numbers, which is the same for all checkpoints of one script."""
    return _NUMBER.sub("#", name)


def _lacks_parts(state: State) -> bool:
    """Return whether the names in a folder show that others are missing."""
    names = [name for name, *_ in state]
    parts: dict[tuple[str, str], int] = Counter(
        (name[: match.start()], match[1]) for name in names if (match := _PART_OF.search(name))
    )
    # torch.distributed.checkpoint writes its index when all ranks have written theirs.
    indexed = {Path(name).parent for name in names if Path(name).name == ".metadata"}
    return (
        any(name.endswith(_UNFINISHED) for name in names)
        or any(found % int(expected) for (_, expected), found in parts.items() if int(expected))
        or any(Path(name).parent not in indexed for name in names if name.endswith(".distcp"))
    )


def shard_of_a_rank(state: State) -> str | None:
    """Return the name of a file that holds one rank's part of a sharded state, or None if there is none."""
    return next((name for name, *_ in state if _SHARD.search(name)), None)


def pointed_to(path: Path, candidates: list[Path]) -> str | None:
    """Return the folder beside it that a short file names, or None.

    DeepSpeed's `latest` has the folder's name, Megatron's latest_checkpointed_iteration.txt its number.
    """
    try:
        text = path.read_text().strip() if path.is_file() and path.stat().st_size <= _POINTER_BYTES else ""
    except (OSError, ValueError):
        return None
    names = [other.name for other in candidates if other.is_dir()]
    if path.name.startswith("latest") and text.isdecimal():
        return next((name for name in names if [*map(int, _NUMBER.findall(name))] == [int(text)]), None)
    return text if text in names else None


def _times(folder: Path) -> Iterator[int]:
    """Yield when the folder and all in it were last changed; a copy keeps the times of files, but not the folder's."""
    with contextlib.suppress(FileNotFoundError):
        yield folder.stat().st_mtime_ns
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            yield path.lstat().st_mtime_ns


def _is_of_a_trainer(folder: Path) -> bool:
    """Return whether a folder `checkpoint-N` is a Trainer's: loops with Accelerate use the same names."""
    return any((folder / name).exists() for name in _TRAINER_FILES) or any(folder.glob("rng_state*.pth"))


def _is_whole(folder: Path, *, ranks: int, quiet: bool) -> bool:
    """Return whether a Trainer has written all of a checkpoint: its state comes last, beside what other ranks write."""
    try:
        json.loads((folder / _TRAINER_STATE).read_bytes())
    except (OSError, ValueError):
        return False
    states = list(folder.glob("rng_state_*.pth"))
    # Numbered states are of several ranks. If the script starts them itself, only time shows that all have written.
    return not states or (len(states) >= ranks and (ranks > 1 or quiet))
