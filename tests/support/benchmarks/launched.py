"""Run the real launcher for benchmarks, with an S3 server in a separate process."""

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from jobs.core.locations import S3Location
from jobs.core.run import MODEL
from tests.support.container.launching import Launched, NewRun, Run, environment_of
from tests.support.container.s3_server import RUNS, s3_client, s3_server


def finished(launched: Launched) -> None:
    """Wait for the end of a run, without a limit. If the run failed, end the benchmark with its output."""
    launched.process.wait()
    if launched.wait():
        sys.exit(launched.output)


def differences(run: Run, whole: Run, *, model: str = f"{MODEL}model.safetensors") -> str:
    """Return the differences between an interrupted and an uninterrupted run, bit by bit; empty if there are none."""
    found = []
    if run.read(model) != whole.read(model):
        found.append("weights")
    pairs = itertools.zip_longest(run.curve(), whole.curve())
    if (differing := next(((mine, other) for mine, other in pairs if mine != other), None)) is not None:
        found.append(f"metrics: {differing[0]} and not {differing[1]}")
    return "; ".join(found)


@contextlib.contextmanager
def launcher(folder: Path, address: str = "127.0.0.1", *, is_fresh: bool = False) -> Iterator[NewRun]:
    """Yield a function that makes runs in one bucket, which is deleted afterwards.

    Each rank uses OMP_NUM_THREADS cores. Default: 1. `address` is the S3 server's. `is_fresh` starts S3 and launchers
    as new processes, because a GPU machine may lack packages that forked processes need.
    """
    with s3_server(address, is_fresh=is_fresh) as endpoint, s3_client(endpoint) as s3:
        environment = {**environment_of(endpoint), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        numbers = itertools.count(1)

        def new_run() -> Run:
            location = S3Location(RUNS, f"research/benchmark-20260102-030405-{next(numbers):04x}/")
            return Run(s3, location, environment, folder / "scratch", Path(sys.executable), is_fresh)

        yield new_run
