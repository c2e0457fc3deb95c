from datetime import datetime, timedelta, timezone

import pytest
from pydantic import ValidationError

from jobs.contract.errors import UsageError
from jobs.contract.locations import S3Location
from jobs.contract.log_lines import Progress
from jobs.contract.records import Attempt, Receipt
from jobs.contract.run import is_run_id, new_run_id, run_prefix, submitted_at

NOON = datetime(2026, 11, 21, 12, 0, 5, tzinfo=timezone.utc)


def test_a_run_id_tells_name_and_utc_time() -> None:
    assert new_run_id("reviews", now=NOON) == "reviews-20261121-120005-0000"
    two_hours_east = NOON.astimezone(timezone(timedelta(hours=2)))
    assert new_run_id("reviews", now=two_hours_east) == "reviews-20261121-120005-0000"


def test_a_run_id_is_read_back_as_the_moment_that_it_names() -> None:
    assert submitted_at(new_run_id("bert-base-2", now=NOON)) == NOON
    with pytest.raises(ValueError, match="is not a run's id"):
        submitted_at("reviews")


def test_ids_of_one_second_sort_by_time() -> None:
    moments = [NOON.replace(microsecond=microsecond) for microsecond in (0, 16, 400, 500_000, 999_999)]
    ids = [new_run_id("a", now=moment) for moment in moments]
    assert ids == sorted(set(ids))
    assert ids[-1] == "a-20261121-120005-ffff"


@pytest.mark.parametrize("name", ["reviews", "a", "bert-base-2", "2-b"])
def test_what_is_made_is_recognised(name: str) -> None:
    assert is_run_id(new_run_id(name, now=NOON))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "reviews",
        "reviews-20261121-120005",
        "reviews-20261121-120005-00AB",
        "Reviews-20261121-120005-00ab",
        "-20261121-120005-00ab",
        "reviews-20261121-120005-00ab/",
        "reviews-20261121-120005-00ab\n",
        "0e5e9c1e-1f6a-4f0e-9a54-6a4f9a2b7c11",
    ],
)
def test_other_texts_are_no_run_ids(text: str) -> None:
    assert not is_run_id(text)


def test_a_runs_files_lie_under_its_team() -> None:
    assert run_prefix("research", "reviews-20261121-120005-00ab") == "research/reviews-20261121-120005-00ab/"


@pytest.mark.parametrize(
    ("uri", "bucket", "key"),
    [
        ("s3://bucket/a/b.txt", "bucket", "a/b.txt"),
        ("s3://bucket/a/", "bucket", "a/"),
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/a#b", "bucket", "a#b"),
    ],
)
def test_s3_locations_are_read(uri: str, bucket: str, key: str) -> None:
    assert S3Location.parse(uri) == S3Location(bucket, key)


@pytest.mark.parametrize("uri", ["", "bucket/key", "s3:/bucket/key", "s3:///key", "https://bucket/key", "data://key"])
def test_what_is_no_s3_location_is_refused(uri: str) -> None:
    with pytest.raises(UsageError) as caught:
        S3Location.parse(uri)
    assert str(caught.value) == f"'{uri}' is not an S3 location; it should look like s3://bucket/key"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("location", "name", "joined"),
    [
        (S3Location("b", "run/"), "spec.yaml", "s3://b/run/spec.yaml"),
        (S3Location("b", "run"), "spec.yaml", "s3://b/run/spec.yaml"),
        (S3Location("b", ""), "spec.yaml", "s3://b/spec.yaml"),
        (S3Location("b", "run/"), "model/", "s3://b/run/model/"),
    ],
)
def test_s3_locations_are_joined(location: S3Location, name: str, joined: str) -> None:
    assert str(location / name) == joined


def test_progress_is_read_back_out_of_a_line_of_the_log() -> None:
    progress = Progress(25, 100, "loss 0.41")
    assert str(progress) == "[progress] 25/100 loss 0.41"
    assert Progress.parse(f"2026-11-21 12:00:05 {progress}") == progress
    assert Progress.parse(str(Progress(0, 100))) == Progress(0, 100)


@pytest.mark.parametrize("line", ["", "25/100", "[progress] of the war", "[progress] a/100", "progress 25/100"])
def test_other_lines_are_no_progress(line: str) -> None:
    assert Progress.parse(line) is None


def test_attempts_and_receipts_survive_json() -> None:
    attempt = Attempt(
        number=1,
        started_at=NOON,
        last_seen_at=NOON + timedelta(minutes=5),
        instance_type="dl1.24xlarge",
        accelerator="hpu",
        nnodes=1,
        world_size=8,
    )
    receipt = Receipt(
        run_id="reviews-20261121-120005-00ab",
        team="research",
        job="finetune-classification",
        state="running",
        attempts=[attempt],
        duration_seconds=300.0,
        instance_hours=1 / 12,
        instance_type="dl1.24xlarge",
        on_demand_usd=1.09,
        spot_usd=0.33,
        price_date="2022-08-24",
        price_source="a page",
        estimate_note="an estimate",
        result={"eval_accuracy": 0.81},
    )
    assert Receipt.model_validate_json(receipt.model_dump_json()) == receipt
    assert receipt.attempts[0].exit_code is None


def test_a_receipt_of_another_release_is_refused_rather_than_half_read() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Attempt.model_validate({"number": 1, "flux_capacitor": True})
