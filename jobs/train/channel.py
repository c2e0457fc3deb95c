"""What the launcher of a node and its ranks tell each other, through files in their scratch folder.

A rank writes heartbeats, which the launcher reads. The launcher asks for a save or a stop, which the ranks read.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

STOPPED = "stopped"
"""What the kernel says of a process that does nothing until somebody lets it go on."""

_FOLDER = "signs"

_LINE_BYTES = 256
"""Of a file: each sign is written over the one before, in one write."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The last one that a rank gave."""

    rank: int
    node: int
    pid: int
    number: int
    """Counts all signs of the rank: another number is another sign."""
    place: int
    """Counts the places that all ranks of a job pass, so a smaller one is behind."""
    step: int
    """The last one that was finished; 0: none."""
    doing: str
    """What began with this sign."""
    slow: bool = False
    """Whether that may take as long as a start does."""
    paced: bool = True
    """Whether the next one is due in time. What comes before a training and after it takes as long as it takes."""


class HeartbeatFile:
    """Of one rank, which writes it."""

    def __init__(self, scratch: Path, local_rank: int) -> None:
        folder = scratch / _FOLDER
        folder.mkdir(exist_ok=True)
        self._file = os.open(folder / str(local_rank), os.O_WRONLY | os.O_CREAT, 0o600)

    def write(self, sign: Heartbeat) -> None:
        os.pwrite(self._file, json.dumps(vars(sign)).encode().ljust(_LINE_BYTES), 0)


def read_heartbeats(scratch: Path) -> dict[int, Heartbeat]:
    """Of this node's ranks that have given any, by their number among all ranks."""
    signs = {}
    for path in (scratch / _FOLDER).glob("*"):
        try:
            sign = Heartbeat(**json.loads(path.read_bytes()))
        except (ValueError, TypeError, OSError):  # it is being written: the next look finds it
            continue
        signs[sign.rank] = sign
    return signs


def process_states(signs: Mapping[int, Heartbeat]) -> dict[int, str]:
    """What the kernel says of their processes, where that explains a rank which gives no sign."""
    return {rank: state for rank, sign in signs.items() if (state := _state(sign.pid))}


def _state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # not on Linux, or it has ended
        return ""
    return {"T": STOPPED, "t": STOPPED, "D": "in the kernel"}.get(letter, "")


Request = Literal["save", "stop"]


class RequestFiles:
    """What launcher and ranks of one node tell each other, in their scratch folder."""

    def __init__(self, scratch: Path) -> None:
        self._folder = scratch / "endings"
        self._folder.mkdir(exist_ok=True)

    def listen(self, local_rank: int) -> None:
        self._write(f"listens-{local_rank}", str(os.getpid()))

    def stop_listening(self, local_rank: int) -> None:
        (self._folder / f"listens-{local_rank}").unlink(missing_ok=True)

    def is_heard(self) -> bool:
        """Whether a request would be answered: the first rank of the node is the one that looks for it."""
        return (self._folder / "listens-0").exists()

    def listeners(self) -> list[int]:
        """Their process ids."""
        return [int(path.read_text()) for path in self._folder.glob("listens-*")]

    def ask(self, request: Request, reason: str) -> None:
        self._write(request, reason)

    def reason(self, request: Request) -> str | None:
        """Of a request; None where there is none."""
        try:
            return (self._folder / request).read_text()
        except FileNotFoundError:
            return None

    def _write(self, name: str, content: str) -> None:
        part = self._folder / f".{name}"
        part.write_text(content)
        part.replace(self._folder / name)
