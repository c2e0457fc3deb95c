"""Points of a sweep that are compared: the best continue as if uncompared, the others stop."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from jobs.container.channel import read_verdict, write_comparison
from jobs.container.rank import Rank, ResumeLaterError
from jobs.container.trainer.halving import Rungs
from jobs.container.trainer.heartbeat import Heartbeats
from jobs.core.errors import TrainyardError
from jobs.core.locations import S3Location
from jobs.spec.sweep import Comparison, MemberOf, RungValue, value_name
from tests.support.container.attempts import Attempts

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

COMPARISON = Comparison(from_step=4, factor=2, metric="eval_loss", smaller_is_better=True)
"""These runs evaluate after the steps 3, 6, 9, …, so they reach rungs at 6 (for 4), 9 (for 8) and 18."""

WITHOUT_BEST: dict[str, Any] = {"metric_for_best_model": None, "early_stopping_patience": None}

MakePoint = Callable[..., Attempts]


class FailsOnce(dict[int, float]):
    """Losses; the evaluation after one step fails the second time."""

    def __init__(self, losses: dict[int, float], *, after_step: int) -> None:
        super().__init__(losses)
        self._step, self._asked = after_step, 0

    def __getitem__(self, step: int) -> float:
        self._asked += step == self._step
        if self._asked == 2:
            self._asked += 1
            raise RuntimeError("cut off")
        return super().__getitem__(step)


@pytest.fixture
def make_point(attempts: Callable[[], Attempts]) -> MakePoint:
    made: list[Attempts] = []

    def of_sweep(**losses: float) -> Attempts:
        point = attempts()
        made.append(point)
        sweep = made[0].run.key.strip("/").rpartition("/")[2]
        point.comparison = COMPARISON
        point.losses.update({int(step.removeprefix("at_")): value for step, value in losses.items()})
        place = point.run / "member-of.json"
        member = MemberOf(sweep=sweep, number=len(made)).model_dump_json().encode()
        point.s3.put_object(Bucket=place.bucket, Key=place.key, Body=member)
        return point

    return of_sweep


def complete_steps(point: Attempts) -> list[int]:
    listed = point.s3.list_objects_v2(Bucket=point.run.bucket, Prefix=f"{point.run.key}checkpoints/")
    manifests = [item["Key"] for item in listed["Contents"] if item["Key"].endswith("manifest.json")]
    return sorted(int(key.split("/")[-2].removeprefix("step-")) for key in manifests)


def test_best_point_finishes_and_a_worse_one_stops(attempts: Callable[[], Attempts], make_point: MakePoint) -> None:
    # GIVEN a run outside a sweep, and a first point, which waits for no other
    whole = attempts()
    whole.train(**WITHOUT_BEST)
    first = make_point()
    first.train(**WITHOUT_BEST)
    # THEN they end the same
    assert [step for step, _ in first.evaluated] == [step for step, _ in whole.evaluated]
    assert first.model() == whole.model()
    assert first.curve() == whole.curve()
    told = read_verdict(first.scratch)
    assert told is not None
    assert (told.rung, told.step, told.rank, told.of, told.stops) == (8, 9, 1, 1, False)

    # WHEN a second point is worse, gets a notice during its rung's evaluation, and fails once when it should stop
    second = make_point(at_3=0.1, at_6=0.6)
    with pytest.raises(ResumeLaterError):
        second.train(interrupt_at=6, **WITHOUT_BEST)
    second.losses = FailsOnce(second.losses, after_step=6)
    with pytest.raises(TrainyardError, match="cut off"):
        second.train(**WITHOUT_BEST)
    # AND another point arrives meanwhile, with which it would rank third of three
    place = S3Location(second.run.bucket, first.run.key) / value_name(4, 3)
    second.s3.put_object(Bucket=place.bucket, Key=place.key, Body=RungValue.of(6, 0.55).model_dump_json().encode())
    result = second.train(**WITHOUT_BEST)

    # THEN the first verdict holds, and the model and checkpoint of that step remain
    told = read_verdict(second.scratch)
    assert told is not None
    assert (told.text, told.stops) == ("ranked 2 of 2 at step 6", True)
    assert [step for step, _ in second.evaluated] == [3, 6, 6, 6], "the last two are those of the model that is left"
    assert result["eval_loss"] == 0.6
    assert second.model() == dict(whole.evaluated)[6]
    assert complete_steps(second)[-1] == 6

    # WHEN it is no longer compared, THEN it resumes there and ends as it would have
    second.comparison = None
    second.losses = dict(whole.losses)
    second.train(**WITHOUT_BEST)
    assert second.model() == whole.model()


def test_point_that_cannot_be_compared_continues_with_a_warning(
    first_rank: Callable[[int], Rank], s3: "S3Client", caplog: pytest.LogCaptureFixture
) -> None:
    rank = first_rank(1)
    rank.scratch.mkdir()
    write_comparison(rank.scratch, COMPARISON)
    rungs = Rungs.of(rank, s3, Heartbeats(rank, compiles=False))
    assert rungs is not None
    with caplog.at_level("WARNING", "trainyard"):
        assert not rungs.is_stopped(6, {"eval_loss": math.nan})
    assert read_verdict(rank.scratch) is None
    assert f"halving: not compared at step 6; continuing: {rank.run}member-of.json, which names" in caplog.text
    # AND so does a point whose record is damaged
    place = rank.run / "member-of.json"
    s3.put_object(Bucket=place.bucket, Key=place.key, Body=b"{")
    with caplog.at_level("WARNING", "trainyard"):
        assert not rungs.is_stopped(9, {"eval_loss": math.nan})
    assert f"halving: not compared at step 9; continuing: {place} cannot be read: " in caplog.text
