"""Resolving `run://name/path` when a spec is submitted, on the deployed stage."""

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jobs.aws.connection import Aws
from jobs.core.errors import NotFoundError, UsageError
from jobs.core.locations import S3Location
from jobs.core.stage import DeployedStage
from jobs.runs import batch
from jobs.runs.job import Job
from jobs.runs.planning import plan_run, plan_runs
from jobs.runs.submit import send
from jobs.spec.plan import Plan
from jobs.spec.spec import JobSpec, parse_spec
from tests.support.jobs.submitting import DATA_KEY, MODEL_KEY, planned_to_run, wait_for

Start = Callable[..., tuple[Plan, Job]]


@pytest.fixture
def name() -> str:
    return f"reads-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def start(emulated: Aws, stage: DeployedStage, name: str) -> Iterator[Start]:
    """Return a function that starts a run with one file, a table, and waits until it is in `state`."""
    submitted: list[str] = []

    def start_one(*command: str, state: str) -> tuple[Plan, Job]:
        plan = planned_to_run(emulated, stage, command, name=name)
        table = plan.run_location / "train.jsonl"
        submitted.append(send(emulated, plan))
        emulated.s3.put_object(
            Bucket=table.bucket, Key=table.key, Body=b'{"text": "good", "label": 1}\n{"text": "bad", "label": 0}\n'
        )
        return plan, wait_for(emulated, stage, submitted[-1], state=state)

    yield start_one
    for job in batch.describe(emulated, stage, submitted):
        if not job.ended:
            batch.terminate(emulated, job.id, reason="the test is over")
            wait_for(emulated, stage, job.id)


def reading(location: str, **changed: Any) -> JobSpec:
    arguments = {"model": f"data://{MODEL_KEY}", "train_data": location}
    spec = {"name": "reader", "job": "finetune-classification", "arguments": arguments}
    return parse_spec({**spec, **changed}, origin="the test")


def test_name_resolves_to_the_newest_run_that_has_not_failed(
    emulated: Aws, stage: DeployedStage, name: str, start: Start
) -> None:
    older, _ = start("true", state="SUCCEEDED")
    newer, _ = start("true", state="SUCCEEDED")
    for wanted, found in ((name, newer), (older.run_id, older), (newer.run_id, newer)):
        planned = plan_run(emulated, stage, reading(f"run://{wanted}/train.jsonl"))
        assert planned.spec.arguments["train_data"] == f"{found.run_location}train.jsonl"
        assert planned.dependencies == ()
        assert "dependsOn" not in planned.request
    nothing = r"arguments\.train_data: a table of examples was expected at .*/other\.csv"
    with pytest.raises(NotFoundError, match=nothing):
        plan_run(emulated, stage, reading(f"run://{name}/other.csv"))
    with pytest.raises(NotFoundError, match=f"has no run of that name or id; did you mean '{name}'"):
        plan_run(emulated, stage, reading(f"run://{name[:-1]}/train.jsonl"))
    # Another team's runs are not found.
    with pytest.raises(NotFoundError, match="team 'product' has no run of that name or id"):
        plan_run(emulated, stage, reading(f"run://{name}/train.jsonl", team="product"))

    # WHEN a newer run is running, THEN the job waits for it, and its future files are not checked
    going, job = start("sleep", "60", state="RUNNING")
    model = {"model": f"run://{going.run_id}/model", "train_data": f"run://{name}/later.jsonl"}
    planned = plan_run(emulated, stage, reading("", arguments=model))
    assert planned.request["dependsOn"] == [{"jobId": job.id}]
    [dependencies] = planned.dependencies
    assert (dependencies.run_id, set(dependencies.arguments)) == (going.run_id, {"model", "train_data"})
    with pytest.raises(NotFoundError, match=r"arguments\.model: a pretrained model's folder was expected"):
        plan_run(emulated, stage, reading("", arguments={**model, "model": "data://tests/none"}))

    # AND a run that has failed is refused with its id
    failed, _ = start("false", state="FAILED")
    with pytest.raises(UsageError) as refused:
        plan_run(emulated, stage, reading(f"run://{name}/train.jsonl"))
    assert f"arguments.train_data: run://{name}/train.jsonl is {failed.run_id}, which has failed" in str(refused.value)
    assert f"Next: trainyard logs {failed.run_id}" in str(refused.value)


def test_runs_of_one_file_wait_for_each_other(emulated: Aws, stage: DeployedStage) -> None:
    first = reading("data://tests/train.jsonl", name="first")
    second = reading("run://first/train.jsonl", name="second")
    third = reading(
        "run://second/train.jsonl",
        name="third",
        arguments={"model": "run://first/model", "train_data": "run://second/train.jsonl"},
    )
    plans = plan_runs(emulated, stage, [first, second, third])
    assert [[run.run_id for run in planned.dependencies] for planned in plans] == [
        [],
        [plans[0].run_id],
        [plans[0].run_id, plans[1].run_id],
    ]
    assert plans[2].spec.arguments["model"] == f"{plans[0].run_location}model"
    assert plans[1].request["dependsOn"] == [{"jobId": f"<job id of {plans[0].run_id}>"}]


@pytest.mark.parametrize(
    ("order", "team", "message"),
    [
        (("second", "first"), "research", "second: arguments.train_data: run://first/train.jsonl comes later in the"),
        (("first", "second"), "product", "second: arguments.train_data: run://first/train.jsonl is a run of team "),
    ],
)
def test_specs_of_a_file_cannot_read_later_or_other_teams_runs(
    emulated: Aws, stage: DeployedStage, order: tuple[str, ...], team: str, message: str
) -> None:
    specs = {
        "first": reading("data://tests/train.jsonl", name="first"),
        "second": reading("run://first/train.jsonl", name="second", team=team),
    }
    with pytest.raises(UsageError) as refused:
        plan_runs(emulated, stage, [specs[name] for name in order])
    assert message in str(refused.value)


def job(name: str, kind: str, **arguments: Any) -> JobSpec:
    return parse_spec({"name": name, "job": kind, "arguments": arguments}, origin="the test")


CORPUS = job("corpus", "prepare-corpus", data=[f"data://{DATA_KEY}"])


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ("run://corpus", "makes a 'corpus', not a 'tokenizer'\nNext: name a run of train-tokenizer"),
        ("run://reader", "is a 'finetune-classification', which makes no artifact"),
    ],
)
def test_run_that_makes_another_artifact_is_refused(
    emulated: Aws, stage: DeployedStage, tokenizer: str, message: str
) -> None:
    tokens = job("tokens", "tokenize", corpus="run://corpus", tokenizer=tokenizer)
    with pytest.raises(UsageError) as refused:
        plan_runs(emulated, stage, [CORPUS, reading(f"data://{DATA_KEY}"), tokens])
    assert f"tokens: arguments.tokenizer: {tokenizer} {message}" in str(refused.value)


def test_artifact_is_checked_before_submission(emulated: Aws, stage: DeployedStage, name: str) -> None:
    place = S3Location(stage.run_bucket, f"research/{name}")
    spec = job("tokens", "train-tokenizer", corpus=str(place))
    with pytest.raises(NotFoundError, match=r"arguments\.corpus: .* but it has neither artifact\.json nor manif"):
        plan_run(emulated, stage, spec)
    pointer = {"kind": "tokenizer", "fingerprint": "0" * 64, "location": "s3://elsewhere/"}
    emulated.s3.put_object(Bucket=place.bucket, Key=f"{place.key}/artifact.json", Body=json.dumps(pointer).encode())
    with pytest.raises(UsageError, match=rf"arguments\.corpus: {place} is a 'tokenizer', not a 'corpus'"):
        plan_run(emulated, stage, spec)
    manifest = {"kind": "corpus"}
    emulated.s3.put_object(Bucket=place.bucket, Key=f"{place.key}/manifest.json", Body=json.dumps(manifest).encode())
    assert plan_run(emulated, stage, spec).inputs[0][1] == str(place)
