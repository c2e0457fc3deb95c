"""Runs of the real launcher, started as by Batch, with a local S3 server."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from jobs.core.locations import S3Location
from jobs.core.records import Attempt, Receipt
from jobs.core.run import METRICS
from tests.support.container import warm_launcher
from tests.support.container.listeners import is_loopback, listeners
from tests.support.container.warm_launcher import WarmLauncher

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

PATIENCE_SECONDS = 120
"""Timeout of every wait. A healthy run needs a tenth."""

_SCAN_EVERY_SECONDS = 0.5

MEASURED = (
    "time",
    "samples_per_second",
    "train_samples_per_second",
    "train_runtime_seconds",
    "train_steps_per_second",
    *(f"eval_{name}" for name in ("runtime", "samples_per_second", "steps_per_second")),
)
"""The metrics that differ between two runs with the same weights."""


@dataclass
class Launched:
    """A running launcher, and its output so far."""

    process: subprocess.Popen[str] | WarmLauncher
    keeps_to_itself: bool
    lines: list[str] = field(default_factory=list)
    open_to_the_network: set[str] = field(default_factory=set)
    """Listening sockets of its processes that other machines could reach, collected while it ran."""
    overlooked: bool = False
    """Whether ranks ran but no listening socket was seen, not even that of their store."""
    _more: threading.Condition = field(default_factory=threading.Condition)
    _ended: bool = False

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._scan, daemon=True).start()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for_line(self, part: str, patience_seconds: float = PATIENCE_SECONDS) -> str:
        """Wait for a line that contains `part`, and return it."""

        def found() -> str | None:
            return next((line for line in self.lines if part in line), None)

        with self._more:
            self._more.wait_for(lambda: found() is not None or self._ended, patience_seconds)
            line = found()
        assert line is not None, f"no line with {part!r} in:\n{self.output}"
        return line

    def wait(self) -> int:
        """Wait for the end, and return the exit code once all output is read."""
        try:
            code = self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {PATIENCE_SECONDS} s:\n{self.output}")
        with self._more:
            assert self._more.wait_for(lambda: self._ended, PATIENCE_SECONDS)
        # Several nodes must reach each other. Their tests check how.
        assert not (self.keeps_to_itself and self.open_to_the_network), self.open_to_the_network
        # A scan that misses the store proves nothing about other sockets.
        assert not (self.keeps_to_itself and self.overlooked), f"no listening socket was seen:\n{self.output}"
        return code

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        return self.wait()

    def ranks(self) -> list[psutil.Process]:
        """Return the running rank processes, rank 0 first."""
        ranks = {_rank(child): child for child in psutil.Process(self.process.pid).children()}
        return [ranks[number] for number in sorted(number for number in ranks if number is not None)]

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                with self._more:
                    self.lines.append(line)
                    self._more.notify_all()
        with self._more:
            self._ended = True
            self._more.notify_all()

    def _scan(self) -> None:
        before: set[psutil.Process] = set()
        """The ranks that were running after the last scan, if it found no socket."""
        while not self._ended:
            with contextlib.suppress(psutil.NoSuchProcess):
                found = listeners(self.process.pid)
                self.open_to_the_network.update(str(one) for one in found if not is_loopback(one.address))
                after = set() if found else set(self.ranks())
                # Ranks that ran before and after this scan ran during it. A short run may end between two scans.
                self.overlooked |= bool(before & after)
                before = after
            time.sleep(_SCAN_EVERY_SECONDS)


def _rank(process: psutil.Process) -> int | None:
    """Return the number of a rank, or None for other processes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        number = process.environ().get("RANK")
        return None if number is None else int(number)
    return None


@dataclass(frozen=True)
class Run:
    """One run: its location, and the start of its attempts."""

    s3: "S3Client"
    location: S3Location
    environment: Mapping[str, str]
    scratch: Path
    python: Path
    """The interpreter that stands in for the image and determines the packages."""
    is_fresh: bool = False
    """Whether each launcher is a new process, because its start is measured."""

    def start(
        self,
        *flags: str,
        nproc: int = 1,
        attempt: int = 1,
        kind: str = "finetune-classification",
        program: Sequence[str] = ("-m", "jobs.container.launch"),
        options: Sequence[str] = (),
        within: Sequence[str] = (),
        script_ranks: str = "fresh",
        **env: str,
    ) -> Launched:
        """Start an attempt.

        `within` is a command that runs the launcher elsewhere. With `script_ranks="forked"`, PyTorch and
        transformers are already imported in a script's ranks, as in ranks of our kinds (warm_launcher.py).
        """
        command = [
            *within,
            *(str(self.python), *program),
            *("--instance-type=dl1.24xlarge", f"--nproc-per-node={nproc}", *options, kind, *flags),
        ]
        self.scratch.mkdir(exist_ok=True)
        environment = {
            **self.environment,
            "TRAINYARD_RUN_URI": f"{self.location}",
            "TRAINYARD_ACCELERATOR": "auto",
            "AWS_BATCH_JOB_ATTEMPT": str(attempt),
            "TMPDIR": str(self.scratch),
            **env,
        }
        process: subprocess.Popen[str] | WarmLauncher
        if not self.is_fresh and warm_launcher.can_fork(command, environment):
            process = warm_launcher.start(command, environment, forks_script=script_ranks == "forked")
        else:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=Path(__file__).parents[3],
            )
        several = {"AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_ARRAY_INDEX"} & env.keys()
        starts_ranks_itself = "--processes=1" in flags  # the torchrun of a script listens on any address
        return Launched(process, keeps_to_itself=not several and not starts_ranks_itself)

    def attempt(self, *flags: str, expect: int = 0, **options: Any) -> Launched:
        """Start an attempt, wait for its end, and check the exit code."""
        launched = self.start(*flags, **options)
        code = launched.wait()
        assert code == expect, f"exit code {code}:\n{launched.output}"
        return launched

    def keys(self, below: str = "") -> list[str]:
        prefix = f"{self.location.key}{below}"
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=self.location.bucket, Prefix=prefix)
        return [item["Key"].removeprefix(self.location.key) for page in pages for item in page.get("Contents", [])]

    def read(self, name: str) -> bytes:
        return self.s3.get_object(Bucket=self.location.bucket, Key=f"{self.location.key}{name}")["Body"].read()

    def write(self, name: str, content: bytes) -> None:
        self.s3.put_object(Bucket=self.location.bucket, Key=f"{self.location.key}{name}", Body=content)

    def download(self, below: str, target: Path) -> Path:
        for name in self.keys(below):
            path = target / name.removeprefix(below)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.read(name))
        return target

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.read(METRICS).splitlines()]

    def curve(self) -> list[dict[str, Any]]:
        """Return the metrics that are equal in runs with the same weights, by step.

        A resumed run writes an evaluation that it catches up on after the other line of the step, not before.
        """
        lines = ({name: value for name, value in line.items() if name not in MEASURED} for line in self.metrics())
        return sorted(lines, key=lambda line: (line["step"], sorted(line)))

    def tensorboard_losses(self, folder: Path) -> list[tuple[int, float]]:
        """Download the event files to `folder`, and return step and loss of each point of TensorBoard's curve."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(self.download("tensorboard/", folder)))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("train/loss")]

    def recorded_attempt(self, number: int) -> Attempt:
        return Attempt.model_validate_json(self.read(f"attempts/{number}.json"))

    def receipt(self) -> Receipt:
        return Receipt.model_validate_json(self.read("receipt.json"))

    def complete_checkpoints(self) -> list[int]:
        manifests = [name for name in self.keys("checkpoints/") if name.endswith("manifest.json")]
        return sorted(int(name.split("/")[1].removeprefix("step-")) for name in manifests)

    def processes(self) -> Iterator[psutil.Process]:
        """Yield the running processes of this run, including ranks whose launcher is gone."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get("TRAINYARD_RUN_URI") == str(self.location):
                    yield process

    def wait_until_gone(self) -> None:
        _, alive = psutil.wait_procs(list(self.processes()), timeout=PATIENCE_SECONDS)
        assert not alive, f"left behind: {alive}"


NewRun = Callable[[], Run]


def two_nodes(job: str = "8d2f") -> list[dict[str, Any]]:
    """Return AWS Batch's variables for the two nodes of a job, the main node first."""
    job_of_two = {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"}
    main = {**job_of_two, "AWS_BATCH_JOB_ID": f"{job}#0", "AWS_BATCH_JOB_NODE_INDEX": "0"}
    child = {**job_of_two, "AWS_BATCH_JOB_ID": f"{job}#1", "AWS_BATCH_JOB_NODE_INDEX": "1"}
    return [main, {**child, "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "127.0.0.1"}]


def environment_of(endpoint: str) -> dict[str, str]:
    """Return a container's environment: some variables of this machine, and the variables for AWS."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    return {
        **kept,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",  # for the S3 server, which does not check it
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        # Runs are compared bit by bit, which requires the same number of threads.
        "OMP_NUM_THREADS": "1",
    }
