"""A sweep from spec to best model: one worker is reclaimed, one point fails and is repeated, others stop early."""

import json
import re
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.aws.connection import Aws
from jobs.cli.local import down
from jobs.core.errors import UsageError
from jobs.core.locations import S3Location
from jobs.core.stage import DeployedStage
from jobs.runs import batch, storage
from jobs.runs.job import Job
from jobs.runs.planning import plan_run, plan_runs
from jobs.spec.spec import JobSpec, parse_spec
from jobs.spec.sweep import Claim, SweepRecord, claim_name
from tests.jobs.cli.conftest import Trainyard
from tests.jobs.report.test_run_page import text_of
from tests.support.container.scripts import write_files
from tests.support.running_emulator import Emulator
from tests.support.waiting import wait_until

SCRIPT = """
import os, sys, time
from pathlib import Path
import trainyard

rate, seed, here = float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
assert os.environ["TRAINYARD_PARAMETER_RATE"] == sys.argv[1]
run = trainyard.Run(save_every_steps=1)
assert run.state is None or run.state["rate"] == rate
if rate == 2 and seed == 1 and not (here / "mended").exists():
    raise RuntimeError("this point fails")
stopped = waits = False
while not stopped and (waits or run.steps_done < 2):
    run.step()
    run.log(run.steps_done, eval_loss=rate)
    run.save(run.steps_done, rate=rate)
    waits = rate == 1 and seed == 1 and not (here / "go").exists()
    time.sleep(0.2)
    stopped = run.should_stop()
if not stopped:
    run.log(run.steps_done, eval_loss=rate + seed / 100)
    (trainyard.output() / "rate.txt").write_text(str(rate))
"""


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    write_files(tmp_path / "code", {"train.py": SCRIPT})
    return {
        "name": f"rates-{uuid.uuid4().hex[:8]}",
        "job": "script",
        "resources": {"nproc_per_node": 1},
        "max_usd": 500,
        "sweep": {
            "arguments.parameters.rate": [1, 2],
            "arguments.parameters.seed": [1, 2],
            "metric": "eval_loss",
            "halving": {"from_step": 1, "factor": 2},
        },
        "arguments": {
            "code": "code",
            "command": f"train.py {{parameters.rate}} {{parameters.seed}} {tmp_path}",
            "parameters": {"rate": 5},
        },
    }


@pytest.mark.timeout(600)
def test_a_sweep_survives_a_reclaim_and_repeats_failed_points(
    *,
    aws_trainyard: Trainyard,
    emulated: Aws,
    stage: DeployedStage,
    deployed_aws: Emulator,
    spec: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        return aws_trainyard(*arguments, expect=expect)

    # GIVEN a sweep with as many workers as its queue has room for
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    submitted = run_command("submit", "spec.yaml", "--detach")
    assert (
        "4 points of parameters.rate, parameters.seed, 2 at a time; one budget for all; from step 1" in submitted.stderr
    )
    assert "2 x dl1.24xlarge" in submitted.stderr
    run_id = submitted.stdout.strip()
    run = storage.find_run(emulated, stage, spec["name"])
    assert run.run_id == run_id == storage.find_run(emulated, stage, "latest").run_id
    record = SweepRecord.model_validate_json(object_at(emulated, run.location / "sweep.json"))
    points = [S3Location(run.location.bucket, f"research/{point.run_id}/") for point in record.points]
    [job] = batch.find_jobs(emulated, stage, run_id)
    with pytest.raises(UsageError, match=r"which is still running: 0 of 4 points done"):
        plan_run(emulated, stage, reading(spec["name"]))

    # WHEN the worker of the first point is reclaimed after it has saved a step
    wait_until(lambda: storage.newest_checkpoint(emulated, points[0]), lambda step: step is not None)
    claim = Claim.model_validate_json(object_at(emulated, run.location / claim_name(job.id, 1)))
    deployed_aws.reclaim(f"{job.id}:{claim.child}")
    wait_until(lambda: storage.read_receipt(emulated, points[0]), lambda bill: bill and bill.state == "interrupted")
    (tmp_path / "go").touch()
    # (AND its report shows its points while it runs)
    path = run_command("report", run_id, "--to", str(tmp_path / "sweep.html")).stdout.strip()
    text = text_of(Path(path).read_text())
    assert "running sweep of script, team research" in text
    assert "Points, best first Point rate seed" in text
    ended = finished(emulated, stage, job.id)

    # THEN its point continued from that step; of the other points one failed, and one that was behind was stopped
    assert (ended.state, ended.points, ended.attempts, sum(ended.nodes.values())) == ("FAILED", 4, (), 2)
    bills = [storage.read_receipt(emulated, point) for point in points]
    reasons = [attempt.reason for bill in bills if bill for attempt in bill.attempts]
    assert [bill and (bill.state, len(bill.attempts)) for bill in bills] == [
        ("succeeded", 2),
        ("succeeded", 1),
        ("failed", 1),
        ("succeeded", 1),
    ], reasons
    assert bills[0] is not None
    assert bills[0].attempts[1].resumed_from_step >= 1
    assert {attempt.job_id for bill in bills if bill for attempt in bill.attempts} == {job.id}
    assert bills[3] is not None
    assert bills[3].stopped_early
    assert bills[3].attempts[0].last_step == storage.newest_checkpoint(emulated, points[3]) == 1
    status = run_command("status", run_id).stdout
    assert "2 of 4 points done, 1 failed, 1 stopped early" in status
    assert " of 500.00 USD used" in status
    listed = json.loads(run_command("list", "--limit", "1", "-o", "json").stdout)[0]
    assert (listed["points"], listed["metric"]) == (
        "2 of 4 points done, 1 failed, 1 stopped early",
        {"name": "eval_loss", "value": 1.01},
    )
    # AND its report shows the ranking, the reasons, and one chart of the metric
    run_command("report", run_id, "--to", path)
    text = text_of(Path(path).read_text())
    assert "Best loss 1.010 point 1" in text
    assert "stopped early : ranked" in text
    assert "this point fails" in text
    assert Path(path).read_text().count('class="chart"') == 1
    # AND other commands know that it is a sweep, and why it ended
    failure = "1 of 4 points failed: point 3: "
    assert failure in status
    why = run_command("why", run_id).stderr
    assert failure in why
    assert f"next: trainyard sweep {run_id}, then trainyard resume {run_id}" in why
    for command, what in {"receipt": "receipt", "fetch": "files"}.items():
        refused = run_command(command, run_id, expect=2).stderr
        assert f"is a sweep: it has no {what}, but each of its points has" in refused
        assert f"next: trainyard {command} {record.points[0].run_id} for its best point so far" in refused
    compared = json.loads(run_command("compare", run_id, "-o", "json").stdout)
    assert [each["run_id"] for each in compared] == [record.points[number].run_id for number in (0, 1, 3, 2)]
    table = run_command("sweep", spec["name"])
    rows = [line.split() for line in table.stdout.splitlines()]
    assert rows[0] == ["POINT", "RATE", "SEED", "LOSS", "USD", "STATE"]
    assert [[*row[:4], *row[5:]] for row in rows[1:3]] == [
        ["1", "1", "1", "1.010", "succeeded"],
        ["2", "1", "2", "1.020", "succeeded"],
    ]
    assert [*rows[3][:4], *rows[3][5:8]] == ["4", "2", "2", "2.000", "stopped", "early:", "ranked"]
    assert (rows[4][:3], rows[4][-1]) == (["3", "2", "1"], "failed")
    assert "point 3: " in table.stderr
    assert "this point fails" in table.stderr
    # AND a point is a run, but without a job
    assert run_command("receipt", record.points[1].run_id).stdout.startswith("run ")
    assert "train.py" in run_command("fetch", record.points[1].run_id, "--code").stdout
    for command in ("resume", "cancel", "logs", "why"):
        refused = run_command(command, record.points[2].run_id, expect=2).stderr
        assert f"is a point of the sweep {run_id}" in refused
        assert f"trainyard {command} {run_id}" in refused
    # AND other specs can read the files of the best point
    planned = plan_run(emulated, stage, reading(spec["name"]))
    assert planned.spec.arguments["inputs"]["rate"] == f"{points[0]}output/rate.txt"
    with pytest.raises(UsageError, match=f"is a sweep, .*run://{spec['name']}@best/"):
        plan_run(emulated, stage, reading(spec["name"], best=""))

    # WHEN the failed point is fixed and the sweep is resumed
    assert "keeps its points" in run_command("resume", run_id, "--set", "sweep.seed=1", expect=2).stderr
    (tmp_path / "mended").touch()
    resumed = run_command("resume", run_id, "-o", "json")
    # THEN only that point ran again, and was stopped early too
    answer = json.loads(resumed.stdout)
    assert (answer["sweep"]["progress"], answer["job"]["points"]) == ("2 of 4 points done, 2 stopped early", 1)
    assert [point["number"] for point in answer["sweep"]["points"]] == [1, 2, 3, 4]
    assert answer["sweep"]["points"][2]["reason"] == "ranked 3 of 4 at step 1"
    assert answer["sweep"]["best"] == record.points[0].run_id
    assert "point 3 stopped early: ranked 3 of 4 at step 1" in run_command("logs", run_id).stdout
    # AND only the stopped points can be resumed, on request
    refused = run_command("resume", run_id, expect=2).stderr
    assert "have succeeded, or were stopped early" in refused
    without = ("--set", "sweep.halving=null")
    assert f"next: finish the stopped points: trainyard resume {run_id} {' '.join(without)}" in refused
    to_the_end = json.loads(run_command("resume", run_id, *without, "-o", "json").stdout)
    assert (to_the_end["sweep"]["progress"], to_the_end["job"]["points"]) == ("4 of 4 points done", 2)
    bills = [storage.read_receipt(emulated, point) for point in points]
    assert [len(bill.attempts) for bill in bills if bill] == [2, 1, 3, 2]
    assert [bill.attempts[-1].resumed_from_step for bill in bills if bill][2:] == [1, 1]
    usd = sum(bill.estimated_usd or 0 for bill in bills if bill)
    assert to_the_end["sweep"]["usd"] == pytest.approx(usd, abs=1e-4)
    assert "has succeeded" in run_command("resume", run_id, expect=2).stderr
    assert f"next: trainyard sweep {run_id}\n" in run_command("why", run_id).stderr

    # AND `local down` asks for the points, because the sweep itself has no files to fetch
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    def unfetched() -> int:
        with pytest.raises(UsageError, match=r"\d+ runs? not in ./runs") as refused:
            down("dev", deployed_aws.state_file, yes=False)
        [count] = re.findall(r"(\d+) runs? not in", str(refused.value))
        return int(count)

    before = unfetched()
    for point in record.points[1:]:
        run_command("fetch", point.run_id, "--to", str(Path("runs").absolute()))
    assert unfetched() == before - 3


def test_an_invalid_point_is_reported_by_number(
    emulated: Aws, stage: DeployedStage, spec: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = {"name": "bad", "job": "finetune-classification", "arguments": {"model": "data://tests/model"}}
    swept = {"arguments.train_data": ["data://tests/train.jsonl", "data://tests/none.jsonl"]}
    with pytest.raises(UsageError, match=r"sweep: 'arguments\.model\.x' leads into a value"):
        parse_spec({**base, "sweep": {"arguments.model.x": [1]}}, origin="a")
    with pytest.raises(Exception, match=r"none\.jsonl"):
        plan_run(emulated, stage, parse_spec({**base, "sweep": swept}, origin="a"))
    odd = {"arguments.train_data": ["data://tests/train.jsonl"], "arguments.global_batch_size": [32, 31]}
    with pytest.raises(UsageError, match="point 2 of 2: global_batch_size 31 is not divisible"):
        plan_run(emulated, stage, parse_spec({**base, "sweep": odd}, origin="a"))
    [first, *_] = plan_runs(emulated, stage, [parse_spec(spec, origin="a")])
    with pytest.raises(UsageError, match="the best point is known only after the sweep has ended"):
        plan_run(emulated, stage, reading(spec["name"]), earlier=[first])
    assert storage.runs_of_team(emulated, stage, "research", prefix="bad-") == []


def reading(name: str, *, best: str = "@best") -> JobSpec:
    arguments = {"code": "code", "command": "train.py", "inputs": {"rate": f"run://{name}{best}/output/rate.txt"}}
    return parse_spec({"name": "reader", "job": "script", "arguments": arguments}, origin="the test")


def object_at(aws: Aws, place: S3Location) -> bytes:
    return aws.s3.get_object(Bucket=place.bucket, Key=place.key)["Body"].read()


def finished(aws: Aws, stage: DeployedStage, job_id: str) -> Job:
    return wait_until(lambda: batch.describe(aws, stage, [job_id])[0], lambda job: job.ended)
