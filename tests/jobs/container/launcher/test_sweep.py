"""A worker of a sweep with an S3 and real launchers of its points: its budget, claims and attempts."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from jobs.aws import s3 as object_store
from jobs.container.launcher import sweep as module
from jobs.container.launcher.accounting import receipt
from jobs.container.launcher.sweep import Worker
from jobs.core.errors import INTERRUPTED_EXIT_CODE, SWEEP_OVER_EXIT_CODE, TrainyardError
from jobs.core.instance_types import instance_type
from jobs.core.locations import S3Location
from jobs.core.records import Attempt
from jobs.money.budget import Spent
from jobs.spec.catalog import CATALOG
from jobs.spec.launcher_options import LauncherOptions
from jobs.spec.sweep import Claim, PointRecord, SweepRecord
from tests.support.container.launching import Run
from tests.support.container.scripts import script_flags, write_files
from tests.support.waiting import wait_until

SCRIPT = """
import sys, time
from pathlib import Path
from typing import Any
from trainyard import output
number, here = sys.argv[1], Path(sys.argv[2])
(here / f"started-{number}").touch()
while not (here / f"go-{number}").exists():
    time.sleep(0.05)
(output() / "done.txt").write_text(number)
"""

MakeWorker = Callable[..., Worker]


@pytest.fixture
def make_worker(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeWorker]:
    """A worker of a sweep of three points. Each point runs until a file go-N exists."""
    write_files(tmp_path / "code", {"train.py": SCRIPT})
    [code, *_] = [flag.partition("=")[2] for flag in script_flags(run.s3, tmp_path / "code", "train.py 1")]
    points = [
        PointRecord(
            number=number,
            run_id=point_id(run, number),
            values={"number": number},
            arguments={"code": code, "command": f"train.py {number} {tmp_path}"},
        )
        for number in (1, 2, 3)
    ]
    run_id = str(run.location).rstrip("/").rpartition("/")[2]
    run.write("sweep.json", SweepRecord(run_id=run_id, points=points).model_dump_json().encode())
    for name, value in run.environment.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    environment = dict(os.environ)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def make(*, child: int = 0, job: str = "job", **options: object) -> Worker:
        values = {"instance_type": "dl1.24xlarge", "nproc_per_node": 1, "capacity": "spot", "sweep_attempts": 2}
        return Worker(
            LauncherOptions.model_validate({**values, **options}),
            CATALOG["script"],
            run.location,
            {
                **run.environment,
                "TRAINYARD_ACCELERATOR": "auto",
                "AWS_BATCH_JOB_ID": f"{job}:{child}",
                "AWS_BATCH_JOB_ARRAY_INDEX": str(child),
                "TMPDIR": str(tmp_path),
            },
        )

    yield make
    os.environ.clear()
    os.environ.update(environment)  # a worker sets variables that PyTorch reads
    for number, handler in before.items():
        signal.signal(number, handler)


def point_id(run: Run, number: int) -> str:
    return f"p{number}-{str(run.location).rstrip('/').rpartition('/')[2]}"


def claim(run: Run, number: int, *, job: str = "job") -> Claim:
    return Claim.model_validate_json(run.read(f"claims/{job}/{number}.json"))


def point_receipt(run: Run, number: int, *, hours: float, state: Any, job: str = "job") -> None:
    """Write the receipt of another worker's point."""
    now = datetime.now(timezone.utc)
    attempt = Attempt(
        number=1,
        job_id=job,
        started_at=now - timedelta(hours=hours),
        last_seen_at=now,
        instance_type="dl1.24xlarge",
        capacity="spot",
        accelerator="hpu",
        nnodes=1,
        world_size=1,
    )
    place = S3Location("runs", f"research/{point_id(run, number)}/")
    instance = instance_type(attempt.instance_type)
    bill = receipt(place, [attempt], job="script", instance=instance, state=state, result={}, on_instance=True)
    object_store.write(run.s3, place / "receipt.json", bill.model_dump_json().encode())
    run.write(f"claims/{job}/{number}.json", Claim(child=9, starts=1).model_dump_json().encode())


def wait_for_start(tmp_path: Path, number: int) -> None:
    wait_until((tmp_path / f"started-{number}").exists, bool)


def test_a_used_up_budget_stops_a_point_and_starts_no_other(
    make_worker: MakeWorker,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.5)
    worker = make_worker(max_hours=10)

    def others_spend() -> None:
        wait_for_start(tmp_path, 1)
        point_receipt(run, 3, hours=9.99, state="running")

    spending = threading.Thread(target=others_spend)
    spending.start()
    assert worker.work() == SWEEP_OVER_EXIT_CODE
    spending.join()
    stopped = claim(run, 1)
    assert (stopped.ended, stopped.starts) == ("stopped", 1)
    assert stopped.reason.startswith("budget: 9.99 instance hours of max_hours 10 used, ")
    assert "; the rest is reserved for saving, 2 minutes for each of the 2 running points. " in stopped.reason
    assert "--set max_hours=20" in stopped.reason
    assert not (tmp_path / "started-2").exists()
    # A worker that starts then runs no point either, and reports why.
    assert make_worker(child=1, max_hours=10).work() == SWEEP_OVER_EXIT_CODE
    why = "point 2 was not started: budget: 9.99 instance hours of max_hours 10 used, "
    assert f"error: {why}" in capfd.readouterr().out
    stop = Claim.model_validate_json(
        run.s3.get_object(Bucket="runs", Key=f"{run.location.key}claims/job/stop.json")["Body"].read()
    )
    assert stop.reason.startswith(why)
    assert "; the rest does not pay for 5 minutes of another point in addition to the 1 running point. " in stop.reason
    assert "claims/job/2.json" not in run.keys("claims/")


def test_an_interrupted_worker_continues_its_own_point(make_worker: MakeWorker, run: Run, tmp_path: Path) -> None:
    # GIVEN a point that succeeded in an earlier job, and a point of another worker
    point_receipt(run, 2, hours=0.1, state="succeeded", job="before")
    run.write("claims/job/3.json", Claim(child=1, starts=1).model_dump_json().encode())

    def interrupt() -> None:
        wait_for_start(tmp_path, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    # WHEN the worker is ended as before a reclaim
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert make_worker().work() == INTERRUPTED_EXIT_CODE
    thread.join()
    assert claim(run, 1) == Claim(child=0, starts=1)
    # THEN it continues the same point
    (tmp_path / "go-1").touch()
    assert make_worker().work() == 0
    assert claim(run, 1) == Claim(child=0, starts=2, ended="succeeded")
    bill = json.loads(run.s3.get_object(Bucket="runs", Key=f"research/{point_id(run, 1)}/receipt.json")["Body"].read())
    assert [attempt["number"] for attempt in bill["attempts"]] == [1, 2]
    # AND leaves the others alone
    assert claim(run, 3).child == 1
    assert "claims/job/2.json" not in run.keys("claims/")


def test_a_point_fails_after_its_timeout_or_all_attempts(
    make_worker: MakeWorker, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a first point with no attempt left, a second that never ends, and a third that fails
    run.write("claims/job/1.json", Claim(child=0, starts=2).model_dump_json().encode())
    commands = iter(["exec sleep 60", "exit 3"])
    monkeypatch.setattr(Worker, "_start_launcher", lambda *_: subprocess.Popen(["sh", "-c", next(commands)]))
    # WHEN
    assert make_worker(sweep_timeout_seconds=1).work() == SWEEP_OVER_EXIT_CODE
    # THEN
    assert claim(run, 1).reason == "all 2 attempts were interrupted"
    assert (claim(run, 2).ended, claim(run, 2).reason) == ("failed", "it exceeded timeout_hours: 0.000277778")
    assert (claim(run, 3).ended, claim(run, 3).reason) == ("failed", "exit code 3")


def test_a_budget_stops_a_point_even_if_s3_fails_now_and_then(
    make_worker: MakeWorker, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(Worker, "_start_launcher", lambda *_: subprocess.Popen(["sh", "-c", "exec sleep 60"]))
    worker = make_worker(max_hours=10)
    # GIVEN that the cost is read before the point, at its start, and twice in each round
    hours = iter([0.0, 0.0, 0.0, None, 0.0, 9.99, None])

    def now() -> tuple[Spent, int]:
        if (used := next(hours)) is None:
            raise TrainyardError("S3 fails")
        return Spent(instance_hours=used), 1

    monkeypatch.setattr(worker._spending, "now", now)
    # THEN the worker ends after its point, not before
    assert worker.work() == SWEEP_OVER_EXIT_CODE
    assert claim(run, 1).ended == "stopped"
    assert claim(run, 1).reason.startswith("budget: 9.99 instance hours of max_hours 10 used")
    assert next(hours) is None
