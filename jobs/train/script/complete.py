"""Which of the things in a script's folder of checkpoints are complete.

A checkpoint is what lies right below the folder, a file or a folder. One is complete
- where it has got its name by a rename (what is being written has another one, here or elsewhere on the disk);
- a folder, where it holds a file called `.complete`;
- a folder `checkpoint-N` of a Trainer of transformers, where its trainer_state.json, which is written last, is whole,
  and each rank's random state is there;
- a file, where no process has it open for writing, and it has stayed as it was for two seconds of the script's life, or
  until its good end: whoever wrote it has come to the end of it;
- a folder that is written under its own name (as by Accelerate's save_state, peft, DeepSpeed), if the script renames
  and marks none: once no process has a file of it open for writing, and it holds all that the folder before it did. If
  there is none to compare it with: once it has stayed as it was for ten seconds. Also once a newer one has begun, a
  link or a file like DeepSpeed's `latest` names it, or the script has come to its good end.

What begins with a dot, or ends in .tmp, .part or .incomplete, is being written. A symbolic link is no checkpoint.
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

QUIET_SECONDS = 2.0

FOLDER_QUIET_SECONDS = 10.0
"""Of a folder that nothing else tells to be whole: its writer may pause between two files."""

_TRAINER_FOLDER = re.compile(r"checkpoint-(\d+)")
_TRAINER_STATE = "trainer_state.json"
_TRAINER_FILES = (_TRAINER_STATE, "training_args.bin", "optimizer.pt", "scheduler.pt")
_PREPARED_BYTES_PER_SECOND = 100e6

_NUMBER = re.compile(r"\d+")
_POINTER_BYTES = 256

_PART_OF = re.compile(r"\d+-of-(\d+)")
"""Numbers the parts of a model that is saved as several files: model-00001-of-00003.safetensors."""
_SHARD = re.compile(r"(^|/)__\d+_\d+\.distcp$|zero_pp_rank_\d+_mp_rank_\d+|_rank\d+\.(bin|pt)$")
"""Names one rank's part of a state: of torch.distributed.checkpoint, DeepSpeed's ZeRO, Accelerate's FSDP."""
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


def is_unfinished(name: str) -> bool:
    return name.startswith(".") or name.endswith(_UNFINISHED)


def state_of(path: Path) -> State:
    """Return what tells a checkpoint from the same one later: of its files and links. What vanishes is left out."""
    found = []
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            state = file.lstat()
            if not stat.S_ISDIR(state.st_mode):
                found.append((os.path.relpath(file, path.parent), state.st_size, state.st_mtime_ns, state.st_ino))
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
    shrunk: bool = False
    """True if it came from the state before by the loss of files: it may be on its way out."""
    since: float = field(default_factory=time.monotonic)

    def is_quiet(self, seconds: float) -> bool:
        return time.monotonic() - self.since >= seconds


class CompleteCheckpoints:
    """Looks now and then at a folder of checkpoints; `find` gives those that are complete."""

    def __init__(self, folder: Path, *, ranks: int = 1, trainer_only: bool = False) -> None:
        """`ranks` are those of this node. `trainer_only`: nothing but folders of a Trainer counts."""
        self._ranks = ranks
        self._folder = folder
        self._trainer_only = trainer_only
        self._renames = Renames(folder)
        self._seen: dict[str, _Seen] = {}
        self._whole: dict[str, State] = {}
        """The folders that were complete, as they were then."""
        self._shapes: dict[str, _Shape] = {}
        """What the newest complete folder of each kind of name holds: the next one is to hold as much."""
        self._restored: dict[str, State] = {}
        self._marks = False
        """True once the script has renamed or marked a folder: then those that are not are not whole."""
        self.in_place: set[str] = set()
        """The names of the folders that were found complete by being left alone."""
        self.unmarked: str | None = None
        """The first folder that neither its name nor a file in it says to be whole, once it was left alone."""

    def find(self, script: Script) -> Iterator[tuple[Path, State]]:
        """Give each complete checkpoint with its state, the oldest first; `script` says how the script is by now."""
        renamed = self._renames.news()
        opened = _OpenFiles()
        found: list[tuple[int, Path, State]] = []
        candidates = self.candidates()
        for path in candidates:
            state = state_of(path)
            seen = self._seen.get(path.name)
            if seen is None or seen.state != state or path.name in renamed:
                shrunk = seen is not None and set(state) < set(seen.state)
                self._seen[path.name] = seen = _Seen(state, renamed=path.name in renamed, shrunk=shrunk)
            if state and self._is_complete(path, seen, candidates, script, opened):
                found.append((max(time_ns for _, _, time_ns, _ in state), path, state))
        for _, path, state in sorted(found):
            self._note_whole(path, state)
            yield path, state

    def states(self) -> list[State]:
        """Return how all was at the last look, complete or not."""
        return [seen.state for seen in self._seen.values()]

    def restored(self, path: Path) -> None:
        """Note a checkpoint of an earlier attempt, which was put back by a rename of ours."""
        self._renames.news()
        self._seen[path.name] = _Seen(state_of(path), renamed=False)
        self._restored[path.name] = state_of(path)
        self._note_whole(path, state_of(path))

    def close(self) -> None:
        self._renames.close()

    def candidates(self) -> list[Path]:
        """Return what may be a checkpoint: no links, and nothing whose name says that it is unfinished."""
        with contextlib.suppress(FileNotFoundError):
            return [
                path
                for path in self._folder.iterdir()
                if not path.is_symlink()
                and not is_unfinished(path.name)
                and (trainer_step(path.name) is not None or not self._trainer_only)
            ]
        return []

    def _note_whole(self, path: Path, state: State) -> None:
        if path.is_dir():
            self._whole[path.name] = state
            self._shapes[_kind(path.name)] = _shape(state)

    def _is_complete(
        self, path: Path, seen: _Seen, candidates: list[Path], script: Script, opened: "_OpenFiles"
    ) -> bool:
        quiet = script == "done" or (script == "lives" and seen.is_quiet(QUIET_SECONDS))
        if path.is_file():
            return seen.renamed or (quiet and not opened.has_any_of(path))
        if seen.renamed or (path / MARKER).exists():
            self._marks = True
            return True
        if trainer_step(path.name) is not None and _is_of_a_trainer(path):
            return _is_whole(path, ranks=self._ranks, quiet=quiet)
        if seen.state == self._whole.get(path.name):
            return True
        left_alone = script == "lives" and seen.is_quiet(_settling_seconds(seen.state))
        whole = self._is_whole_in_place(path, seen, candidates, script, opened, left_alone=left_alone)
        if whole:
            self.in_place.add(path.name)
        if self.unmarked is None and (whole or left_alone or script == "done"):
            self.unmarked = path.name
        return whole

    def _is_whole_in_place(
        self,
        path: Path,
        seen: _Seen,
        candidates: list[Path],
        script: Script,
        opened: "_OpenFiles",
        *,
        left_alone: bool,
    ) -> bool:
        """Return whether a folder has come to its end that was written under its own name, and has no mark.

        A writer may pause between two files. So a folder counts early only if it holds all that the one before it did,
        all of it written anew, and late only if there is none to compare it with, or a newer one has begun.
        """
        before = self._whole.get(path.name, ())
        if _lacks_parts(seen.state):
            return False
        if script == "done":
            return True
        if self._marks or set(seen.state) < set(before):  # the second: it is being removed
            return False
        if script == "ended":
            return self._has_newer(path, candidates)
        if not (left_alone or (seen.is_quiet(QUIET_SECONDS) and not seen.shrunk)) or opened.has_any_of(path):
            return False
        if self._has_newer(path, candidates) or _is_pointed_to(path, candidates):
            return True
        known = self._shapes.get(_kind(path.name))
        if known is None or set(before) & set(seen.state):
            return left_alone
        return not known - _shape(seen.state)

    def _has_newer(self, path: Path, candidates: list[Path]) -> bool:
        """Return whether all of another folder with a name alike was written after the last change in this one.

        One that was restored does not count: its times are of another machine's clock.
        """
        newest = max(_times(path), default=0)
        alike = [other for other in candidates if other != path and _kind(other.name) == _kind(path.name)]
        states = {other.name: state_of(other) for other in alike}
        return any(
            self._restored.get(name) != state and min((time_ns for _, _, time_ns, _ in state), default=0) > newest
            for name, state in states.items()
        )


_Shape = Counter[str]


def _settling_seconds(state: State) -> float:
    """Return for how long a folder is to be left alone: of a large one the next file may take longer to prepare."""
    return max(FOLDER_QUIET_SECONDS, sum(size for _, size, _, _ in state) / _PREPARED_BYTES_PER_SECOND)


def _kind(name: str) -> str:
    """Return a name without its numbers: those of one script's checkpoints are alike."""
    return _NUMBER.sub("#", name)


def _shape(state: State) -> _Shape:
    """Return the names in a folder without their numbers, and how often there is each."""
    return Counter(_kind(name.partition("/")[2]) for name, *_ in state)


def _lacks_parts(state: State) -> bool:
    """Return whether names in a folder tell that others are still to come."""
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
    """Return the name of a file that holds one rank's part of a sharded state; None if there is none."""
    return next((name for name, *_ in state if _SHARD.search(name)), None)


def _is_pointed_to(folder: Path, candidates: list[Path]) -> bool:
    """Return whether a link, or a file like DeepSpeed's `latest`, was written after the folder, and names it."""
    newest = max(_times(folder), default=0)
    with contextlib.suppress(FileNotFoundError):
        return any(
            path.lstat().st_mtime_ns > newest and pointed_to(path, candidates) == folder.name
            for path in folder.parent.iterdir()
        )
    return False


def pointed_to(path: Path, candidates: list[Path]) -> str | None:
    """Return the folder beside it that a link, or a short file, names: most scripts write such a one last.

    DeepSpeed's `latest` has the folder's name, Megatron's latest_checkpointed_iteration.txt its number.
    """
    try:
        if path.is_symlink():
            text = path.readlink().name
        elif path.is_file() and path.stat().st_size <= _POINTER_BYTES:
            text = path.read_text().strip()
        else:
            return None
    except (OSError, ValueError):
        return None
    names = [other.name for other in candidates if other.is_dir()]
    if path.name.startswith("latest") and text.isdecimal():
        return next((name for name in names if [*map(int, _NUMBER.findall(name))] == [int(text)]), None)
    return text if text in names else None


def _times(folder: Path) -> Iterator[int]:
    """Yield when the folder and all in it were last changed; a copy may bring old times, but not to its folder."""
    with contextlib.suppress(FileNotFoundError):
        yield folder.stat().st_mtime_ns
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            yield path.lstat().st_mtime_ns


def _is_of_a_trainer(folder: Path) -> bool:
    """Return whether a folder `checkpoint-N` is a Trainer's: loops with Accelerate give theirs the same names."""
    return any((folder / name).exists() for name in _TRAINER_FILES) or any(folder.glob("rng_state*.pth"))


def _is_whole(folder: Path, *, ranks: int, quiet: bool) -> bool:
    """Return whether a Trainer has written all of a checkpoint: its state comes last, beside what other ranks write."""
    try:
        json.loads((folder / _TRAINER_STATE).read_bytes())
    except (OSError, ValueError):
        return False
    states = list(folder.glob("rng_state_*.pth"))
    # A state with a number is of several ranks; where none but the script knows how many, they are given some time.
    return not states or (len(states) >= ranks and (ranks > 1 or quiet))


class _OpenFiles:
    """The files that processes of this user have open for writing, looked up once."""

    def __init__(self) -> None:
        self._found: set[tuple[int, int]] | None = None

    def has_any_of(self, path: Path) -> bool:
        """Return whether the file is one of them, or any file in the folder is."""
        if self._found is None:
            self._found = set(_open_for_writing())
        for file in [path] if path.is_file() else path.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                state = file.lstat()
                if (state.st_dev, state.st_ino) in self._found:
                    return True
        return False


def _open_for_writing() -> Iterator[tuple[int, int]]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    opened = link.stat()
                    if stat.S_ISREG(opened.st_mode) and _is_writable(process / "fdinfo" / link.name):
                        yield opened.st_dev, opened.st_ino


def _is_writable(info: Path) -> bool:
    """Return whether a descriptor was opened for writing (proc(5): fdinfo, `flags` in octal)."""
    flags = next(line.split()[1] for line in info.read_text().splitlines() if line.startswith("flags:"))
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY
