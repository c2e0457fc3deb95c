"""Submitting exactly once, and what is known of jobs afterwards, over the API of the emulator."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from botocore.exceptions import ClientError

from jobs.aws.connection import Aws
from jobs.cli.submission import send
from jobs.core.errors import MaybeSubmittedError, TrainyardError
from jobs.core.locations import S3Location
from jobs.core.stage import DeployedStage
from jobs.runs import batch
from jobs.runs.logs import LogReader
from jobs.spec.plan import Plan
from tests.support.jobs.proxies import Fault, FaultyProxy
from tests.support.jobs.submitting import RunCommand, planned_to_run, wait_for
from tests.support.waiting import wait_until

DELAYS_SECONDS = (0.05, 0.05, 0.05)

REFUSED_FOR_NOW = Fault("answer", status=429, code="TooManyRequestsException")
FAILED = Fault("answer", status=500)
FAILED_BUT_TAKEN = Fault("answer", status=500, taken="before")
CUT = Fault("cut")
CUT_BUT_TAKEN = Fault("cut", taken="before")
LATE = Fault("cut", taken="late")
DENIED = Fault("answer", status=403, code="AccessDeniedException")


@pytest.mark.parametrize(
    ("faults", "sent"),
    [
        pytest.param([REFUSED_FOR_NOW], 2, id="throttled"),
        pytest.param([FAILED_BUT_TAKEN], 1, id="500 though taken"),
        pytest.param([REFUSED_FOR_NOW, CUT], 3, id="throttled, then cut"),
        pytest.param([FAILED, CUT_BUT_TAKEN], 2, id="500, then cut after it was taken"),
    ],
)
def test_one_job_exists_whatever_went_wrong(
    faulty: FaultyProxy, stage: DeployedStage, faults: Sequence[Fault], sent: int
) -> None:
    aws = Aws()
    plan = planned_to_run(aws, stage, ["true"])
    faulty.faults["submitjob"].extend(faults)
    job_id = send(aws, plan, delays_seconds=DELAYS_SECONDS)
    assert jobs_of(aws, plan) == [job_id]
    assert faulty.seen.count("submitjob") == sent
    assert faulty.seen.index("spec.yaml") < faulty.seen.index("submitjob")
    assert files_of(aws, plan.run_location) == ["spec.yaml"]


def test_a_submission_that_arrives_late_is_stopped_again(faulty: FaultyProxy, stage: DeployedStage) -> None:
    aws = Aws()
    plan = planned_to_run(aws, stage, ["sleep", "60"])
    faulty.faults["submitjob"].append(LATE)
    job_id = batch.submit(aws, plan, delays_seconds=DELAYS_SECONDS)
    duplicates = [other for other in jobs_of(aws, plan) if other != job_id]
    assert len(duplicates) == 1
    stopped = wait_for(aws, stage, duplicates[0])
    assert stopped.state == "FAILED"
    assert f"duplicate of {job_id}" in stopped.reason
    [job] = batch.describe(aws, stage, [job_id])
    assert not job.ended
    found = batch.find_job(aws, stage, plan.run_id)
    assert found is not None
    assert found.id == job_id
    batch.terminate(aws, job, reason="the test is over")
    wait_for(aws, stage, job_id)


def test_throttled_tries_are_bounded_and_leave_nothing(faulty: FaultyProxy, stage: DeployedStage) -> None:
    aws = Aws()
    plan = planned_to_run(aws, stage, ["true"])
    faulty.faults["submitjob"].extend([REFUSED_FOR_NOW] * 20)
    with pytest.raises(TrainyardError, match=f"{plan.run_id} was not submitted") as error:
        send(aws, plan, delays_seconds=DELAYS_SECONDS)
    assert error.value.next_step == "try again in some minutes"
    assert faulty.seen.count("submitjob") == len(DELAYS_SECONDS)
    assert jobs_of(aws, plan) == []
    assert files_of(aws, plan.run_location) == []


@pytest.mark.parametrize(
    ("submitting", "listing", "jobs"),
    [
        pytest.param([CUT] * 20, [], 0, id="no try is answered"),
        pytest.param([CUT, DENIED], [], 0, id="a refusal after a lost answer"),
        pytest.param([CUT_BUT_TAKEN], [DENIED], 1, id="nobody may look"),
    ],
)
def test_what_may_be_a_run_keeps_its_spec_and_is_said_to_be_one(
    *, faulty: FaultyProxy, stage: DeployedStage, submitting: Sequence[Fault], listing: Sequence[Fault], jobs: int
) -> None:
    aws = Aws()
    plan = planned_to_run(aws, stage, ["true"])
    faulty.faults["submitjob"].extend(submitting)
    faulty.faults["listjobs"].extend(listing)
    with pytest.raises(MaybeSubmittedError, match=f"{plan.run_id} may have been submitted") as error:
        send(aws, plan, delays_seconds=DELAYS_SECONDS)
    assert error.value.next_step == f"trainyard status {plan.run_id}, before it is submitted again"
    assert faulty.seen.count("submitjob") == min(len(submitting), len(DELAYS_SECONDS))
    faulty.faults.clear()
    assert len(jobs_of(aws, plan)) == jobs
    assert files_of(aws, plan.run_location) == ["spec.yaml"]


def test_a_duplicate_that_cannot_be_stopped_is_named(
    faulty: FaultyProxy, stage: DeployedStage, caplog: pytest.LogCaptureFixture
) -> None:
    aws = Aws()
    plan = planned_to_run(aws, stage, ["sleep", "60"])
    faulty.faults["submitjob"].append(LATE)
    faulty.faults["terminatejob"].append(DENIED)
    job_id = send(aws, plan, delays_seconds=DELAYS_SECONDS)
    [duplicate] = [other for other in jobs_of(aws, plan) if other != job_id]
    assert f"aws batch terminate-job --job-id {duplicate}" in caplog.text
    assert files_of(aws, plan.run_location) == ["spec.yaml"]
    for job in batch.describe(aws, stage, [job_id, duplicate]):
        batch.terminate(aws, job, reason="the test is over")
        wait_for(aws, stage, job.id)


def test_a_refusal_is_not_tried_again_and_takes_the_spec_back(faulty: FaultyProxy, stage: DeployedStage) -> None:
    aws = Aws()
    plan = planned_to_run(aws, stage, ["true"])
    bad = replace(plan, request={**plan.request, "jobDefinition": "no-such-definition:1"})
    with pytest.raises(ClientError):
        send(aws, bad)
    assert faulty.seen.count("submitjob") == 1
    assert files_of(aws, plan.run_location) == []


def test_reads_of_a_throttled_service_are_tried_again(faulty: FaultyProxy, stage: DeployedStage) -> None:
    faulty.faults["getparametersbypath"].extend([REFUSED_FOR_NOW, FAILED])
    assert batch.read_stage(Aws(), stage.name) == stage


def test_a_job_is_described_attempt_by_attempt(emulated: Aws, stage: DeployedStage, run_command: RunCommand) -> None:
    run = run_command(["sh", "-c", 'echo "attempt $AWS_BATCH_JOB_ATTEMPT"; exit $((76 - AWS_BATCH_JOB_ATTEMPT))'])
    job = run.ended
    assert (job.state, job.run_id, job.team, job.queue) == ("FAILED", run.plan.run_id, "research", "spot@research")
    assert (job.kind, job.max_attempts, job.attempt) == ("finetune-classification", 3, 2)
    # 75 asks to be started again, 74 is the job's own fault.
    assert [attempt.exit_code for attempt in job.attempts] == [75, 74]
    assert [attempt.number for attempt in job.attempts] == [1, 2]
    assert [stream.attempt for stream in job.log_streams] == [1, 2]
    for attempt in job.attempts:
        assert attempt.started_at
        assert attempt.stopped_at
        assert attempt.started_at <= attempt.stopped_at
    assert job.stopped_at
    assert job.created_at <= job.stopped_at


def test_nodes_that_start_one_by_one_are_described_as_one_job(emulated: Aws, stage: DeployedStage) -> None:
    # GIVEN two nodes, of which both leave once, and one then fails by itself
    script = """
        echo "node $AWS_BATCH_JOB_ARRAY_INDEX"
        [ $AWS_BATCH_JOB_ATTEMPT = 1 ] && exit 75
        [ $AWS_BATCH_JOB_ARRAY_INDEX = 1 ] && exit 3
        sleep 60
    """
    plan = planned_to_run(emulated, stage, ["sh", "-c", script])
    plan.request["arrayProperties"] = {"size": 2}
    job_id = batch.submit(emulated, plan)
    job = wait_until(
        lambda: batch.describe(emulated, stage, [job_id])[0], lambda job: job.nodes == {"RUNNING": 1, "FAILED": 1}
    )
    # THEN it runs as long as one of them does
    assert (job.state, job.nodes_text, job.attempt, job.ended) == ("RUNNING", "1 of 2 nodes", 2, False)
    assert [(attempt.exit_code, bool(attempt.stopped_at)) for attempt in job.attempts] == [(75, True), (None, False)]
    assert [(stream.attempt, stream.node) for stream in job.log_streams] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    lines = LogReader(emulated, stage.log_group).read(job.log_streams)
    assert {(line.attempt, line.node, line.text) for line in lines} == {
        (attempt, node, f"node {node}") for attempt in (1, 2) for node in (0, 1)
    }
    assert job.run_id in [
        listed.run_id for listed in batch.list_jobs(emulated, stage, since=job.created_at - timedelta(seconds=1))
    ]
    # AND its end ends all of them
    batch.terminate(emulated, job, reason="enough")
    ended = wait_for(emulated, stage, job_id)
    assert (ended.state, ended.reason, ended.nodes) == ("CANCELLED", "enough", {"FAILED": 2})
    # AND what failed by itself says why, not who had to leave with it
    assert [attempt.exit_code for attempt in ended.attempts] == [75, 3]


def test_runs_are_listed_newest_first_by_time_and_team(
    emulated: Aws, stage: DeployedStage, run_command: RunCommand
) -> None:
    start = datetime.now(timezone.utc)
    first, second = run_command(["true"]), run_command(["true"])
    emulated.batch.submit_job(
        jobName="not-a-run",
        jobQueue=stage.queues["spot@research"],
        jobDefinition=first.plan.request["jobDefinition"],
        shareIdentifier="research",
        ecsPropertiesOverride=second.plan.request["ecsPropertiesOverride"],
    )
    runs = [job.run_id for job in batch.list_jobs(emulated, stage, since=start)]
    assert runs == [second.plan.run_id, first.plan.run_id]
    assert batch.list_jobs(emulated, stage, since=start, team="product") == []
    assert batch.list_jobs(emulated, stage, since=datetime.now(timezone.utc) + timedelta(minutes=1)) == []


def jobs_of(aws: Aws, plan: Plan) -> list[str]:
    """Ids of every job that has the plan's name, straight from the API."""
    answer = aws.batch.list_jobs(
        jobQueue=plan.request["jobQueue"], filters=[{"name": "JOB_NAME", "values": [plan.run_id]}]
    )
    return [job["jobId"] for job in answer["jobSummaryList"]]


def files_of(aws: Aws, run: S3Location) -> list[str]:
    found = aws.s3.list_objects_v2(Bucket=run.bucket, Prefix=run.key).get("Contents", [])
    return [item["Key"].removeprefix(run.key) for item in found]
