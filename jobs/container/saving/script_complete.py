"""Decide which entries in a script's folder of checkpoints are complete.

A checkpoint is a file or a folder right below that folder. These are complete:

- an entry that got its name by a rename;
- a folder that contains a file named `.complete`;
- a folder `checkpoint-N` of a transformers Trainer, if its trainer_state.json, which is written last, is intact and the
  random state of each rank is there;
- a file of torch.save or safetensors whose end is there, although it was written in place;
- any other entry written in place, if it has not changed for ten seconds (longer if it is large), if the script has
  ended successfully, or, for a folder, if a newer one has begun. If a script renames or marks one folder, this does not
  apply to its folders: it must rename or mark all of them.

In the files and folders that `keep` names, Trainer folders and files with a checkpoint's suffix are checkpoints, at any
depth; all else there is output.

Names that begin with a dot or end in .tmp, .part or .incomplete are unfinished. A symbolic link is not a checkpoint.
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
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

MARKER = ".complete"

QUIET_SECONDS = 10.0

_PREPARED_BYTES_PER_SECOND = 100e6
"""Assumed speed at which a writer prepares its next file: a large checkpoint must stay unchanged for longer."""

_TRAINER_FOLDER = re.compile(r"checkpoint-(\d+)")
_TRAINER_STATE = "trainer_state.json"
_TRAINER_FILES = (_TRAINER_STATE, "training_args.bin", "optimizer.pt", "scheduler.pt")

CHECKPOINT_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".tar", ".npz", ".pkl")
"""Suffixes of files that a script may load when it starts again."""

_ZIP_END = b"PK\x05\x06"
_ZIP_END_BYTES = 22
"""The last record of a ZIP archive, which torch.save writes last (no comment follows it)."""

_NUMBER = re.compile(r"\d+")
_POINTER_BYTES = 256

_PART_OF = re.compile(r"\d+-of-(\d+)")
"""Part of a model that is saved as several files: model-00001-of-00003.safetensors."""
_SHARD = re.compile(r"(^|/)__\d+_\d+\.distcp$|zero_pp_rank_\d+_mp_rank_\d+|_rank\d+\.(bin|pt)$")
"""One rank's part of a state, from torch.distributed.checkpoint, DeepSpeed's ZeRO or Accelerate's FSDP."""
_UNFINISHED = (".tmp", ".part", ".incomplete")

_IN_MOVED_TO = 0x80
_IN_NONBLOCK = 0o4000
_EVENT = struct.Struct("iIII")

Script = Literal["running", "done", "ended"]
"""done: the script has ended successfully. ended: it was stopped, so its last checkpoint may be incomplete."""

State = tuple[tuple[str, int, int, int], ...]
"""Names, sizes, modification times and inodes of a checkpoint's files."""


def trainer_step(name: str) -> int | None:
    """Return the step in the name of a transformers Trainer's checkpoint folder, or None for any other name."""
    match = _TRAINER_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def is_checkpoint_name(name: str) -> bool:
    """Return whether a file or folder that `keep` names, or that is below one, is a checkpoint by its name."""
    last = Path(name).name
    return trainer_step(last) is not None or last.endswith(CHECKPOINT_SUFFIXES)


def is_below(name: str, parts: Collection[str]) -> bool:
    """Return whether a relative name is one of `parts` or below one."""
    return any(name == part or name.startswith(f"{part}/") for part in parts)


def is_unfinished(name: str) -> bool:
    return name.startswith(".") or name.endswith(_UNFINISHED)


def state_of(path: Path) -> State:
    """Return a value that changes if any file or link of a checkpoint changes. Files that vanish are skipped."""
    found = []
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            state = file.lstat()
            if not stat.S_ISDIR(state.st_mode):
                found.append((os.path.relpath(file, path.parent), state.st_size, state.st_mtime_ns, state.st_ino))
    return tuple(found)


class Renames:
    """Collects the names that entries of a folder got by a rename, as reported by the kernel (inotify)."""

    def __init__(self, folder: Path) -> None:
        """Watch `folder` from now on. Only Linux reports renames."""
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
    """Checks a folder of checkpoints whenever `find` is called, which yields the complete ones."""

    def __init__(
        self, folder: Path, *, ranks: int = 1, trainer_only: bool = False, parts: Collection[str] | None = None
    ) -> None:
        """`ranks` is the number of ranks on this node. `trainer_only` ignores all folders but a Trainer's.

        With `parts`, only these files and folders are searched, with all that is below them.
        """
        self._parts = parts
        self._ranks = ranks
        self._folder = folder
        self._trainer_only = trainer_only
        self._renames = Renames(folder)
        self._seen: dict[str, _Seen] = {}
        self._restored: dict[str, State] = {}
        self._marks = False
        """True once the script has renamed or marked a folder. Folders that are neither are then incomplete."""
        self.in_place: set[str] = set()
        """Names of folders that count as complete because they stopped changing or a newer one has begun."""

    def find(self, script: Script) -> Iterator[tuple[Path, State]]:
        """Yield each complete checkpoint with its state, oldest first."""
        renamed = self._renames.news()
        candidates = self.candidates()
        looked: list[tuple[Path, _Seen]] = []
        for path in candidates:
            state = state_of(path)
            name = self.name_of(path)
            seen = self._seen.get(name)
            if seen is None or seen.state != state or name in renamed:
                self._seen[name] = seen = _Seen(state, renamed=name in renamed)
            looked.append((path, seen))
            self._marks = self._marks or (path.is_dir() and _is_marked(path, seen))
        found = [
            (max(time_ns for _, _, time_ns, _ in seen.state), path, seen.state)
            for path, seen in looked
            if seen.state and self._is_complete(path, seen, candidates, script)
        ]
        for _, path, state in sorted(found):
            yield path, state

    def name_of(self, path: Path) -> str:
        """Return a checkpoint's name relative to the folder."""
        return path.relative_to(self._folder).as_posix()

    def states(self) -> list[State]:
        """Return the state of each candidate at the last check, complete or not."""
        return [seen.state for seen in self._seen.values()]

    def restored(self, path: Path) -> None:
        """Record that the platform has just restored a checkpoint, and ignore its rename."""
        self._renames.news()
        self._restored[self.name_of(path)] = state_of(path)
        self._seen[self.name_of(path)] = _Seen(state_of(path), renamed=False)

    def close(self) -> None:
        self._renames.close()

    def candidates(self) -> list[Path]:
        """Return the entries that may be checkpoints: no links and no unfinished names."""
        if self._parts is not None:
            return [path for part in self._parts for path in _checkpoints_in(self._folder / part)]
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
        left_alone = script == "done" or (script == "running" and seen.is_quiet())
        if seen.state == self._restored.get(self.name_of(path)):
            return True
        if path.is_file():
            return seen.renamed or left_alone or _is_whole_file(path)
        if _is_marked(path, seen):
            return True
        if trainer_step(path.name) is not None and _is_of_a_trainer(path):
            return _is_whole(path, ranks=self._ranks, quiet=left_alone)
        if _lacks_parts(seen.state) or (self._marks and script != "done"):
            return False
        if not left_alone and not self._has_newer(path, candidates):
            return False
        self.in_place.add(self.name_of(path))
        return True

    def _has_newer(self, path: Path, candidates: list[Path]) -> bool:
        """Return whether a folder that differs only in its number was begun after the last change in this one.

        Restored folders do not count, because their times come from another machine's clock.
        """
        newest = max(_times(path), default=0)
        others = (
            state_of(other)
            for other in candidates
            if other != path and self.name_of(other) not in self._restored and _kind(other.name) == _kind(path.name)
        )
        return any(state and min(time_ns for _, _, time_ns, _ in state) > newest for state in others)


def _checkpoints_in(place: Path) -> Iterator[Path]:
    """Yield the checkpoints by name in a folder, at any depth, or the place itself if it is one. Follows no links."""
    if place.is_symlink() or is_unfinished(place.name):
        return
    if is_checkpoint_name(place.name) and place.is_dir() == (trainer_step(place.name) is not None) and place.exists():
        yield place
    elif place.is_dir():
        with contextlib.suppress(FileNotFoundError):
            for path in sorted(place.iterdir()):
                yield from _checkpoints_in(path)


def _is_whole_file(path: Path) -> bool:
    """Return whether the end of a file shows that it was written to its end, in the formats that have one."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if path.name.endswith(".safetensors"):
                file.seek(0)
                header = file.read(int.from_bytes(file.read(8), "little"))
                ends = [
                    value["data_offsets"][1] for name, value in json.loads(header).items() if name != "__metadata__"
                ]
                return size == 8 + len(header) + max(ends, default=0)
            file.seek(max(0, size - _ZIP_END_BYTES))
            return file.read(4) == _ZIP_END
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError):
        return False


def _is_marked(folder: Path, seen: _Seen) -> bool:
    return seen.renamed or (folder / MARKER).exists()


def _kind(name: str) -> str:
    """Return a name with its numbers masked, which is the same for all checkpoints of one script."""
    return _NUMBER.sub("#", name)


def _lacks_parts(state: State) -> bool:
    """Return whether the names in a folder show that files are missing."""
    names = [name for name, *_ in state]
    parts: dict[tuple[str, str], int] = Counter(
        (name[: match.start()], match[1]) for name in names if (match := _PART_OF.search(name))
    )
    # torch.distributed.checkpoint writes its index once all ranks have written their parts.
    indexed = {Path(name).parent for name in names if Path(name).name == ".metadata"}
    return (
        any(name.endswith(_UNFINISHED) for name in names)
        or any(found % int(expected) for (_, expected), found in parts.items() if int(expected))
        or any(Path(name).parent not in indexed for name in names if name.endswith(".distcp"))
    )


def shard_of_a_rank(state: State) -> str | None:
    """Return the name of a file with one rank's part of a sharded state, or None if there is none."""
    return next((name for name, *_ in state if _SHARD.search(name)), None)


def pointed_to(path: Path, candidates: list[Path]) -> str | None:
    """Return the folder beside `path` that this short file names, or None.

    DeepSpeed's `latest` contains the folder's name, Megatron's latest_checkpointed_iteration.txt its number.
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
    """Yield the modification times of the folder and its contents. A copied folder gets a new time itself."""
    with contextlib.suppress(FileNotFoundError):
        yield folder.stat().st_mtime_ns
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            yield path.lstat().st_mtime_ns


def _is_of_a_trainer(folder: Path) -> bool:
    """Return whether a folder `checkpoint-N` is a Trainer's: loops with Accelerate use the same name."""
    return any((folder / name).exists() for name in _TRAINER_FILES) or any(folder.glob("rng_state*.pth"))


def _is_whole(folder: Path, *, ranks: int, quiet: bool) -> bool:
    """Return whether a Trainer and its other ranks have finished a checkpoint. It writes its own state last."""
    try:
        json.loads((folder / _TRAINER_STATE).read_bytes())
    except (OSError, ValueError):
        return False
    states = list(folder.glob("rng_state_*.pth"))
    # Numbered states are from several ranks. If the script starts its ranks itself, only time shows that all are done.
    return not states or (len(states) >= ranks and (ranks > 1 or quiet))
