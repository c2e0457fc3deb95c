"""The three jobs before pre-training as Batch starts them, each reading what the one before has made."""

import json
from pathlib import Path

from jobs.artifact import Pointer
from jobs.runs import Progress
from tests.jobs.train.corpora import paragraphs, put_jsonl
from tests.jobs.train.launching import NewRun


def test_receipts_metrics_and_logs_tell_what_was_made(new_run: NewRun, tmp_path: Path) -> None:
    data = put_jsonl(tmp_path / "corpus.jsonl", paragraphs(200))
    prepare, train, tokenize = new_run(), new_run(), new_run()
    prepare.attempt(f"--data={json.dumps([str(data)])}", "--held-out-fraction=0.1", kind="prepare-corpus")
    train.attempt(
        f"--corpus={prepare.location}", "--vocabulary-size=1000", "--sample-fraction=1", kind="train-tokenizer"
    )
    launched = tokenize.attempt(
        f"--corpus={prepare.location}", f"--tokenizer={train.location}", "--sequence-length=32", kind="tokenize"
    )

    assert prepare.receipt().result["documents"] + prepare.receipt().result["held_out_documents"] == 200
    assert train.receipt().result["vocabulary_size"] == 1000
    receipt = tokenize.receipt()
    assert (receipt.state, receipt.job) == ("succeeded", "tokenize")
    assert receipt.result["tokens"] > 32 * (receipt.result["sequences"] - 1)
    assert {"bytes", "tokens_per_second", "encoder", "encoder_reason"} <= receipt.result.keys()
    assert tokenize.metrics()[-1]["tokens_per_second"] == receipt.result["tokens_per_second"]
    assert Pointer.model_validate_json(tokenize.read("artifact.json")).kind == "packed-tokens"
    progress = [Progress.parse(line) for line in launched.lines if "[progress]" in line]
    assert progress[-1] is not None
    assert progress[-1].step == progress[-1].total_steps == 2
    assert any(line.startswith("encoder: ") for line in launched.lines)
