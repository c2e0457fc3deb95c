"""The EC2 instance that the launcher runs on: what its metadata service (IMDSv2) says, and its own disks.

Where nobody answers (a laptop, a job of several nodes, whose containers are kept from the metadata service, a hop limit
that is too low) there is no news, and no word about it: SIGTERM comes all the same.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from jobs.core.locations import S3Location
from jobs.core.queues import CAPACITY_NAMES, Capacity

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""The SDKs' own name for another address of the metadata service."""

DISABLED_VARIABLE = "AWS_EC2_METADATA_DISABLED"

_ENDPOINT = "http://169.254.169.254"
_ANSWER_SECONDS = 1.0
_TOKEN_SECONDS = 60

_END_SECONDS = 3.0
"""The time that ranks have to end after their launcher was killed: the kernel kills them with it."""


@dataclass(frozen=True, kw_only=True)
class SpotNotice:
    """EC2's notice that it takes the instance away."""

    action: str
    """terminate, stop or hibernate."""
    time: datetime

    def __str__(self) -> str:
        return f"Spot notice: {self.action} at {self.time.astimezone(timezone.utc):%H:%M:%SZ}"


class InstanceMetadata:
    """The instance's metadata service. No question to it raises, or takes longer than two seconds."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint.rstrip("/")
        # No proxy reaches a link-local address.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @classmethod
    def of(cls, environment: Mapping[str, str], *, on_instance: bool) -> "InstanceMetadata | None":
        """Return the service at the address that the environment names; None where there is none to ask."""
        if environment.get(DISABLED_VARIABLE, "").lower() == "true":
            return None
        endpoint = environment.get(ENDPOINT_VARIABLE) or (_ENDPOINT if on_instance else None)
        return cls(endpoint) if endpoint else None

    def capacity(self) -> Capacity | None:
        """Return what the instance is paid as, since a Spot queue may start On-Demand ones where Spot has none.

        None where nobody says, or where it is something else.
        """
        found = self._text("instance-life-cycle")
        return next((capacity for capacity in CAPACITY_NAMES if capacity == found), None)

    def zone(self) -> str | None:
        return self._text("placement/availability-zone")

    def instance_id(self) -> str | None:
        return self._text("instance-id")

    def local_ipv4(self) -> str | None:
        return self._text("local-ipv4")

    def spot_notice(self) -> SpotNotice | None:
        found = self._read("spot/instance-action")
        try:
            return SpotNotice(action=str(found["action"]), time=_time(found["time"])) if found else None
        except (KeyError, ValueError):
            return None

    def rebalance_recommended(self) -> bool:
        return self._read("events/recommendations/rebalance") is not None

    def _read(self, path: str) -> Mapping[str, str] | None:
        try:
            found = json.loads(self._text(path) or "null")
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def _text(self, path: str) -> str | None:
        """Ask with a token of its own, so that none can expire. None is also the answer of 404, which means no news."""
        try:
            token = self._ask("/latest/api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)})
            return self._ask(f"/latest/meta-data/{path}", "GET", {"X-aws-ec2-metadata-token": token.decode()}).decode()
        except (urllib.error.URLError, HTTPException, OSError, ValueError):
            return None

    def _ask(self, path: str, method: str, headers: Mapping[str, str]) -> bytes:
        request = urllib.request.Request(  # noqa: S310 - always http, to the instance itself
            self._endpoint + path, method=method, headers=dict(headers)
        )
        with self._opener.open(request, timeout=_ANSWER_SECONDS) as answer:
            content: bytes = answer.read()
        return content


def cpus() -> int:
    """Return the number of this machine's CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def capacity_paid(asked: Capacity | None, environment: Mapping[str, str], *, on_instance: bool) -> Capacity | None:
    """Return what the instance is paid as; what was asked for where it does not say."""
    if asked == "on-demand":
        return asked
    metadata = InstanceMetadata.of(environment, on_instance=on_instance)
    return (metadata.capacity() if metadata is not None else None) or asked


def zone(environment: Mapping[str, str], *, on_instance: bool) -> str | None:
    """Return the availability zone of the instance; None where it does not say."""
    metadata = InstanceMetadata.of(environment, on_instance=on_instance)
    return metadata.zone() if metadata is not None else None


def own_address(metadata: InstanceMetadata | None, s3_endpoint: str) -> str:
    """Return the address at which the other nodes reach this one.

    It is what EC2 says of the instance; elsewhere the address from which this machine talks to S3.
    """
    said = metadata.local_ipv4() if metadata is not None else None
    if said is not None:
        return said
    endpoint = urlsplit(s3_endpoint)
    return address_towards(endpoint.hostname, endpoint.port or (443 if endpoint.scheme == "https" else 80))


def address_towards(host: str | None, port: int) -> str:
    """Return the address of this machine from which it talks to another. Raises OSError where there is no way."""
    towards = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as talk:
        talk.connect(towards)  # sends nothing: the kernel only picks the way
        address: str = talk.getsockname()[0]
        return address


@contextlib.contextmanager
def scratch_folder(disks: Path, run: S3Location, *, node: int, on_instance: bool) -> Iterator[Path]:
    """Make a folder for what the attempt downloads and writes, and remove it at the end.

    Its path is the same in every attempt of a run, since checkpoints of scripts contain absolute paths. Only while a
    process of an earlier attempt still uses that folder is it another one. It is on the instance's own disks if the
    container has them at `disks`: they are larger and faster than its root volume.
    """
    # The nodes of one run share a machine on the emulator only: on instances all have the same path.
    text = str(run) if on_instance or not node else f"{run}#{node}"
    name = f"trainyard-{hashlib.sha256(text.encode()).hexdigest()[:8]}"  # short: sockets below it have 107 bytes
    temporary = Path(tempfile.gettempdir())
    folder, lock = None, None
    for place in [disks, temporary] if on_instance else [temporary]:
        with contextlib.suppress(OSError):  # there is no such folder, or it is not ours
            lock = _locked(place / name)
            folder = place / name if lock is not None else Path(tempfile.mkdtemp(prefix="trainyard-", dir=place))
            break
    folder = folder or Path(tempfile.mkdtemp(prefix="trainyard-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """Make the folder, or empty what a killed attempt has left of it, and return a lock on it that is to be closed.

    Return None if somebody else has it. Raises OSError if it cannot be made.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_uid == os.geteuid() and _is_same(folder, lock):
                if _is_left(folder):
                    for path in folder.iterdir():
                        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                    return lock
            elif not folder.exists():  # its attempt has ended just now, and removed it
                os.close(lock)
                continue
        except BlockingIOError:
            pass  # a launcher that lives
        except OSError:
            os.close(lock)
            raise
        os.close(lock)
        return None


def _is_same(folder: Path, opened: int) -> bool:
    try:
        return os.path.samestat(folder.lstat(), os.fstat(opened))
    except FileNotFoundError:
        return False


def _is_left(folder: Path) -> bool:
    """Return whether no process works below the folder. Those of a killed launcher have a moment to end."""
    until = time.monotonic() + _END_SECONDS
    while any(folder.iterdir()) and _is_used(folder):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _is_used(folder: Path) -> bool:
    below = f"{folder.resolve()}/"
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            for link in (process / "cwd", *(process / "fd").iterdir()):
                with contextlib.suppress(OSError):
                    if f"{link.readlink()}/".startswith(below):
                        return True
    return False


def _time(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
