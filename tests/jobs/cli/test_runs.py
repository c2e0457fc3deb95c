"""The commands about runs that exist, on jobs that the embedded AWS really runs."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from jobs.aws.connection import Aws
from jobs.cli.runs import parse_since
from jobs.cli.submit import send
from jobs.client import batch
from jobs.client.storage import put_spec
from jobs.contract.errors import UsageError
from jobs.contract.plan import plan
from jobs.contract.records import Attempt, Receipt
from jobs.contract.run import new_run_id
from jobs.contract.spec import JobSpec
from jobs.contract.stage import DeployedStage
from tests.support.embedded_aws import environment_of
from tests.support.jobs.faulty_proxy import Fault, FaultyProxy
from tests.support.jobs.recorded_runs import three_attempts
from tests.support.jobs.submitting import SPEC, Run, RunCommand, planned_to_run, wait_for
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
    # Batch's words for each container that has ended are a reason of a failure alone.
    assert listed[0]["attempts"][0]["reason"] == "Essential container in task exited"
    assert (listed[1]["reason"], listed[1]["attempts"][0]["reason"]) == ("", "")
    assert "Essential container" not in aws_trainyard("status", good.plan.run_id).stdout
    nothing = aws_trainyard("list", "--team", "product")
    assert (nothing.returncode, nothing.stdout) == (0, "")
    assert "no runs since 7d" in nothing.stderr


def test_list_shows_results_and_costs_filters_by_state_and_kind_and_sorts_by_them(
    aws_trainyard: Trainyard, run_command: RunCommand, embedded: Aws
) -> None:
    runs = [run_command([command]).plan for command in ("true", "true", "false")]
    accuracies = (0.7, 0.9)
    for planned, accuracy in zip(runs, accuracies, strict=False):
        receipt = three_attempts(100, run_id=planned.run_id, accuracy=accuracy).receipt
        assert receipt is not None
        place = planned.run_location / "receipt.json"
        embedded.s3.put_object(Bucket=place.bucket, Key=place.key, Body=receipt.model_dump_json().encode())

    def listed(*options: str) -> list[dict[str, Any]]:
        found = json.loads(aws_trainyard("list", "--limit", "1000", "-o", "json", *options).stdout)
        ids = [planned.run_id for planned in runs]  # other tests have runs there too
        return [run for run in found if run["run_id"] in ids]

    best, second, _ = listed("--sort", "metric")
    assert (best["run_id"], best["metric"]) == (runs[1].run_id, {"name": "eval_accuracy", "value": 0.9})
    assert (second["run_id"], second["metric"]["value"]) == (runs[0].run_id, 0.7)
    assert {run["run_id"] for run in listed("--sort", "cost")[:2]} == {planned.run_id for planned in runs[:2]}
    assert best["usd"] > 0
    [failed] = listed("--state", "failed")
    assert (failed["run_id"], failed["usd"], failed["metric"]) == (runs[2].run_id, None, None)
    assert listed("--job", "notebook") == []
    table = aws_trainyard("list", "--sort", "metric", "--limit", "1000").stdout
    assert "accuracy 0.900" in table
    refused = aws_trainyard("list", "--state", "DONE")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "next: one of SUBMITTED, " in refused.stderr


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


@pytest.mark.parametrize("interrupt", [signal.SIGINT, signal.SIGTERM])
def test_followed_logs_come_live_and_ctrl_c_leaves_the_job_alone(
    *,
    interrupt: signal.Signals,
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
        terminal.process.send_signal(interrupt)
        assert terminal.wait() == 130
    assert f"detached from {plan.run_id}; it goes on" in terminal.shown
    assert f"next: trainyard logs {plan.run_id} --follow" in terminal.shown
    [job] = batch.describe(embedded, stage, [job_id])
    assert job.state == "RUNNING"
    batch.terminate(embedded, job, reason="the test is over")
    wait_for(embedded, stage, job_id)


def test_progress_feeds_a_bar_on_a_terminal_and_the_other_lines_pass_above_it(
    *,
    trainyard: Trainyard,
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
            if step == 2:
                status = trainyard("status", plan.run_id, environment=deployed_environment).stdout
                assert "2 of 3 (66 %): loss 0.2" in status
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
    assert (job.state, len(job.attempts)) == ("CANCELLED", 1)
    assert job.reason == f"cancelled by {embedded.caller}: wrong data"
    again = aws_trainyard("cancel", plan.run_id)
    assert again.returncode == 0
    assert "had ended before: CANCELLED" in again.stderr
    assert "CANCELLED, attempt 1 of 3" in aws_trainyard("status", plan.run_id).stdout
    assert f"has ended: {job.reason}" in aws_trainyard("why", plan.run_id).stderr
    [listed] = json.loads(aws_trainyard("list", "--limit", "1", "-o", "json").stdout)
    assert listed["state"] == "CANCELLED"


@pytest.mark.parametrize(
    ("command", "next_step"), [(["true"], "trainyard fetch {}"), (["false"], "trainyard resume {}")], ids=str
)
def test_without_a_command_it_says_how_to_go_on_with_the_newest_run(
    command: list[str], next_step: str, aws_trainyard: Trainyard, run_command: RunCommand
) -> None:
    run_id = run_command(command).plan.run_id
    shown = aws_trainyard()
    assert shown.returncode == 0
    assert f"The newest run of stage 'dev' is {run_id}: " in shown.stdout
    assert next_step.format(run_id) in shown.stdout


def test_the_latest_run_is_asked_about_before_it_is_cancelled(
    aws_trainyard: Trainyard, embedded: Aws, stage: DeployedStage
) -> None:
    plan = planned_to_run(embedded, stage, ["sleep", "60"])
    job_id = send(embedded, plan)
    unasked = aws_trainyard("cancel", "latest")
    assert unasked.returncode == 2
    assert f"'latest' is {plan.run_id}" in unasked.stderr
    assert aws_trainyard("cancel", "latest", "--yes").returncode == 0
    assert wait_for(embedded, stage, job_id).state == "CANCELLED"


def test_the_latest_run_is_that_of_ones_own_team(
    aws_trainyard: Trainyard, run_command: RunCommand, embedded: Aws, stage: DeployedStage
) -> None:
    ours = run_command(["true"]).plan.run_id
    next_second()
    spec = {**SPEC, "name": "theirs", "team": "product"}
    theirs = plan(JobSpec.model_validate(spec), stage, run_id=new_run_id("theirs", now=datetime.now(timezone.utc)))
    put_spec(embedded, theirs)

    def found(*arguments: str) -> str:
        return str(json.loads(aws_trainyard("status", *arguments, "-o", "json").stdout)["run_id"])

    assert found("latest") == ours
    assert found("latest", "--team", "product") == found("product/latest") == theirs.run_id
    unknown = aws_trainyard("status", "latest", "--team", "produce")
    assert unknown.returncode == 4
    assert "did you mean 'product'?" in unknown.stderr


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
        result={
            "eval_accuracy": 0.8191,
            "eval_majority_accuracy": 0.5,
            "eval_combined_score": 0.8,
            "train_samples_per_second": 41.23,
        },
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
    assert rows["mean of accuracy, F1"] == "0.800"
    assert rows["samples/s"] == "41.2"
    assert rows["duration"] == "1 min 30 s"
    assert rows["estimated cost"] == "0.33 USD On-Demand, 0.0980 USD Spot (0.0250 h of dl1.24xlarge)"
    assert rows["price"] == "as of 2022-08-24, from a price list; an estimate"
    assert Receipt.model_validate_json(aws_trainyard("receipt", run.plan.run_id, "-o", "json").stdout) == receipt

    embedded.s3.put_object(Bucket=place.bucket, Key=place.key, Body=b'{"run_id": 1}')
    damaged = aws_trainyard("receipt", run.plan.run_id)
    assert damaged.returncode == 1
    assert f"error: {place} cannot be read: " in damaged.stderr
    assert "Traceback" not in damaged.stderr


@pytest.mark.parametrize("content", [b'{"run_id": "pro', b"[]", b"\xff", b"[" * 100_000])
def test_records_that_cannot_be_read_are_named_and_the_rest_is_told(
    aws_trainyard: Trainyard, embedded: Aws, run_command: RunCommand, content: bytes
) -> None:
    run = run_command(["true"])
    place = run.plan.run_location
    line = b'{"step": 8, "eval_accuracy": 0.75}\n'
    for name, text in (
        ("receipt.json", content),
        ("metrics.jsonl", line + content),
        *((name, content) for name in ("classes.json", "data.json", "code.json", "spec.yaml")),
    ):
        embedded.s3.put_object(Bucket=place.bucket, Key=(place / name).key, Body=text)
    status = aws_trainyard("status", run.plan.run_id)
    assert status.returncode == 0, status.stderr
    assert "step 8, accuracy 0.75" in status.stdout
    assert sorted(status.stderr.splitlines()) == [
        f"warning: {place}metrics.jsonl: left out 1 line that cannot be read, the first at line 2",
        f"warning: {place}receipt.json cannot be read: it is left out",
    ]
    report = aws_trainyard("report", run.plan.run_id)
    assert report.returncode == 0, report.stderr
    for name in ("classes.json", "data.json", "code.json"):
        assert f"warning: {place}{name} cannot be read: it is left out" in report.stderr
    assert f"warning: {place}spec.yaml: " in report.stderr
    code = aws_trainyard("fetch", run.plan.run_id, "--code")
    assert code.returncode == 1
    assert code.stderr.startswith(f"error: {place}code.json cannot be read: ")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (BOMB.encode(), "more than 10000 values"),
        (b"name: probe\nday: 2020-13-45\n", "line 2, column 6: '2020-13-45' cannot be read as timestamp"),
        (b"name: caf\xe9\n", "byte 0xe9 is not UTF-8"),
        (b"name: " + b"x" * 1_000_000, "it is larger than 1 MB, so it is no spec"),
    ],
    ids=["a bomb of aliases", "no day", "Latin-1", "too large"],
)
def test_a_stored_spec_is_read_within_the_limits_of_a_spec_file(
    aws_trainyard: Trainyard, embedded: Aws, run_command: RunCommand, text: bytes, fault: str
) -> None:
    run = run_command(["false"])
    place = run.plan.run_location / "spec.yaml"
    embedded.s3.put_object(Bucket=place.bucket, Key=place.key, Body=text)
    began = time.monotonic()
    resumed = aws_trainyard("resume", run.plan.run_id, "--dry-run")
    assert resumed.returncode == 2
    assert resumed.stderr.startswith(f"error: {place}: ")
    assert fault in resumed.stderr
    report = aws_trainyard("report", run.plan.run_id)
    assert report.returncode == 0, report.stderr
    assert f"warning: {place}: " in report.stderr
    assert fault in report.stderr
    assert time.monotonic() - began < 30


def test_what_a_later_release_adds_to_a_receipt_is_left_out_at_every_level(
    aws_trainyard: Trainyard, embedded: Aws, run_command: RunCommand
) -> None:
    run = run_command(["true"])
    place = run.plan.run_location / "receipt.json"
    receipt = receipt_of(run)
    cards = {"utilization_percent": 1, "memory_percent": 2, "mean_utilization_percent": 3, "idle_seconds": 4}
    content = receipt.model_dump(mode="json")
    content["attempts"][0]["cards"] = {**cards, "warp": 9}
    written = json.dumps({**content, "flux_capacitor": 1}).encode()
    embedded.s3.put_object(Bucket=place.bucket, Key=place.key, Body=written)
    shown = aws_trainyard("receipt", run.plan.run_id, "-o", "json")
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert "flux_capacitor" not in found
    assert found["attempts"][0]["cards"] == cards
    what = "what this release does not know (attempts.cards.warp, flux_capacitor)"
    assert shown.stderr == f"warning: {place} holds {what}: that is left out\n"


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
    with_checkpoints = json.loads(aws_trainyard("fetch", run_id, "--checkpoints", "--to=~/all", "-o", "json").stdout)
    assert str(tmp_path / f"home/all/{run_id}/checkpoints/step-1/manifest.json") in with_checkpoints

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
    line = b'{"step": 8, "eval_accuracy": 0.75, "samples_per_second": 12.5}\n'
    embedded.s3.put_object(Bucket=stage.run_bucket, Key=f"research/{run_id}/metrics.jsonl", Body=line)
    status = aws_trainyard("status", "forgotten")
    assert status.returncode == 0
    assert "unknown to AWS Batch by now" in status.stdout
    assert "step 8, accuracy 0.75, samples/s 12.5" in status.stdout
    fetched = aws_trainyard("fetch", "forgotten").stdout.split()
    assert fetched == [f"runs/{run_id}/metrics.jsonl", f"runs/{run_id}/spec.yaml"]
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
