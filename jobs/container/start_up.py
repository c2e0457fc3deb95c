"""What the start of an attempt takes, part by part, from its launcher's start to the end of the first step.

    start-up: … s to the end of step N (CPU of this rank in brackets): launcher and imports … (…), tokenizer … (…), …

A part that takes longer than its CPU waits: for the network, a disk, a card, or for a processor that others use.
"""

import os
import time

LAUNCHED_AT_VARIABLE = "TRAINYARD_LAUNCHED_AT"
"""When the process of the launcher began, in seconds since 1970."""


class StartUp:
    """The parts of one rank's start, one after the other: each ends when `done` names it."""

    def __init__(self) -> None:
        began = os.environ.get(LAUNCHED_AT_VARIABLE)
        self._ended = time.monotonic() - (max(0.0, time.time() - float(began)) if began else 0.0), 0.0
        self.parts: dict[str, tuple[float, float]] = {}
        """Seconds and CPU seconds of this process, by name, in their order."""

    def done(self, name: str) -> None:
        """Note that what was done since the part before is called so; a name may come again."""
        now = time.monotonic(), time.process_time()
        taken = self.parts.get(name, (0.0, 0.0))
        self.parts[name] = taken[0] + now[0] - self._ended[0], taken[1] + now[1] - self._ended[1]
        self._ended = now

    def line(self, step: int) -> str:
        """Return the parts as a line of the log, `step` being the first that was made."""
        total = sum(seconds for seconds, _ in self.parts.values())
        parts = ", ".join(f"{name} {seconds:.1f} ({cpu:.1f})" for name, (seconds, cpu) in self.parts.items())
        return f"start-up: {total:.1f} s to the end of step {step} (CPU of this rank in brackets): {parts}"
