"""Ranking the points of a sweep, and the reason for its end."""

from dataclasses import replace

import pytest

from jobs.aws.connection import Aws
from jobs.core.locations import S3Location
from jobs.core.records import Verdict
from jobs.core.stage import DeployedStage
from jobs.runs.job import job_from
from jobs.runs.sweeps import Standing, best, done_text, ended_by, missing_metric_warning, progress_text, ranked
from jobs.spec.sweep import Claim, PointRecord, Sweep, stop_name
from tests.support.jobs.recorded_runs import three_attempts

SWEEP = Sweep.model_validate({"arguments.seed": [1, 2], "metric": "eval_loss", "halving": {"from_step": 100}})


def standing(number: int, state: str, loss: float, *, rung: int | None, has_result: bool = True) -> Standing:
    receipt = three_attempts().receipt
    assert receipt is not None
    halving = None
    if rung is not None:
        stops = state == "stopped early"
        halving = Verdict(rung=rung, step=rung, metric="eval_loss", value=loss, rank=2, of=3, stops=stops)
    return Standing(
        point=PointRecord(number=number, run_id=f"p{number}", values={}, arguments={}),
        location=S3Location("runs", f"research/p{number}/"),
        state=state,
        receipt=receipt.model_copy(update={"halving": halving, "result": {"eval_loss": loss} if has_result else {}}),
    )


def test_points_that_halving_let_train_longer_rank_first() -> None:
    points = [
        standing(1, "stopped early", 0.5, rung=100),
        standing(2, "stopped early", 0.7, rung=300),
        standing(3, "stopped early", 0.6, rung=300),
        standing(4, "succeeded", 0.9, rung=300),
        standing(5, "succeeded", 0.8, rung=100),  # training ended by itself before the second rung
        standing(6, "running", 0.4, rung=100, has_result=False),
        standing(7, "running", 0.95, rung=300, has_result=False),
        standing(8, "waiting", 0.1, rung=None, has_result=False),
    ]
    assert [each.point.number for each in ranked(points, SWEEP)] == [5, 4, 7, 6, 3, 2, 1, 8]
    assert best(points, SWEEP) is points[4]
    assert points[5].metric(SWEEP) == ("eval_loss", 0.4), "the value at its rung, until there is a result"
    assert progress_text(points) == "2 of 8 points done, 1 waiting, 3 stopped early, 2 running"
    assert done_text(points) == "2 of 8"


def test_sweeps_reason_is_that_of_its_points_or_budget(
    emulated: Aws, stage: DeployedStage, request: pytest.FixtureRequest
) -> None:
    detail = {"jobId": request.node.name, "jobName": "rates", "jobQueue": "q", "status": "FAILED", "createdAt": 1}
    exited = "Essential container in task exited"
    failed = job_from({**detail, "statusReason": exited}, [], queue_names={})
    run = S3Location(stage.run_bucket, f"research/{request.node.name}/")
    done, waits = standing(1, "succeeded", 0.5, rung=None), standing(2, "not run", 0.5, rung=None)
    assert ended_by(emulated, run, [done, waits], failed) == exited, "nothing more is known"
    # WHEN a worker has recorded why it started no other point
    stop = Claim(child=0, ended="stopped", reason="point 2 was not started: budget: …")
    place = run / stop_name(failed.id)
    emulated.s3.put_object(Bucket=place.bucket, Key=place.key, Body=stop.model_dump_json().encode())
    assert ended_by(emulated, run, [done, waits], failed) == stop.reason
    # AND the reasons of points that were stopped or have failed
    of_points = [
        replace(waits, state="stopped", reason="budget: …"),
        replace(done, state="failed", reason="exit code 1"),
    ]
    assert ended_by(emulated, run, of_points, failed) == "budget: …; 1 of 2 points failed: point 1: exit code 1"
    assert ended_by(emulated, run, of_points, replace(failed, state="RUNNING")) == ""
    cancelled = replace(failed, state="CANCELLED", reason="cancelled by alice")
    assert ended_by(emulated, run, of_points, cancelled) == "cancelled by alice"


def test_missing_metric_is_warned_of() -> None:
    other = Sweep.model_validate({"arguments.seed": [1, 2], "metric": "eval_los"})
    done, fails = standing(1, "succeeded", 0.5, rung=None), standing(2, "failed", 0.5, rung=None)
    assert missing_metric_warning([done, fails], other) == (
        "none of the points that have succeeded has sweep.metric 'eval_los'; did you mean 'eval_loss'?"
    )
    assert missing_metric_warning([done, fails], SWEEP) == missing_metric_warning([fails], other) == ""
    nothing = standing(1, "succeeded", 0.5, rung=None, has_result=False)
    any_metric = Sweep.model_validate({"arguments.seed": [1, 2]})
    assert missing_metric_warning([nothing], any_metric) == (
        "none of the points that have succeeded has a metric to rank by; name one in sweep.metric; "
        "they reported no numbers"
    )
