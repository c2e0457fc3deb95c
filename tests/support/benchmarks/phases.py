"""What an attempt is at, from outside: by the lines it prints, its requests to S3, and the folder it saves into.

Nothing is printed where a save or an evaluation begins. A save begins with a folder of its step and ends with the
first request of its upload. That an evaluation has begun, and not only the step before it, is told by the stack of
rank 0, which a rank prints when it is sent SIGUSR1.
"""

import os
import re
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.train.faulty_s3 import FaultyS3
from tests.support.train.launching import Launched

START_UP, STEP, SAVE, UPLOAD, EVALUATION = PHASES = ("start-up", "step", "save", "upload", "evaluation")

LAUNCHER, RANKS, FETCH, MODEL = PARTS = ("launcher", "ranks", "checkpoint", "model")
"""The parts of a start-up, each up to: the attempt's first line, its data, a checkpoint, the steps."""

LOOK_SECONDS = 0.001
STACK_SECONDS = 2.0
"""For the stack of a rank; it takes some milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """The length of a training in steps."""

    steps: int
    save_every: int
    evaluate_every: int


@dataclass(frozen=True, kw_only=True)
class State:
    """What an attempt is at, and after which of its steps."""

    phase: str
    what: str
    step: int = 0

    @property
    def part(self) -> str:
        """The part of the start-up, or the phase."""
        return self.what.removeprefix(f"{START_UP}: ") if self.phase == START_UP else self.phase


class Phases:
    """Watch one attempt whose scratch folder nobody else uses, and on whose S3 nobody else is."""

    def __init__(self, launched: Launched, scratch: Path, s3: FaultyS3, rhythm: Rhythm) -> None:
        self.resumed_from = 0
        """The step; 0 until it is known."""
        self._launched = launched
        self._scratch = scratch
        self._rhythm = rhythm
        self._part: str | None = LAUNCHER
        self._step = self._evaluated = self._newest_upload = 0
        self._saving = self._uploading = 0
        self._model = self._ended = False
        self._saves: set[int] = set()
        self._folder: Path | None = None
        self._requests: list[tuple[str, str]] = []
        self._lines_read = self._requests_read = 0
        s3.breaks = self._see

    def look(self) -> State | None:
        """None: between two of them, or at its end."""
        self._read_requests()
        self._read_folder()
        for line in self._launched.lines[self._lines_read :]:
            self._lines_read += 1
            self._read_line(line)
        step = self._step
        if self._part is not None:
            return State(phase=START_UP, what=f"{START_UP}: {self._part}")
        if self._ended:
            return None
        if self._saving:
            return State(phase=SAVE, what=f"save of step {self._saving}", step=step)
        if (evaluated := self._perhaps_evaluates()) is not None:
            return State(phase=EVALUATION, what=f"evaluation after step {evaluated}", step=step)
        if self._model:
            return State(phase=UPLOAD, what="upload of the model", step=step)
        if self._uploading:
            return State(phase=UPLOAD, what=f"upload of step {self._uploading}", step=step)
        is_save_due = step % self._rhythm.save_every == 0 and step not in self._saves and step != self.resumed_from
        return None if is_save_due else State(phase=STEP, what=f"step {step + 1}", step=step)

    def evaluates(self, rank_pid: int) -> bool:
        """Return whether rank 0, whose process it is, evaluates; its stack is in the log then."""
        before = len(self._launched.lines)
        os.kill(rank_pid, signal.SIGUSR1)
        until = time.monotonic() + STACK_SECONDS
        while time.monotonic() < until:
            stack = self._launched.lines[before:]
            if any("_run_code" in line for line in stack):  # of runpy, which runs the entrypoint's module
                return any(line.rstrip().endswith(" in evaluated") for line in stack)
            time.sleep(LOOK_SECONDS)
        return False

    def until_the_end(self) -> Iterator[State | None]:
        """What it is at, every millisecond."""
        while self._launched.process.poll() is None:
            yield self.look()
            time.sleep(LOOK_SECONDS)

    def lengths(self) -> Mapping[str, float]:
        """Seconds of each phase and of each part of the start-up, in the middle, of an attempt that runs to its end."""
        found: dict[str, list[float]] = defaultdict(list)
        last, since = None, time.monotonic()
        for state in self.until_the_end():
            if state != last:
                now = time.monotonic()
                if last is not None:
                    found[last.part].append(now - since)
                last, since = state, now
        return {part: statistics.median(seconds) for part, seconds in found.items()}

    def _see(self, method: str, path: str) -> None:
        """Called by S3 on each request, when its headers are there."""
        self._requests.append((method, path))

    def _read_requests(self) -> None:
        for method, path in self._requests[self._requests_read :]:
            self._requests_read += 1
            if method in ("GET", "HEAD"):
                continue
            self._model = self._model or "/model/" in path
            found = re.search(r"/checkpoints/step-(\d+)/", path)
            if found and int(found[1]) > self._newest_upload:  # older ones are deleted
                self._uploading = self._newest_upload = int(found[1])
                self._saves.add(self._uploading)
                self._saving = 0

    def _read_folder(self) -> None:
        if self._folder is None:
            self._folder = next(self._scratch.glob("trainyard-*/checkpoints"), None)
            return
        try:
            names = [path.name for path in self._folder.iterdir()]
        except FileNotFoundError:
            return
        for name in names:
            step = int(name.rpartition("-")[2]) if name.startswith("checkpoint-") else 0
            if step and step not in self._saves:
                self._saves.add(step)
                self._saving = step

    def _read_line(self, line: str) -> None:
        if line.startswith("attempt "):
            self._part = RANKS
        elif line.startswith("data: "):
            self._part = FETCH
        elif line.startswith("start: "):
            self._part = MODEL
            if found := re.match(r"start: resumed from checkpoint step-(\d+)", line):
                self.resumed_from = self._newest_upload = int(found[1])
        elif found := re.match(r"\[progress\] (\d+)/", line):
            self._part, self._step = None, int(found[1])
        elif found := re.match(r"evaluation: step (\d+),", line):
            self._evaluated = int(found[1])
        elif line.startswith("evaluation: "):
            self._evaluated = self._rhythm.steps
        elif found := re.match(r"checkpoint: step (\d+),", line):
            if self._uploading == int(found[1]):
                self._uploading = 0
        elif line.startswith("result: "):
            self._ended = True

    def _perhaps_evaluates(self) -> int | None:
        """After which step; it may still be in that step."""
        every, steps, step = self._rhythm.evaluate_every, self._rhythm.steps, self._step
        due = None
        if step == steps:
            due = steps
        elif (step + 1) % every == 0 and step + 1 < steps:
            due = step + 1
        elif step and step == self.resumed_from and step % every == 0:
            due = step  # the attempt before was ended in its midst
        return due if due != self._evaluated else None
