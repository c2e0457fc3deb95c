"""How many widths sequences are padded to: where each is compiled, as many as take the least time."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from jobs.aws import s3 as object_store
from jobs.client.throughputs import throughputs
from jobs.contract.data_summary import DataSummary
from jobs.contract.instance_types import INSTANCE_TYPES
from jobs.contract.locations import S3Location
from jobs.contract.run import DATA
from jobs.kinds.finetune_classification import FinetuneClassification
from jobs.train.accelerator import Accelerator
from jobs.train.data.labelled_buckets import (
    AUTO,
    FORWARD,
    FORWARD_AND_BACKWARD,
    MOST,
    USUAL,
    Pass,
    bucket_widths,
    choose_widths,
    in_batches,
)
from jobs.train.kinds.finetune_classification import _length_buckets
from jobs.train.launcher.rank_environment import rank_environment
from jobs.train.launcher.request import parse
from jobs.train.models import pretrained
from jobs.train.rank import Rank

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from numpy.typing import NDArray

DL1 = INSTANCE_TYPES["dl1.24xlarge"]

BERT_LARGE = 335_000_000


def lengths_of(count: int, *, mean: float, deviation: float, most: int) -> "NDArray[np.int64]":
    drawn = np.random.default_rng(7).normal(mean, deviation, count).round().astype(np.int64)
    lengths: NDArray[np.int64] = np.minimum(np.maximum(drawn, 8), most)
    return lengths


def mrpc(batch: int, epochs: float = 3.0) -> list[Pass]:
    """Pairs of sentences as MRPC has them: as many, and about as long."""
    return [
        Pass(
            lengths=lengths_of(3668, mean=53, deviation=18, most=103),
            batch=batch,
            times=epochs,
            operations=FORWARD_AND_BACKWARD,
        ),
        Pass(lengths=lengths_of(408, mean=53, deviation=18, most=103), batch=8, operations=FORWARD),
    ]


def chosen(passes: list[Pass], *, ranks: int, **further: Any) -> tuple[list[int], str | None]:
    asked = {"asked": AUTO, "max_length": 128, "row": DL1, "parameters": lambda: BERT_LARGE, **further}
    found = choose_widths(passes, ranks=ranks, **asked)
    return found.widths, found.reason


@pytest.mark.parametrize(
    ("ranks", "batch", "samples_per_second", "published_seconds"), [(1, 32, 165.4, 90.7), (8, 128, 877.0, 60.6)]
)
def test_mrpc_is_not_projected_slower_than_it_was_published(
    ranks: int, batch: int, samples_per_second: float, published_seconds: float
) -> None:
    """By the published samples/s, of sequences of 128 tokens, and the published time before them."""
    training = mrpc(batch)[0]
    widths, reason = chosen(mrpc(batch), ranks=ranks)
    places = in_batches(np.searchsorted(np.asarray(widths), training.lengths), batch)
    buckets = places // len(training.lengths)
    tokens = training.times * int(np.asarray(widths)[buckets].sum())
    shapes = len(np.unique(buckets))
    projected = shapes * DL1.compile_seconds[ranks > 1] + tokens / (128 * samples_per_second)
    assert projected <= published_seconds
    assert reason is not None
    assert reason.startswith(f"{len(widths)} widths: ")
    # Four of them would have been
    assert (
        4 * DL1.compile_seconds[ranks > 1] + training.times * int(training.lengths.sum()) / (128 * samples_per_second)
        > published_seconds
    )


def test_what_is_published_of_the_cards_follows_from_the_published_runs() -> None:
    (alone,) = [row for row in throughputs() if row.instance_type == DL1.name and row.cards == 1]
    assert alone.samples_per_second * 128 * FORWARD_AND_BACKWARD * BERT_LARGE / 1e12 == pytest.approx(
        DL1.training_teraflops, abs=0.1
    )
    samples = 3 * 3668
    assert DL1.compile_seconds == pytest.approx((90.7 - samples / 165.4, 60.6 - samples / 877), abs=0.05)


@pytest.mark.parametrize("epochs", [1, 30, 1000])
@pytest.mark.parametrize("ranks", [1, 8])
def test_the_number_is_the_one_with_the_least_of_compilation_and_padding(ranks: int, epochs: float) -> None:
    passes = mrpc(32, epochs)

    def seconds(number: int) -> float:
        total = 0.0
        together = np.concatenate([one.lengths for one in passes])
        widths = np.asarray(bucket_widths(together, at_most=number))
        for one in passes:
            used = in_batches(np.searchsorted(widths, one.lengths), one.batch) // len(one.lengths)
            padding = int(widths[used].sum()) - int(one.lengths.sum())
            flops = one.times * padding * one.operations * BERT_LARGE
            total += len(set(used.tolist())) * DL1.compile_seconds[ranks > 1] + flops / (42.6e12 * ranks)
        return total

    best = min(range(1, MOST + 1), key=seconds)
    assert chosen(passes, ranks=ranks)[0] == bucket_widths(
        np.concatenate([one.lengths for one in passes]), at_most=best
    )


def test_a_long_training_has_more_widths_than_a_short_one() -> None:
    assert len(chosen(mrpc(32, 1), ranks=1)[0]) == 1 < len(chosen(mrpc(32, 1000), ranks=1)[0])


def test_where_nothing_is_compiled_or_the_number_is_asked_for_it_stays() -> None:
    passes = mrpc(32)
    usual = bucket_widths(np.concatenate([one.lengths for one in passes]), at_most=USUAL)
    for row in (None, INSTANCE_TYPES["p4d.24xlarge"], INSTANCE_TYPES["m6i.4xlarge"]):
        assert chosen(passes, ranks=1, row=row) == (usual, None)
    assert chosen(passes, ranks=1, asked=USUAL) == (usual, None)
    assert chosen(passes, ranks=1, asked=1, max_length=100) == ([100], None)
    assert FinetuneClassification.model_fields["length_buckets"].default == AUTO
    free = dataclasses.replace(DL1, compile_seconds=(0.0, 0.0))
    assert chosen(passes, ranks=1, row=free) == (usual, None)


def test_parameters_are_counted_by_the_files_of_a_model(tiny_bert: Path, tmp_path: Path) -> None:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tiny_bert)
    expected = sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(tmp_path / "safe")
    assert pretrained.parameters(tmp_path / "safe") == expected
    model.save_pretrained(tmp_path / "pickle", safe_serialization=False)
    assert pretrained.parameters(tmp_path / "pickle") == pytest.approx(expected, rel=0.3)  # and some kB around them


def test_a_resumed_run_keeps_the_number_of_widths_whatever_it_runs_on(s3: "S3Client", tmp_path: Path) -> None:
    run = S3Location("runs", f"research/{tmp_path.name}/")
    rank: Any = SimpleNamespace(run=run)
    arguments = FinetuneClassification(model="m", train_data="t.jsonl")
    assert _length_buckets(rank, arguments, s3) == AUTO
    summary = DataSummary(training=1, classes=[], length_buckets=3)
    object_store.write(s3, run / DATA, summary.model_dump_json().encode())
    assert _length_buckets(rank, arguments, s3) == 3
    assert _length_buckets(rank, arguments.model_copy(update={"length_buckets": 2}), s3) == 2


def test_a_rank_knows_its_instance_where_it_trains_on_its_cards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = ["finetune-classification", "--model=s3://data/model", "--train-data=s3://data/reviews.csv"]
    launch = parse(
        ["--instance-type=dl1.24xlarge", "--nproc-per-node=1", *flags], {"TRAINYARD_RUN_URI": "s3://runs/research/run/"}
    )
    hpu = Accelerator(name="hpu", devices=8, reason="a test")
    for name, value in {
        **rank_environment(launch, hpu, tmp_path),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "TRAINYARD_RUN_URI": "s3://runs/research/run/",
    }.items():
        monkeypatch.setenv(name, value)
    rank = Rank.from_environment()
    assert rank.instance("hpu") is DL1
    assert rank.instance("cpu") is None
