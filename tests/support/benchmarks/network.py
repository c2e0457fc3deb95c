"""A network of nodes on one machine: network namespaces on a bridge, like instances in a subnet.

Everything is inside the benchmark's own namespaces, which the kernel deletes with their last process. So this
machine's network, mounts and processes stay unchanged, however a benchmark ends.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

OWN_NAMESPACES = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
TEMPORARY = Path("/run")
"""Once a network exists, this folder is in memory and disappears with the network."""

_SUBNET = "10.210.0"
OUTSIDE = f"{_SUBNET}.254"
"""The benchmark's address, at which nodes reach services outside the job, such as S3."""

_PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "mount": "util-linux"}
"""Required programs, each with its package."""

_TAKE_NAME = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'


def lacking() -> str:
    """Return what this machine lacks for network namespaces, or an empty string."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [f"{program} ({package})" for program, package in _PROGRAMS.items() if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    probe = "mount -t tmpfs none /run && ip link add hub type bridge && ip netns add node && ip link add port type veth"
    tried = subprocess.run([*OWN_NAMESPACES, "sh", "-c", probe], capture_output=True, text=True, check=False)
    return f"this machine permits no network namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def in_own_namespaces(command: Sequence[str]) -> int:
    """Run `command` in new namespaces and return its exit code. Its processes end with it, at Ctrl-C or at SIGTERM."""
    signal.signal(signal.SIGTERM, _end)
    # In a separate session, so that Ctrl-C reaches this process only and no launcher.
    inner = subprocess.Popen([*OWN_NAMESPACES, *command], start_new_session=True)
    try:
        return inner.wait()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        inner.kill()  # --kill-child also kills the first process of the namespaces, which ends all others
        inner.wait()


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


class Network:
    """A network of `nnodes` nodes. Create it once, inside `in_own_namespaces`."""

    def __init__(self, nnodes: int) -> None:
        _run("mount", "-t", "tmpfs", "none", str(TEMPORARY))  # iproute2 keeps namespaces there
        self._name_all(nnodes)
        _ip("link set lo up")
        _ip("link add hub type bridge")
        _ip(f"addr add {OUTSIDE}/24 dev hub")
        _ip("link set hub up")
        for index in range(nnodes):
            name = self._name(index)
            _ip(f"netns add {name}")
            _ip(f"link add {self._port(index)} type veth peer name eth0 netns {name}")
            _ip(f"link set {self._port(index)} master hub up")
            _ip(f"-n {name} addr add {self.address(index)}/24 dev eth0")
            for link in ("lo", "eth0"):
                _ip(f"-n {name} link set {link} up")

    def address(self, index: int) -> str:
        return f"{_SUBNET}.{index + 1}"

    def on_node(self, index: int) -> Sequence[str]:
        """Return a prefix that runs a command on that node: the same process, but another host."""
        name = self._name(index)
        return ("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", _TAKE_NAME, name)

    def kill(self, index: int) -> None:
        """Kill all processes of the node at once, like a power failure."""
        for pid in self.processes(index):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, index: int) -> list[int]:
        return [int(pid) for pid in _ip(f"netns pids {self._name(index)}").split()]

    def cut_off(self, index: int) -> None:
        """Disconnect the node like a pulled cable: packets are lost, and neither side gets an error."""
        _ip(f"link set {self._port(index)} down")

    def mend(self, index: int) -> None:
        _ip(f"link set {self._port(index)} up")

    def _name_all(self, nnodes: int) -> None:
        """Make host names resolve, as in an EC2 subnet with DNS host names; gloo depends on it."""
        hosts = TEMPORARY / "hosts"
        names = ["127.0.0.1 localhost", *(f"{self.address(index)} {self._name(index)}" for index in range(nnodes))]
        hosts.write_text("".join(f"{line}\n" for line in names))
        _run("mount", "--bind", str(hosts), "/etc/hosts")

    def _name(self, index: int) -> str:
        return f"node-{index}"

    def _port(self, index: int) -> str:
        return f"port-{index}"


def _ip(arguments: str) -> str:
    return _run("ip", *arguments.split())


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
