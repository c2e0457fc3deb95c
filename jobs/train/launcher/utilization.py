"""How busy a node's accelerators are: the launcher logs one JSON line a minute, of which CloudWatch makes a metric.

    {"accelerator_utilization_percent": 87.5, "accelerator_memory_percent": 61.2, "accelerators": 8, "node": 0}

It asks the tool that comes with the accelerator's driver: nvidia-smi, or hl-smi, whose options are those of Habana's
System Management Interface guide and were not tried on a Gaudi [?]. Where there is no tool, or it fails, nothing is
logged and the job does not notice.
"""

import json
import logging
import re
import shutil
import subprocess
import threading
from types import TracebackType

from jobs.contract.log_lines import UTILIZATION_KEY

log = logging.getLogger("trainyard")

INTERVAL_SECONDS = 60.0

TOOL_TIMEOUT_SECONDS = 10.0

_TOOLS = {
    "hpu": ["hl-smi", "-Q", "utilization.aip,memory.used,memory.total", "-f", "csv,noheader"],
    "cuda": ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used,memory.total", "--format=csv,noheader"],
}
"""The tool of each kind of accelerator: it prints a line for each, with per cent, memory used and memory in
all, with or without units."""

_NUMBER = re.compile(r"\d+(\.\d+)?")


class UtilizationLog:
    """Logs how busy the accelerators are, in a thread of its own: a context manager."""

    def __init__(self, accelerator: str, *, node: int, interval_seconds: float = INTERVAL_SECONDS) -> None:
        command = _TOOLS.get(accelerator)
        tool = shutil.which(command[0]) if command else None
        self._command = [tool, *command[1:]] if command and tool else None
        self._node = node
        self._interval_seconds = interval_seconds
        self._over = threading.Event()
        self._asked: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, name="utilization", daemon=True)

    def __enter__(self) -> "UtilizationLog":
        if self._command:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        if self._asked is not None:
            self._asked.kill()  # one that hangs must not hold the job's end up
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _run(self) -> None:
        while not self._over.wait(self._interval_seconds):
            line = self._look()
            if line is None:
                return  # what failed once is asked no more
            log.info("%s", json.dumps(line))

    def _look(self) -> "dict[str, float | int] | None":
        assert self._command is not None  # noqa: S101 - the thread runs only where there is one
        try:
            with subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True
            ) as self._asked:
                try:
                    output, _ = self._asked.communicate(timeout=TOOL_TIMEOUT_SECONDS)
                except subprocess.TimeoutExpired:
                    self._asked.kill()
                    return None
                return read(output, node=self._node) if self._asked.returncode == 0 else None
        except (OSError, ValueError):
            return None


def read(output: str, *, node: int) -> "dict[str, float | int]":
    """Return the mean over the accelerators that a tool has listed. Raises ValueError on what is no such list."""
    cards = [[_number(part) for part in line.split(",")] for line in output.splitlines() if line.strip()]
    if not cards or any(len(card) != 3 or not card[2] for card in cards):
        raise ValueError("no accelerators are listed")
    return {
        UTILIZATION_KEY: round(sum(card[0] for card in cards) / len(cards), 1),
        "accelerator_memory_percent": round(100 * sum(card[1] for card in cards) / sum(card[2] for card in cards), 1),
        "accelerators": len(cards),
        "node": node,
    }


def _number(text: str) -> float:
    match = _NUMBER.search(text)
    if match is None:
        raise ValueError(f"'{text}' is no number")
    return float(match[0])
