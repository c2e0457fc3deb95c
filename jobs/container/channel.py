"""Pass data between a job's launchers and ranks: in files in a node's scratch folder, and in a key-value store.

heartbeats/RANK    the progress of a rank; each rank writes its own file, the launcher reads them
requests/          requests of the launcher to the ranks (save, stop), and which ranks listen for them
stopped            why a script's ranks saved and ended early with exit code 0
checkpoint         the step of the newest checkpoint that the library has completed
left-RANK          exists if the script of a rank has ended without an error
library            exists if a script's ranks use the library `trainyard`
result.json        the result that a script reports; written by rank 0
collected.json     the newest metrics of a script's files and log; written by the launcher
halving.json       how a point of a sweep is compared with the others; written by the launcher
verdict.json       how the point ranked at the last rung, and whether it stops there; written by rank 0
status.json        the progress of the training, for the attempt's record; written by rank 0

The store is PyTorch's TCPStore, which has no authentication and by default listens on all addresses. It therefore
listens on loopback only if there is a single node, otherwise on the main node's address only.
"""

import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from pydantic import BaseModel

from jobs.core.records import Verdict
from jobs.spec.sweep import Comparison

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C++


STOPPED = "stopped"
"""The state of a process that was stopped by a signal."""

_HEARTBEATS = "heartbeats"

_LINE_BYTES = 256
"""The size of a heartbeat file. Each heartbeat overwrites the previous one in a single write."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A rank's sign of life, with its progress."""

    rank: int
    node: int
    pid: int
    number: int
    """Counts the rank's heartbeats, so that no two are equal."""
    place: int
    """Number of places passed in the code. All ranks pass the same places, so a rank with fewer is behind."""
    step: int
    """The last finished step, or 0."""
    doing: str
    """The activity that starts with this heartbeat."""
    slow: bool = False
    """Whether the activity may take as long as a start."""
    paced: bool = True
    """Whether the next heartbeat has a time limit. False before and after training."""
    patience_seconds: float = 0.0
    """The time that a script has requested for the activity, if that is longer than the limit."""


class HeartbeatFile:
    """The file with one rank's newest heartbeat."""

    def __init__(self, scratch: Path, local_rank: int) -> None:
        folder = scratch / _HEARTBEATS
        folder.mkdir(exist_ok=True)
        self._file = os.open(folder / str(local_rank), os.O_WRONLY | os.O_CREAT, 0o600)

    def write(self, heartbeat: Heartbeat) -> None:
        os.pwrite(self._file, json.dumps(vars(heartbeat)).encode().ljust(_LINE_BYTES), 0)


def read_heartbeats(scratch: Path) -> dict[int, Heartbeat]:
    """Return the newest heartbeat of each rank of this node, by rank."""
    heartbeats = {}
    for path in (scratch / _HEARTBEATS).glob("*"):
        try:
            heartbeat = Heartbeat(**json.loads(path.read_bytes()))
        except (ValueError, TypeError, OSError):  # it is being written; the next call reads it
            continue
        heartbeats[heartbeat.rank] = heartbeat
    return heartbeats


def process_states(heartbeats: Mapping[int, Heartbeat]) -> dict[int, str]:
    """Return the state of each rank's process that is stopped or blocked in the kernel."""
    return {rank: state for rank, heartbeat in heartbeats.items() if (state := _state(heartbeat.pid))}


def _state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # not on Linux, or the process has ended
        return ""
    return {"T": STOPPED, "t": STOPPED, "D": "in the kernel"}.get(letter, "")


Request = Literal["save", "stop"]


class Asked(NamedTuple):
    """A request of the launcher."""

    reason: str
    by: float | None = None
    """Unix time by which the ranks must have ended; they train until then. If None, they stop at once."""


class RequestFiles:
    """The launcher's requests to the ranks of its node, and which ranks listen for them."""

    def __init__(self, scratch: Path) -> None:
        self._folder = scratch / "requests"
        self._folder.mkdir(exist_ok=True)
        self._places = {request: self._folder / request for request in get_args(Request)}

    def listen(self, local_rank: int) -> None:
        _put(self._folder / f"listens-{local_rank}", str(os.getpid()))

    def stop_listening(self, local_rank: int) -> None:
        (self._folder / f"listens-{local_rank}").unlink(missing_ok=True)

    def is_heard(self) -> bool:
        """Return whether the node's first rank, which checks for requests, is listening."""
        return (self._folder / "listens-0").exists()

    def listeners(self) -> list[int]:
        """Return the process ids of the ranks that listen."""
        return [int(path.read_text()) for path in self._folder.glob("listens-*")]

    def ask(self, request: Request, reason: str, *, by: float | None = None) -> None:
        _put(self._places[request], json.dumps(Asked(reason, by)))

    def asked(self, request: Request) -> Asked | None:
        """Return a request of the launcher, or None.

        Ranks call this at every step, so it must be cheap when there is no request.
        """
        place = self._places[request]
        return Asked(*json.loads(place.read_text())) if place.exists() else None


def write_stopped(scratch: Path, reason: str) -> None:
    """Record why a script's ranks have saved and end early with exit code 0."""
    _put(scratch / "stopped", reason)


def read_stopped(scratch: Path) -> str | None:
    """Return the reason that `write_stopped` recorded, or None."""
    return _get(scratch / "stopped")


def write_left(scratch: Path, rank: int) -> None:
    """Record that the script of a rank has ended without an error."""
    (scratch / f"left-{rank}").touch()


def read_left(scratch: Path) -> list[int]:
    """Return this node's ranks whose script has ended without an error."""
    return sorted(int(path.name.removeprefix("left-")) for path in scratch.glob("left-*"))


def mark_library_used(scratch: Path) -> None:
    """Record that a script saves through the library, so its checkpoint folder is not uploaded."""
    (scratch / "library").touch()


def write_saved_step(scratch: Path, step: int) -> None:
    """Record the step of a checkpoint that is complete on S3."""
    _put(scratch / "checkpoint", str(step))


def read_saved_step(scratch: Path) -> int | None:
    """Return the step of the newest complete checkpoint, or None."""
    found = _get(scratch / "checkpoint")
    return None if found is None else int(found)


def uses_library(scratch: Path) -> bool:
    return (scratch / "library").exists()


def add_result(scratch: Path, values: Mapping[str, Any]) -> None:
    """Add values to the result that the script reports."""
    _put(scratch / "result.json", json.dumps({**read_result(scratch), **values}))


def read_result(scratch: Path) -> dict[str, Any]:
    """Return the result that the script has reported so far."""
    result: dict[str, Any] = json.loads(_get(scratch / "result.json") or "{}")
    return result


def write_collected(scratch: Path, values: Mapping[str, Any]) -> None:
    """Record the result that follows from a script's files and log."""
    _put(scratch / "collected.json", json.dumps(values))


def read_collected(scratch: Path) -> dict[str, Any]:
    """Return the result that follows from a script's files and log so far."""
    result: dict[str, Any] = json.loads(_get(scratch / "collected.json") or "{}")
    return result


def write_comparison(scratch: Path, comparison: Comparison) -> None:
    """Request that the ranks compare their point with the others of its sweep."""
    _put(scratch / "halving.json", comparison.model_dump_json())


def read_comparison(scratch: Path) -> Comparison | None:
    """Return the requested comparison, or None."""
    found = _get(scratch / "halving.json")
    return None if found is None else Comparison.model_validate_json(found)


def write_verdict(scratch: Path, verdict: Verdict) -> None:
    """Record how the point ranked, and whether it stops early."""
    _put(scratch / "verdict.json", verdict.model_dump_json())


def read_verdict(scratch: Path) -> Verdict | None:
    """Return the newest verdict, or None."""
    found = _get(scratch / "verdict.json")
    return None if found is None else Verdict.model_validate_json(found)


class RankStatus(BaseModel):
    """The progress of the training. Rank 0 writes it, and the launcher copies it into the attempt's record."""

    training_started_at: datetime | None = None
    resumed_from_step: int = 0
    restored_step: int | None = None
    repeats_from_step: int | None = None
    saved_at: datetime | None = None
    starts_over: bool = False
    """True if the script does not load its checkpoint, so that each attempt starts over."""
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
    """Write a file atomically."""
    part = path.with_name(f".{path.name}")
    part.write_text(content)
    part.replace(path)


def _get(path: Path) -> str | None:
    """Return the content of a file, or None if it does not exist."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


LOOPBACK = "127.0.0.1"

STORE_TIMEOUT = timedelta(hours=24)
"""Timeout of one request. A peer that prepares data may take hours; a dead or hanging peer is detected by its missing
heartbeats instead."""


def serve_store(address: str, port: int = 0) -> "TCPStore":
    """Serve a store at one of this machine's addresses while the returned object exists. Port 0 picks a free port.

    Another multi-tenant store at the same port in this process, such as that of PyTorch's rendezvous, shares this
    server. Raises OSError if the address cannot be used.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C++

    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen()
        return TCPStore(
            address,
            listening.getsockname()[1],
            is_master=True,
            timeout=STORE_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listening.detach(),  # the store closes it
        )


def connect_store(address: str, port: int) -> "TCPStore":
    """Return a new connection to a store. On a shared one, a thread that waits would block the others."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C++

    return TCPStore(address, port, is_master=False, timeout=STORE_TIMEOUT, wait_for_workers=False)


def loopback_sockets() -> dict[str, str]:
    """Return the variables that make the ranks of one node connect over loopback only."""
    return sockets_of_interface("lo" if sys.platform == "linux" else "lo0")


def sockets_of_interface(name: str) -> dict[str, str]:
    """Return the variables that make ranks listen on one network interface only.

    By default, Gloo uses the address that the machine's name resolves to, and NCCL every interface it finds. NCCL takes
    a name as a prefix unless it starts with `=` (NCCL's documentation, Environment Variables), and connects over
    sockets even if its data goes over EFA. HCCL's HCCL_SOCKET_IFNAME is not set, because its format is not documented
    and could not be tested here.
    """
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
