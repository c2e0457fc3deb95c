"""How the points of a sweep are ranked."""

from jobs.client.sweeps import Standing, best, done_text, progress_text, ranked
from jobs.contract.halving import Verdict
from jobs.contract.locations import S3Location
from jobs.contract.sweep import PointRecord, Sweep
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


def test_those_that_halving_let_go_further_are_before_the_others_whatever_their_metric() -> None:
    points = [
        standing(1, "stopped early", 0.5, rung=100),
        standing(2, "stopped early", 0.7, rung=300),
        standing(3, "stopped early", 0.6, rung=300),
        standing(4, "succeeded", 0.9, rung=300),
        standing(5, "succeeded", 0.8, rung=100),  # a training that stopped by itself before its second rung
        standing(6, "running", 0.4, rung=100, has_result=False),
        standing(7, "running", 0.95, rung=300, has_result=False),
        standing(8, "waiting", 0.1, rung=None, has_result=False),
    ]
    assert [each.point.number for each in ranked(points, SWEEP)] == [5, 4, 7, 6, 3, 2, 1, 8]
    assert best(points, SWEEP) is points[4]
    assert points[5].metric(SWEEP) == ("eval_loss", 0.4), "that of its rung, until it has a result"
    assert progress_text(points) == "2 of 8 points done, 1 waiting, 3 stopped early, 2 running"
    assert done_text(points) == "2 of 8"
