"""Runs of the real launcher for benchmarks, on an S3 in a process of its own."""

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3

from jobs.runs import S3Location
from tests.jobs.train.conftest import SERVER
from tests.jobs.train.launching import Launched, NewRun, Run, environment_of

BUCKET = "runs"


def finished(launched: Launched) -> None:
    """Waits for as long as it takes. Ends the benchmark with the output of a run that failed."""
    launched.process.wait()
    if launched.wait():
        sys.exit(launched.output)


@contextlib.contextmanager
def launcher(folder: Path) -> Iterator[NewRun]:
    """Makes runs, all in one bucket; what they leave is gone afterwards. A rank takes OMP_NUM_THREADS cores, or one."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            endpoint = f"http://localhost:{int(server.stdout.readline())}"
            s3 = boto3.client(
                "s3",
                endpoint_url=endpoint,
                aws_access_key_id="test",
                aws_secret_access_key="test",
                region_name="us-east-1",
            )
            s3.create_bucket(Bucket=BUCKET)
            environment = {**environment_of(endpoint), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            numbers = itertools.count(1)

            def new_run() -> Run:
                location = S3Location(BUCKET, f"research/benchmark-20260102-030405-{next(numbers):04x}/")
                return Run(s3, location, environment, folder / "scratch", Path(sys.executable))

            yield new_run
        finally:
            server.terminate()
