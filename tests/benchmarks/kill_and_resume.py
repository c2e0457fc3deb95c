"""Measure whether anything is lost: trainings interrupted at random moments, against the same ones left alone.

python -m tests.benchmarks.kill_and_resume                          20 moments, in about ten minutes
python -m tests.benchmarks.kill_and_resume --moments 100 --seed 2   more, and others
python -m tests.benchmarks.kill_and_resume --faults 0.1             on an S3 that fails, is slow, is cut off, denies

A moment has a phase of an attempt: its start-up (and which part of it), a step, a save, an upload, an evaluation; which
one of them, and when in it, is random. What happens then is one of six: SIGTERM, a Spot notice, a rebalance
recommendation, SIGKILL of a rank, of the launcher, of all at once. Each phase and each way comes as often as the
others, in every combination over 30 moments. With --faults a seventh is S3 that denies all access for a while, and that
share of its requests fails, is slow or is cut off. What was hit is looked at after the blow
(phases.py); where it is not what was to be hit, the moment is drawn again, and the interruption is
shown but not counted. A run is started again with the next number of an attempt, as Batch and `trainyard resume` do,
interrupted again or not, until it ends. Trained are two-layer BERTs, fine-tuned and pre-trained, on one rank and on
two. S3 is that of the tests, 30 ms away, so that uploads take a while; where there is to be a notice a launcher looks
for it twenty times a second, since these trainings take seconds.

Equal means: the weights are those of the uninterrupted run, bit by bit, and metrics.jsonl has its lines, each once, but
for what the clock says. Exit status 1 where one is not, or where an announced ending was not answered with 0 or 75, or
not within 30 s of SIGTERM and two minutes of a notice.
"""

import argparse
import itertools
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.benchmarks.launched import differences, finished, launcher
from tests.support.benchmarks.moments import DENIED, NOTICES, SIGTERM, WAYS, Interruption, Moment, drawn
from tests.support.benchmarks.phases import FETCH, PHASES, STEP, Phases, Rhythm
from tests.support.train.faulty_s3 import FaultyS3
from tests.support.train.launching import Launched, Run
from tests.support.train.metadata_service import MetadataService
from tests.support.train.packing import save_packed, sentences
from tests.support.train.recipes import Flags, finetuning, longer_finetuning, pretraining
from tests.support.train.reviews import save_tiny_bert
from tests.support.train.s3_server import put

KINDS = ("finetune-classification", "pretrain-mlm")
RANKS = (1, 2)
RHYTHM = Rhythm(steps=84, save_every=14, evaluate_every=24)
LATENCY_SECONDS = 0.03
POSITIONS = 32768
"""Positions of the models, which use 16 of them: their checkpoints have 13 MB, whose save takes some hundredths of a
second."""
HELD_OUT = 200
"""Sentences for the evaluations of pre-training; reviews for those of fine-tuning are there."""
ANOTHER_MOMENT = 0.5
"""How likely a run that was interrupted is interrupted once more."""
HANGS_SECONDS = 300

LAUNCHER = """
import sys
from jobs.train import launch
from jobs.train.launcher import shutdown
shutdown.POLL_SECONDS = {}
sys.exit(launch.main())
"""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One of the four, as it is uninterrupted."""

    kind: str
    ranks: int
    flags: Flags
    s3: FaultyS3
    whole: Run
    lengths: Mapping[str, float]
    """The lengths of its phases, in seconds."""

    @classmethod
    def measured(cls, kind: str, ranks: int, flags: Flags, s3: FaultyS3, whole: Run) -> "Training":
        launched = whole.start(*flags, kind=kind, nproc=ranks)
        lengths = Phases(launched, whole.scratch, s3, RHYTHM).lengths()
        finished(launched)
        # Nothing is fetched here; it is as much as is uploaded.
        return cls(
            kind=kind, ranks=ranks, flags=flags, s3=s3, whole=whole, lengths={**lengths, FETCH: lengths["upload"]}
        )

    def start(self, run: Run, attempt: int, metadata: MetadataService, *, poll_seconds: float) -> Launched:
        return run.start(
            *self.flags,
            kind=self.kind,
            nproc=self.ranks,
            attempt=attempt,
            program=("-c", LAUNCHER.format(poll_seconds)),
            **metadata.environment,
        )


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run that was interrupted, and what it has come to differ in."""

    training: Training
    moments: list[Moment]
    difference: str

    def is_equal(self, moment: Moment) -> bool:
        return not self.difference and moment.is_answered


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.kill_and_resume", description=__doc__)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=float, default=0.0, help="share of the requests to S3 that go wrong")
    parser.add_argument("--logs", type=Path, help="a folder for the output of all attempts")
    options = parser.parse_args()
    ended: list[Ended] = []
    with (
        tempfile.TemporaryDirectory() as name,
        launcher(Path(name)) as direct_run,
        FaultyS3(
            direct_run().environment["AWS_ENDPOINT_URL"],
            fraction=options.faults,
            seed=options.seed,
            latency_seconds=LATENCY_SECONDS,
        ) as far_s3,
    ):

        def new_run() -> Run:
            run = direct_run()
            scratch = Path(name) / run.location.key.strip("/")[-4:]
            return replace(run, environment={**run.environment, "AWS_ENDPOINT_URL": far_s3.url}, scratch=scratch)

        trainings = [
            Training.measured(kind, ranks, flags, far_s3, new_run())
            for kind, flags in _flags(direct_run(), Path(name)).items()
            for ranks in RANKS
        ]
        ways = (*WAYS, DENIED) if options.faults else WAYS
        moments = drawn(options.moments, options.seed, len(trainings), ways)
        for number, (training, left) in enumerate(zip(trainings, moments, strict=True)):
            chance = random.Random(f"{options.seed} {number}")
            while left:
                done = _interrupted(training, new_run(), left, chance, options.logs)
                if done.difference and not done.moments:
                    sys.exit(f"a run that nobody interrupted is not as the other one: {done.difference}")
                ended.append(done)
                _show(done, len(ended))
    print(f"faults: {dict(far_s3.counts)}" if options.faults else "no faults")
    return _sum_up(ended, options.moments, ways)


def _flags(run: Run, folder: Path) -> dict[str, Flags]:
    """The recipes of the two kinds; their data is on the run's S3."""
    model = save_tiny_bert(folder / "tiny-bert", positions=POSITIONS)
    tuning = longer_finetuning(run.s3, finetuning(run.s3, model, folder), folder, "long")
    texts = [sentences(130, seed=1), sentences(37, seed=2)]
    training = pretraining(run.s3, save_packed(folder / "tokens", model, texts, sentences(HELD_OUT, seed=3)))
    shape = ("--hidden-size", "--layers", "--heads", "--intermediate-size")
    training = (*(flag for flag in training if not flag.startswith(shape)), f"--config={put(run.s3, model, 'shape')}")
    rhythm = (
        "--eval-batch-size=1",
        f"--checkpoint-every-steps={RHYTHM.save_every}",
        f"--evaluate-every-steps={RHYTHM.evaluate_every}",
        "--log-every-steps=1",
    )
    tuning = (*tuning, f"--epochs={RHYTHM.steps // 12}", "--max-batch-size-per-rank=8")
    flags = ((*tuning, *rhythm), (*training, f"--max-steps={RHYTHM.steps}", *rhythm))
    return dict(zip(KINDS, flags, strict=True))


def _interrupted(training: Training, run: Run, left: list[Moment], chance: random.Random, logs: Path | None) -> Ended:
    """One run. What it has hit is taken off `left`; what it was to hit and has not is drawn again, for another one."""
    done: list[Moment] = []
    for attempt in itertools.count(1):
        wanted = _next(run, left, done, chance)
        struck = None
        with MetadataService() as metadata:
            poll_seconds = 0.05 if wanted is not None and wanted.way in NOTICES else 5.0
            launched, started = training.start(run, attempt, metadata, poll_seconds=poll_seconds), time.monotonic()
            if wanted is not None:
                phases = Phases(launched, run.scratch, training.s3, RHYTHM)
                interruption = Interruption(wanted, run, launched, phases, training.s3)
                if interruption.reach(training.lengths, RHYTHM.steps, chance):
                    at = time.monotonic()
                    hit = interruption.strike(metadata, chance)
                    struck = replace(wanted, attempt=attempt, seconds=at - started, hit=hit)
            code = _exit_code(run, launched)
            if struck is not None:
                struck = replace(struck, exit_code=code, ended_after_seconds=time.monotonic() - at)
        if wanted in left:
            left.remove(wanted)
            if struck is None or not struck.counts:
                left.append(wanted.again(chance))
        if logs is not None:
            logs.mkdir(exist_ok=True)
            name = f"{training.kind}-{training.ranks}-{run.location.key.strip('/')[-4:]}-{attempt}.log"
            (logs / name).write_text(f"{struck or wanted}\n{launched.output}exit code {code}\n")
        if done and (resumed := re.search(r"start: resumed from checkpoint step-(\d+)", launched.output)):
            done[-1] = replace(done[-1], next_from=int(resumed[1]))
        if struck is not None:
            done.append(struck)
        elif code:
            reason = f"attempt {attempt}, which nobody interrupted, ended with {code}: {launched.lines[-1].strip()}"
            return Ended(training=training, moments=done, difference=reason)
        if code is None:
            return Ended(training=training, moments=done, difference=f"attempt {attempt} has not ended")
        if code == 0:
            return Ended(training=training, moments=done, difference=differences(run, training.whole))
    raise AssertionError


def _next(run: Run, left: list[Moment], done: list[Moment], chance: random.Random) -> Moment | None:
    """For the next attempt of a run; None: it is left alone."""
    others = [moment for moment in left if moment.part != FETCH]
    if len(others) < len(left):
        if run.complete_checkpoints():
            return next(moment for moment in left if moment.part == FETCH)
        if not others:
            return Moment(way=SIGTERM, part=STEP, after=0.5, within=0.5, is_drawn=False)
    return others[0] if others and (not done or chance.random() < ANOTHER_MOMENT) else None


def _exit_code(run: Run, launched: Launched) -> int | None:
    """None where it has not ended, for far longer than any of them takes; all of it is killed then."""
    try:
        launched.process.wait(HANGS_SECONDS)
    except subprocess.TimeoutExpired:
        for process in run.processes():
            process.kill()
        return None
    code = launched.wait()
    run.wait_until_gone()
    return code


def _show(run: Ended, number: int) -> None:
    """Print a line for each blow that the run has taken."""
    for moment in run.moments:
        assert moment.hit is not None
        aimed = (
            "" if moment.counts else f" (not counted: {f'not {moment.part}' if moment.is_drawn else 'for the next'})"
        )
        equal = "equal" if run.is_equal(moment) else f"NOT EQUAL: {run.difference or 'not to be started again'}"
        print(
            f"{run.training.kind}, {run.training.ranks} rank(s), run {number}, attempt {moment.attempt}, "
            f"at {moment.seconds:.1f} s: {moment.way} hit {moment.hit.what}{aimed}; ended after "
            f"{moment.ended_after_seconds:.1f} s with {moment.exit_code}, next from step {moment.next_from}: {equal}",
            flush=True,
        )


def _sum_up(ended: Sequence[Ended], moments: int, ways: Sequence[str]) -> int:
    """Print how often each phase was hit in each way; return the exit code."""
    struck = [(run, moment) for run in ended for moment in run.moments]
    hits = Counter((moment.phase, moment.way) for _, moment in struck if moment.counts)
    for phase in PHASES:
        print(f"{phase:<12} " + ", ".join(f"{way} {hits[phase, way]}" for way in ways))
    equal = sum(run.is_equal(moment) for run, moment in struck if moment.counts)
    others = [run.is_equal(moment) for run, moment in struck if not moment.counts]
    print(f"not counted: {sum(others)} of {len(others)}\n{equal} of {moments}")
    return 0 if equal == moments and all(others) else 1


if __name__ == "__main__":
    sys.exit(main())
