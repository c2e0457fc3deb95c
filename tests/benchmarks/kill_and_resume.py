"""Whether anything is lost: trainings interrupted at random moments, against the same ones left alone.

python -m tests.benchmarks.kill_and_resume                          20 moments, in about ten minutes
python -m tests.benchmarks.kill_and_resume --moments 100 --seed 2   more, and others
python -m tests.benchmarks.kill_and_resume --faults 0.1             on an S3 that fails, is slow, is cut off

A moment is uniformly random over the whole life of an attempt: start-up, steps, saves, uploads, evaluations. What
happens then is one of six, as often each: SIGTERM, a Spot notice, a rebalance recommendation, SIGKILL of a rank, of the
launcher, of all at once. A run is then started again with the next number of an attempt, as Batch and `trainyard
resume` do, interrupted again or not, until it ends. Fine-tuning and pre-training of two-layer BERTs take turns, on one
rank and on two. S3 is that of the tests, 30 ms away, so that uploads take a while; a launcher looks for notices twice a
second, since these trainings take seconds.

Equal means: the weights are those of the uninterrupted run, bit by bit, and metrics.jsonl has its lines, each once, but
for what the clock says. Exit status 1 where one is not, or where an announced ending was not answered with 0 or 75.
"""

import argparse
import contextlib
import itertools
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jobs.errors import INTERRUPTED_EXIT_CODE
from tests.benchmarks.launched import differences, finished, launcher
from tests.jobs.train.faulty_s3 import FaultyS3
from tests.jobs.train.launching import Launched, NewRun, Run
from tests.jobs.train.metadata_service import NOTICE, REBALANCE, MetadataService
from tests.jobs.train.recipes import Flags, finetuning, longer_finetuning, packed_sentences, pretraining
from tests.jobs.train.reviews import save_tiny_bert

KINDS = ("finetune-classification", "pretrain-mlm")
RANKS = (1, 2)
SAVE_EVERY = 10
STEPS = 240
RHYTHM = (f"--checkpoint-every-steps={SAVE_EVERY}", "--evaluate-every-steps=25", "--log-every-steps=5")
LATENCY_SECONDS = 0.03
ANOTHER_MOMENT = 0.4
"""How likely a run that was interrupted is interrupted once more."""

SIGTERM, SPOT, REBALANCED = "SIGTERM", "Spot notice", "rebalance"
KILL_RANK, KILL_LAUNCHER, KILL_ALL = "SIGKILL of a rank", "SIGKILL of the launcher", "SIGKILL of all"
WAYS = (SIGTERM, KILL_RANK, SPOT, KILL_LAUNCHER, REBALANCED, KILL_ALL)
ANNOUNCED = (SIGTERM, SPOT, REBALANCED)
BEFORE_PYTHON_LISTENS = -signal.SIGTERM
"""Of a launcher whose SIGTERM came before its first line ran; as process 1 of a container it would not take it."""

QUICK_LAUNCHER = (
    "import sys; from jobs.train import endings, launch; endings.POLL_SECONDS = 0.5; sys.exit(launch.main())"
)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One interruption, and what came of it."""

    way: str
    at: float
    """As a share of the life of an uninterrupted attempt."""
    attempt: int = 0
    seconds: float = 0.0
    hit: str = ""
    exit_code: int = 0
    next_from: int = 0
    """The step that the next attempt resumed from; 0: there was no checkpoint yet, or no next attempt."""

    @property
    def is_answered(self) -> bool:
        """An announced ending must leave a code with which Batch starts the job again, or 0."""
        return self.way not in ANNOUNCED or self.exit_code in (0, INTERRUPTED_EXIT_CODE, BEFORE_PYTHON_LISTENS)


@dataclass(frozen=True, kw_only=True)
class Training:
    """One of the four, as it is uninterrupted."""

    kind: str
    ranks: int
    flags: Flags
    whole: Run
    seconds: float

    @classmethod
    def measured(cls, kind: str, ranks: int, flags: Flags, new_run: NewRun) -> "Training":
        whole, started = new_run(), time.monotonic()
        finished(whole.start(*flags, kind=kind, nproc=ranks))
        return cls(kind=kind, ranks=ranks, flags=flags, whole=whole, seconds=time.monotonic() - started)

    def start(self, run: Run, attempt: int, metadata: MetadataService) -> Launched:
        return run.start(
            *self.flags,
            kind=self.kind,
            nproc=self.ranks,
            attempt=attempt,
            program=("-c", QUICK_LAUNCHER),
            **metadata.environment,
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.kill_and_resume", description=__doc__)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=float, default=0.0, help="share of the requests to S3 that go wrong")
    parser.add_argument("--logs", type=Path, help="a folder for the output of all attempts")
    options = parser.parse_args()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows: list[tuple[Training, list[Moment], str]] = []
    with (
        tempfile.TemporaryDirectory() as name,
        launcher(Path(name)) as direct_run,
        FaultyS3(
            direct_run().environment["AWS_ENDPOINT_URL"],
            fraction=options.faults,
            seed=options.seed,
            latency_seconds=LATENCY_SECONDS,
        ) as far_s3,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):

        def new_run() -> Run:
            run = direct_run()
            return replace(run, environment={**run.environment, "AWS_ENDPOINT_URL": far_s3.url})

        bar = progress.add_task("uninterrupted runs", total=options.moments)
        trainings = [
            Training.measured(kind, ranks, flags, new_run)
            for kind, flags in _flags(new_run(), Path(name)).items()
            for ranks in RANKS
        ]
        for number, training in enumerate(trainings):
            progress.update(bar, description=f"{training.kind}, {training.ranks} rank(s)")
            left = _moments(options.moments, options.seed)[number :: len(trainings)]
            chance = random.Random(f"{options.seed} {number}")
            while left:
                run = new_run()
                done, difference = _interrupted(training, run, left, chance, options.logs)
                if difference and not done:
                    sys.exit(f"a run that nobody interrupted is not as the other one: {difference}")
                rows.append((training, done, difference))
                progress.update(bar, advance=len(done))
    equal = _print(rows)
    print(f"{equal} of {options.moments}")
    return 0 if equal == options.moments else 1


def _flags(run: Run, folder: Path) -> dict[str, Flags]:
    """Of the two kinds; their data is on the run's S3."""
    model = save_tiny_bert(folder / "tiny-bert")
    tuning = longer_finetuning(run.s3, finetuning(run.s3, model, folder), folder, "long")
    training = pretraining(run.s3, packed_sentences(model, folder / "tokens"))
    return dict(
        zip(KINDS, ((*tuning, "--epochs=20", *RHYTHM), (*training, f"--max-steps={STEPS}", *RHYTHM)), strict=True)
    )


def _moments(count: int, seed: int) -> list[Moment]:
    """Each way as often as the others, in a random order."""
    chance = random.Random(seed)
    ways = [WAYS[number % len(WAYS)] for number in range(count)]
    chance.shuffle(ways)
    return [Moment(way=way, at=chance.random()) for way in ways]


def _interrupted(
    training: Training, run: Run, left: list[Moment], chance: random.Random, logs: Path | None
) -> tuple[list[Moment], str]:
    """The moments, taken off `left`, of one run, and what it has come to differ in. A moment after whose end an attempt
    would have gone on is drawn again, for another run."""
    done: list[Moment] = []
    for attempt in itertools.count(1):
        wanted = left[0] if left and (not done or chance.random() < ANOTHER_MOMENT) else None
        with MetadataService() as metadata:
            launched, started = training.start(run, attempt, metadata), time.monotonic()
            if wanted is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launched.process.wait(wanted.at * training.seconds)
            if wanted is not None and launched.process.poll() is None:
                seconds, hit = time.monotonic() - started, _phase(launched.lines)
                _interrupt(wanted.way, run, launched, metadata, chance)
                left.pop(0)
            elif wanted is not None:
                left[0], wanted = replace(wanted, at=chance.random()), None
            launched.process.wait()  # for as long as it takes
            code = launched.wait()
            run.wait_until_gone()
        if logs is not None:
            logs.mkdir(exist_ok=True)
            name = f"{training.kind}-{training.ranks}-{run.location.key.strip('/')[-4:]}-{attempt}.log"
            (logs / name).write_text(f"{wanted}\n{launched.output}exit code {code}\n")
        if done and (resumed := re.search(r"start: resumed from checkpoint step-(\d+)", launched.output)):
            done[-1] = replace(done[-1], next_from=int(resumed[1]))
        if wanted is not None:
            done.append(replace(wanted, attempt=attempt, seconds=seconds, hit=hit, exit_code=code))
        elif code != 0:
            return done, f"attempt {attempt}, which nobody interrupted, ended with {code}: {launched.lines[-1].strip()}"
        if code == 0:
            return done, differences(run, training.whole)
    raise AssertionError


def _interrupt(way: str, run: Run, launched: Launched, metadata: MetadataService, chance: random.Random) -> None:
    if way == SIGTERM:
        launched.process.send_signal(signal.SIGTERM)
    elif way == SPOT:
        ends_at = datetime.now(timezone.utc) + timedelta(seconds=120)
        metadata.news[NOTICE] = {"action": "terminate", "time": f"{ends_at:%Y-%m-%dT%H:%M:%SZ}"}
    elif way == REBALANCED:
        metadata.news[REBALANCE] = {"noticeTime": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"}
    elif way == KILL_LAUNCHER:
        launched.process.kill()
    else:
        alive, ranks = list(run.processes()), []
        with contextlib.suppress(psutil.NoSuchProcess):
            ranks = launched.ranks()
        # Before there are ranks the launcher is all there is.
        for process in [chance.choice(ranks)] if way == KILL_RANK and ranks else alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _phase(lines: Sequence[str]) -> str:
    """What an attempt is at, by the lines it has printed."""
    phase = "start-up: launcher"
    for line in list(lines):
        for said, then in (
            ("attempt ", "start-up: ranks"),
            ("data: ", "start-up: checkpoint, model"),
            ("evaluation: step", "step"),
            (f"checkpoint: step {STEPS},", "final evaluation"),
            ("result: ", "end"),
        ):
            if line.startswith(said):
                phase = then
        if re.match(r"evaluation: \d", line):
            phase = "upload of the model"
        if found := re.match(r"\[progress\] (\d+)/", line):
            step = int(found[1])
            saves = step and step % SAVE_EVERY == 0
            phase = f"save, upload of step {step}" if saves else f"after step {step}"
        elif (found := re.match(r"checkpoint: step (\d+),", line)) and phase.endswith(f"step {found[1]}"):
            phase = f"after step {found[1]}"
    return phase


def _print(rows: Sequence[tuple[Training, list[Moment], str]]) -> int:
    """The table; how many moments left nothing lost."""
    table = Table(box=None, pad_edge=False)
    for title in ("training", "ranks", "run", "attempt", "at s", "what it hit", "interrupted by", "exit code"):
        table.add_column(title, no_wrap=True)
    table.add_column("next from", no_wrap=True)
    table.add_column("equal")
    equal = 0
    for number, training, moment, difference in _flat(rows):
        good = not difference and moment.is_answered
        equal += good
        table.add_row(
            training.kind,
            str(training.ranks),
            str(number),
            str(moment.attempt),
            f"{moment.seconds:.1f} of {training.seconds:.1f}",
            moment.hit,
            moment.way,
            str(moment.exit_code),
            f"step {moment.next_from}" if moment.next_from else "-",
            "yes" if good else f"no: {difference or 'not to be started again'}",
        )
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    return equal


def _flat(
    rows: Sequence[tuple[Training, list[Moment], str]],
) -> Iterator[tuple[int, Training, Moment, str]]:
    for number, (training, moments, difference) in enumerate(rows, 1):
        for moment in moments:
            yield number, training, moment, difference


if __name__ == "__main__":
    sys.exit(main())
