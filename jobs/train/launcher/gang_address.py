"""Where a member of a gang is reached by the others: an address that they share a network with, and a free port."""

import random
import socket
from urllib.parse import urlsplit

from jobs.train.launcher.instance_metadata import InstanceMetadata

_PORTS = range(20_000, 30_000)
"""Below those that Linux gives to outgoing connections, which come and go."""


def own_address(metadata: InstanceMetadata | None, s3_endpoint: str) -> str:
    """What EC2 says of the instance; elsewhere the address from which this machine talks to S3."""
    said = metadata.local_ipv4() if metadata is not None else None
    if said is not None:
        return said
    endpoint = urlsplit(s3_endpoint)
    port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
    towards = socket.getaddrinfo(endpoint.hostname, port, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as talk:
        talk.connect(towards)  # sends nothing: the kernel only picks the way
        address: str = talk.getsockname()[0]
        return address


def hold_port() -> socket.socket:
    """A port that nobody else gets until the socket is closed."""
    numbers = list(_PORTS)
    random.shuffle(numbers)
    for number in numbers:
        held = socket.socket()
        try:
            held.bind(("", number))
        except OSError:
            held.close()
        else:
            return held
    raise OSError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free")
