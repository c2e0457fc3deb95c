"""How busy a node's accelerators are, and for how long they have done nothing: looked at every ten seconds.

Once a minute the mean goes to the job's log, as a JSON line of which CloudWatch makes a metric, and to the run's
`utilization/N.jsonl`:

    {"accelerator_utilization_percent": 87.5, "accelerator_memory_percent": 61.2, "accelerators": 8, "node": 0}

The tool that comes with the accelerator's driver is asked: nvidia-smi, or hl-smi, whose options are those of Habana's
System Management Interface guide and were not tried on a Gaudi [?]. Of a job on CPUs the kernel says how much of them
its processes took; that is not logged, since the metric is of cards. Where there is no tool, or it fails, nothing is
said and the job does not notice.
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
"""The time that a line of the log and of the record stands for."""

LOOKS = 6
"""Looks in that time: a tool says what the cards do at that moment."""

TOOL_TIMEOUT_SECONDS = 10.0

IDLE_PERCENT = 1.0
"""A card that is less busy than that does nothing."""

IDLE_CPUS = 0.1
"""A job on CPUs does nothing where its processes take less than so much of one: launcher and waiting ranks look around
now and then."""

_TOOLS = {
    "hpu": ["hl-smi", "-Q", "utilization.aip,memory.used,memory.total", "-f", "csv,noheader"],
    "cuda": ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used,memory.total", "--format=csv,noheader"],
}
"""The tool of each kind of accelerator: it prints a line for each, with per cent, memory used and memory in
all, with or without units."""

_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a node's accelerators do at a moment; of several looks: their means."""

    utilization_percent: float
    memory_percent: float
    accelerators: int
    is_busy: bool
    """True where any of them does anything."""


@dataclass(frozen=True, kw_only=True)
class NodeUse:
    """What a node tells the main one of its accelerators."""

    utilization_percent: float
    memory_percent: float
    idle_seconds: float
    """The time for which all of them have done nothing."""


class Utilization:
    """Looks at this node's accelerators in a thread of its own, and keeps what it saw: a context manager."""

    def __init__(
        self,
        accelerator: str,
        *,
        node: int,
        interval_seconds: float = INTERVAL_SECONDS,
        limit_seconds: float = 0.0,
    ) -> None:
        """`limit_seconds`: it looks several times in what the accelerators may idle; 0: there is no limit."""
        self.other_nodes: Callable[[], Iterable[NodeUse]] = tuple
        """Returns what the other nodes have told last: what is kept for the record is of all together."""
        self._look = _sensor(accelerator)
        self._is_logged = accelerator in _TOOLS
        self._node = node
        self._pause_seconds = min(interval_seconds / LOOKS, limit_seconds / 3 or interval_seconds)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._minute: list[Look] = []
        self._newest: NodeUse | None = None
        self._busy_at = time.monotonic()
        self._lines: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._run, name="utilization", daemon=True)

    def __enter__(self) -> "Utilization":
        self._busy_at = time.monotonic()
        if self._look is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(1.0)  # a tool that hangs must not hold the job's end up
        with self._lock:
            if self._minute and self._newest is not None:
                self._end_minute(self._newest)  # what there is of it

    @property
    def newest(self) -> NodeUse | None:
        """Return what this node's accelerators have done in the last minute; None where nothing is known of them."""
        with self._lock:
            return self._newest

    def idle_seconds(self) -> float:
        """Return for how long all accelerators of all nodes have done nothing; 0 where any node says nothing."""
        own = self.newest
        return 0.0 if own is None else min([own.idle_seconds, *(node.idle_seconds for node in self.other_nodes())])

    def record(self, *, working_since: datetime | None) -> CardUse | None:
        """Return what is kept of all nodes' accelerators for the attempt's record; None where nothing is known."""
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
        """Return a line for each minute so far: `time`, the means over all nodes, and the main node's idle seconds."""
        with self._lock:
            return list(self._lines)

    def _run(self) -> None:
        assert self._look is not None  # noqa: S101 - the thread runs only where there is one
        try:
            while not self._over.wait(self._pause_seconds):
                self._keep(self._look())
        except Exception as error:  # noqa: BLE001 - a job must not end for idle cards by what was seen before
            if not self._over.is_set():
                with self._lock:
                    self._newest = None  # what failed once is asked no more, and nothing is judged by it
                log.warning("warning: %s; from here on it is not known whether cards are idle", error)

    def _keep(self, look: Look) -> None:
        now = time.monotonic()
        with self._lock:
            self._minute.append(look)
            if look.is_busy:
                self._busy_at = now
            minute = mean_of(self._minute[-LOOKS:])
            self._newest = NodeUse(
                utilization_percent=minute.utilization_percent,
                memory_percent=minute.memory_percent,
                idle_seconds=now - self._busy_at,
            )
            # The first look stands for itself: a run of some seconds has its line too, and a panel something to show.
            if self._lines and len(self._minute) < LOOKS:
                return
            self._end_minute(self._newest)
        if self._is_logged:
            log.info("%s", json.dumps(_log_line(minute, node=self._node)))

    def _end_minute(self, own: NodeUse) -> None:
        nodes = [own, *self.other_nodes()]
        idle = self._pause_seconds * sum(not look.is_busy for look in self._minute)
        self._minute = []
        self._lines.append(
            {
                "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                UTILIZATION_KEY: round(_mean(node.utilization_percent for node in nodes), 1),
                MEMORY_KEY: round(_mean(node.memory_percent for node in nodes), 1),
                "idle_seconds": round(idle, 3),
            }
        )


def _log_line(look: Look, *, node: int) -> dict[str, float | int]:
    return {
        UTILIZATION_KEY: round(look.utilization_percent, 1),
        MEMORY_KEY: round(look.memory_percent, 1),
        "accelerators": look.accelerators,
        "node": node,
    }


def mean_of(looks: list[Look]) -> Look:
    return Look(
        utilization_percent=_mean(look.utilization_percent for look in looks),
        memory_percent=_mean(look.memory_percent for look in looks),
        accelerators=looks[-1].accelerators,
        is_busy=any(look.is_busy for look in looks),
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _sensor(accelerator: str) -> "Callable[[], Look] | None":
    """Return what looks at this node's accelerators, and raises if it cannot; None where there is no such tool."""
    if accelerator == "cpu":
        return Cpus().look
    command = _TOOLS[accelerator]
    tool = shutil.which(command[0])
    return functools.partial(ask_tool, [tool, *command[1:]]) if tool else None


def ask_tool(command: list[str]) -> Look:
    """Ask the tool of the cards' driver. Raises RuntimeError with its name if it fails, hangs or lists no cards."""
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
        return read(done.stdout)
    except subprocess.CalledProcessError as error:
        words = error.stdout.strip().splitlines() or ["it printed nothing"]
        reason = f"exit code {error.returncode}: {words[0]}"
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    raise RuntimeError(f"{Path(command[0]).name} failed: {reason}")


def read(output: str) -> Look:
    """Return the mean over the accelerators that a tool has listed. Raises ValueError on what is no such list."""
    cards = [[_number(part) for part in line.split(",")] for line in output.splitlines() if line.strip()]
    if not cards or any(len(card) != 3 or not card[2] for card in cards):
        raise ValueError("no accelerators are listed")
    return Look(
        utilization_percent=_mean(card[0] for card in cards),
        memory_percent=100 * sum(card[1] for card in cards) / sum(card[2] for card in cards),
        accelerators=len(cards),
        is_busy=max(card[0] for card in cards) >= IDLE_PERCENT,
    )


def _number(text: str) -> float:
    match = _NUMBER.search(text)
    if match is None:
        raise ValueError(f"'{text}' is no number")
    return float(match[0])


class Cpus:
    """The CPUs that this process and those it started, ranks and theirs, have taken since the last look."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._memory_bytes = psutil.virtual_memory().total
        self._seconds = self._taken()[0]
        self._at = time.monotonic()

    def look(self) -> Look:
        seconds, memory_bytes = self._taken()
        now = time.monotonic()
        # A process that ended without being waited for takes its time with it: never below 0.
        taken = max(0.0, seconds - self._seconds) / max(1e-3, now - self._at)
        self._seconds, self._at = seconds, now
        return Look(
            utilization_percent=min(100.0, 100 * taken / cpus()),
            memory_percent=min(100.0, 100 * memory_bytes / self._memory_bytes),
            accelerators=cpus(),
            is_busy=taken >= IDLE_CPUS,
        )

    def _taken(self) -> tuple[float, int]:
        """Return the seconds and the bytes of memory that all of them have taken."""
        seconds, memory_bytes = 0.0, 0
        for process in (self._process, *self._process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                seconds += sum(process.cpu_times()[:4])  # user and system, its own and of children that have ended
                memory_bytes += process.memory_info().rss
        return seconds, memory_bytes
