"""Measure whether anything is lost of a script with the library: interrupted at random moments, against one left alone.

python -m tests.benchmarks.kill_and_resume_scripts                          20 moments, in about ten minutes
python -m tests.benchmarks.kill_and_resume_scripts --moments 60 --seed 2    more, and others

Two scripts are trained, each on one rank and on two: one with a Trainer, an evaluation every ten steps, the best model
at its end and `trainyard.Callback` (level 2 of jobs/docs/scripts.md), and a loop of its own with dropout and
`trainyard.Run` (level 3). They are those of tests/jobs/train/script. A run is struck at a random time of its attempt,
from the launcher's first moment to its last, by SIGTERM, a Spot notice, SIGKILL of a rank, of the launcher, or of all
at once, each as often as the others. It is started again with the next number of an attempt, as Batch does, struck
again or not, until it ends. A blow after the end of an attempt hits nothing, is shown, and drawn again.

Equal means: the model that the script left is that of the uninterrupted run, bit by bit, and metrics.jsonl has its
lines, each once, but for what the clock says. Exit status 1 where one is not, or where SIGTERM or a notice was answered
with neither 0 nor 75.
"""

import argparse
import contextlib
import itertools
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from jobs.contract.errors import INTERRUPTED_EXIT_CODE
from tests.benchmarks.kill_and_resume import LAUNCHER
from tests.jobs.train.script.test_interrupted_scripts import LOOP, TRAINER
from tests.support.benchmarks.launched import differences, finished, launcher
from tests.support.benchmarks.moments import (
    BEFORE_PYTHON_LISTENS,
    KILL_ALL,
    KILL_LAUNCHER,
    KILL_RANK,
    NOTICE_SECONDS,
    SIGTERM,
    SPOT,
)
from tests.support.train.launching import Launched, NewRun, Run
from tests.support.train.metadata_service import MetadataService
from tests.support.train.scripts import script_flags, write_files

SCRIPTS = {
    "Trainer (level 2)": (TRAINER, "output/model/model.safetensors"),
    "own loop (level 3)": (LOOP, "output/model.pt"),
}
RANKS = (1, 2)
WAYS = (SIGTERM, SPOT, KILL_RANK, KILL_LAUNCHER, KILL_ALL)
ANSWERS = (0, INTERRUPTED_EXIT_CODE, BEFORE_PYTHON_LISTENS)
ANOTHER_BLOW = 0.5
"""How likely a run that was interrupted is interrupted once more."""
POLL_SECONDS = 0.05
"""Between two looks for a notice: these trainings take seconds."""


@dataclass(frozen=True, kw_only=True)
class Blow:
    """One interruption, and how it was answered."""

    way: str
    seconds: float
    """From the start of the attempt on."""
    after: str
    """The last line of the log before it."""
    exit_code: int

    @property
    def is_answered(self) -> bool:
        return self.way not in (SIGTERM, SPOT) or self.exit_code in ANSWERS


@dataclass(frozen=True, kw_only=True)
class Training:
    """One of the four, as it is uninterrupted."""

    name: str
    model: str
    ranks: int
    flags: Sequence[str]
    whole: Run
    seconds: float

    @classmethod
    def measured(cls, name: str, ranks: int, flags: Sequence[str], whole: Run) -> "Training":
        started = time.monotonic()
        finished(whole.start(*flags, kind="script", nproc=ranks))
        seconds = time.monotonic() - started
        return cls(name=name, model=SCRIPTS[name][1], ranks=ranks, flags=flags, whole=whole, seconds=seconds)


@dataclass(kw_only=True)
class Ended:
    """A run that was interrupted, and what it has come to differ in."""

    training: Training
    blows: list[Blow] = field(default_factory=list)
    difference: str = ""

    @property
    def is_equal(self) -> bool:
        return not self.difference and all(blow.is_answered for blow in self.blows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.kill_and_resume_scripts", description=__doc__)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    ways = [WAYS[number % len(WAYS)] for number in range(options.moments)]
    chance.shuffle(ways)
    ended: list[Ended] = []
    with tempfile.TemporaryDirectory() as name, launcher(Path(name)) as new_run:
        trainings = list(_trainings(new_run, Path(name)))
        for number, training in enumerate(trainings):
            left = ways[number :: len(trainings)]
            while left:
                run = _interrupted(training, new_run(), left, chance)
                ended.append(run)
                _show(run, len(ended))
    equal = sum(len(run.blows) for run in ended if run.is_equal)
    print(f"{equal} of {sum(len(run.blows) for run in ended)}")
    return 0 if all(run.is_equal for run in ended) else 1


def _show(run: Ended, number: int) -> None:
    """Print a line for each blow that the run has taken."""
    equal = "equal" if run.is_equal else f"NOT EQUAL: {run.difference or 'not to be started again'}"
    for blow in run.blows:
        print(
            f"{run.training.name}, {run.training.ranks} rank(s), run {number}, at {blow.seconds:.1f} s: {blow.way} "
            f"after the line '{blow.after[:50]}'; ended with {blow.exit_code}: {equal}",
            flush=True,
        )


def _trainings(new_run: NewRun, folder: Path) -> "itertools.chain[Training]":
    def of(name: str) -> list[Training]:
        code = write_files(folder / str(len(name)), {"train.py": SCRIPTS[name][0]})
        flags = script_flags(new_run().s3, code, "train.py")
        return [Training.measured(name, ranks, flags, new_run()) for ranks in RANKS]

    return itertools.chain.from_iterable(map(of, SCRIPTS))


def _interrupted(training: Training, run: Run, left: list[str], chance: random.Random) -> Ended:
    """One run. The blows that it has taken are taken off `left`."""
    ended = Ended(training=training)
    for attempt in itertools.count(1):
        strikes = bool(left) and (not ended.blows or chance.random() < ANOTHER_BLOW)
        with MetadataService() as metadata:
            launched = run.start(
                *training.flags,
                kind="script",
                nproc=training.ranks,
                attempt=attempt,
                program=("-c", LAUNCHER.format(POLL_SECONDS)),
                **metadata.environment,
            )
            at = chance.random() * training.seconds
            line = _strike(launched, run, (left[0], at), metadata, chance) if strikes else None
            launched.process.wait()
            code = launched.wait()
            run.wait_until_gone()
        if line is not None:
            ended.blows.append(Blow(way=left.pop(0), seconds=at, after=line, exit_code=code))
        elif code:
            ended.difference = f"attempt {attempt}, which nobody interrupted, ended with {code}: {launched.lines[-1]}"
            return ended
        if code == 0:
            ended.difference = differences(run, training.whole, model=training.model)
            return ended
    raise AssertionError


def _strike(
    launched: Launched, run: Run, blow: tuple[str, float], metadata: MetadataService, chance: random.Random
) -> str | None:
    """Interrupt an attempt, in a way and after so many seconds.

    Return the last line before it; None where the attempt had ended.
    """
    way, seconds = blow
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if launched.process.poll() is not None:
            return None
        time.sleep(min(left, 0.05))
    before = launched.lines[-1].strip() if launched.lines else "nothing yet"
    if way == SIGTERM:
        launched.process.send_signal(signal.SIGTERM)
    elif way == SPOT:
        metadata.give_notice(chance.uniform(*NOTICE_SECONDS))
    else:
        for process in _struck(launched, run, way, chance):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    return before


def _struck(launched: Launched, run: Run, way: str, chance: random.Random) -> list[psutil.Process]:
    everything = list(run.processes())
    of_launcher = [process for process in everything if process.pid == launched.process.pid]
    if way == KILL_LAUNCHER:
        return of_launcher
    if way == KILL_RANK:
        with contextlib.suppress(psutil.Error):
            if ranks := launched.ranks():
                return [chance.choice(ranks)]
    return everything  # also where there is no rank yet


if __name__ == "__main__":
    sys.exit(main())
