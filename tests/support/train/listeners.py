"""Which sockets of a running job others could connect to: what a port scan would find, seen from inside."""

import contextlib
import ipaddress
from typing import NamedTuple

import psutil


class Listener(NamedTuple):
    """A listening TCP socket."""

    process: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.process} at {self.address}:{self.port}"


def listeners(pid: int) -> list[Listener]:
    """The listening TCP sockets of a process and all that it has started."""
    root = psutil.Process(pid)
    found = []
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [
                Listener(process.name(), connection.laddr.ip, connection.laddr.port)
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            ]
    return found


def open_to_the_network(pid: int) -> list[str]:
    """Those of them which are not on loopback alone."""
    return [str(one) for one in listeners(pid) if not is_loopback(one.address)]


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool((mapped or parsed).is_loopback)
