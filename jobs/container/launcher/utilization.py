"""Sample the use of a node's accelerators every ten seconds, and measure how long they have been idle.

Once a minute the mean is written to the run's `utilization/N.jsonl` and to the job's log, as a JSON line from which
CloudWatch makes a metric:

    {"accelerator_utilization_percent": 87.5, "accelerator_memory_percent": 61.2, "accelerators": 8, "node": 0}

The samples come from the tool of the accelerator's driver: nvidia-smi, or hl-smi with the options from Habana's System
Management Interface guide, which were never tested on a Gaudi. For a job on CPUs, the samples are the CPU time of its
processes, which is not logged, because the metric is for cards. If the tool is missing or fails, the job continues
without samples.
"""

import contextlib
import functools
import json
import logging
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from jobs.container.instance import cpus
from jobs.core.output import MEMORY_KEY, UTILIZATION_KEY
from jobs.core.records import CardUse

log = logging.getLogger("trainyard")

INTERVAL_SECONDS = 60.0
"""The interval covered by one line of the log and of the record."""

SAMPLES = 6
"""Samples in that interval. A tool reports only the current moment."""

TOOL_TIMEOUT_SECONDS = 10.0

IDLE_PERCENT = 1.0
"""A card below this utilization is idle."""

IDLE_CPUS = 0.1
"""A job on CPUs is idle if its processes use less than this share of one CPU, which polling alone can take."""

_TOOLS = {
    "hpu": ["hl-smi", "-Q", "utilization.aip,memory.used,memory.total", "-f", "csv,noheader"],
    "cuda": ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used,memory.total", "--format=csv,noheader"],
}
"""The tool for each kind of accelerator. It prints one line per card: utilization in percent, memory used, and total
memory, with or without units."""

_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The use of a node's accelerators at one moment, or the mean of several samples."""

    utilization_percent: float
    memory_percent: float
    accelerators: int
    is_busy: bool
    """True if any accelerator is busy."""


@dataclass(frozen=True, kw_only=True)
class NodeUse:
    """The use of a node's accelerators, as reported to the main node."""

    utilization_percent: float
    memory_percent: float
    idle_seconds: float
    """How long all of them have been idle."""


class Utilization:
    """Samples the use of this node's accelerators in a thread, and keeps the results. A context manager."""

    def __init__(
        self,
        accelerator: str,
        *,
        node: int,
        interval_seconds: float = INTERVAL_SECONDS,
        limit_seconds: float = 0.0,
    ) -> None:
        """`limit_seconds` is the idle limit, or 0 for none. A small limit shortens the sampling interval."""
        self.other_nodes: Callable[[], Iterable[NodeUse]] = tuple
        """Returns the latest reports of the other nodes. The record is the mean over all nodes."""
        self._sample = _sensor(accelerator)
        self._is_logged = accelerator in _TOOLS
        self._node = node
        self._pause_seconds = min(interval_seconds / SAMPLES, limit_seconds / 3 or interval_seconds)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._minute: list[Sample] = []
        self._newest: NodeUse | None = None
        self._busy_at = time.monotonic()
        self._lines: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._run, name="utilization", daemon=True)

    def __enter__(self) -> "Utilization":
        self._busy_at = time.monotonic()
        if self._sample is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(1.0)  # a tool that hangs must not delay the end of the job
        with self._lock:
            if self._minute and self._newest is not None:
                self._end_minute(self._newest)  # the last, shorter interval

    @property
    def newest(self) -> NodeUse | None:
        """The use of this node's accelerators in the last minute, or None if it is unknown."""
        with self._lock:
            return self._newest

    def idle_seconds(self) -> float:
        """Return how long all accelerators of all nodes have been idle, or 0 if this node's use is unknown."""
        own = self.newest
        return 0.0 if own is None else min([own.idle_seconds, *(node.idle_seconds for node in self.other_nodes())])

    def record(self, *, working_since: datetime | None) -> CardUse | None:
        """Return the use of all nodes' accelerators for the attempt's record, or None if it is unknown."""
        with self._lock:
            if not self._lines:
                return None
            return CardUse(
                utilization_percent=self._lines[-1][UTILIZATION_KEY],
                memory_percent=self._lines[-1][MEMORY_KEY],
                mean_utilization_percent=round(_mean(line[UTILIZATION_KEY] for line in self._lines), 1),
                idle_seconds=round(
                    sum(
                        line["idle_seconds"]
                        for line in self._lines
                        if working_since is None or datetime.fromisoformat(line["time"]) > working_since
                    ),
                    1,
                ),
            )

    def lines(self) -> list[dict[str, Any]]:
        """Return a line for each minute so far: `time`, the means over all nodes, and this node's idle seconds."""
        with self._lock:
            return list(self._lines)

    def _run(self) -> None:
        assert self._sample is not None  # noqa: S101 - the thread runs only if there is a sensor
        try:
            while not self._over.wait(self._pause_seconds):
                self._keep(self._sample())
        except Exception as error:  # noqa: BLE001 - old samples must not end the job as idle
            if not self._over.is_set():
                with self._lock:
                    self._newest = None  # unknown from now on, because a failed tool is not run again
                log.warning("warning: %s; idle cards are no longer detected", error)

    def _keep(self, sample: Sample) -> None:
        now = time.monotonic()
        with self._lock:
            self._minute.append(sample)
            if sample.is_busy:
                self._busy_at = now
            minute = mean_of(self._minute[-SAMPLES:])
            self._newest = NodeUse(
                utilization_percent=minute.utilization_percent,
                memory_percent=minute.memory_percent,
                idle_seconds=now - self._busy_at,
            )
            # The first sample is a line by itself, so that even a run of a few seconds has a line.
            if self._lines and len(self._minute) < SAMPLES:
                return
            self._end_minute(self._newest)
        if self._is_logged:
            line = {
                UTILIZATION_KEY: round(minute.utilization_percent, 1),
                MEMORY_KEY: round(minute.memory_percent, 1),
                "accelerators": minute.accelerators,
                "node": self._node,
            }
            log.info("%s", json.dumps(line))

    def _end_minute(self, own: NodeUse) -> None:
        nodes = [own, *self.other_nodes()]
        idle = self._pause_seconds * sum(not sample.is_busy for sample in self._minute)
        self._minute = []
        self._lines.append(
            {
                "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                UTILIZATION_KEY: round(_mean(node.utilization_percent for node in nodes), 1),
                MEMORY_KEY: round(_mean(node.memory_percent for node in nodes), 1),
                "idle_seconds": round(idle, 3),
            }
        )


def mean_of(samples: list[Sample]) -> Sample:
    return Sample(
        utilization_percent=_mean(sample.utilization_percent for sample in samples),
        memory_percent=_mean(sample.memory_percent for sample in samples),
        accelerators=samples[-1].accelerators,
        is_busy=any(sample.is_busy for sample in samples),
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _sensor(accelerator: str) -> "Callable[[], Sample] | None":
    """Return a function that takes a sample of this node's accelerators, or None if its tool is not installed."""
    if accelerator == "cpu":
        return Cpus().sample
    command = _TOOLS[accelerator]
    tool = shutil.which(command[0])
    return functools.partial(run_tool, [tool, *command[1:]]) if tool else None


def run_tool(command: list[str]) -> Sample:
    """Run a driver's tool. Raises RuntimeError with the tool's name if it fails, hangs or lists no cards."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TOOL_TIMEOUT_SECONDS,
            check=True,
        )
        return parse(done.stdout)
    except subprocess.CalledProcessError as error:
        words = error.stdout.strip().splitlines() or ["it printed nothing"]
        reason = f"exit code {error.returncode}: {words[0]}"
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    raise RuntimeError(f"{Path(command[0]).name} failed: {reason}")


def parse(output: str) -> Sample:
    """Return the mean over the accelerators in a tool's output. Raises ValueError if the output cannot be parsed."""
    cards = [[_number(part) for part in line.split(",")] for line in output.splitlines() if line.strip()]
    if not cards or any(len(card) != 3 or not card[2] for card in cards):
        raise ValueError("it listed no accelerators")
    return Sample(
        utilization_percent=_mean(card[0] for card in cards),
        memory_percent=100 * sum(card[1] for card in cards) / sum(card[2] for card in cards),
        accelerators=len(cards),
        is_busy=max(card[0] for card in cards) >= IDLE_PERCENT,
    )


def _number(text: str) -> float:
    match = _NUMBER.search(text)
    if match is None:
        raise ValueError(f"'{text}' is not a number")
    return float(match[0])


class Cpus:
    """The CPU time of this process and all its descendants since the last sample."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._memory_bytes = psutil.virtual_memory().total
        self._seconds = self._taken()[0]
        self._at = time.monotonic()

    def sample(self) -> Sample:
        seconds, memory_bytes = self._taken()
        now = time.monotonic()
        # The time of a process that ended without being waited for is lost, so the difference may be negative.
        taken = max(0.0, seconds - self._seconds) / max(1e-3, now - self._at)
        self._seconds, self._at = seconds, now
        return Sample(
            utilization_percent=min(100.0, 100 * taken / cpus()),
            memory_percent=min(100.0, 100 * memory_bytes / self._memory_bytes),
            accelerators=cpus(),
            is_busy=taken >= IDLE_CPUS,
        )

    def _taken(self) -> tuple[float, int]:
        """Return the CPU seconds and the bytes of memory of all processes."""
        seconds, memory_bytes = 0.0, 0
        for process in (self._process, *self._process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                seconds += sum(process.cpu_times()[:4])  # user and system time, of the process and its ended children
                memory_bytes += process.memory_info().rss
        return seconds, memory_bytes
