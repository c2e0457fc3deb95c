"""Reading the stage, and describing, listing and stopping jobs, on the emulator's API."""

from datetime import datetime, timedelta, timezone

from jobs.aws.connection import Aws
from jobs.core.stage import DeployedStage
from jobs.runs import batch
from jobs.runs.logs import LogReader
from jobs.runs.submit import submit_job
from tests.support.jobs.proxies import Fault, FaultyProxy
from tests.support.jobs.submitting import RunCommand, planned_to_run, wait_for
from tests.support.waiting import wait_until

THROTTLED = Fault("answer", status=429, code="TooManyRequestsException")
FAILED = Fault("answer", status=500)


def test_throttled_reads_are_retried(faulty: FaultyProxy, stage: DeployedStage) -> None:
    faulty.faults["getparametersbypath"].extend([THROTTLED, FAILED])
    assert batch.read_stage(Aws(), stage.name) == stage


def test_job_is_described_attempt_by_attempt(emulated: Aws, stage: DeployedStage, run_command: RunCommand) -> None:
    run = run_command(["sh", "-c", 'echo "attempt $AWS_BATCH_JOB_ATTEMPT"; exit $((76 - AWS_BATCH_JOB_ATTEMPT))'])
    job = run.ended
    assert (job.state, job.run_id, job.team, job.queue) == ("FAILED", run.plan.run_id, "research", "spot@research")
    assert (job.kind, job.max_attempts, job.attempt) == ("finetune-classification", 3, 2)
    # 75 requests a retry, 74 is an error of the job itself.
    assert [attempt.exit_code for attempt in job.attempts] == [75, 74]
    assert [attempt.number for attempt in job.attempts] == [1, 2]
    assert [stream.attempt for stream in job.log_streams] == [1, 2]
    for attempt in job.attempts:
        assert attempt.started_at
        assert attempt.stopped_at
        assert attempt.started_at <= attempt.stopped_at
    assert job.stopped_at
    assert job.created_at <= job.stopped_at


def test_separate_nodes_are_described_as_one_job(emulated: Aws, stage: DeployedStage) -> None:
    # GIVEN two nodes that both leave once, after which one fails by itself
    script = """
        echo "node $AWS_BATCH_JOB_ARRAY_INDEX"
        [ $AWS_BATCH_JOB_ATTEMPT = 1 ] && exit 75
        [ $AWS_BATCH_JOB_ARRAY_INDEX = 1 ] && exit 3
        sleep 60
    """
    plan = planned_to_run(emulated, stage, ["sh", "-c", script])
    plan.request["arrayProperties"] = {"size": 2}
    job_id = submit_job(emulated, plan)
    job = wait_until(
        lambda: batch.describe(emulated, stage, [job_id])[0], lambda job: job.nodes == {"RUNNING": 1, "FAILED": 1}
    )
    # THEN the job runs as long as one of them does
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
    # AND stopping the job stops all of them
    batch.terminate(emulated, job.id, reason="enough")
    ended = wait_for(emulated, stage, job_id)
    assert (ended.state, ended.reason, ended.nodes) == ("CANCELLED", "enough", {"FAILED": 2})
    # AND the reason is that of the node that failed by itself
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
