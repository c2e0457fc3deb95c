"""`trainyard why`: why jobs wait, on the emulator."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from jobs.aws.connection import Aws
from jobs.core.errors import TimedOutError
from jobs.core.instance_types import instance_type
from jobs.core.queues import SPOT, team_queue_name
from jobs.core.stage import DEFAULT_TEAM, DeployedStage
from jobs.runs import batch
from jobs.runs.failure import raise_failure
from jobs.runs.job import Job
from jobs.runs.submit import send
from jobs.runs.why import Finding, findings, is_waiting
from jobs.spec.placement import place
from jobs.spec.spec import parse_spec
from tests.jobs.cli.conftest import Trainyard
from tests.jobs.conftest import point_at
from tests.support.emulator.batch_calls import Batch, overrides
from tests.support.jobs.proxies import Fault, FaultyProxy
from tests.support.jobs.submitting import SPEC, Begin, no_instances, planned_to_run, wait_for
from tests.support.running_emulator import Emulator

Submit = Callable[..., Job]
QUEUE = team_queue_name(SPOT, DEFAULT_TEAM)


@pytest.fixture
def submit(emulated: Aws, stage: DeployedStage, begin: Begin) -> Submit:
    """Return a function that submits a job, and returns it once it is in `state`. It ends with the test."""

    def submit_one(
        state: str, *, name: str = "waits", depends_on: Job | None = None, nodes: int = 1, **keys: int
    ) -> Job:
        plan = planned_to_run(emulated, stage, ["sleep", "300"], name=name, **keys)
        if depends_on is not None:
            plan.request["dependsOn"] = [{"jobId": depends_on.id}]
        if nodes > 1:
            plan.request["arrayProperties"] = {"size": nodes}
        return begin(plan, state=state)

    return submit_one


def causes(found: list[Finding]) -> dict[str, str]:
    return {finding.about: finding.text for finding in found if finding.verdict == "cause"}


def test_a_job_waits_for_room_and_for_earlier_jobs(
    emulated: Aws, stage: DeployedStage, submit: Submit, aws_trainyard: Trainyard
) -> None:
    # GIVEN that both instances of `dev` are in use
    for _ in range(2):
        submit("RUNNING")
    # WHEN two more jobs are submitted
    third = submit("RUNNABLE", name="third")
    fourth = submit("RUNNABLE", name="fourth")
    # THEN the findings say what each waits for
    full = "2 of at most 2 instances of dl1.24xlarge are in use (jobs: research 2)"
    assert causes(findings(emulated, stage, third)) == {"instance limit": full}
    found = findings(emulated, stage, fourth)
    ahead = "1 job waits ahead of it"
    assert causes(found) == {"instance limit": full, "queue position": ahead}
    assert next(item.next_step for item in found if item.about == "queue position") == f"trainyard why {third.run_id}"
    fifth = submit("RUNNABLE", name="fifth")
    assert causes(findings(emulated, stage, fifth))["queue position"] == "2 jobs wait ahead of it"
    # AND the team's urgent run is first, which the others are told, also in lists
    urgent = submit("RUNNABLE", name="urgent", priority=5)
    [place] = [item.text for item in findings(emulated, stage, urgent) if item.about == "queue position"]
    assert place == "it is the first waiting job"
    waits = causes(findings(emulated, stage, third))["queue position"]
    assert waits == "1 job waits ahead of it (priority 5, this run has 0)"
    listed = aws_trainyard("list", "--state", "RUNNABLE", expect=0).stdout.splitlines()
    assert listed[0].split()[2] == "PRIORITY"
    assert [line.split()[2] for line in listed if urgent.run_id in line] == ["5"]
    assert "priority 5" in aws_trainyard("status", urgent.run_id, expect=0).stdout
    # AND the other checks follow after the causes
    assert [finding.verdict for finding in found] == sorted(finding.verdict for finding in found)
    assert {"queue", "Spot instances"} <= {finding.about for finding in found if finding.verdict == "fine"}


def test_nodes_that_start_together_need_room_in_one_zone(
    emulated: Aws, stage: DeployedStage, deployed_aws: Emulator, request: pytest.FixtureRequest
) -> None:
    # GIVEN a queue with room for three nodes in each of two zones, and a job of two nodes in each
    [spot] = emulated.batch.describe_job_queues(jobQueues=[stage.queue(QUEUE)])["jobQueues"]
    [like] = emulated.batch.describe_compute_environments(
        computeEnvironments=[spot["computeEnvironmentOrder"][0]["computeEnvironment"]]
    )["computeEnvironments"]
    resources = like["computeResources"]
    api = Batch(
        aws=deployed_aws,
        client=emulated.batch,
        vpc="",
        subnet=resources["subnets"][0],
        security_group=resources["securityGroupIds"][0],
        instance_profile=resources["instanceRole"],
    )
    vcpus = instance_type("dl1.24xlarge").vcpus
    zones = emulated.batch.describe_compute_environments(
        computeEnvironments=[api.environment(max_vcpus=3 * vcpus) for _ in "ab"]
    )["computeEnvironments"]
    queue = api.queue(*(zone["computeEnvironmentArn"] for zone in zones))
    several = replace(stage, queues={**stage.queues, "multinode@research": queue})

    def submit(nodes: int) -> Job:
        each = overrides(resourceRequirements=[{"type": "VCPU", "value": str(vcpus)}])
        job_id = api.submit(
            api.multinode_definition("sleep 300", nodes=nodes),
            queue,
            nodeOverrides={"nodePropertyOverrides": [{"targetNodes": "0:", "ecsPropertiesOverride": each}]},
        )
        request.addfinalizer(lambda: api.client.terminate_job(jobId=job_id, reason="the test has ended"))
        return batch.describe(emulated, several, [job_id])[0]

    for _ in range(2):
        api.wait_for(submit(2).id, "RUNNING")
    # THEN a third has no room in one zone, although there is room in both together
    limits = {finding.about: finding for finding in findings(emulated, several, submit(2))}
    used = "4 of at most 6 instances of dl1.24xlarge are in use"
    found = limits["instance limit"]
    assert (found.verdict, found.text) == ("unknown", f"{used}; the job needs 2 in one zone, which allows 3")
    # AND no job can be larger than a zone
    larger = causes(findings(emulated, several, submit(4)))["instance limit"]
    assert larger == "the job needs 4 instances of dl1.24xlarge, but the stage allows 3"
    together = place(parse_spec({**SPEC, "resources": {"nnodes": 2}}, origin="the test"), several)
    assert batch.room_of(emulated, several, together) == 3


def test_an_update_of_the_instances_blocks_no_job(emulated: Aws, stage: DeployedStage, submit: Submit) -> None:
    # GIVEN jobs on both instances, and a deployment that replaces the instances
    for _ in range(2):
        submit("RUNNING")
    waiting = submit("RUNNABLE", name="waits")
    [queue] = emulated.batch.describe_job_queues(jobQueues=[stage.queue(QUEUE)])["jobQueues"]
    name = queue["computeEnvironmentOrder"][0]["computeEnvironment"]
    emulated.batch.update_compute_environment(computeEnvironment=name, computeResources={"tags": {"Name": "new"}})
    # THEN only the missing room is a cause
    found = findings(emulated, stage, waiting)
    [instances] = [finding for finding in found if finding.about == "Spot instances"]
    assert (instances.verdict, instances.next_step) == ("fine", "")
    assert instances.text.startswith("a deployment is replacing them")
    assert causes(found).keys() == {"instance limit"}


def test_a_job_with_several_spot_nodes_waits_for_all_of_them(
    emulated: Aws, stage: DeployedStage, submit: Submit
) -> None:
    # GIVEN that one of the two instances of `dev` is in use
    submit("RUNNING")
    several = submit("RUNNING", nodes=2)
    # THEN the other instance runs a node of the next job, whose second node waits
    assert several.nodes == {"RUNNABLE": 1, "RUNNING": 1}
    assert is_waiting(several)
    found = findings(emulated, stage, several)
    assert causes(found) == {"instance limit": "2 of at most 2 instances of dl1.24xlarge are in use (jobs: research 2)"}
    more = submit("RUNNABLE", nodes=3)
    wants = "the job needs 3 instances of dl1.24xlarge, but the stage allows 2"
    assert causes(findings(emulated, stage, more))["instance limit"] == wants


def test_a_job_waits_if_its_instances_are_switched_off(
    *,
    emulated: Aws,
    stage: DeployedStage,
    submit: Submit,
    faulty: FaultyProxy,
    deployed_aws: Emulator,
    aws_trainyard: Trainyard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with no_instances(emulated, stage, QUEUE):
        job = submit("RUNNABLE")

        def instances(stage: DeployedStage) -> Finding:
            found = {each.about: each for each in findings(emulated, stage, job)}
            assert "instance limit" not in found  # it would be 0
            assert found["Spot instances"].verdict == "cause"
            return found["Spot instances"]

        [reason] = [each for each in findings(emulated, stage, job) if each.text.startswith("CAPACITY")]
        assert reason.next_step == "wait"  # `dev` has no On-Demand queue
        by_hand = instances(stage)
        assert by_hand.text.startswith("their compute environment was disabled by hand")
        assert "--state ENABLED" in by_hand.next_step
        [queue] = emulated.batch.describe_job_queues(jobQueues=[stage.queue(QUEUE)])["jobQueues"]
        name = queue["computeEnvironmentOrder"][0]["computeEnvironment"].rsplit("/", 1)[-1]
        record = {"since": "2026-11-21T12:00:00+00:00", "reason": "it has started 3 instances that never joined it"}
        never_joined = instances(replace(stage, never_joined={name: json.dumps(record)}))
        assert never_joined.text == "they were switched off: it has started 3 instances that never joined it"
        assert "--state ENABLED" in never_joined.next_step
        stop = {"budget_usd": 500, "since": "2026-11-20T00:00:00+00:00", "until": "2026-12-01T00:00:00+00:00"}
        stopped = instances(replace(stage, stage_stop=json.dumps(stop)))
        assert stopped.text == "they are switched off: the stage has used up its budget of 500 USD a month"
        assert stopped.next_step == "wait until 2026-12-01, or ask for a higher monthly_budget_usd of the stage"
        limited = instances(replace(stage, hourly_stops=frozenset({""})))
        assert limited.text == "they are switched off: the instances of stage 'dev' cost more than its max_usd_per_hour"
        # AND the command prints a table or JSON
        shown = aws_trainyard("why", job.run_id)
        assert (shown.returncode, shown.stderr.split(" in ")[0]) == (0, f"{job.run_id} is RUNNABLE")
        assert shown.stdout.splitlines()[1].startswith("cause")
        answer = json.loads(aws_trainyard("why", job.run_id, "-o", "json").stdout)
        assert (answer["state"], answer["queue"], answer["findings"][0]["verdict"]) == ("RUNNABLE", QUEUE, "cause")
        # AND a denied request is unknown, and the other checks continue
        faulty.faults["getjobqueuesnapshot"].append(Fault(kind="answer", status=403, code="AccessDeniedException"))
        found = findings(Aws(), stage, job)
        [place] = [finding for finding in found if finding.about == "queue position"]
        denied = "AWS refused to answer: GetJobQueueSnapshot failed with AccessDeniedException"
        assert (place.verdict, place.text) == ("unknown", denied)
        assert "Spot instances" in causes(found)
        # AND a real AWS is asked for EC2's offer and the quota
        point_at(monkeypatch, deployed_aws.endpoint)
        real = Aws()
        real.__dict__["emulated"] = False
        found = findings(real, stage, job)
        assert causes(found)["EC2 availability"] == "EC2 does not offer dl1.24xlarge in this region"
        [quota] = [finding for finding in found if finding.about == "vCPU quota"]
        assert (quota.verdict, "GetServiceQuota" in quota.text) == ("unknown", True)


def test_a_job_waits_for_its_dependency(
    *,
    emulated: Aws,
    stage: DeployedStage,
    submit: Submit,
    aws_trainyard: Trainyard,
) -> None:
    first = submit("RUNNING", name="first")
    assert not is_waiting(first)
    shown = aws_trainyard("why", first.run_id)
    assert (shown.returncode, shown.stdout) == (0, "")
    assert shown.stderr.startswith(f"{first.run_id} is not waiting: it is RUNNING\n")
    found = findings(emulated, stage, submit("PENDING", name="second", depends_on=first))
    assert causes(found) == {"dependency": f"it depends on {first.run_id}, which is RUNNING"}


def test_a_timed_out_job_names_the_option_for_more_time(
    aws_trainyard: Trainyard, emulated: Aws, stage: DeployedStage
) -> None:
    plan = planned_to_run(emulated, stage, ["sleep", "300"], name="slow")
    plan.request["timeout"] = {"attemptDurationSeconds": 1}
    job = wait_for(emulated, stage, send(emulated, plan))
    assert (job.state, len(job.attempts)) == ("FAILED", 1), "Batch starts nothing again after a timeout"
    with pytest.raises(TimedOutError, match="exceeded timeout") as ended:
        raise_failure(job)
    assert ended.value.next_step == f"trainyard resume {job.run_id} --set timeout_hours=HOURS"
    shown = aws_trainyard("why", job.run_id)
    assert shown.stderr.splitlines() == [
        f"{job.run_id} has ended: it exceeded its timeout_hours",
        f"next: trainyard resume {job.run_id} --set timeout_hours=HOURS",
    ]
