"""The EC2 instance that the launcher runs on: what its metadata service (IMDSv2) says, and its own disks.

Where nobody answers (a laptop, a job of several nodes, whose containers are kept from the metadata service, a hop limit
that is too low) there is no news, and no word about it: SIGTERM comes all the same.
"""

import contextlib
import json
import shutil
import socket
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from jobs.contract.queues import MARKET, Capacity

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""The SDKs' own name for another address of the metadata service."""

DISABLED_VARIABLE = "AWS_EC2_METADATA_DISABLED"

_ENDPOINT = "http://169.254.169.254"
_ANSWER_SECONDS = 1.0
_TOKEN_SECONDS = 60


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
        return next((capacity for capacity in MARKET if capacity == found), None)

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
def scratch_folder(disks: Path, *, on_instance: bool) -> Iterator[Path]:
    """Make a folder for what the attempt downloads and writes, and remove it at the end.

    It lies on the instance's own disks where the container has them at `disks`: they are larger and faster than its
    root volume.
    """
    folder = None
    if on_instance:
        with contextlib.suppress(OSError):  # no such folder, or none of ours
            folder = Path(tempfile.mkdtemp(prefix="trainyard-", dir=disks))
    folder = folder or Path(tempfile.mkdtemp(prefix="trainyard-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _time(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
