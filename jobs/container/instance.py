"""Use the launcher's EC2 instance: its metadata service (IMDSv2) and its own disks.

The metadata service does not answer on a laptop, in multi-node jobs (whose containers have no access to it), or if the
hop limit is too low. The job then runs without it and logs nothing, because SIGTERM still arrives.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from jobs.container.environment import task_zone
from jobs.core.locations import S3Location
from jobs.core.queues import CAPACITY_NAMES, Capacity

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""The AWS SDKs' variable for the address of the metadata service."""

DISABLED_VARIABLE = "AWS_EC2_METADATA_DISABLED"

_ENDPOINT = "http://169.254.169.254"
_ANSWER_SECONDS = 1.0
_TOKEN_SECONDS = 60

_END_SECONDS = 3.0
"""Time for the ranks of a killed launcher to end. The kernel kills them with the launcher."""


@dataclass(frozen=True, kw_only=True)
class SpotNotice:
    """EC2's notice that it reclaims the instance."""

    action: str
    """`terminate`, `stop` or `hibernate`."""
    time: datetime

    def __str__(self) -> str:
        return f"Spot notice: {self.action} at {self.time.astimezone(timezone.utc):%H:%M:%SZ}"


class InstanceMetadata:
    """The instance's metadata service. Requests never raise, and take at most two seconds."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint.rstrip("/")
        # No proxy reaches a link-local address.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @classmethod
    def of(cls, environment: Mapping[str, str], *, on_instance: bool) -> "InstanceMetadata | None":
        """Return the service at the address set in the environment, or None if there is no service."""
        if environment.get(DISABLED_VARIABLE, "").lower() == "true":
            return None
        endpoint = environment.get(ENDPOINT_VARIABLE) or (_ENDPOINT if on_instance else None)
        return cls(endpoint) if endpoint else None

    def capacity(self) -> Capacity | None:
        """Return how the instance is billed, or None if the service does not answer or reports another life cycle.

        A Spot queue may start On-Demand instances if there is no Spot capacity.
        """
        found = self._text("instance-life-cycle")
        return next((capacity for capacity in CAPACITY_NAMES if capacity == found), None)

    def instance_type(self) -> str | None:
        return self._text("instance-type")

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
        """Return one value, or None if there is none. Each request uses a new token, so that none expires."""
        try:
            token = self._request(
                "/latest/api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
            )
            return self._request(
                f"/latest/meta-data/{path}", "GET", {"X-aws-ec2-metadata-token": token.decode()}
            ).decode()
        except (urllib.error.URLError, HTTPException, OSError, ValueError):
            return None

    def _request(self, path: str, method: str, headers: Mapping[str, str]) -> bytes:
        request = urllib.request.Request(  # noqa: S310 - always http, to the instance
            self._endpoint + path, method=method, headers=dict(headers)
        )
        with self._opener.open(request, timeout=_ANSWER_SECONDS) as answer:
            content: bytes = answer.read()
        return content


def cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def billed_capacity(asked: Capacity | None, environment: Mapping[str, str], *, on_instance: bool) -> Capacity | None:
    """Return how the instance is billed, or the requested capacity if the instance does not report it."""
    if asked == "on-demand":
        return asked
    metadata = InstanceMetadata.of(environment, on_instance=on_instance)
    return (metadata.capacity() if metadata is not None else None) or asked


def found_type(planned: Sequence[str], environment: Mapping[str, str], *, on_instance: bool) -> str:
    """Return which of the planned instance types this instance has: the first if it does not report one of them.

    Asks only if several types are planned, and up to three times, because costs depend on it.
    """
    metadata = InstanceMetadata.of(environment, on_instance=on_instance) if len(planned) > 1 else None
    answers = (metadata.instance_type() for _ in range(3)) if metadata is not None else iter(())
    return next((found for found in answers if found is not None and found in planned), planned[0])


def zone(environment: Mapping[str, str], *, on_instance: bool) -> str | None:
    """Return the availability zone of the instance, or None if neither the instance nor ECS reports it.

    Nodes that start together cannot reach the instance's metadata service (infra/compute/user_data.py).
    """
    metadata = InstanceMetadata.of(environment, on_instance=on_instance)
    return (metadata.zone() if metadata is not None else None) or task_zone(environment)


def own_address(metadata: InstanceMetadata | None, s3_endpoint: str) -> str:
    """Return the address at which the other nodes reach this one.

    It is the address in EC2's metadata or, without metadata, the address from which this machine connects to S3.
    """
    address = metadata.local_ipv4() if metadata is not None else None
    if address is not None:
        return address
    endpoint = urlsplit(s3_endpoint)
    return source_address(endpoint.hostname, endpoint.port or (443 if endpoint.scheme == "https" else 80))


def source_address(host: str | None, port: int) -> str:
    """Return the address from which this machine connects to `host`. Raises OSError if there is no route."""
    target = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing; the kernel only chooses the route
        address: str = probe.getsockname()[0]
        return address


@contextlib.contextmanager
def scratch_folder(disks: Path, run: S3Location, *, node: int, on_instance: bool) -> Iterator[Path]:
    """Create a folder for the attempt's downloads and files, and remove it at the end.

    The path is the same in every attempt of a run, because checkpoints of scripts contain absolute paths. It differs
    only while a process of an earlier attempt still uses the folder. The folder is on the instance's own disks if they
    are mounted at `disks`, because they are larger and faster than the root volume.
    """
    # Nodes of a run share a machine only on the emulator. On instances, all nodes have the same path.
    text = str(run) if on_instance or not node else f"{run}#{node}"
    name = f"trainyard-{hashlib.sha256(text.encode()).hexdigest()[:8]}"  # short: a socket's path has at most 107 bytes
    temporary = Path(tempfile.gettempdir())
    folder, lock = None, None
    for place in [disks, temporary] if on_instance else [temporary]:
        with contextlib.suppress(OSError):  # the folder does not exist, or is not writable
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
    """Create the folder, or empty what a killed attempt left. Returns an open lock on it, for the caller to close.

    Returns None if another process uses the folder. Raises OSError if it cannot be created.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_uid == os.geteuid() and _is_same(folder, lock):
                if _wait_until_unused(folder):
                    for path in folder.iterdir():
                        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                    return lock
            elif not folder.exists():  # its attempt has just ended and removed it
                os.close(lock)
                continue
        except BlockingIOError:
            pass  # another launcher is running
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


def _wait_until_unused(folder: Path) -> bool:
    """Give the ranks of a killed launcher time to end. Returns whether no process uses the folder afterwards."""
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
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            for link in (process / "cwd", *(process / "fd").iterdir()):
                with contextlib.suppress(OSError):
                    if f"{link.readlink()}/".startswith(below):
                        return True
    return False


def _time(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
