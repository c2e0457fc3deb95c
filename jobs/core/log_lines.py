"""The lines of a job's log that machines read: its progress, and how busy its accelerators are."""

import re
from dataclasses import dataclass

UTILIZATION_KEY = "accelerator_utilization_percent"
"""First key of the JSON line in which a node logs, once a minute, how busy its accelerators are."""

MEMORY_KEY = "accelerator_memory_percent"
"""Key of the memory that is in use on them, in the same line."""


LEFT = " left"
"""How the note of a line of progress ends that says how long the job still takes."""


def is_utilization(line: str) -> bool:
    """Return whether a line of a job's log is for CloudWatch's metric, not for people."""
    return line.startswith(f'{{"{UTILIZATION_KEY}"')


@dataclass(frozen=True)
class Progress:
    """One line of a job's log that says how far it is; the command line draws its bar from it."""

    step: int
    total_steps: int
    note: str = ""

    _LINE = re.compile(r"\[progress\] (?P<step>\d+)/(?P<total>\d+)(?: (?P<note>.*))?")

    @property
    def time_left(self) -> str:
        """The time that the job itself says is left, which it reckons by its last steps; empty where it says none."""
        last = self.note.rpartition(", ")[2]
        return last.removesuffix(LEFT) if last.endswith(LEFT) else ""

    def __str__(self) -> str:
        return f"[progress] {self.step}/{self.total_steps} {self.note}".rstrip()

    @classmethod
    def parse(cls, line: str) -> "Progress | None":
        """Return the progress that a line of the log tells; None where it tells none."""
        match = cls._LINE.search(line)
        return cls(int(match["step"]), int(match["total"]), match["note"] or "") if match else None
