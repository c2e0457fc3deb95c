"""Interrupt trainings at random moments, and compare their results with uninterrupted trainings.

python -m tests.benchmarks.kill_and_resume                             20 interruptions of all kinds of training
python -m tests.benchmarks.kill_and_resume trainer --interruptions 60  only this kind, interrupted more often
python -m tests.benchmarks.kill_and_resume --faults 0.1                with an S3 that fails, is slow, drops connections

    finetune    fine-tuning of a two-layer BERT            trainer    a script: Trainer with trainyard.Callback
    pretrain    pre-training of a two-layer BERT           loop       a script: its own loop with trainyard.Run
                                                           fsdp       such a loop with a model sharded by FSDP2

Each kind trains on one rank and on two. An interruption is SIGTERM, a Spot notice, a rebalance recommendation, or
SIGKILL of a rank, of the launcher, or of all at once, all equally often. It happens soon after an event: an output
line, a request to S3, or a new checkpoint folder, all equally often. The kinds of lines and requests are equally
frequent too, because a training has many steps and few evaluations. The run is restarted with the next attempt number,
as by Batch and `trainyard resume`, and may be interrupted again, until it ends. An interruption after the end of its
attempt has no effect and is drawn again.

The tests' S3 responds after 30 ms, so that uploads take a while. A launcher polls for notices twenty times a second,
because these trainings take seconds.

Two trainings are equal if their weights are bit-identical and metrics.jsonl has the same lines, each once, except for
times. The exit code is 1 if a training is not equal, or if an attempt did not exit with 0 or 75 within 30 s of SIGTERM
or two minutes of a notice.
"""

import argparse
import contextlib
import glob
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

import psutil

from jobs.core.errors import INTERRUPTED_EXIT_CODE
from jobs.core.run import MODEL
from tests.jobs.container.script.test_interrupted_scripts import LOOP, TRAINER
from tests.support.benchmarks.launched import differences, finished, launcher
from tests.support.container.faulty_s3 import FaultyS3
from tests.support.container.launching import Launched, Run
from tests.support.container.metadata_service import REBALANCE, MetadataService
from tests.support.container.packing import save_packed, sentences
from tests.support.container.recipes import finetuning, longer_finetuning, pretraining
from tests.support.container.reviews import save_tiny_bert
from tests.support.container.s3_server import put
from tests.support.container.scripts import script_flags, write_files
from tests.support.container.sharding import FSDP

LOOK_SECONDS = 0.001


class Watched:
    """Watch one attempt, which must be the only user of its scratch folder and its S3 server."""

    def __init__(self, launched: Launched, scratch: Path, s3: FaultyS3) -> None:
        self.shown: list[tuple[float, str]] = []
        """Seconds since the start, and the kind, of each event."""
        self._launched = launched
        self._scratch = scratch
        self._requests: list[str] = []
        self._lines_read = self._requests_read = 0
        self._folders: set[str] = set()
        self._started = time.monotonic()
        s3.breaks = lambda method, path: self._requests.append(f"{method} {path}")

    def until_the_end(self) -> Iterator[None]:
        """Look every millisecond while the attempt runs."""
        while self._launched.process.poll() is None:
            self._look()
            yield
            time.sleep(LOOK_SECONDS)

    def counts(self) -> Counter[str]:
        return Counter(kind for _, kind in self.shown)

    def _look(self) -> None:
        lines, requests = self._launched.lines[self._lines_read :], self._requests[self._requests_read :]
        self._lines_read += len(lines)
        self._requests_read += len(requests)
        # Unlike Path.glob, this passes over folders that are deleted in the meantime.
        found = glob.glob("trainyard-*/checkpoints/*", root_dir=self._scratch)  # noqa: PTH207
        folders = {os.path.basename(path) for path in found} - self._folders  # noqa: PTH119
        self._folders |= folders
        kinds = [
            *map(_kind_of_line, lines),
            *map(_kind_of_request, requests),
            *["folder of a checkpoint"] * len(folders),
        ]
        self.shown += [(time.monotonic() - self._started, kind) for kind in kinds]


def _kind_of_line(line: str) -> str:
    """Return 'line' and the line's first word if that names its topic, such as 'line evaluation:'."""
    first = line.split(maxsplit=1)[:1]
    return f"line {first[0]}" if first and re.fullmatch(r"\[?[a-z]+[]:]", first[0]) else "line without a topic"


def _kind_of_request(request: str) -> str:
    """Return the method and the run's subfolder, such as 'request PUT checkpoints'."""
    method, _, path = request.partition(" ")
    found = re.search(r"/benchmark-[^/]+/([\w.]+)", path)
    return f"request {method} {found[1] if found else 'what it reads'}"


RANKS = (1, 2)
LATENCY_SECONDS = 0.03
HANGS_SECONDS = 300
ANOTHER = 0.5
"""Probability that an interrupted run is interrupted again."""

SIGTERM, SPOT, REBALANCED = ("SIGTERM", "Spot notice", "rebalance")
KILL_RANK, KILL_LAUNCHER, KILL_ALL = ("SIGKILL of a rank", "SIGKILL of the launcher", "SIGKILL of all")
WAYS = (SIGTERM, SPOT, REBALANCED, KILL_RANK, KILL_LAUNCHER, KILL_ALL)
LIMIT_SECONDS = {SIGTERM: 30.0, SPOT: 120.0, REBALANCED: 120.0}
"""Limits for an announced end: Batch's time between SIGTERM and SIGKILL, and EC2's between notice and end."""
BEFORE_PYTHON_LISTENS = -signal.SIGTERM
"""Exit code of a launcher that got SIGTERM before its first line. As process 1 of a container, it would ignore it."""
NOTICE_SECONDS = (10.0, 18.0)
"""Range of the time between notice and end, shorter than EC2's, because these trainings last two minutes."""

LAUNCHER = """
import sys
from jobs.container import launch
from jobs.container.saving import interruption as shutdown
shutdown.POLL_SECONDS = 0.05
sys.exit(launch.main())
"""


@dataclass(frozen=True, kw_only=True)
class Training:
    """An uninterrupted training, and the events of its attempt."""

    name: str
    ranks: int
    start: Callable[..., Launched]
    model: str
    whole: Run
    s3: FaultyS3
    shown: dict[str, list[float]]
    """For each kind of event, the seconds until the next event."""


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """One interruption, and its outcome."""

    way: str
    after: str
    """Kind of the event that it follows."""
    nth: int
    delay_seconds: float
    attempt: int = 0
    seconds: float = 0.0
    """Since the start of the attempt."""
    exit_code: int | None = None
    """None if the attempt did not end."""
    ended_after_seconds: float = 0.0

    @property
    def is_answered(self) -> bool:
        """Return whether the attempt ended. An announced end must also be in time, with 0 or a retried code."""
        if self.way not in LIMIT_SECONDS:
            return self.exit_code is not None
        in_time = self.ended_after_seconds <= LIMIT_SECONDS[self.way]
        return in_time and self.exit_code in (0, INTERRUPTED_EXIT_CODE, BEFORE_PYTHON_LISTENS)


@dataclass(kw_only=True)
class Ended:
    """An interrupted run, and how it differs from the uninterrupted one."""

    training: Training
    interruptions: list[Interruption] = field(default_factory=list)
    difference: str = ""

    @property
    def is_equal(self) -> bool:
        return not self.difference and all(interruption.is_answered for interruption in self.interruptions)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.kill_and_resume",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kinds", metavar="KIND", nargs="*", help=f"{', '.join(_STARTS)}; default: all")
    parser.add_argument("--interruptions", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=float, default=0.0, help="share of S3 requests that fail")
    parser.add_argument("--logs", type=Path, help="folder in which to keep the output of all attempts")
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(_STARTS):
        parser.error(f"unknown kind: {', '.join(sorted(unknown))}")
    chance = random.Random(options.seed)
    ways = [WAYS[number % len(WAYS)] for number in range(options.interruptions)]
    chance.shuffle(ways)
    ended: list[Ended] = []
    with tempfile.TemporaryDirectory() as name, launcher(Path(name)) as direct_run:
        endpoint = direct_run().environment["AWS_ENDPOINT_URL"]
        draws = {"fraction": options.faults, "seed": options.seed}
        with FaultyS3(endpoint, latency_seconds=LATENCY_SECONDS, **draws) as s3:

            def new_run() -> Run:
                run = direct_run()
                scratch = Path(name) / run.location.key.strip("/")[-4:]
                return replace(run, environment={**run.environment, "AWS_ENDPOINT_URL": s3.url}, scratch=scratch)

            trainings = [
                _uninterrupted(kind, ranks, new_run(), s3, Path(name))
                for kind in options.kinds or _STARTS
                for ranks in RANKS
            ]
            for number, training in enumerate(trainings):
                left = ways[number :: len(trainings)]
                while left:
                    ended.append(_interrupted(training, new_run(), left, chance, options.logs))
                    _show(ended[-1], len(ended))
            print(f"S3 faults: {dict(s3.counts)}" if options.faults else "no S3 faults")
    return _sum_up(ended)


def _finetune(run: Run, folder: Path) -> tuple[str, Sequence[str], str]:
    model = save_tiny_bert(folder / "tiny-bert", positions=POSITIONS)
    flags = longer_finetuning(run.s3, finetuning(run.s3, model, folder), folder, "long")
    return "finetune-classification", (*flags, "--epochs=7", "--max-batch-size-per-rank=8", *_RHYTHM), MODEL_FILE


def _pretrain(run: Run, folder: Path) -> tuple[str, Sequence[str], str]:
    model = save_tiny_bert(folder / "shape", positions=POSITIONS)
    texts = [sentences(130, seed=1), sentences(37, seed=2)]
    flags = pretraining(run.s3, save_packed(folder / "tokens", model, texts, sentences(200, seed=3)))
    shape = ("--hidden-size", "--layers", "--heads", "--intermediate-size")
    flags = (*(flag for flag in flags if not flag.startswith(shape)), f"--config={put(run.s3, model, 'shape')}")
    return "pretrain-mlm", (*flags, "--max-steps=84", *_RHYTHM), MODEL_FILE


def _trainer(run: Run, folder: Path) -> tuple[str, Sequence[str], str]:
    return _script(run, folder / "trainer", TRAINER, "output/model/model.safetensors")


def _loop(run: Run, folder: Path) -> tuple[str, Sequence[str], str]:
    return _script(run, folder / "loop", LOOP, "output/model.pt")


def _fsdp(run: Run, folder: Path) -> tuple[str, Sequence[str], str]:
    wide = FSDP.replace('"WIDTH", "7"', '"WIDTH", "60000"')  # checkpoints of 5 MB
    return _script(run, folder / "fsdp", wide, "output/model.pt")


def _script(run: Run, folder: Path, text: str, model: str) -> tuple[str, Sequence[str], str]:
    return "script", script_flags(run.s3, write_files(folder, {"train.py": text}), "train.py"), model


_STARTS = {"finetune": _finetune, "pretrain": _pretrain, "trainer": _trainer, "loop": _loop, "fsdp": _fsdp}
"""For each kind of training: the kind of job, its flags, and the location of its model."""

_RHYTHM = (
    "--eval-batch-size=1",
    "--checkpoint-every-steps=14",
    "--evaluate-every-steps=24",
    "--log-every-steps=1",
)
"""For trainings of 84 steps."""
POSITIONS = 32768
"""Positions of the models, which use only 16. They enlarge checkpoints to 13 MB, so that a save takes some hundredths
of a second."""
MODEL_FILE = f"{MODEL}model.safetensors"


def _uninterrupted(name: str, ranks: int, whole: Run, s3: FaultyS3, folder: Path) -> Training:
    kind, flags, model = _STARTS[name](whole, folder / f"{name}-{ranks}")

    def start(run: Run, attempt: int, **environment: str) -> Launched:
        return run.start(*flags, kind=kind, nproc=ranks, attempt=attempt, program=("-c", LAUNCHER), **environment)

    with MetadataService() as metadata:
        launched = start(whole, 1, **metadata.environment)
        watched = Watched(launched, whole.scratch, s3)
        for _ in watched.until_the_end():
            pass
        finished(launched)
    seconds: dict[str, list[float]] = defaultdict(list)
    for (at, shown), (until, _) in itertools.pairwise(watched.shown):
        seconds[shown].append(until - at)
    # Nothing is downloaded here, but a resumed attempt downloads as much as it uploads.
    seconds["request GET checkpoints"] = seconds["request PUT checkpoints"]
    return Training(name=name, ranks=ranks, start=start, model=model, whole=whole, s3=s3, shown=dict(seconds))


def _interrupted(training: Training, run: Run, left: list[str], chance: random.Random, logs: Path | None) -> Ended:
    """Restart one run until it ends, and remove its interruptions from `left`."""
    ended = Ended(training=training)
    for attempt in itertools.count(1):
        interruption = None
        if left and (not ended.interruptions or chance.random() < ANOTHER):
            interruption = _draw(left[0], training, attempt, chance)
        with MetadataService() as metadata:
            launched, started = training.start(run, attempt, **metadata.environment), time.monotonic()
            watched = Watched(launched, run.scratch, training.s3)
            if interruption is not None and _reached(watched, interruption):
                seconds = time.monotonic() - started
                if _interrupt(interruption.way, launched, run, metadata, chance):
                    interruption = replace(interruption, seconds=seconds)
            code = _exit_code(run, launched)
        if logs is not None:
            logs.mkdir(exist_ok=True)
            path = logs / f"{training.name}-{training.ranks}-{run.location.key.strip('/')[-4:]}-{attempt}.log"
            path.write_text(f"{interruption}\n{launched.output}exit code {code}\n")
        if interruption is not None and interruption.seconds:
            left.pop(0)
            answered = time.monotonic() - started - interruption.seconds
            ended.interruptions.append(replace(interruption, exit_code=code, ended_after_seconds=answered))
        elif code:
            ended.difference = (
                f"attempt {attempt} ended with {code} without an interruption: {launched.lines[-1].strip()}"
            )
            return ended
        if code is None:
            ended.difference = f"attempt {attempt} has not ended"
            return ended
        if code == 0:
            ended.difference = differences(run, training.whole, model=training.model)
            return ended
    raise AssertionError


def _draw(way: str, training: Training, attempt: int, chance: random.Random) -> Interruption:
    sort = chance.choice(sorted({kind.split()[0] for kind in training.shown}))
    after = chance.choice(sorted(kind for kind in training.shown if kind.startswith(sort)))
    seconds = training.shown[after]
    nth = chance.randrange(len(seconds))
    return Interruption(way=way, after=after, nth=nth, delay_seconds=chance.uniform(0, seconds[nth]), attempt=attempt)


def _reached(watched: Watched, interruption: Interruption) -> bool:
    """Wait for the moment of an interruption. Return whether the attempt still runs."""
    until = None
    for _ in watched.until_the_end():
        if until is None and watched.counts()[interruption.after] > interruption.nth:
            until = time.monotonic() + interruption.delay_seconds
        if until is not None and time.monotonic() >= until:
            return True
    return False


def _interrupt(way: str, launched: Launched, run: Run, metadata: MetadataService, chance: random.Random) -> bool:
    """Interrupt an attempt. Return False if its target does not exist: at its start, an attempt has no ranks."""
    if way == SIGTERM:
        launched.process.send_signal(signal.SIGTERM)
    elif way == SPOT:
        metadata.give_notice(chance.uniform(*NOTICE_SECONDS))
    elif way == REBALANCED:
        metadata.news[REBALANCE] = {"noticeTime": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"}
    else:
        processes = _targets(way, launched, run, chance)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return bool(processes)
    return True


def _targets(way: str, launched: Launched, run: Run, chance: random.Random) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        if way == KILL_LAUNCHER:
            return [psutil.Process(launched.process.pid)]
        if way == KILL_RANK:
            ranks = launched.ranks()
            return [chance.choice(ranks)] if ranks else []
        return list(run.processes())
    return []


def _exit_code(run: Run, launched: Launched) -> int | None:
    """Wait for the end of the attempt. If it does not end, kill all its processes and return None."""
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
    """Print a line for each interruption of the run."""
    equal = "equal" if run.is_equal else f"NOT EQUAL: {run.difference or 'wrong exit code or too late'}"
    for interruption in run.interruptions:
        print(
            f"{run.training.name}, {run.training.ranks} rank(s), run {number}, attempt {interruption.attempt}, at "
            f"{interruption.seconds:.1f} s: {interruption.way} {interruption.delay_seconds:.3f} s after "
            f"{interruption.after}; ended after "
            f"{interruption.ended_after_seconds:.1f} s with {interruption.exit_code}: {equal}",
            flush=True,
        )
    if not run.interruptions:
        print(f"{run.training.name}, {run.training.ranks} rank(s), run {number}, no interruption: {equal}", flush=True)


def _sum_up(ended: Sequence[Ended]) -> int:
    """Print the number of interruptions of each kind, and return the exit code."""
    hits = Counter(interruption.way for run in ended for interruption in run.interruptions)
    equal = sum(len(run.interruptions) for run in ended if run.is_equal)
    print(", ".join(f"{way} {hits[way]}" for way in WAYS))
    print(f"{equal} of {hits.total()} interruptions had no effect on the result")
    return 0 if all(run.is_equal for run in ended) else 1


if __name__ == "__main__":
    sys.exit(main())
