"""The commands about runs that exist, on jobs that the embedded AWS really runs."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from jobs.aws.connection import Aws
from jobs.cli.runs import parse_since
from jobs.cli.submit import send
from jobs.client import batch
from jobs.contract.errors import UsageError
from jobs.contract.records import Attempt, Receipt
from jobs.contract.stage import DeployedStage
from tests.support.jobs.faulty_proxy import Fault, FaultyProxy
from tests.support.jobs.submitting import Run, RunCommand, environment_of, planned_to_run, wait_for
from tests.support.jobs.terminal import TRAINYARD, Terminal

Trainyard = Callable[..., subprocess.CompletedProcess[str]]

TWO_ATTEMPTS = ["sh", "-c", 'echo "hello from attempt $AWS_BATCH_JOB_ATTEMPT"; exit $((76 - AWS_BATCH_JOB_ATTEMPT))']


@pytest.fixture
def aws_trainyard(trainyard: Trainyard, deployed_environment: Mapping[str, str]) -> Trainyard:
    """`trainyard`, pointed at the embedded AWS."""
    return lambda *arguments: trainyard(*arguments, environment=deployed_environment)


def wait_for_file(path: Path) -> str:
    """What a job's shell does until `path` is there."""
    return f"while [ ! -e {path} ]; do sleep 0.05; done"


def next_second() -> None:
    """Run ids tell runs apart by the second: of two in the same one, neither is the newer."""
    time.sleep(1 - time.time() % 1)


def test_a_run_is_found_by_id_by_prefix_by_name_and_as_the_latest(
    aws_trainyard: Trainyard, run_command: RunCommand
) -> None:
    older = run_command(["true"], name="found-by").plan.run_id
    next_second()
    newer = run_command(["true"], name="found-by").plan.run_id
    next_second()
    longer_name = run_command(["true"], name="found-by-another").plan.run_id

    def found(text: str) -> str:
        finished = aws_trainyard("status", text, "-o", "json")
        assert finished.returncode == 0, finished.stderr
        return str(json.loads(finished.stdout)["run_id"])

    assert found(older) == older
    assert found("found-by") == newer
    assert found("found-by-a") == longer_name
    assert found("latest") == longer_name
    several = aws_trainyard("status", "found-b")
    assert several.returncode == 2
    assert "error: 'found-b' begins 3 run ids" in several.stderr
    none = aws_trainyard("status", "fund-by")
    assert none.returncode == 4
    assert "run 'fund-by' not found in stage 'dev'; did you mean 'found-by'?" in none.stderr


def test_list_shows_runs_as_a_table_and_as_json(aws_trainyard: Trainyard, run_command: RunCommand) -> None:
    good, bad = run_command(["true"]), run_command(["false"])
    table = aws_trainyard("list", "--limit", "2")
    rows = [line.split() for line in table.stdout.splitlines()]
    assert [row[:2] for row in rows] == [
        ["RUN", "STATE"],
        [bad.plan.run_id, "FAILED"],
        [good.plan.run_id, "SUCCEEDED"],
    ]
    listed = json.loads(aws_trainyard("list", "-o", "json", "--since", "1h", "--team", "research").stdout)
    assert [job["run_id"] for job in listed[:2]] == [bad.plan.run_id, good.plan.run_id]
    assert listed[0]["attempts"][0]["exit_code"] == 1
    nothing = aws_trainyard("list", "--team", "product")
    assert (nothing.returncode, nothing.stdout) == (0, "")
    assert "no runs since 7d" in nothing.stderr


def test_status_tells_each_attempt_and_why_it_ended(aws_trainyard: Trainyard, run_command: RunCommand) -> None:
    run = run_command(TWO_ATTEMPTS)
    shown = aws_trainyard("status", run.plan.run_id).stdout
    assert "FAILED, attempt 2 of 3" in shown
    attempts = [line.split() for line in shown.splitlines() if line[:1] in "12" and line[1:2] == " "]
    assert [(row[0], row[5]) for row in attempts] == [("1", "75"), ("2", "74")]
    assert str(run.plan.run_location) in shown
    as_json = json.loads(aws_trainyard("status", run.plan.run_id, "-o", "json").stdout)
    assert as_json["job"]["state"] == "FAILED"
    assert as_json["receipt"] is None


def test_logs_are_those_of_all_attempts(aws_trainyard: Trainyard, run_command: RunCommand) -> None:
    run = run_command(TWO_ATTEMPTS)
    printed = aws_trainyard("logs", run.plan.run_id)
    assert printed.stdout.splitlines() == ["hello from attempt 1", "hello from attempt 2"]
    lines = [json.loads(line) for line in aws_trainyard("logs", run.plan.run_id, "-o", "json").stdout.splitlines()]
    assert [(line["attempt"], line["node"], line["text"]) for line in lines] == [
        (1, None, "hello from attempt 1"),
        (2, None, "hello from attempt 2"),
    ]
    later = (datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()
    none = aws_trainyard("logs", run.plan.run_id, "--since", later)
    assert none.stdout == ""
    assert "has logged nothing since" in none.stderr
    assert aws_trainyard("logs", run.plan.run_id, "--since", "1h").stdout == printed.stdout


def test_followed_logs_come_live_and_ctrl_c_leaves_the_job_alone(
    embedded: Aws,
    stage: DeployedStage,
    clean_environment: dict[str, str],
    deployed_environment: Mapping[str, str],
    tmp_path: Path,
) -> None:
    plan = planned_to_run(embedded, stage, ["sh", "-c", "echo ready; exec sleep 60"])
    job_id = send(embedded, plan)
    with Terminal(
        [TRAINYARD, "logs", plan.run_id, "--follow"],
        environment={**clean_environment, **deployed_environment},
        folder=tmp_path,
    ) as terminal:
        terminal.wait_until_shown("ready")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.wait() == 130
    assert f"detached from {plan.run_id}; it goes on" in terminal.shown
    assert f"next: trainyard logs {plan.run_id} --follow" in terminal.shown
    [job] = batch.describe(embedded, stage, [job_id])
    assert job.state == "RUNNING"
    batch.terminate(embedded, job, reason="the test is over")
    wait_for(embedded, stage, job_id)


def test_progress_feeds_a_bar_on_a_terminal_and_the_other_lines_pass_above_it(
    embedded: Aws,
    stage: DeployedStage,
    clean_environment: dict[str, str],
    deployed_environment: Mapping[str, str],
    tmp_path: Path,
) -> None:
    shown = tmp_path / "shown"
    steps = f"for step in 1 2 3; do echo [progress] $step/3 loss 0.$step; {wait_for_file(shown)}; rm {shown}; done"
    plan = planned_to_run(embedded, stage, ["sh", "-c", f"echo before; {steps}; echo after"])
    send(embedded, plan)
    with Terminal(
        [TRAINYARD, "logs", plan.run_id, "--follow"],
        environment={**clean_environment, **deployed_environment},
        folder=tmp_path,
    ) as terminal:
        for step in (1, 2, 3):
            terminal.wait_until_shown(f"{step}/3")
            terminal.wait_until_shown(f"loss 0.{step}")
            shown.touch()
        terminal.wait_until_shown("[SUCCEEDED]")
        assert terminal.wait() == 0
    assert "attempt 1" in terminal.shown
    assert "[progress]" not in terminal.shown
    lines = [line.strip() for line in terminal.shown.splitlines()]
    assert any(line.endswith("before") for line in lines)
    assert any(line.endswith("after") for line in lines)


def test_following_waits_out_throttling_and_loses_no_line(
    trainyard: Trainyard, embedded: Aws, stage: DeployedStage, faulty: FaultyProxy, tmp_path: Path
) -> None:
    over = tmp_path / "over"
    script = f"for i in 1 2 3; do echo line $i; done; {wait_for_file(over)}; for i in 4 5 6; do echo line $i; done"
    plan = planned_to_run(embedded, stage, ["sh", "-c", script])
    send(embedded, plan)
    throttled = Fault("answer", status=429, code="TooManyRequestsException")
    # The first call finds the run; then more in a row fail than boto3 itself tries again.
    faulty.faults["describejobs"].extend([None, *[throttled] * 6])
    faulty.faults["getlogevents"].extend([Fault("cut"), *[Fault("answer", status=500)] * 6])
    faulty.when_over = over.touch
    finished = trainyard("logs", plan.run_id, "--follow", environment=environment_of(faulty.url))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == [f"line {number}" for number in range(1, 7)]


def test_cancel_stops_what_runs(aws_trainyard: Trainyard, embedded: Aws, stage: DeployedStage) -> None:
    plan = planned_to_run(embedded, stage, ["sleep", "60"])
    job_id = send(embedded, plan)
    wait_for(embedded, stage, job_id, state="RUNNING")
    finished = aws_trainyard("cancel", plan.run_id, "--reason", "wrong data")
    assert finished.returncode == 0
    assert f"{plan.run_id} (RUNNING) is being stopped" in finished.stderr
    job = wait_for(embedded, stage, job_id)
    assert (job.state, len(job.attempts)) == ("FAILED", 1)
    assert "wrong data" in job.reason
    again = aws_trainyard("cancel", plan.run_id)
    assert again.returncode == 0
    assert "had ended before: FAILED" in again.stderr


def receipt_of(run: Run) -> Receipt:
    noon = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
    return Receipt(
        run_id=run.plan.run_id,
        team="research",
        job="finetune-classification",
        state="succeeded",
        attempts=[
            Attempt(
                number=1,
                started_at=noon,
                finished_at=noon + timedelta(seconds=90),
                last_seen_at=noon + timedelta(seconds=90),
                exit_code=0,
                instance_type="dl1.24xlarge",
                accelerator="cpu",
                nnodes=1,
                world_size=2,
            )
        ],
        duration_seconds=90,
        instance_hours=0.025,
        instance_type="dl1.24xlarge",
        on_demand_usd=0.328,
        spot_usd=0.098,
        price_date="2022-08-24",
        price_source="a price list",
        estimate_note="an estimate",
        result={"eval_accuracy": 0.8191, "eval_majority_accuracy": 0.5, "train_samples_per_second": 41.23},
    )


def test_receipt_shows_the_result_and_that_its_cost_is_an_estimate(
    aws_trainyard: Trainyard, embedded: Aws, run_command: RunCommand
) -> None:
    run = run_command(["true"])
    missing = aws_trainyard("receipt", run.plan.run_id)
    assert missing.returncode == 4
    assert f"error: {run.plan.run_id} has written no receipt" in missing.stderr

    receipt = receipt_of(run)
    place = run.plan.run_location / "receipt.json"
    embedded.s3.put_object(Bucket=place.bucket, Key=place.key, Body=receipt.model_dump_json().encode())
    rows = {}
    for line in aws_trainyard("receipt", run.plan.run_id).stdout.splitlines():
        label, _, value = line.partition("  ")
        rows[label] = value.strip()
    assert rows["accuracy"] == "0.819"
    assert rows["majority class"] == "0.500"
    assert rows["samples/s"] == "41.2"
    assert rows["duration"] == "1 min 30 s"
    assert rows["estimated cost"] == "0.33 USD On-Demand, 0.0980 USD Spot (0.0250 h of dl1.24xlarge)"
    assert rows["price"] == "as of 2022-08-24, from a price list"
    assert Receipt.model_validate_json(aws_trainyard("receipt", run.plan.run_id, "-o", "json").stdout) == receipt

    embedded.s3.put_object(Bucket=place.bucket, Key=place.key, Body=b'{"run_id": 1}')
    damaged = aws_trainyard("receipt", run.plan.run_id)
    assert damaged.returncode == 1
    assert "is no receipt that this release reads" in damaged.stderr


def test_fetch_brings_everything_but_checkpoints(
    aws_trainyard: Trainyard, embedded: Aws, run_command: RunCommand, tmp_path: Path
) -> None:
    run = run_command(["true"])
    run_id, place = run.plan.run_id, run.plan.run_location
    contents = {"metrics.jsonl": b"{}\n", "model/config.json": b"{}", "checkpoints/step-1/manifest.json": b"{}"}
    for name, content in contents.items():
        embedded.s3.put_object(Bucket=place.bucket, Key=(place / name).key, Body=content)
    finished = aws_trainyard("fetch", run_id)
    assert finished.returncode == 0
    folder = Path("runs") / run_id
    expected = {str(folder / name) for name in ("metrics.jsonl", "model/config.json", "spec.yaml")}
    assert set(finished.stdout.splitlines()) == expected
    files = {str(path.relative_to(tmp_path)) for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert files == expected
    with_checkpoints = json.loads(aws_trainyard("fetch", run_id, "--checkpoints", "--to", "all", "-o", "json").stdout)
    assert f"all/{run_id}/checkpoints/step-1/manifest.json" in with_checkpoints

    embedded.s3.put_object(Bucket=place.bucket, Key=f"{place.key}../../escaped", Body=b"")
    refused = aws_trainyard("fetch", run_id)
    assert refused.returncode == 2
    assert "would be written outside" in refused.stderr
    assert not (tmp_path / "escaped").exists()


def test_a_fetch_that_the_disk_has_no_room_for_names_the_file(
    run_command: RunCommand,
    embedded: Aws,
    clean_environment: dict[str, str],
    deployed_environment: Mapping[str, str],
    tmp_path: Path,
) -> None:
    run = run_command(["true"])
    run_id, place = run.plan.run_id, run.plan.run_location
    embedded.s3.put_object(Bucket=place.bucket, Key=(place / "model/weights").key, Body=bytes(1 << 20))
    finished = subprocess.run(
        ["sh", "-c", 'ulimit -f 64; exec "$@"', "sh", TRAINYARD, "fetch", run_id],
        cwd=tmp_path,
        env={**clean_environment, **deployed_environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 1
    assert finished.stderr == f"error: runs/{run_id}/model/weights: File too large\n"
    assert list((tmp_path / "runs" / run_id / "model").iterdir()) == []


def test_a_run_that_batch_has_forgotten_is_still_there(
    aws_trainyard: Trainyard, embedded: Aws, stage: DeployedStage
) -> None:
    run_id = "forgotten-20200131-120000-beef"
    embedded.s3.put_object(Bucket=stage.run_bucket, Key=f"research/{run_id}/spec.yaml", Body=b"name: forgotten\n")
    status = aws_trainyard("status", "forgotten")
    assert status.returncode == 0
    assert "unknown to AWS Batch by now" in status.stdout
    assert aws_trainyard("fetch", "forgotten").stdout.strip() == f"runs/{run_id}/spec.yaml"
    logs = aws_trainyard("logs", "forgotten")
    assert logs.returncode == 4
    assert f"next: trainyard fetch {run_id}" in logs.stderr


def test_tab_completes_run_ids(
    trainyard: Trainyard, deployed_environment: Mapping[str, str], run_command: RunCommand
) -> None:
    run_id = run_command(["true"], name="completed").plan.run_id
    asked = {"_TRAINYARD_COMPLETE": "complete_bash", "COMP_WORDS": "trainyard status compl", "COMP_CWORD": "2"}
    completed = trainyard(environment={**deployed_environment, **asked})
    assert completed.stdout.split() == [run_id]
    without_aws = trainyard(environment=asked)
    assert (without_aws.stdout.strip(), without_aws.stderr) == ("", "")


@pytest.mark.parametrize(("text", "ago"), [("90s", 90), ("30m", 1800), ("12h", 43200), ("7d", 604800), ("1 h", 3600)])
def test_since_counts_back_from_now(text: str, ago: int) -> None:
    expected = datetime.now(timezone.utc) - timedelta(seconds=ago)
    assert abs(parse_since(text) - expected) < timedelta(seconds=5)


def test_since_takes_a_time_and_refuses_the_rest() -> None:
    assert parse_since("2026-01-31T12:00:00+01:00") == datetime(2026, 1, 31, 11, tzinfo=timezone.utc)
    assert parse_since("2026-01-31") == datetime(2026, 1, 31, tzinfo=timezone.utc)
    for text in ("yesterday", "9" * 5000 + "d"):
        with pytest.raises(UsageError, match="it should look like 30m, 12h, 7d"):
            parse_since(text)


@pytest.mark.parametrize("days", [10**7, 10**11, 10**30])
def test_since_reaches_no_further_back_than_there_are_years(days: int) -> None:
    with pytest.raises(UsageError, match=f"--since {days}d: that is before the first year there is"):
        parse_since(f"{days}d")
