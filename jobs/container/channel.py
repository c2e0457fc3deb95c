"""The files in a node's scratch folder by which its launcher and its ranks talk.

heartbeats/RANK    where a rank is; each rank writes its own, the launcher reads them
requests/          what the launcher asks of the ranks (save, stop), and which ranks listen for it
stopped            why the ranks have saved and ended before their work was done, where no exit code says so
checkpoint         the step of the newest checkpoint that the library has completed
library            there where a script's own ranks use the library `trainyard`
result.json        what a script has found, by its own word; rank 0 writes it
halving.json       how a point of a sweep is compared with the others; the launcher writes it
verdict.json       how it stood at the last rung, and whether it ends there; rank 0 writes it
status.json        how far the training is, for the attempt's record; rank 0 writes it
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel

from jobs.core.records import Verdict
from jobs.spec.sweep import Comparison

STOPPED = "stopped"
"""The state of a process that does nothing until somebody lets it go on."""

_HEARTBEATS = "heartbeats"

_LINE_BYTES = 256
"""The size of a heartbeat file: each heartbeat is written over the one before, in one write."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A rank's word that it lives, and where it is."""

    rank: int
    node: int
    pid: int
    number: int
    """Counts all heartbeats of the rank, so another number is another heartbeat."""
    place: int
    """Counts the places that all ranks of a job pass, so a rank with a smaller one is behind."""
    step: int
    """The last step that was finished; 0: none."""
    doing: str
    """The activity that began with this heartbeat."""
    slow: bool = False
    """True where that activity may take as long as a start does."""
    paced: bool = True
    """True where the next heartbeat is due in time. What comes before a training and after it has no limit."""
    patience_seconds: float = 0.0
    """The time that the activity may take by the word of a script, where that is longer than the limit."""


class HeartbeatFile:
    """The file in which one rank leaves its newest heartbeat."""

    def __init__(self, scratch: Path, local_rank: int) -> None:
        folder = scratch / _HEARTBEATS
        folder.mkdir(exist_ok=True)
        self._file = os.open(folder / str(local_rank), os.O_WRONLY | os.O_CREAT, 0o600)

    def write(self, heartbeat: Heartbeat) -> None:
        os.pwrite(self._file, json.dumps(vars(heartbeat)).encode().ljust(_LINE_BYTES), 0)


def read_heartbeats(scratch: Path) -> dict[int, Heartbeat]:
    """Return the newest heartbeat of each of this node's ranks, by the rank's number in the job."""
    heartbeats = {}
    for path in (scratch / _HEARTBEATS).glob("*"):
        try:
            heartbeat = Heartbeat(**json.loads(path.read_bytes()))
        except (ValueError, TypeError, OSError):  # it is being written: the next look finds it
            continue
        heartbeats[heartbeat.rank] = heartbeat
    return heartbeats


def process_states(heartbeats: Mapping[int, Heartbeat]) -> dict[int, str]:
    """Return the kernel's state of each rank's process, where that explains a rank which is silent."""
    return {rank: state for rank, heartbeat in heartbeats.items() if (state := _state(heartbeat.pid))}


def _state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # not on Linux, or it has ended
        return ""
    return {"T": STOPPED, "t": STOPPED, "D": "in the kernel"}.get(letter, "")


Request = Literal["save", "stop"]


class Asked(NamedTuple):
    """A request as the launcher made it."""

    reason: str
    by: float | None = None
    """When the ranks have to be gone, in seconds since the epoch: until then they train. None: they stop at once."""


class RequestFiles:
    """The launcher's requests to the ranks of its node, and which of those listen for them."""

    def __init__(self, scratch: Path) -> None:
        self._folder = scratch / "requests"
        self._folder.mkdir(exist_ok=True)
        self._places = {request: self._folder / request for request in get_args(Request)}

    def listen(self, local_rank: int) -> None:
        self._write(f"listens-{local_rank}", str(os.getpid()))

    def stop_listening(self, local_rank: int) -> None:
        (self._folder / f"listens-{local_rank}").unlink(missing_ok=True)

    def is_heard(self) -> bool:
        """Return True if a request would be answered: the first rank of the node is the one that looks for it."""
        return (self._folder / "listens-0").exists()

    def listeners(self) -> list[int]:
        """Return the process ids of the ranks that listen."""
        return [int(path.read_text()) for path in self._folder.glob("listens-*")]

    def ask(self, request: Request, reason: str, *, by: float | None = None) -> None:
        self._write(request, json.dumps(Asked(reason, by)))

    def asked(self, request: Request) -> Asked | None:
        """Return a request of the launcher; None where it has made none.

        Ranks ask at every step, so what is not there costs one look.
        """
        place = self._places[request]
        return Asked(*json.loads(place.read_text())) if place.exists() else None

    def _write(self, name: str, content: str) -> None:
        _put(self._folder / name, content)


def tell_stopped(scratch: Path, reason: str) -> None:
    """Leave word that the ranks have saved and end before their work is done, with exit code 0: a script's own do."""
    _put(scratch / "stopped", reason)


def stopped(scratch: Path) -> str | None:
    """Return the word of `tell_stopped`; None where there is none."""
    return _get(scratch / "stopped")


def write_library_note(scratch: Path) -> None:
    """Leave word that a script saves through the library: what lies in its folder of checkpoints is not for us."""
    (scratch / "library").touch()


def note_checkpoint(scratch: Path, step: int) -> None:
    """Leave word that a checkpoint is complete on S3."""
    _put(scratch / "checkpoint", str(step))


def noted_checkpoint(scratch: Path) -> int | None:
    """Return the step of the newest checkpoint that is complete, as its rank says; None where there is none."""
    found = _get(scratch / "checkpoint")
    return None if found is None else int(found)


def uses_library(scratch: Path) -> bool:
    return (scratch / "library").exists()


def tell_result(scratch: Path, values: Mapping[str, Any]) -> None:
    """Add to what the script says that it has found."""
    _put(scratch / "result.json", json.dumps({**told_result(scratch), **values}))


def told_result(scratch: Path) -> dict[str, Any]:
    """Return the word of `tell_result`: nothing where there is none."""
    told: dict[str, Any] = json.loads(_get(scratch / "result.json") or "{}")
    return told


def ask_comparison(scratch: Path, comparison: Comparison) -> None:
    """Have the ranks compare their point with the others of its sweep."""
    _put(scratch / "halving.json", comparison.model_dump_json())


def asked_comparison(scratch: Path) -> Comparison | None:
    """Return the word of `ask_comparison`; None where there is none."""
    found = _get(scratch / "halving.json")
    return None if found is None else Comparison.model_validate_json(found)


def tell_verdict(scratch: Path, verdict: Verdict) -> None:
    """Leave word of how the point stood; where it stops: that its training ends for that."""
    _put(scratch / "verdict.json", verdict.model_dump_json())


def told_verdict(scratch: Path) -> Verdict | None:
    """Return the newest word of `tell_verdict`; None where there is none."""
    found = _get(scratch / "verdict.json")
    return None if found is None else Verdict.model_validate_json(found)


class RankStatus(BaseModel):
    """How far the training is: rank 0 writes it, the launcher copies it into the attempt's record."""

    training_started_at: datetime | None = None
    resumed_from_step: int = 0
    restored_step: int | None = None
    repeats_from_step: int | None = None
    saved_at: datetime | None = None
    starts_over: bool = False
    """True if the script does not load its checkpoint, so each attempt begins at its beginning."""
    last_step: int = 0
    compiling_seconds: float = 0.0
    saving_seconds: float = 0.0
    changed: dict[str, tuple[Any, Any]] = {}
    result: dict[str, Any] = {}

    def write(self, scratch: Path) -> None:
        _put(scratch / "status.json", self.model_dump_json())

    @classmethod
    def read(cls, scratch: Path) -> "RankStatus":
        return cls.model_validate_json(_get(scratch / "status.json") or "{}")


def _put(path: Path, content: str) -> None:
    """Write a file that nobody ever sees in parts."""
    part = path.with_name(f".{path.name}")
    part.write_text(content)
    part.replace(path)


def _get(path: Path) -> str | None:
    """Return the content of a file, or None if there is none."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
