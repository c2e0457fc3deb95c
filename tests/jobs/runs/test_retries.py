"""Which of several jobs with a run's name is the run, and whether a failed job may continue as another."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from jobs.aws.connection import Aws
from jobs.core.errors import INTERRUPTED_EXIT_CODE
from jobs.core.queues import SPOT_WAITED_TOO_LONG
from jobs.core.retries import EXITED_REASON, MOVED_REASON, MOVED_TAG
from jobs.core.stage import DeployedStage, Fallback
from jobs.runs import batch
from jobs.runs.job import Job, JobAttempt
from jobs.runs.logs import may_have_successor
from tests.support.jobs.submitting import planned_to_run, wait_for

ENDED = Job(
    id="1",
    run_id="probe-20260131-120000-0000",
    state="FAILED",
    reason="",
    queue="spot",
    team="research",
    kind="finetune-classification",
    moved="",
    created_at=datetime.now(timezone.utc) - timedelta(hours=5),
    started_at=None,
    stopped_at=datetime.now(timezone.utc),
    attempts=(),
    max_attempts=3,
    log_streams=(),
)
LAST = JobAttempt(number=3, started_at=None, stopped_at=None, exit_code=None, reason="", log_stream=None)
RECLAIMED = "Host EC2 (instance i-0123456789abcdef0) terminated."


@pytest.fixture
def with_on_demand(stage: DeployedStage) -> DeployedStage:
    return replace(stage, queues={**stage.queues, "on-demand": "arn:…/on-demand"})


@pytest.mark.parametrize(
    ("changes", "seconds_ago", "wanted"),
    [
        ({"reason": f"{MOVED_REASON} after 3 reclaims: …"}, 300, True),
        ({"reason": f"{MOVED_REASON} after 3 reclaims: …"}, 3600, False),
        ({"reason": SPOT_WAITED_TOO_LONG}, 300, True),
        ({"reason": RECLAIMED}, 30, True),
        ({"reason": RECLAIMED}, 300, False),
        ({"reason": EXITED_REASON, "exit_code": INTERRUPTED_EXIT_CODE}, 30, True),
        ({"reason": EXITED_REASON, "exit_code": INTERRUPTED_EXIT_CODE}, 300, False),
        ({"reason": EXITED_REASON, "exit_code": 1}, 1, False),
        ({"reason": "Job attempt duration exceeded timeout", "exit_code": INTERRUPTED_EXIT_CODE}, 1, False),
        ({"reason": "not needed any more"}, 1, False),
        ({"reason": RECLAIMED, "queue": "on-demand"}, 1, False),
        ({"reason": RECLAIMED, "state": "RUNNABLE"}, 1, False),
    ],
)
def test_run_continues_only_if_the_stage_will_soon_move_it(
    changes: dict[str, Any], seconds_ago: int, *, wanted: bool, with_on_demand: DeployedStage, stage: DeployedStage
) -> None:
    ended_at = datetime.now(timezone.utc) - timedelta(seconds=seconds_ago)
    last = replace(LAST, exit_code=changes.get("exit_code"))
    changed = {name: value for name, value in changes.items() if name != "exit_code"}
    job = replace(ENDED, **changed, attempts=(last,), stopped_at=ended_at)
    assert may_have_successor(with_on_demand, job) is wanted
    assert not may_have_successor(stage, job), "a stage without On-Demand moves nothing"


def test_run_continues_in_its_teams_on_demand_queue(stage: DeployedStage) -> None:
    job = replace(ENDED, reason=SPOT_WAITED_TOO_LONG, stopped_at=None, queue="spot@research")
    for queue, wanted in (("on-demand@research", True), ("on-demand", False), ("on-demand@product", False)):
        assert may_have_successor(replace(stage, queues={**stage.queues, queue: "arn:…"}), job) is wanted


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, True),
        ({"queue": "spot"}, True),
        ({"reason": "not needed any more"}, False),
        ({"queue": "cpu-spot@research"}, False),
        ({"queue": "spot/dl1-24xlarge-1-20-0"}, False),  # of a retiring pool
        ({"nodes": {"FAILED": 2}}, False),
        ({"points": 9}, False),
        # It moves there only once; whether that stage has an On-Demand queue is not known here.
        ({"home": "dev"}, True),
        ({"home": "dev", "queue": "on-demand@research"}, False),
    ],
)
def test_run_may_continue_in_the_fallback_stage(changes: dict[str, Any], *, wanted: bool, stage: DeployedStage) -> None:
    falling_back = replace(stage, fallback=Fallback(stage="west", region="us-west-2", wait_seconds=600))
    ended = {"reason": SPOT_WAITED_TOO_LONG, "queue": "spot@research", "stopped_at": datetime.now(timezone.utc)}
    job = replace(ENDED, **{**ended, **changes})
    assert may_have_successor(falling_back, job) is wanted


def test_newest_job_is_the_run_but_a_late_duplicate_is_not(emulated: Aws, stage: DeployedStage) -> None:
    elsewhere = stage.queues["spot@product"]  # used as the On-Demand queue, which stage `dev` does not have
    plan = planned_to_run(emulated, stage, ["sleep", "60"])
    tags = {**plan.request["tags"], MOVED_TAG: "after 3 reclaims"}
    moved = {**plan.request, "jobQueue": elsewhere, "shareIdentifier": "product", "tags": tags}
    # The second is a lost submission that arrived late.
    ids = [emulated.batch.submit_job(**request)["jobId"] for request in (plan.request, plan.request, moved)]
    found = replace(stage, queues={"spot": stage.queues["spot@research"], "on-demand": elsewhere})
    try:
        assert [job.id for job in batch.find_jobs(emulated, found, plan.run_id)] == [ids[0], ids[2]]
        newest = batch.find_job(emulated, found, plan.run_id)
        assert newest is not None
        assert (newest.id, newest.queue, newest.moved) == (ids[2], "on-demand", "after 3 reclaims")
        since = datetime.now(timezone.utc) - timedelta(minutes=5)
        listed = [job.id for job in batch.list_jobs(emulated, found, since=since) if job.run_id == plan.run_id]
        assert listed == [ids[2]]
    finally:
        for job_id in ids:
            emulated.batch.terminate_job(jobId=job_id, reason="the test is over")
        for job_id in ids:
            wait_for(emulated, found, job_id)
