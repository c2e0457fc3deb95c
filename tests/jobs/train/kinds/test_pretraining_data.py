"""The three jobs before pre-training as Batch starts them, each reading what the one before has made."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.contract.artifact import Pointer
from jobs.contract.log_lines import Progress
from jobs.train.data.artifacts import open_artifact
from tests.support.train.corpora import paragraphs, put_jsonl
from tests.support.train.hub_server import TOKEN, Hub
from tests.support.train.launching import NewRun

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


def test_receipts_metrics_logs_and_the_hub_tell_what_was_made(
    new_run: NewRun, hub: Hub, s3: "S3Client", tmp_path: Path
) -> None:
    to_hub: dict[str, Any] = {"HF_TOKEN": TOKEN, "HF_ENDPOINT": hub.url}
    data = put_jsonl(tmp_path / "corpus.jsonl", paragraphs(200))
    prepare, train, tokenize = new_run(), new_run(), new_run()
    prepare.attempt(
        *(f"--data={json.dumps([str(data)])}", "--held-out-fraction=0.1", "--push-to-hub=acme/texts"),
        kind="prepare-corpus",
        **to_hub,
    )
    train.attempt(
        *(f"--corpus={prepare.location}", "--vocabulary-size=1000", "--sample-fraction=1"),
        "--push-to-hub=acme/vocabulary",
        kind="train-tokenizer",
        **to_hub,
    )
    launched = tokenize.attempt(
        *(f"--corpus={prepare.location}", f"--tokenizer={train.location}", "--sequence-length=32"),
        "--push-to-hub=acme/tokens",
        kind="tokenize",
        **to_hub,
    )

    receipt = tokenize.receipt()
    assert (receipt.state, receipt.job) == ("succeeded", "tokenize")
    assert receipt.result["tokens"] > 32 * (receipt.result["sequences"] - 1)
    assert tokenize.metrics()[-1]["tokens_per_second"] == receipt.result["tokens_per_second"]
    progress = [Progress.parse(line) for line in launched.lines if "[progress]" in line]
    assert progress[-1] is not None
    assert progress[-1].step == progress[-1].total_steps == 2
    assert any(line.startswith("encoder: ") for line in launched.lines)

    assert hub.private == {"datasets/acme/texts": True, "acme/vocabulary": True, "datasets/acme/tokens": True}
    assert hub.commits == [f"Run {run.receipt().run_id}" for run in (prepare, train, tokenize)]
    assert f"hub: pushed to {hub.url}/datasets/acme/tokens\n" in launched.lines
    assert "arning" not in launched.output
    for name, run in (("datasets/acme/texts", prepare), ("acme/vocabulary", train), ("datasets/acme/tokens", tokenize)):
        pushed = hub.files[name]
        pointer = Pointer.model_validate_json(run.read("artifact.json"))
        copy = tmp_path / name
        for file, content in pushed.items():
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            (copy / file).write_bytes(content)
        artifact = open_artifact(str(copy), kind=pointer.kind, s3=lambda: s3, scratch=tmp_path)
        artifact.download()  # which verifies each file
        assert pushed.keys() == {*artifact.manifest.files, "manifest.json", "README.md"}
        assert hub.by_lfs[name] <= artifact.manifest.files.keys()
        assert "push_to_hub" not in artifact.manifest.options, "it would be another artifact"
        card = pushed["README.md"].decode()
        for row in (
            f"| fingerprint | {pointer.fingerprint} |",
            f"| run | {run.location} |",
            f"| bytes | {artifact.manifest.total_bytes} |",
        ):
            assert row in card
    assert "| sequence_length | 32 |" in hub.files["datasets/acme/tokens"]["README.md"].decode()
