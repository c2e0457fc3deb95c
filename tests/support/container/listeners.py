"""The sockets of a running job that other machines could reach: a port scan, seen from inside."""

import contextlib
import ipaddress
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

_LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp (proc_net_tcp.txt of the Linux kernel)."""


class Listener(NamedTuple):
    """A listening TCP socket."""

    process: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.process} at {self.address}:{self.port}"


def listeners(pid: int) -> list[Listener]:
    """Return the listening TCP sockets of a process and its descendants."""
    root = psutil.Process(pid)
    places = _listening(pid)
    found = []
    for process in (root, *root.children(recursive=True)) if places else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [Listener(process.name(), *places[inode]) for inode in _sockets(process.pid) if inode in places]
    return found


def _listening(pid: int) -> Mapping[str, tuple[str, int]]:
    """Return address and port of each listening socket in the process's network, by inode.

    psutil would read the machine's tables once for each process, which takes ten milliseconds each time after a test
    with hundreds of recently closed connections.
    """
    places = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # the process has ended, or the machine has no IPv6
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN:
                    address, _, port = fields[1].partition(":")
                    places[fields[9]] = (_address(address), int(port, 16))
    return places


def _address(text: str) -> str:
    """Parse the kernel's format: words of four bytes, each in this machine's byte order."""
    words = (bytes.fromhex(text[place : place + 8]) for place in range(0, len(text), 8))
    packed = b"".join(word if sys.byteorder == "big" else word[::-1] for word in words)
    return str(ipaddress.ip_address(packed))


def _sockets(pid: int) -> Iterator[str]:
    """Yield the inodes of a process's sockets."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has been closed
                if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry)):  # noqa: PTH115 - it is no path
                    yield found[1]


def open_to_the_network(pid: int) -> list[str]:
    """Return the listening sockets that other machines could reach."""
    return [str(one) for one in listeners(pid) if not is_loopback(one.address)]


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool((mapped or parsed).is_loopback)
