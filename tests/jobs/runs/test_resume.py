"""Only one program may continue a run after one of its jobs has ended."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from jobs.aws.connection import Aws
from jobs.core.errors import UsageError
from jobs.core.locations import S3Location
from jobs.core.stage import DeployedStage
from jobs.runs import resume
from jobs.runs.resume import Claim

RUN_ID = "probe-20261121-120005-00ab"


@pytest.fixture
def claim(emulated: Aws, stage: DeployedStage, request: pytest.FixtureRequest) -> Claim:
    return Claim.of(emulated, RUN_ID, S3Location(stage.run_bucket, f"research/{RUN_ID}/"), request.node.name)


def test_only_one_of_many_takes_the_claim(claim: Claim, caplog: pytest.LogCaptureFixture) -> None:
    def take(_: int) -> bool:
        try:
            return not claim.take()
        except UsageError as error:
            refusals.append(str(error))
            return False

    refusals: list[str] = []
    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(take, range(8))) == 1
    assert (
        len([text for text in refusals if "is just being resumed, or moved to On-Demand, by someone else" in text]) == 7
    )
    assert not caplog.text
    claim.record("job-2")
    with pytest.raises(UsageError, match=f"{RUN_ID} already continues as job job-2"):
        claim.take()


def test_abandoned_and_released_claims_can_be_taken(claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    assert claim.take() is False
    monkeypatch.setattr(resume, "CLAIM_SECONDS", -1)
    assert claim.take() is True
    claim.release()
    assert claim.take() is False
    # A claim that cannot be read names no successor.
    claim.aws.s3.put_object(Bucket=claim.place.bucket, Key=claim.place.key, Body=b'{"succ')
    assert claim.take() is True
