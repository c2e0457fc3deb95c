"""`trainyard why`: why jobs wait, on an embedded Batch that really lets them wait."""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest

from jobs.aws.connection import Aws
from jobs.cli.submit import send
from jobs.client.batch import describe, terminate
from jobs.client.job import Job
from jobs.client.why import Finding, findings, is_waiting
from jobs.contract.queues import SPOT, team_queue_name
from jobs.contract.stage import DEFAULT_TEAM, DeployedStage
from tests.jobs.conftest import point_at
from tests.support.embedded_aws import EmbeddedAws, environment_of
from tests.support.jobs.faulty_proxy import Fault, FaultyProxy
from tests.support.jobs.submitting import no_instances, planned_to_run, wait_for

Submit = Callable[..., Job]
QUEUE = team_queue_name(SPOT, DEFAULT_TEAM)


@pytest.fixture
def submit(embedded: Aws, stage: DeployedStage) -> Iterator[Submit]:
    """Submits a job that runs until the test is over, and returns it once it is in `state`."""
    submitted: list[str] = []

    def submit_one(state: str, *, name: str = "waits", depends_on: Job | None = None, nodes: int = 1) -> Job:
        plan = planned_to_run(embedded, stage, ["sleep", "300"], name=name)
        if depends_on is not None:
            plan.request["dependsOn"] = [{"jobId": depends_on.id}]
        if nodes > 1:
            plan.request["arrayProperties"] = {"size": nodes}
        submitted.append(send(embedded, plan))
        return wait_for(embedded, stage, submitted[-1], state=state)

    yield submit_one
    for job in describe(embedded, stage, submitted[::-1]):
        terminate(embedded, job, reason="the test is over")
    for job_id in submitted:
        wait_for(embedded, stage, job_id)


@pytest.fixture
def disabled(embedded: Aws, stage: DeployedStage) -> Iterator[None]:
    """A stage whose Spot instances are switched off."""
    with no_instances(embedded, stage, QUEUE):
        yield


def causes(found: list[Finding]) -> dict[str, str]:
    return {finding.about: finding.text for finding in found if finding.verdict == "cause"}


def test_a_job_waits_for_room_and_for_those_before_it(embedded: Aws, stage: DeployedStage, submit: Submit) -> None:
    # GIVEN the two instances that `dev` may have, in use
    for _ in range(2):
        submit("RUNNING")
    # WHEN two more jobs come
    third = submit("RUNNABLE", name="third")
    fourth = submit("RUNNABLE", name="fourth")
    # THEN each is told what it waits for
    full = "2 of at most 2 instances of dl1.24xlarge are in use (jobs: research 2)"
    assert causes(findings(embedded, stage, third)) == {"room": full}
    found = findings(embedded, stage, fourth)
    ahead = "1 job waits before it"
    assert causes(found) == {"room": full, "place in the queue": ahead}
    assert (
        next(item.next_step for item in found if item.about == "place in the queue") == f"trainyard why {third.run_id}"
    )
    # AND what is in order is said as well, after the causes
    assert [finding.verdict for finding in found] == sorted(finding.verdict for finding in found)
    assert {"queue", "Spot instances"} <= {finding.about for finding in found if finding.verdict == "fine"}


def test_a_job_whose_nodes_start_one_by_one_waits_for_those_that_lack(
    embedded: Aws, stage: DeployedStage, submit: Submit
) -> None:
    # GIVEN one of the two instances that `dev` may have, in use
    submit("RUNNING")
    several = submit("RUNNING", nodes=2)
    # THEN the other one runs a node of the next job, whose second one waits
    assert several.nodes == {"RUNNABLE": 1, "RUNNING": 1}
    assert is_waiting(several)
    found = findings(embedded, stage, several)
    assert causes(found) == {"room": "2 of at most 2 instances of dl1.24xlarge are in use (jobs: research 2)"}
    more = submit("RUNNABLE", nodes=3)
    wants = "the job wants 3 instances of dl1.24xlarge; the stage may have 2"
    assert causes(findings(embedded, stage, more))["room"] == wants


def test_a_job_waits_where_instances_are_switched_off(
    embedded: Aws, stage: DeployedStage, disabled: None, submit: Submit
) -> None:
    found = findings(embedded, stage, submit("RUNNABLE"))
    [instances] = [finding for finding in found if finding.about == "Spot instances"]
    assert (instances.verdict, "--state ENABLED" in instances.next_step) == ("cause", True)
    assert instances.text.startswith("their compute environment was disabled by hand")


def test_a_job_waits_where_instances_boot_and_never_join(
    embedded: Aws, stage: DeployedStage, disabled: None, submit: Submit
) -> None:
    job = submit("RUNNABLE")
    detail = embedded.batch.describe_jobs(jobs=[job.id])["jobs"][0]
    queue = embedded.batch.describe_job_queues(jobQueues=[detail["jobQueue"]])["jobQueues"][0]
    name = queue["computeEnvironmentOrder"][0]["computeEnvironment"].rsplit("/", 1)[-1]
    reason = {"since": "2026-11-21T12:00:00+00:00", "reason": "it has started 3 instances that never joined it"}
    found = findings(embedded, replace(stage, never_joined={name: json.dumps(reason)}), job)
    [instances] = [finding for finding in found if finding.about == "Spot instances"]
    assert instances.text == "they were switched off: it has started 3 instances that never joined it"
    assert "--state ENABLED" in instances.next_step


def test_a_job_waits_for_the_next_month_where_the_stages_budget_is_used_up(
    embedded: Aws, stage: DeployedStage, disabled: None, submit: Submit
) -> None:
    record = json.dumps({"budget_usd": 500, "since": "2026-11-20T00:00:00+00:00", "until": "2026-12-01T00:00:00+00:00"})
    stopped = replace(stage, stage_stop=record)
    found = findings(embedded, stopped, submit("RUNNABLE"))
    [instances] = [finding for finding in found if finding.about == "Spot instances"]
    assert instances.text == "they are switched off: the stage has used up its budget of 500 USD a month"
    assert instances.next_step == "wait until 2026-12-01, or have monthly_budget_usd of the stage raised"


def test_a_job_waits_for_the_one_it_depends_on(embedded: Aws, stage: DeployedStage, submit: Submit) -> None:
    first = submit("RUNNING", name="first")
    found = findings(embedded, stage, submit("PENDING", name="second", depends_on=first))
    assert causes(found) == {"dependency": f"it depends on {first.run_id}, which is RUNNING"}


def test_ec2_is_asked_for_its_offer_and_the_quota(
    deployed_aws: EmbeddedAws, stage: DeployedStage, disabled: None, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN an AWS that is not taken for the embedded one; its EC2 knows no dl1.24xlarge, its quotas nothing of EC2
    job = submit("RUNNABLE")
    point_at(monkeypatch, deployed_aws.endpoint)
    real = Aws()
    real.__dict__["embedded"] = False
    found = findings(real, stage, job)
    assert causes(found)["EC2's offer"] == "EC2 does not offer dl1.24xlarge in this region"
    # AND what cannot be asked is no reason to say nothing
    [quota] = [finding for finding in found if finding.about == "vCPU quota"]
    assert quota.verdict == "unknown"
    assert "GetServiceQuota" in quota.text


def test_a_denied_question_is_unknown_and_the_others_go_on(
    embedded: Aws, stage: DeployedStage, disabled: None, submit: Submit, faulty: FaultyProxy
) -> None:
    job = submit("RUNNABLE")
    faulty.faults["getjobqueuesnapshot"].append(Fault(kind="answer", status=403, code="AccessDeniedException"))
    found = findings(Aws(), stage, job)
    [place] = [finding for finding in found if finding.about == "place in the queue"]
    assert (place.verdict, place.text) == (
        "unknown",
        "AWS would not say: GetJobQueueSnapshot was answered with AccessDeniedException",
    )
    assert "Spot instances" in causes(found)


def test_why_says_it_in_a_table_and_as_json(
    trainyard: Callable[..., subprocess.CompletedProcess[str]],
    deployed_aws: EmbeddedAws,
    disabled: None,
    submit: Submit,
) -> None:
    environment: Mapping[str, str] = environment_of(deployed_aws.endpoint)
    job = submit("RUNNABLE")
    shown = trainyard("why", job.run_id, environment=environment)
    assert (shown.returncode, shown.stderr.split(" in ")[0]) == (0, f"{job.run_id} is RUNNABLE")
    assert shown.stdout.splitlines()[1].startswith("cause")
    answer = json.loads(trainyard("why", job.run_id, "-o", "json", environment=environment).stdout)
    assert (answer["run_id"], answer["state"], answer["queue"]) == (job.run_id, "RUNNABLE", QUEUE)
    assert answer["findings"][0]["verdict"] == "cause"


def test_a_job_that_runs_does_not_wait(
    trainyard: Callable[..., subprocess.CompletedProcess[str]], deployed_aws: EmbeddedAws, submit: Submit
) -> None:
    job = submit("RUNNING")
    assert not is_waiting(job)
    shown = trainyard("why", job.run_id, environment=environment_of(deployed_aws.endpoint))
    assert (shown.returncode, shown.stdout) == (0, "")
    assert shown.stderr.splitlines() == [
        f"{job.run_id} does not wait: it is RUNNING",
        f"next: trainyard status {job.run_id}",
    ]


def test_a_job_whose_time_is_over_says_so_and_how_to_give_it_more(
    trainyard: Callable[..., subprocess.CompletedProcess[str]],
    deployed_aws: EmbeddedAws,
    embedded: Aws,
    stage: DeployedStage,
) -> None:
    plan = planned_to_run(embedded, stage, ["sleep", "300"], name="slow")
    plan.request["timeout"] = {"attemptDurationSeconds": 1}
    job = wait_for(embedded, stage, send(embedded, plan))
    assert (job.state, len(job.attempts)) == ("FAILED", 1), "Batch starts nothing again after a timeout"
    shown = trainyard("why", job.run_id, environment=environment_of(deployed_aws.endpoint))
    assert shown.stderr.splitlines() == [
        f"{job.run_id} has ended: its timeout_hours were over",
        f"next: trainyard resume {job.run_id} --set timeout_hours=HOURS",
    ]
