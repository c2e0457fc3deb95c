"""Hold everything that a run has recorded so far, read once, for reports and comparisons."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from jobs.core.records import Attempt, Inputs, Receipt, is_step
from jobs.core.run import submitted_at
from jobs.core.words import counted
from jobs.data_checks.classes import ClassReport
from jobs.data_checks.data_summary import DataSummary
from jobs.spec.code import CodeRecord
from jobs.spec.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint that has not been deleted."""

    step: int
    at: datetime


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run as its files record it."""

    run_id: str
    team: str
    location: str
    spec_text: str = ""
    """The content of spec.yaml; empty if there is none."""
    spec: JobSpec | None = None
    """None if there is no spec.yaml or this release cannot read it."""
    receipt: Receipt | None = None
    metrics: Sequence[Mapping[str, Any]] = ()
    """The lines of metrics.jsonl that have a step and a time, with `time` as a datetime."""
    utilization: Sequence[Mapping[str, Any]] = ()
    """The lines of all attempts' utilization/N.jsonl, with `time` as a datetime, ordered by time."""
    checkpoints: Sequence[Checkpoint] = field(default_factory=tuple)
    classes: ClassReport | None = None
    generations: Sequence[Mapping[str, str]] = ()
    """Texts that a language model generated, by the names that the script gave them on each line."""
    data: DataSummary | None = None
    inputs: Inputs | None = None
    """The inputs that a script or an evaluation read."""
    code: CodeRecord | None = None

    @property
    def attempts(self) -> Sequence[Attempt]:
        return self.receipt.attempts if self.receipt else ()

    @property
    def result(self) -> Mapping[str, Any]:
        return self.receipt.result if self.receipt else {}

    @property
    def state(self) -> str:
        return self.receipt.state if self.receipt else "not started"

    @property
    def ran_on(self) -> str:
        """Return the instances, ranks and accelerator of the last attempt, or an empty string before the first."""
        if not self.attempts:
            return ""
        last = self.attempts[-1]
        nodes = f"{last.nnodes} x {last.instance_type} ({last.capacity or 'capacity unknown'})"
        return f"{nodes}, {counted(last.world_size, 'rank')} on {last.accelerator}"

    @property
    def submitted_at(self) -> datetime:
        return submitted_at(self.run_id)


def texts_line(line: dict[str, Any]) -> dict[str, Any] | None:
    """Return the strings of an object, or None if it has none."""
    return {name: value for name, value in line.items() if isinstance(value, str)} or None


def metrics_line(line: Any) -> dict[str, Any] | None:
    """Return a metrics line with its time as a datetime, or None if it has no step or no time."""
    if not isinstance(line, dict) or not is_step(line.get("step")):
        return None
    return timed_line(line)


def timed_line(line: Any) -> dict[str, Any] | None:
    """Return an object with its time as a datetime, or None if it has no time or is not an object."""
    if not isinstance(line, dict):
        return None
    try:
        at = datetime.fromisoformat(line["time"])
    except (KeyError, TypeError, ValueError):
        return None
    return {**line, "time": at if at.tzinfo else at.replace(tzinfo=timezone.utc)}
