"""`trainyard resume`: which runs it refuses, and that it submits only one job."""

import json
import subprocess
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import yaml

from jobs.aws.connection import Aws
from jobs.container.launcher.accounting import receipt
from jobs.core.records import Attempt
from jobs.core.stage import DeployedStage
from jobs.money.budget import Budget
from jobs.runs import batch
from jobs.runs.submit import send
from tests.jobs.cli.conftest import Trainyard
from tests.support.jobs.proxies import Fault, FaultyProxy
from tests.support.jobs.submitting import SPEC, Run, RunCommand, no_instances, planned_to_run, wait_for
from tests.support.jobs.terminal import TRAINYARD
from tests.support.running_emulator import environment_of

Resume = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def resume(aws_trainyard: Trainyard) -> Resume:
    return lambda *arguments, **options: aws_trainyard("resume", *arguments, **options)


@pytest.fixture
def failed(run_command: RunCommand) -> Run:
    return run_command(["false"])


def stop(aws: Aws, stage: DeployedStage, run_id: str) -> None:
    for job in batch.find_jobs(aws, stage, run_id):
        batch.terminate(aws, job.id, reason="the test is over")
        wait_for(aws, stage, job.id)


def jobs_of(aws: Aws, stage: DeployedStage, run_id: str) -> list[str]:
    """Return the ids of all jobs of the run that Batch knows."""
    found = aws.batch.list_jobs(
        jobQueue=stage.queues["spot@research"], filters=[{"name": "JOB_NAME", "values": [run_id]}]
    )["jobSummaryList"]
    return [job["jobId"] for job in found]


def attempt_of(job_id: str, number: int, hours: float, **values: Any) -> Attempt:
    begin = datetime.now(timezone.utc) - timedelta(hours=9)
    return Attempt(
        number=number,
        job_id=job_id,
        started_at=begin,
        last_seen_at=begin + timedelta(hours=hours),
        instance_type="dl1.24xlarge",
        capacity="spot",
        accelerator="hpu",
        nnodes=1,
        world_size=8,
        **values,
    )


def test_succeeded_runs_and_runs_without_a_spec_are_refused(
    resume: Resume, run_command: RunCommand, failed: Run, emulated: Aws, stage: DeployedStage
) -> None:
    done = run_command(["true"]).plan.run_id
    succeeded = resume(done, expect=2)
    assert f"{done} has succeeded" in succeeded.stderr
    assert f"next: trainyard fetch {done}" in succeeded.stderr

    run_id = failed.plan.run_id
    emulated.s3.delete_object(Bucket=stage.run_bucket, Key=f"research/{run_id}/spec.yaml")
    # A run without files does not exist, so it needs another file.
    emulated.s3.put_object(Bucket=stage.run_bucket, Key=f"research/{run_id}/metrics.jsonl", Body=b"")
    without_spec = resume(run_id, expect=4)
    assert f"{run_id} cannot be resumed: there is no spec.yaml" in without_spec.stderr
    assert "next: submit its spec as a new run" in without_spec.stderr
    assert jobs_of(emulated, stage, run_id) == [failed.ended.id]

    # If Batch has forgotten a run, the record of its last attempt counts.
    forgotten = "kept-20200131-120000-beef"
    records = {"spec.yaml": yaml.safe_dump({**SPEC, "name": "kept"})}
    records["attempts/1.json"] = attempt_of("1c", 1, 1.0, exit_code=0).model_dump_json()
    for name, content in records.items():
        emulated.s3.put_object(Bucket=stage.run_bucket, Key=f"research/{forgotten}/{name}", Body=content.encode())
    assert f"{forgotten} has succeeded" in resume(forgotten, expect=2).stderr


def test_changes_that_affect_the_result_need_an_option(
    resume: Resume, failed: Run, emulated: Aws, stage: DeployedStage
) -> None:
    run_id = failed.plan.run_id
    change = ("--set", "arguments.learning_rate=0.5", "--dry-run")
    refused = resume(run_id, *change, expect=2)
    assert "arguments.learning_rate: was 5e-05, is 0.5" in refused.stderr
    assert "--allow-changes" in refused.stderr.splitlines()[-1]
    more = resume(run_id, "--set", "nnodes=9", "--set", "capacity=spot", "--dry-run", expect=2)
    assert "resources.nnodes: stage 'dev' has room for 2 nodes of dl1.24xlarge (Spot), not for 9" in more.stderr

    allowed = resume(run_id, *change, "--allow-changes", "-o", "json", expect=0)
    assert "learning_rate is 0.5 from this step on; it was 5e-05" in allowed.stderr
    request = json.loads(allowed.stdout)
    command = request["ecsPropertiesOverride"]["taskProperties"][0]["containers"][0]["command"]
    assert command.index("--allow-changes") < command.index("finetune-classification")
    assert "--learning-rate=0.5" in command
    assert request["tags"]["trainyard:resumed"] == failed.ended.id
    assert request["jobName"] == run_id

    # Other arguments may always be changed.
    changes = [f"--set={it}" for it in ("attempts=7", "timeout_hours=1", "arguments.log_every_steps=3")]
    request = json.loads(resume(run_id, "--dry-run", "-o", "json", *changes, expect=0).stdout)
    assert (request["retryStrategy"]["attempts"], request["timeout"]["attemptDurationSeconds"]) == (7, 3600)
    another = resume(run_id, "--set", "team=product", expect=2)
    assert "keeps its team 'research'" in another.stderr
    assert jobs_of(emulated, stage, run_id) == [failed.ended.id]


def test_a_resumed_run_continues_from_its_newest_checkpoint(
    aws_trainyard: Trainyard, resume: Resume, failed: Run, emulated: Aws
) -> None:
    # GIVEN a run with a checkpoint, whose second job ends at a bad row of its data
    run_id, place = failed.plan.run_id, failed.plan.run_location / "checkpoints/step-20/manifest.json"
    emulated.s3.put_object(Bucket=place.bucket, Key=place.key, Body=b"{}")
    resumed = resume(run_id, "-o", "json", expect=1)
    result = json.loads(resumed.stdout)
    assert (result["run_id"], result["job"]["resumed"]) == (run_id, failed.ended.id)
    assert "resumes from checkpoint step-20" in resumed.stderr
    status = aws_trainyard("status", run_id).stdout
    assert f"resumed after job {failed.ended.id}" in status
    assert status.splitlines()[-1].startswith("2  ")
    assert "attempt 1, resumed" in aws_trainyard("logs", run_id).stderr


def test_two_simultaneous_resumes_submit_one_job(
    *,
    failed: Run,
    resume: Resume,
    aws_trainyard: Trainyard,
    emulated: Aws,
    stage: DeployedStage,
    aws_environment: dict[str, str],
) -> None:
    run_id = failed.plan.run_id
    with no_instances(emulated, stage, "spot@research"):
        both = [
            subprocess.Popen(
                [TRAINYARD, "resume", run_id, "--detach", "-o", "json"],
                env=aws_environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        answers = [process.communicate(timeout=120) for process in both]
        assert sorted(process.returncode for process in both) == [0, 2], answers
        [submitted] = [json.loads(out) for out, _ in answers if out]
        assert submitted["run_id"] == run_id
        assert sorted(jobs_of(emulated, stage, run_id)) == sorted([failed.ended.id, submitted["job_id"]])
        assert run_id in resume(run_id, expect=2).stderr

        found = batch.find_jobs(emulated, stage, run_id)
        assert [(job.id, job.resumed) for job in found] == [
            (failed.ended.id, ""),
            (submitted["job_id"], failed.ended.id),
        ]
        listed = json.loads(aws_trainyard("list", "-o", "json").stdout)
        assert [job["id"] for job in listed if job["run_id"] == run_id] == [submitted["job_id"]]
        aws_trainyard("cancel", run_id, expect=0)
        assert wait_for(emulated, stage, submitted["job_id"]).state == "CANCELLED"

    # A cancelled run can be resumed again, after its newest job.
    again = resume(run_id, "--detach", "-o", "json", expect=0)
    newest = batch.find_job(emulated, stage, run_id)
    assert newest is not None
    assert (newest.id, newest.resumed) == (json.loads(again.stdout)["job_id"], submitted["job_id"])
    stop(emulated, stage, run_id)


def test_a_run_must_have_ended_before_it_is_resumed(
    resume: Resume, aws_trainyard: Trainyard, emulated: Aws, stage: DeployedStage
) -> None:
    saves = "trap 'sleep 5; exit 75' TERM; sleep 600 & wait"
    planned = planned_to_run(emulated, stage, ["sh", "-c", saves])
    job_id = send(emulated, planned)
    wait_for(emulated, stage, job_id, state="RUNNING")
    running = resume(planned.run_id, expect=2)
    assert f"{planned.run_id} has not ended: job {job_id} is RUNNING" in running.stderr
    assert f"or trainyard cancel {planned.run_id} and then resume it" in running.stderr
    aws_trainyard("cancel", planned.run_id, expect=0)
    ending = resume(planned.run_id, expect=2)
    assert (
        f"{planned.run_id} is being stopped: job {job_id} stays RUNNING until it has saved and ended" in ending.stderr
    )
    assert "trainyard cancel" not in ending.stderr
    assert wait_for(emulated, stage, job_id).state == "CANCELLED"
    resume(planned.run_id, "--dry-run", expect=0)


def test_a_refused_resume_changes_nothing(
    *, trainyard: Trainyard, resume: Resume, failed: Run, emulated: Aws, stage: DeployedStage, faulty: FaultyProxy
) -> None:
    run_id = failed.plan.run_id

    def files() -> dict[str, bytes]:
        listed = emulated.s3.list_objects_v2(Bucket=stage.run_bucket, Prefix=f"research/{run_id}/")["Contents"]
        return {
            item["Key"]: emulated.s3.get_object(Bucket=stage.run_bucket, Key=item["Key"])["Body"].read()
            for item in listed
        }

    before = files()
    faulty.faults["submitjob"].append(Fault("answer", status=403, code="AccessDeniedException"))
    refused = trainyard("resume", run_id, "--set", "attempts=9", "--detach", environment=environment_of(faulty.url))
    assert refused.returncode != 0
    assert files() == before
    assert resume(run_id, "--detach").returncode == 0
    stop(emulated, stage, run_id)


def test_a_run_ended_by_its_budget_resumes_with_a_larger_one(
    resume: Resume, aws_trainyard: Trainyard, failed: Run, emulated: Aws, stage: DeployedStage
) -> None:
    run_id, location, row = failed.plan.run_id, failed.plan.run_location, stage.instance_type
    reason = "budget: max_usd 2.00 reached: 1.97 USD"
    attempt = attempt_of(failed.ended.id, 1, 0.5, exit_code=1, reason=reason)
    attempt = attempt.model_copy(update={"finished_at": attempt.last_seen_at})
    budget = Budget(max_usd=2)
    bill = receipt(
        location, [attempt], job="x", instance=row, state="failed", result={}, budget=budget, on_instance=True
    )
    for name, text in (
        ("receipt.json", bill.model_dump_json()),
        ("spec.yaml", yaml.safe_dump({**failed.plan.spec.model_dump(mode="json", exclude_none=True), "max_usd": 2})),
    ):
        place = location / name
        emulated.s3.put_object(Bucket=place.bucket, Key=place.key, Body=text.encode())

    used = f"{row.spot_usd_per_hour / 2:.2f} of 2.00 USD"
    assert reason in aws_trainyard("why", run_id, expect=0).stderr
    status = aws_trainyard("status", run_id, expect=0).stdout
    assert reason in status
    assert f"{used} used" in status
    assert f"{used} used" in aws_trainyard("receipt", run_id, expect=0).stdout
    assert f"{used} are used up" in resume(run_id, "--dry-run", expect=2).stderr
    larger = resume(run_id, "--dry-run", "--set", "max_usd=10", expect=0)
    assert "of 10.00 USD used so far" in larger.stdout
    as_json = resume(run_id, "--dry-run", "--set", "max_usd=10", "-o", "json", expect=0)
    assert '"--max-usd=10.0"' in as_json.stdout


def test_an_unreadable_receipt_does_not_prevent_resuming(resume: Resume, failed: Run, emulated: Aws) -> None:
    run_id, location = failed.plan.run_id, failed.plan.run_location
    attempts = [attempt_of(failed.ended.id, number, number) for number in (1, 2)]
    cards = {"utilization_percent": 1, "memory_percent": 2, "mean_utilization_percent": 3, "idle_seconds": 4, "warp": 9}
    for name, content in {
        "receipt.json": b'{"run_id": "pro',
        "attempts/1.json": attempts[0].model_dump_json().encode(),
        "attempts/2.json": json.dumps({**attempts[1].model_dump(mode="json"), "cards": cards, "flux": 1}).encode(),
        "attempts/3.json": b'{"number": 3, "jo',
        "attempts/junk.json": b"[]",
    }.items():
        emulated.s3.put_object(Bucket=location.bucket, Key=(location / name).key, Body=content)

    used_up = resume(run_id, "--dry-run", "--set", "max_hours=2.5", expect=2)
    assert "3.00 of 2.5 instance hours are used up" in used_up.stderr
    found = resume(run_id, "--dry-run", "--set", "max_hours=9", expect=0)
    assert "3.00 of 9 instance hours used so far" in found.stdout
    assert "no receipt can be read: the budget counts the run's 2 recorded attempts" in found.stderr
    warnings = used_up.stderr + found.stderr  # each is printed once per process
    for name in ("3.json", "junk.json"):
        assert f"warning: {location}attempts/{name} cannot be read and is skipped" in warnings
