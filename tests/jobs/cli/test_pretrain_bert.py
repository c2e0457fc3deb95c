"""`trainyard submit jobs/specs/pretrain-bert.yaml` on small data: four runs, each on what those before it made."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from jobs.aws.connection import Aws
from jobs.cli.spec_file import READY_SPECS
from jobs.client import batch
from jobs.client.job import Job
from jobs.client.storage import read_receipt
from jobs.contract.locations import S3Location
from jobs.contract.run import run_prefix
from jobs.contract.stage import DeployedStage
from tests.jobs.cli.conftest import Trainyard
from tests.support.train.corpora import paragraphs

SPEC = READY_SPECS / "pretrain-bert.yaml"
DOCUMENTS = "tests/pretrain-bert/documents.jsonl"
NAMES = ("prepare-corpus", "train-tokenizer", "tokenize", "pretrain-bert")
SMALL = {
    "prepare-corpus.arguments.data": f"[data://{DOCUMENTS}]",
    "prepare-corpus.arguments.held_out_fraction": 0.2,
    "train-tokenizer.arguments.vocabulary_size": 1000,
    "train-tokenizer.arguments.sample_fraction": 1,
    "tokenize.arguments.sequence_length": 32,
    "pretrain-bert.arguments.hidden_size": 32,
    "pretrain-bert.arguments.layers": 2,
    "pretrain-bert.arguments.heads": 2,
    "pretrain-bert.arguments.intermediate_size": 64,
    "pretrain-bert.arguments.global_batch_size": 16,
    "pretrain-bert.arguments.eval_sequences": 64,
    "pretrain-bert.arguments.max_steps": 120,
    "pretrain-bert.arguments.learning_rate": 0.005,
    "pretrain-bert.arguments.log_every_steps": 10,
    "pretrain-bert.arguments.evaluate_every_steps": 20,
    "pretrain-bert.resources.nproc_per_node": 1,
}

_SECONDS = 450
"""Four programs that load torch one after the other, where the machine does other things as well."""


@pytest.fixture
def documents(embedded: Aws, stage: DeployedStage) -> None:
    rows = [{"text": paragraph} for paragraph in paragraphs(400)]
    content = "".join(f"{json.dumps(row)}\n" for row in rows)
    embedded.s3.put_object(Bucket=stage.data_bucket, Key=DOCUMENTS, Body=content.encode())


class Pipeline:
    """One submission of the spec, and what it left."""

    def __init__(
        self,
        trainyard: Trainyard,
        environment: Mapping[str, str],
        aws: Aws,
        stage: DeployedStage,
        *,
        spec: Path = SPEC,
        names: Sequence[str] = NAMES,
    ) -> None:
        values = {key: value for key, value in SMALL.items() if key.partition(".")[0] in names}
        overrides = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        command = ["submit", spec, "-o", "json", *overrides]
        finished = trainyard(*command, environment=environment, timeout_seconds=_SECONDS)
        assert finished.returncode == 0, finished.stderr
        self.log = finished.stderr
        self._aws = aws
        self._bucket = stage.run_bucket
        told = json.loads(finished.stdout)
        self.results: list[dict[str, Any]] = told if len(names) > 1 else [told]
        self.run_ids = [result["run_id"] for result in self.results]
        found = [batch.find_job(aws, stage, run_id) for run_id in self.run_ids]
        self.jobs: list[Job] = [job for job in found if job is not None]

    def run(self, number: int) -> S3Location:
        return S3Location(self._bucket, run_prefix("research", self.run_ids[number]))

    def record(self, place: S3Location) -> dict[str, Any]:
        body = self._aws.s3.get_object(Bucket=place.bucket, Key=place.key)["Body"]
        record: dict[str, Any] = json.load(body)
        return record

    def metrics(self, number: int, name: str) -> list[float]:
        """One value's curve, step by step."""
        place = self.run(number) / "metrics.jsonl"
        lines = self._aws.s3.get_object(Bucket=place.bucket, Key=place.key)["Body"].read().splitlines()
        return [row[name] for row in map(json.loads, lines) if name in row]

    def artifact(self, number: int) -> S3Location:
        return S3Location.parse(self.record(self.run(number) / "artifact.json")["location"])

    def written(self, number: int) -> dict[str, Any]:
        """When each object of an artifact was written."""
        place = self.artifact(number)
        listed = self._aws.s3.list_objects_v2(Bucket=place.bucket, Prefix=place.key)["Contents"]
        return {item["Key"]: (item["LastModified"], item["ETag"]) for item in listed}


@pytest.mark.timeout(2 * _SECONDS)
@pytest.mark.usefixtures("documents")
def test_four_runs_make_a_model_from_text_and_nothing_is_made_twice(
    trainyard: Trainyard,
    deployed_environment: Mapping[str, str],
    embedded: Aws,
    stage: DeployedStage,
    tmp_path: Path,
) -> None:
    first = Pipeline(trainyard, deployed_environment, embedded, stage)
    # THEN each has run in its own queue, after those that it reads from
    assert [job.run_id.rsplit("-", 3)[0] for job in first.jobs] == list(NAMES)
    assert [job.state for job in first.jobs] == ["SUCCEEDED"] * 4
    assert [job.queue for job in first.jobs] == ["cpu-spot@research"] * 3 + ["spot@research"]
    ids = [job.id for job in first.jobs]
    assert [set(job.depends_on) for job in first.jobs] == [set(), {ids[0]}, {ids[0], ids[1]}, {ids[2]}]
    for earlier, later in zip(first.jobs, first.jobs[1:], strict=False):
        assert earlier.stopped_at is not None
        assert later.started_at is not None
        assert earlier.stopped_at <= later.started_at
    # AND what they made says what it was made from
    corpus, tokenizer, tokens = (first.record(first.artifact(number) / "manifest.json") for number in range(3))
    assert tokenizer["inputs"]["corpus"] == corpus["fingerprint"]
    assert tokens["inputs"] == {"corpus": corpus["fingerprint"], "tokenizer": tokenizer["fingerprint"]}
    model = first.run(3) / "model"
    vocabulary = first.record(model / "tokenizer.json")["model"]["vocab"]
    assert {"the", "python"} <= set(vocabulary)
    assert first.record(model / "config.json")["vocab_size"] >= len(vocabulary)
    names = {
        item["Key"].rpartition("/")[2]
        for item in embedded.s3.list_objects_v2(Bucket=model.bucket, Prefix=f"{model.key}/")["Contents"]
    }
    assert "model.safetensors" in names
    receipt = read_receipt(embedded, first.run(3))
    assert receipt is not None
    # AND the run's curves in S3 show that the model has learned
    losses = first.metrics(3, "loss")
    perplexities = first.metrics(3, "eval_perplexity")
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    assert len(perplexities) == 6
    assert perplexities[-1] < 0.85 * perplexities[0]
    assert receipt.result["eval_perplexity"] == perplexities[-1]

    # WHEN its beginning is submitted again
    written = first.written(0)
    again = tmp_path / "again.yaml"
    again.write_text(SPEC.read_text().split("---")[0])
    second = Pipeline(trainyard, deployed_environment, embedded, stage, spec=again, names=NAMES[:1])
    # THEN the run finds what it would make
    assert second.artifact(0) == first.artifact(0)
    assert second.written(0) == written
    assert f" exists: {first.artifact(0)}" in second.log
