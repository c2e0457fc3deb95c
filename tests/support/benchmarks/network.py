"""A network of nodes on one machine (network namespaces on a bridge, like instances in a subnet), and jobs on it.

Everything is inside the benchmark's own namespaces, which the kernel deletes with their last process. So this
machine's network, mounts and processes stay unchanged, however a benchmark ends.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from tests.support.container.launching import Launched, Run
from tests.support.container.recipes import Flags

OWN_NAMESPACES = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
TEMPORARY = Path("/run")
"""Once a network exists, this folder is in memory and disappears with the network."""

_SUBNET = "10.210.0"
OUTSIDE = f"{_SUBNET}.254"
"""The benchmark's address, at which nodes reach services outside the job, such as S3."""

_PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "mount": "util-linux"}
"""Required programs, each with its package."""

_TAKE_NAME = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'


def missing_requirements() -> str:
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
        """Return a prefix that runs a command on that node, in the same process but on another host."""
        name = self._name(index)
        return ("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", _TAKE_NAME, name)

    def kill(self, index: int) -> None:
        """Kill all processes of the node at once, like a power failure."""
        for pid in self.processes(index):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, index: int) -> list[int]:
        return [int(pid) for pid in _ip(f"netns pids {self._name(index)}").split()]

    def disconnect(self, index: int) -> None:
        """Disconnect the node like a pulled cable: packets are lost, and neither side gets an error."""
        _ip(f"link set {self._port(index)} down")

    def reconnect(self, index: int) -> None:
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


Kind = Literal["multi-node", "node-group"]
"""A multi-node job of AWS Batch, or an array of one-node jobs that find each other through S3."""

HANG_TIMEOUT_SECONDS = 20
PATIENCE_SECONDS = 120.0
"""Time limit for all launchers to exit after one is interrupted."""


class Job:
    """One run on the first nodes of a network."""

    def __init__(self, network: Network, kind: Kind, nnodes: int, run: Run, *, flags: Flags, logs: Path | None) -> None:
        self.kind = kind
        self.nnodes = nnodes
        self.run = run
        self.nodes: list[Launched] = []
        self.least = nnodes
        """Minimum number of nodes on which a node group trains."""
        self._network = network
        self._flags = flags
        self._logs = logs

    def start(self, attempt: int) -> None:
        self.nodes = self.started(range(self.nnodes), attempt)

    def started(self, indices: Iterable[int], attempt: int, *options: str) -> list[Launched]:
        """Start and return the launchers of these nodes."""
        return [
            self.run.start(
                *self._flags,
                attempt=attempt,
                options=[f"--hang-timeout-seconds={HANG_TIMEOUT_SECONDS}", *self._options(), *options],
                within=self._network.on_node(index),
                **self._batch(index),
            )
            for index in indices
        ]

    def ended(self) -> dict[int, float]:
        """Return when each launcher exited, and kill those that did not exit in time."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        times: dict[int, float] = {}
        while len(times) < self.nnodes and time.monotonic() < deadline:
            for index, node in enumerate(self.nodes):
                if index not in times and node.process.poll() is not None:
                    times[index] = time.monotonic()
            time.sleep(0.05)
        for node in self.nodes:
            node.process.kill()
            node.wait()
        return times

    def keep_output(self, name: str) -> None:
        if self._logs is not None:
            self._logs.mkdir(exist_ok=True)
            for index, node in enumerate(self.nodes):
                text = f"{node.output}exit code {node.process.returncode}\n"
                (self._logs / f"{self.kind}-{self.nnodes}-{name.replace(' ', '-')}-node-{index}.log").write_text(text)

    def _options(self) -> list[str]:
        return [f"--rendezvous-min-nnodes={self.least}"] if self.kind == "node-group" else []

    def _batch(self, index: int) -> dict[str, Any]:
        """Return Batch's variables of a node or of an array's child. The main node does not get its own address."""
        job_id = self.run.location.key.strip("/")[-4:]
        if self.kind == "node-group":
            return {
                "AWS_BATCH_JOB_ID": f"{job_id}:{index}",
                "AWS_BATCH_JOB_ARRAY_INDEX": str(index),
                "AWS_BATCH_JOB_ARRAY_SIZE": str(self.nnodes),
            }
        variables = {
            "AWS_BATCH_JOB_ID": f"{job_id}#{index}",
            "AWS_BATCH_JOB_NUM_NODES": str(self.nnodes),
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
            "AWS_BATCH_JOB_NODE_INDEX": str(index),
        }
        if index:
            variables["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = self._network.address(0)
        return variables
