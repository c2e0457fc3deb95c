"""A job before pre-training as Batch starts it: its receipt, metrics, log, and push to the hub."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.container.data.artifacts import open_artifact
from jobs.core.artifact import Pointer
from jobs.core.output import Progress
from tests.support.container.corpora import paragraphs, put_jsonl
from tests.support.container.hub_server import Hub
from tests.support.container.launching import Run

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


def test_receipt_metrics_log_and_hub_describe_the_result(run: Run, hub: Hub, s3: "S3Client", tmp_path: Path) -> None:
    to_hub: dict[str, Any] = hub.environment
    data = put_jsonl(tmp_path / "corpus.jsonl", paragraphs(200))
    launched = run.attempt(
        *(f"--data={json.dumps([str(data)])}", "--held-out-fraction=0.1", "--push-to-hub=acme/texts"),
        kind="prepare-corpus",
        **to_hub,
    )

    receipt = run.receipt()
    assert (receipt.state, receipt.job) == ("succeeded", "prepare-corpus")
    assert receipt.result["documents"] + receipt.result["held_out_documents"] == 200
    assert run.metrics()[-1]["bytes_per_second"] == receipt.result["bytes_per_second"]
    progress = [Progress.parse(line) for line in launched.lines if "[progress]" in line]
    assert progress[-1] is not None
    assert progress[-1].step == progress[-1].total_steps == 100
    assert "arning" not in launched.output

    name = "datasets/acme/texts"
    assert hub.private == {name: True}
    assert hub.commits == [f"Run {receipt.run_id}"]
    assert f"hub: pushed to {hub.url}/{name}\n" in launched.lines
    pointer = Pointer.model_validate_json(run.read("artifact.json"))
    for file, content in hub.files[name].items():
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / file).write_bytes(content)
    artifact = open_artifact(str(tmp_path / name), kind=pointer.kind, s3=lambda: s3, scratch=tmp_path)
    artifact.download()  # which verifies each file
    assert hub.files[name].keys() == {*artifact.manifest.files, "manifest.json", "README.md"}
    assert "push_to_hub" not in artifact.manifest.options, "it would be another artifact"
    card = hub.files[name]["README.md"].decode()
    for row in (
        f"| fingerprint | {pointer.fingerprint} |",
        f"| run | {run.location} |",
        f"| bytes | {artifact.manifest.total_bytes} |",
        "| held_out_fraction | 0.1 |",
    ):
        assert row in card
