"""Submitting exactly once, on an API that fails, cuts connections or answers late."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from botocore.exceptions import ClientError

from jobs.aws.connection import Aws
from jobs.core.errors import MaybeSubmittedError, TrainyardError
from jobs.core.instance_types import instance_type
from jobs.core.locations import S3Location
from jobs.core.queues import SPOT
from jobs.core.stage import DEFAULT_TEAM, DeployedStage
from jobs.money.budget import attempt_usd_per_hour
from jobs.runs import batch
from jobs.runs.planning import plan_run
from jobs.runs.storage import readable_receipt
from jobs.runs.submit import send, submit_job
from jobs.runs.why import findings
from jobs.spec.plan import Plan
from jobs.spec.spec import parse_spec
from tests.support.jobs.proxies import Fault, FaultyProxy
from tests.support.jobs.submitting import SPEC, planned_to_run, wait_for

if TYPE_CHECKING:
    from mypy_boto3_batch.type_defs import ComputeEnvironmentOrderTypeDef

DELAYS_SECONDS = (0.05, 0.05, 0.05)

THROTTLED = Fault("answer", status=429, code="TooManyRequestsException")
FAILED = Fault("answer", status=500)
FAILED_BUT_ACCEPTED = Fault("answer", status=500, taken="before")
CUT = Fault("cut")
CUT_BUT_ACCEPTED = Fault("cut", taken="before")
LATE = Fault("cut", taken="late")
DENIED = Fault("answer", status=403, code="AccessDeniedException")


@pytest.mark.parametrize(
    ("faults", "sent"),
    [
        pytest.param([THROTTLED], 2, id="throttled"),
        pytest.param([FAILED_BUT_ACCEPTED], 1, id="500 although accepted"),
        pytest.param([THROTTLED, CUT], 3, id="throttled, then cut"),
        pytest.param([FAILED, CUT_BUT_ACCEPTED], 2, id="500, then cut after acceptance"),
    ],
)
def test_exactly_one_job_exists_after_any_failure(
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


def test_submission_that_arrives_late_is_stopped(faulty: FaultyProxy, stage: DeployedStage) -> None:
    aws = Aws()
    plan = planned_to_run(aws, stage, ["sleep", "60"])
    faulty.faults["submitjob"].append(LATE)
    job_id = submit_job(aws, plan, delays_seconds=DELAYS_SECONDS)
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
    batch.terminate(aws, job.id, reason="the test is over")
    wait_for(aws, stage, job_id)


def test_a_job_starts_on_the_next_card_if_the_first_has_no_capacity(emulated: Aws, stage: DeployedStage) -> None:
    # GIVEN a queue of two cards, the first without capacity
    client, names = emulated.batch, ("p5.48xlarge", "p4d.24xlarge")
    [model, *_] = client.describe_compute_environments()["computeEnvironments"]
    arns = [
        client.create_compute_environment(
            computeEnvironmentName=f"ladder-{name.partition('.')[0]}",
            type="MANAGED",
            state="DISABLED" if name == "p5.48xlarge" else "ENABLED",
            computeResources={**model["computeResources"], "type": "SPOT", "instanceTypes": [name], "maxvCpus": 192},
        )["computeEnvironmentArn"]
        for name in names
    ]
    order: list[ComputeEnvironmentOrderTypeDef] = [
        {"order": number, "computeEnvironment": arn} for number, arn in enumerate(arns, start=1)
    ]
    policy = client.describe_job_queues()["jobQueues"][0]["schedulingPolicyArn"]
    queue = client.create_job_queue(
        jobQueueName="ladder", priority=1, computeEnvironmentOrder=order, schedulingPolicyArn=policy
    )["jobQueueArn"]
    types = tuple(map(instance_type, names))
    queues = {**stage.queues, stage.queue_of(DEFAULT_TEAM, SPOT): queue}
    ladder = replace(stage, instance_types=types, queues=queues)
    # WHEN a job runs
    plan = plan_run(emulated, ladder, parse_spec(SPEC, origin="the test"))
    assert plan.usd_per_hour == types[0].spot_usd_per_hour
    job = wait_for(emulated, ladder, send(emulated, plan))
    # THEN it started on the second, and its record, its receipt and its price say so
    receipt = readable_receipt(emulated, plan.run_location)
    assert receipt is not None, job
    [attempt] = receipt.attempts
    assert (receipt.instance_type, attempt.instance_type, attempt.capacity) == (names[1], names[1], "spot")
    assert attempt_usd_per_hour(attempt) == types[1].spot_usd_per_hour
    assert receipt.price_date == types[1].price_date
    # AND `why` told the two apart while it waited
    found = {each.about: each.text for each in findings(emulated, ladder, replace(job, state="RUNNABLE"))}
    assert found["Spot p5.48xlarge"] == "their compute environment was disabled by hand"
    assert found["Spot p4d.24xlarge"] == "their compute environment is enabled and valid"


def test_throttled_requests_are_limited_and_leave_nothing(faulty: FaultyProxy, stage: DeployedStage) -> None:
    aws = Aws()
    plan = planned_to_run(aws, stage, ["true"])
    faulty.faults["submitjob"].extend([THROTTLED] * 20)
    with pytest.raises(TrainyardError, match=f"{plan.run_id} was not submitted") as error:
        send(aws, plan, delays_seconds=DELAYS_SECONDS)
    assert error.value.next_step == "try again in a few minutes"
    assert faulty.seen.count("submitjob") == len(DELAYS_SECONDS)
    assert jobs_of(aws, plan) == []
    assert files_of(aws, plan.run_location) == []


@pytest.mark.parametrize(
    ("submitting", "listing", "jobs"),
    [
        pytest.param([CUT] * 20, [], 0, id="no request is answered"),
        pytest.param([CUT, DENIED], [], 0, id="a refusal after a lost answer"),
        pytest.param([CUT_BUT_ACCEPTED], [DENIED], 1, id="listing is denied"),
    ],
)
def test_possible_submission_keeps_its_spec_and_is_reported(
    *, faulty: FaultyProxy, stage: DeployedStage, submitting: Sequence[Fault], listing: Sequence[Fault], jobs: int
) -> None:
    aws = Aws()
    plan = planned_to_run(aws, stage, ["true"])
    faulty.faults["submitjob"].extend(submitting)
    faulty.faults["listjobs"].extend(listing)
    with pytest.raises(MaybeSubmittedError, match=f"{plan.run_id} may have been submitted") as error:
        send(aws, plan, delays_seconds=DELAYS_SECONDS)
    assert error.value.next_step == f"run 'trainyard status {plan.run_id}' before you submit it again"
    assert faulty.seen.count("submitjob") == min(len(submitting), len(DELAYS_SECONDS))
    faulty.faults.clear()
    assert len(jobs_of(aws, plan)) == jobs
    assert files_of(aws, plan.run_location) == ["spec.yaml"]


def test_duplicate_that_cannot_be_stopped_is_reported(
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
        batch.terminate(aws, job.id, reason="the test is over")
        wait_for(aws, stage, job.id)


def test_refusal_is_not_retried_and_removes_the_spec(faulty: FaultyProxy, stage: DeployedStage) -> None:
    aws = Aws()
    plan = planned_to_run(aws, stage, ["true"])
    bad = replace(plan, request={**plan.request, "jobDefinition": "no-such-definition:1"})
    with pytest.raises(ClientError):
        send(aws, bad)
    assert faulty.seen.count("submitjob") == 1
    assert files_of(aws, plan.run_location) == []


def jobs_of(aws: Aws, plan: Plan) -> list[str]:
    """Return the ids of all jobs with the plan's name, from the API."""
    answer = aws.batch.list_jobs(
        jobQueue=plan.request["jobQueue"], filters=[{"name": "JOB_NAME", "values": [plan.run_id]}]
    )
    return [job["jobId"] for job in answer["jobSummaryList"]]


def files_of(aws: Aws, run: S3Location) -> list[str]:
    found = aws.s3.list_objects_v2(Bucket=run.bucket, Prefix=run.key).get("Contents", [])
    return [item["Key"].removeprefix(run.key) for item in found]
