"""`trainyard submit jobs/specs/pretrain-bert.yaml` on small data: four runs, each using earlier results."""

import json

import pytest

from jobs.aws.connection import Aws
from jobs.core.locations import S3Location
from jobs.core.run import run_prefix
from jobs.core.stage import DeployedStage
from jobs.runs import batch
from jobs.runs.spec_file import READY_SPECS
from jobs.runs.storage import read_receipt
from tests.jobs.cli.conftest import Trainyard
from tests.support.container.corpora import paragraphs

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
"""Enough for four programs that load torch one after the other on a busy machine."""


@pytest.fixture
def documents(emulated: Aws, stage: DeployedStage) -> None:
    rows = [{"text": paragraph} for paragraph in paragraphs(400)]
    content = "".join(f"{json.dumps(row)}\n" for row in rows)
    emulated.s3.put_object(Bucket=stage.data_bucket, Key=DOCUMENTS, Body=content.encode())


@pytest.mark.timeout(2 * _SECONDS)
@pytest.mark.usefixtures("documents")
def test_four_runs_pretrain_a_model_from_text(aws_trainyard: Trainyard, emulated: Aws, stage: DeployedStage) -> None:
    overrides = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    finished = aws_trainyard("submit", SPEC, "-o", "json", *overrides, expect=0)
    run_ids = [result["run_id"] for result in json.loads(finished.stdout)]
    jobs = [job for run_id in run_ids if (job := batch.find_job(emulated, stage, run_id))]
    runs = [S3Location(stage.run_bucket, run_prefix("research", run_id)) for run_id in run_ids]

    def read(place: S3Location) -> bytes:
        return emulated.s3.get_object(Bucket=place.bucket, Key=place.key)["Body"].read()

    # THEN each run used its own queue, and started after the runs it reads from
    assert [job.run_id.rsplit("-", 3)[0] for job in jobs] == list(NAMES)
    assert [job.state for job in jobs] == ["SUCCEEDED"] * 4
    assert [job.queue for job in jobs] == ["cpu-spot@research"] * 3 + ["spot@research"]
    ids = [job.id for job in jobs]
    assert [set(job.depends_on) for job in jobs] == [set(), {ids[0]}, {ids[0], ids[1]}, {ids[2]}]
    # AND their results record their inputs
    places = [S3Location.parse(json.loads(read(run / "artifact.json"))["location"]) for run in runs[:3]]
    corpus, tokenizer, tokens = (json.loads(read(place / "manifest.json")) for place in places)
    assert tokenizer["inputs"]["corpus"] == corpus["fingerprint"]
    assert tokens["inputs"] == {"corpus": corpus["fingerprint"], "tokenizer": tokenizer["fingerprint"]}
    assert {"the", "python"} <= json.loads(read(runs[3] / "model/tokenizer.json"))["model"]["vocab"].keys()
    assert read(runs[3] / "model/model.safetensors")
    # AND the model has learned
    curve = [json.loads(line) for line in read(runs[3] / "metrics.jsonl").splitlines()]
    losses = [line["loss"] for line in curve if "loss" in line]
    perplexities = [line["eval_perplexity"] for line in curve if "eval_perplexity" in line]
    assert (len(losses), len(perplexities)) == (12, 6)
    assert losses[-1] < losses[0] - 0.5
    assert perplexities[-1] < 0.85 * perplexities[0]
    receipt = read_receipt(emulated, runs[3])
    assert receipt is not None
    assert receipt.result["eval_perplexity"] == perplexities[-1]
