"""How many widths sequences are padded to; tests/jobs/container/trainer/test_batch_order.py tests which ones."""

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from jobs.aws import s3 as object_store
from jobs.container.kinds.finetune_classification import _length_buckets
from jobs.core.locations import S3Location
from jobs.core.run import DATA
from jobs.data_checks.data_summary import DataSummary
from jobs.spec.kinds.finetune_classification import FinetuneClassification
from jobs.spec.launcher_options import ACCELERATOR_VARIABLE

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


@pytest.mark.parametrize(("accelerator", "number"), [("cpu", 4), ("hpu", 2)])
def test_a_resumed_run_keeps_the_number_of_widths_whatever_it_runs_on(
    accelerator: str, number: int, s3: "S3Client", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ACCELERATOR_VARIABLE, accelerator)
    run = S3Location("runs", f"research/{tmp_path.name}/")
    rank: Any = SimpleNamespace(run=run)
    arguments = FinetuneClassification(model="m", train_data="t.jsonl")
    assert _length_buckets(rank, arguments, s3) == number
    summary = DataSummary(training=1, classes=[], length_buckets=3)
    object_store.write(s3, run / DATA, summary.model_dump_json().encode())
    assert _length_buckets(rank, arguments, s3) == 3
    assert _length_buckets(rank, arguments.model_copy(update={"length_buckets": 2}), s3) == 2
