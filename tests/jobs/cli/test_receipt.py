"""`trainyard receipt`, and what the commands make of records that are damaged or from a later release."""

import json
import re
import time
from datetime import datetime, timedelta, timezone

import pytest

from jobs.aws.connection import Aws
from jobs.contract.records import Attempt, Receipt
from tests.jobs.cli.conftest import Trainyard
from tests.support.jobs.submitting import Run, RunCommand


def receipt_of(run: Run) -> Receipt:
    noon = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
    return Receipt(
        run_id=run.plan.run_id,
        team="research",
        job="finetune-classification",
        state="succeeded",
        attempts=[
            Attempt(
                number=1,
                started_at=noon,
                finished_at=noon + timedelta(seconds=90),
                last_seen_at=noon + timedelta(seconds=90),
                exit_code=0,
                instance_type="dl1.24xlarge",
                accelerator="cpu",
                nnodes=1,
                world_size=2,
            )
        ],
        duration_seconds=90,
        instance_hours=0.025,
        instance_type="dl1.24xlarge",
        on_demand_usd=0.328,
        spot_usd=0.098,
        price_date="2022-08-24",
        price_source="a price list",
        estimate_note="an estimate",
        result={
            "eval_accuracy": 0.8191,
            "eval_majority_accuracy": 0.5,
            "eval_combined_score": 0.8,
            "train_samples_per_second": 41.23,
        },
    )


def test_receipt_shows_the_result_and_that_its_cost_is_an_estimate(
    aws_trainyard: Trainyard, embedded: Aws, run_command: RunCommand
) -> None:
    run = run_command(["true"])
    missing = aws_trainyard("receipt", run.plan.run_id)
    assert missing.returncode == 4
    assert f"error: {run.plan.run_id} has written no receipt" in missing.stderr

    receipt = receipt_of(run)
    place = run.plan.run_location / "receipt.json"
    embedded.s3.put_object(Bucket=place.bucket, Key=place.key, Body=receipt.model_dump_json().encode())
    rows = {}
    printed = aws_trainyard("receipt", run.plan.run_id).stdout
    for line in printed.splitlines():
        label, _, value = line.partition("  ")
        rows[label] = value.strip()
    assert rows["accuracy"] == "0.819"
    assert rows["majority class"] == "0.500"
    assert rows["mean of accuracy, F1"] == "0.800"
    assert rows["samples/s"] == "41.2"
    assert rows["ran for"] == "1 min 30 s, without its wait for instances"
    assert rows["in AWS it would cost"] == "0.33 USD On-Demand, 0.0980 USD Spot (0.0250 h of dl1.24xlarge)"
    # A run that has ended tells in its status too what it took and cost
    status = aws_trainyard("status", run.plan.run_id).stdout
    assert re.search(r"^took  .+ s, waiting too$", status, re.M)
    assert re.search(r"^in AWS it would cost  0\.\d+ USD", status, re.M)
    assert rows["price"] == "as of 2022-08-24, from a price list; an estimate"
    told = Receipt.model_validate_json(aws_trainyard("receipt", run.plan.run_id, "-o", "json").stdout)
    assert told.model_copy(update={"stored": None}) == receipt

    checkpoint = run.plan.run_location / "checkpoints/step-3/optimizer.pt"
    embedded.s3.put_object(Bucket=place.bucket, Key=checkpoint.key, Body=b"x" * 2_000_000)
    kept = Receipt.model_validate_json(aws_trainyard("receipt", run.plan.run_id, "-o", "json").stdout).stored
    assert kept is not None
    assert told.stored is not None
    assert (kept.all_bytes, kept.checkpoint_bytes) == (told.stored.all_bytes + 2_000_000, 2_000_000)
    assert kept.usd_per_month == kept.all_bytes / 2**30 * 0.023
    shown = f"{told.stored.all_bytes / 1000:.3g} kB, 0 B of it checkpoints: 0.0000 USD a month"
    assert rows["stored"].startswith(shown)
    assert "transfer within the region costs nothing" in " ".join(printed.split())

    embedded.s3.put_object(Bucket=place.bucket, Key=place.key, Body=b'{"run_id": 1}')
    damaged = aws_trainyard("receipt", run.plan.run_id)
    assert damaged.returncode == 1
    assert f"error: {place} cannot be read: " in damaged.stderr
    assert "Traceback" not in damaged.stderr


@pytest.mark.parametrize("content", [b'{"run_id": "pro', b"[]", b"\xff", b"[" * 100_000])
def test_records_that_cannot_be_read_are_named_and_the_rest_is_told(
    aws_trainyard: Trainyard, embedded: Aws, run_command: RunCommand, content: bytes
) -> None:
    run = run_command(["true"])
    place = run.plan.run_location
    line = b'{"step": 8, "eval_accuracy": 0.75}\n'
    for name, text in (
        ("receipt.json", content),
        ("metrics.jsonl", line + content),
        *((name, content) for name in ("classes.json", "data.json", "code.json", "spec.yaml")),
    ):
        embedded.s3.put_object(Bucket=place.bucket, Key=(place / name).key, Body=text)
    status = aws_trainyard("status", run.plan.run_id)
    assert status.returncode == 0, status.stderr
    assert "step 8, accuracy 0.75" in status.stdout
    assert sorted(status.stderr.splitlines()) == [
        f"warning: {place}metrics.jsonl: left out 1 line that cannot be read, the first at line 2",
        f"warning: {place}receipt.json cannot be read: it is left out",
    ]
    report = aws_trainyard("report", run.plan.run_id)
    assert report.returncode == 0, report.stderr
    for name in ("classes.json", "data.json", "code.json"):
        assert f"warning: {place}{name} cannot be read: it is left out" in report.stderr
    assert f"warning: {place}spec.yaml: " in report.stderr
    code = aws_trainyard("fetch", run.plan.run_id, "--code")
    assert code.returncode == 1
    assert code.stderr.startswith(f"error: {place}code.json cannot be read: ")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (BOMB.encode(), "more than 10000 values"),
        (b"name: caf\xe9\n", "byte 0xe9 is not UTF-8"),
        (b"name: " + b"x" * 1_000_000, "it is larger than 1 MB, so it is no spec"),
    ],
    ids=["a bomb of aliases", "Latin-1", "too large"],
)
def test_a_stored_spec_is_read_within_the_limits_of_a_spec_file(
    aws_trainyard: Trainyard, embedded: Aws, run_command: RunCommand, text: bytes, fault: str
) -> None:
    run = run_command(["false"])
    place = run.plan.run_location / "spec.yaml"
    embedded.s3.put_object(Bucket=place.bucket, Key=place.key, Body=text)
    began = time.monotonic()
    resumed = aws_trainyard("resume", run.plan.run_id, "--dry-run")
    assert resumed.returncode == 2
    assert resumed.stderr.startswith(f"error: {place}: ")
    assert fault in resumed.stderr
    report = aws_trainyard("report", run.plan.run_id)
    assert report.returncode == 0, report.stderr
    assert f"warning: {place}: " in report.stderr
    assert fault in report.stderr
    assert time.monotonic() - began < 30


def test_what_a_later_release_adds_to_a_receipt_is_left_out_at_every_level(
    aws_trainyard: Trainyard, embedded: Aws, run_command: RunCommand
) -> None:
    run = run_command(["true"])
    place = run.plan.run_location / "receipt.json"
    receipt = receipt_of(run)
    cards = {"utilization_percent": 1, "memory_percent": 2, "mean_utilization_percent": 3, "idle_seconds": 4}
    content = receipt.model_dump(mode="json")
    content["attempts"][0]["cards"] = {**cards, "warp": 9}
    written = json.dumps({**content, "flux_capacitor": 1}).encode()
    embedded.s3.put_object(Bucket=place.bucket, Key=place.key, Body=written)
    shown = aws_trainyard("receipt", run.plan.run_id, "-o", "json")
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert "flux_capacitor" not in found
    assert found["attempts"][0]["cards"] == cards
    what = "what this release does not know (attempts.cards.warp, flux_capacitor)"
    assert shown.stderr == f"warning: {place} holds {what}: that is left out\n"
