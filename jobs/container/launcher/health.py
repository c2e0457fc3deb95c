"""Check the health of a node before its ranks start. The attempt names a bad node, and ends with 75.

The check counts the cards, compares Gaudi's driver with the image's release, and runs a process on each card that
multiplies and all-reduces for some seconds (jobs.container.launcher.health_rank). The host of a bad node finds a file
on /scratch and shuts down (infra/compute/boot/bad_node.sh), so that the next attempt gets another node.
"""

import contextlib
import importlib.metadata
import json
import logging
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jobs.container.accelerator import Accelerator
from jobs.container.channel import LOOPBACK, loopback_sockets, serve_store
from jobs.container.instance import InstanceMetadata, cpus
from jobs.container.launcher.attempt import Attempt
from jobs.container.launcher.nodes import Nodes
from jobs.container.launcher.outcome import End, of_node, retried
from jobs.container.launcher.request import Launch, Node
from jobs.container.rank import LAUNCHER_PID_VARIABLE
from jobs.spec.launcher_options import BAD_NODE_FILE, MATMUL_FLOOR, Health

log = logging.getLogger("trainyard")

START_SECONDS = 180.0
"""Time in addition to the measurement, in which the check's processes load PyTorch and connect their cards."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of the process on one card. None if the process ended before a measurement."""

    teraflops: float | None = None
    gigabytes_per_second: float | None = None
    fault: str | None = None


def check_nodes(attempt: Attempt) -> End | None:
    """Check this node and wait for the others. Returns how the attempt ends if a node is bad, else None."""
    launch = attempt.launch
    seconds = launch.options.health.seconds_on(attempt.accelerator.name, on_instance=launch.on_instance)
    if not seconds:
        return None
    own = _check_this_node(attempt, seconds=seconds)
    return own if attempt.nodes is None else _wait_until_all_healthy(attempt.nodes, launch.node, own, seconds=seconds)


def _check_this_node(attempt: Attempt, *, seconds: float) -> End | None:
    launch, accelerator = attempt.launch, attempt.accelerator
    started = time.monotonic()
    health = launch.options.health.with_floors_of(launch.instance, accelerator.name)
    faults = static_faults(launch, accelerator)
    measured: list[Measured] = []
    if not faults:
        measured = measure(launch.nproc_per_node, accelerator, attempt.scratch, seconds=seconds)
        faults = measured_faults(measured, health, card=_card(accelerator))
    took = time.monotonic() - started
    if not faults:
        log.info("health: node %s is healthy: %s; %.0f s", launch.node.index, summary(measured, health), took)
        return None
    name = node_name(launch)
    log.info("health: %s is bad after %.0f s: %s", name, took, "; ".join(faults))
    if launch.on_instance:
        with contextlib.suppress(OSError):  # the folder may not exist
            (attempt.disks / BAD_NODE_FILE).write_text(f"{name}: {'; '.join(faults)}\n")  # makes the host shut down
    return retried(f"{name} is bad: {'; '.join(faults)}", "lost")


def _wait_until_all_healthy(nodes: Nodes, node: Node, own: End | None, *, seconds: float) -> End | None:
    """Wait until all nodes have reported that they are healthy. `own` is how the attempt ends if this node is bad.

    Returns how the attempt ends if a node is bad. Without this wait, ranks would time out on those of a bad node.
    """
    if own is not None:
        nodes.send_end(own)
        return own
    if not node.is_main:
        nodes.send_healthy()
    others = set(range(1, node.nnodes))
    deadline = time.monotonic() + seconds + 2 * START_SECONDS
    while time.monotonic() < deadline:
        if nodes.order is not None:
            return retried(f"the main node ended the attempt: {nodes.order.reason}", "ended")
        for index, end in sorted(nodes.ends.items()):
            found = of_node(index, end)
            nodes.send_end(found)
            return found
        if node.is_main and nodes.healthy == others:
            nodes.send_healthy()
            return None
        if nodes.may_start:
            return None
        time.sleep(0.05)
    silent = ", ".join(f"node {index}" for index in (sorted(others - nodes.healthy) if node.is_main else [0]))
    end = retried(f"{silent} did not report its health", "lost")
    nodes.send_end(end)
    return end


def static_faults(launch: Launch, accelerator: Accelerator) -> list[str]:
    """Return the faults of a node that show before anything runs on its cards."""
    faults = []
    expected = launch.instance.accelerators
    if launch.on_instance and accelerator.name == launch.instance.accelerator and accelerator.devices < expected:
        faults.append(f"it has {accelerator.devices} of the {expected} cards of a {launch.instance.name}")
    if accelerator.name == "hpu" and (fault := driver_fault(driver_version(), plugin_version())):
        faults.append(fault)
    return faults


def driver_fault(driver: str | None, release: str | None) -> str | None:
    """Return how the host's driver and the image's release differ. None if they match, or if one is unknown."""
    if driver is None or release is None:
        log.info("health: driver %s, release %s: not compared", driver or "unknown", release or "unknown")
        return None
    # Patch versions of one release work together: docs.habana.ai, Support Matrix, has a row for each minor release.
    if driver.split(".")[:2] == release.split(".")[:2]:
        return None
    return f"its driver is {driver}, but the image's release is {release}"


def driver_version() -> str | None:
    """Return the version of Gaudi's driver, which hl-smi prints as `Driver Version: 1.21.0-ad17d8c`."""
    try:
        done = subprocess.run(["hl-smi"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("warning: hl-smi failed: %s", error)
        return None
    found = re.search(r"^\W*Driver Version:\s*(\d+\.\d+\.\d+)", done.stdout, re.MULTILINE)
    if found is None:
        words = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()
        log.warning("warning: hl-smi reported no driver version (exit code %s): %s", done.returncode, words[0])
    return found[1] if found else None


def plugin_version() -> str | None:
    try:
        return importlib.metadata.version("habana-torch-plugin")
    except importlib.metadata.PackageNotFoundError:
        return None


def measure(nproc: int, accelerator: Accelerator, scratch: Path, *, seconds: float) -> list[Measured]:
    """Run one process on each of `nproc` cards, all at the same time. Returns their measurements."""
    folder = scratch / "health"
    folder.mkdir(exist_ok=True)
    store = serve_store(LOOPBACK)
    files = [folder / f"{number}.json" for number in range(nproc)]
    environment = {**os.environ, **_environment(accelerator, nproc=nproc, port=store.port)}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, file in enumerate(files):
            command = [sys.executable, "-m", "jobs.container.launcher.health_rank", str(seconds), str(file)]
            place = {"RANK": str(number), "LOCAL_RANK": str(number)}
            processes.append(subprocess.Popen(command, env={**environment, **place}))
        deadline = time.monotonic() + seconds + START_SECONDS
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes):
                deadline = min(deadline, time.monotonic() + 5)  # the others wait for the failed one
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [_read(file, process.returncode) for file, process in zip(files, processes, strict=True)]


def measured_faults(measured: list[Measured], health: Health, *, card: str) -> list[str]:
    """Return faults: cards that failed or are too slow, and a slow connection between the cards."""
    reached = [found.teraflops for found in measured if found.teraflops is not None]
    least = health.min_teraflops
    if least is None and len(reached) > 1:
        least = MATMUL_FLOOR * statistics.median(reached)
    faults = []
    for number, found in enumerate(measured):
        if found.fault:
            faults.append(f"{card} {number} {found.fault}")
        if found.teraflops is not None and least is not None and found.teraflops < least:
            faults.append(f"{card} {number} multiplies at {found.teraflops:.3g} TFLOP/s, less than {least:.3g}")
    rates = [found.gigabytes_per_second for found in measured if found.gigabytes_per_second is not None]
    floor = health.min_gigabytes_per_second
    if rates and floor is not None and min(rates) < floor:
        faults.append(f"an all-reduce among its {card}s runs at {min(rates):.3g} GB/s, less than {floor:.3g}")
    return faults


def summary(measured: list[Measured], health: Health) -> str:
    """Return the measurements of a healthy node as text, with the required minimum."""
    slowest = min(found.teraflops for found in measured if found.teraflops is not None)
    floor = f" (at least {health.min_teraflops:.3g})" if health.min_teraflops is not None else ""
    text = f"{slowest:.3g} TFLOP/s on the slowest{floor}"
    rates = [found.gigabytes_per_second for found in measured if found.gigabytes_per_second is not None]
    if rates:
        floor = f" (at least {health.min_gigabytes_per_second:.3g})" if health.min_gigabytes_per_second else ""
        text += f", all-reduce at {min(rates):.3g} GB/s{floor}"
    return text


def node_name(launch: Launch) -> str:
    """Return the node's number, with its instance id or, elsewhere, its host name."""
    metadata = InstanceMetadata.of(os.environ, on_instance=launch.on_instance)
    instance = metadata.instance_id() if metadata is not None else None
    return f"node {launch.node.index} ({instance or socket.gethostname()})"


def _environment(accelerator: Accelerator, *, nproc: int, port: int) -> Mapping[str, str]:
    return {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store exists already; no rank serves one
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cpus() // nproc))),
        LAUNCHER_PID_VARIABLE: str(os.getpid()),
        **loopback_sockets(),
        **accelerator.environment,
    }


def _read(file: Path, code: int) -> Measured:
    try:
        found = Measured(**json.loads(file.read_bytes()))
    except FileNotFoundError:
        found = Measured()
    if code == 0:
        return found
    how = "did not finish" if code == -9 else f"failed with exit code {code}"
    during = "multiplication" if found.teraflops is None else "all-reduce"
    return Measured(teraflops=found.teraflops, fault=found.fault or f"{how} during the {during} of the health check")


def _card(accelerator: Accelerator) -> str:
    return {"hpu": "HPU", "cuda": "GPU", "cpu": "rank"}[accelerator.name]
