"""What a plan says of the image that a job will run in."""

from dataclasses import replace

import pytest

from jobs.contract.errors import ConfigurationError
from jobs.contract.plan import plan
from jobs.contract.stage import DeployedStage
from tests.support.jobs.planning import EMBEDDED, RUN_ID, STAGE, spec

REPOSITORY = "123456789012.dkr.ecr.us-east-1.amazonaws.com/gaudi"
OLD, NEW = (f"{REPOSITORY}@sha256:{letter * 64}" for letter in "ab")
NEVER = f"{REPOSITORY}:not-built-yet"


def with_images(stage: DeployedStage, *, deployed: str, pushed: str, image_tag: str | None = None) -> DeployedStage:
    return replace(
        stage,
        release="1.21.0",
        image_tag=image_tag,
        job_images={"finetune-classification": deployed},
        images={("gaudi", "1.21.0"): pushed, ("gaudi", "1.23.0"): OLD},
    )


def notes(stage: DeployedStage) -> list[str]:
    return [note for note in plan(spec(), stage, run_id=RUN_ID).notes if "image" in note]


def test_nothing_is_said_of_an_image_that_is_there() -> None:
    assert notes(with_images(STAGE, deployed=NEW, pushed=NEW)) == []
    # Nor of a stage that was deployed before images were recorded, nor where jobs are processes.
    assert notes(STAGE) == []


@pytest.mark.parametrize(
    ("stage", "pushed", "next_step"),
    [
        (STAGE, NEVER, "trainyard --stage dev images push gaudi, then cdk deploy 'dev/jobs' -c stage=dev"),
        (STAGE, NEW, "cdk deploy 'dev/jobs' -c stage=dev"),
        (EMBEDDED, NEVER, "trainyard --stage dev images push cpu, then trainyard --stage dev local up"),
    ],
    ids=["never pushed", "not deployed since", "embedded"],
)
def test_a_job_without_an_image_is_refused_before_money_is_spent(
    stage: DeployedStage, pushed: str, next_step: str
) -> None:
    with pytest.raises(ConfigurationError, match="'finetune-classification' jobs had not been pushed") as caught:
        plan(spec(), with_images(stage, deployed=NEVER, pushed=pushed), run_id=RUN_ID)
    assert caught.value.next_step == next_step


def test_a_newer_image_than_the_deployed_one_is_noted() -> None:
    assert notes(with_images(STAGE, deployed=OLD, pushed=NEW)) == [
        f"runs in {OLD}; a newer image was pushed, which 'cdk deploy 'dev/jobs' -c stage=dev' rolls out"
    ]
    # Where the settings name a tag, that is on purpose.
    assert notes(with_images(STAGE, deployed=f"{REPOSITORY}:1", pushed=NEW, image_tag="1")) == []


def test_an_image_that_the_next_deployment_would_take_away_is_noted() -> None:
    # GIVEN a deployment that put the first value back into the parameter, and no other since
    assert notes(with_images(STAGE, deployed=OLD, pushed=NEVER)) == [
        f"runs in {OLD}, which the stage no longer records: 'trainyard images push' before it is deployed"
    ]
