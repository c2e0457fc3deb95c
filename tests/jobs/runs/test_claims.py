"""Going on with a run after one of its jobs: one does, whoever else tries."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from jobs.aws.connection import Aws
from jobs.core.errors import UsageError
from jobs.core.locations import S3Location
from jobs.core.stage import DeployedStage
from jobs.runs import claims
from jobs.runs.claims import Claim

RUN_ID = "probe-20261121-120005-00ab"


@pytest.fixture
def claim(emulated: Aws, stage: DeployedStage, request: pytest.FixtureRequest) -> Claim:
    return Claim.of(emulated, RUN_ID, S3Location(stage.run_bucket, f"research/{RUN_ID}/"), request.node.name)


def test_of_many_that_try_one_has_it(claim: Claim, caplog: pytest.LogCaptureFixture) -> None:
    def take(_: int) -> bool:
        try:
            return not claim.take()
        except UsageError as error:
            refusals.append(str(error))
            return False

    refusals: list[str] = []
    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(take, range(8))) == 1
    assert len([said for said in refusals if "is being resumed, or moved to On-Demand, by somebody else" in said]) == 7
    assert not caplog.text
    claim.record("job-2")
    with pytest.raises(UsageError, match=f"{RUN_ID} goes on already, as job job-2"):
        claim.take()


def test_an_abandoned_claim_is_taken_over_and_a_released_one_is_free(
    claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert claim.take() is False
    monkeypatch.setattr(claims, "CLAIM_SECONDS", -1)
    assert claim.take() is True
    claim.release()
    assert claim.take() is False
    # One that cannot be read names no successor.
    claim.aws.s3.put_object(Bucket=claim.place.bucket, Key=claim.place.key, Body=b'{"succ')
    assert claim.take() is True
