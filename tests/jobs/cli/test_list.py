"""`trainyard list` of jobs that run on the emulator, and --since."""

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from jobs.aws.connection import Aws
from jobs.cli.options import parse_since
from jobs.core.errors import UsageError
from tests.jobs.cli.conftest import Trainyard
from tests.support.jobs.recorded_runs import three_attempts
from tests.support.jobs.submitting import RunCommand


def test_list_shows_results_filters_and_sorts(aws_trainyard: Trainyard, run_command: RunCommand, emulated: Aws) -> None:
    runs = [run_command(command).plan for command in (["true"], ["sh", "-c", "sleep 1.5"], ["false"])]
    ids = [planned.run_id for planned in runs]
    for planned, accuracy in zip(runs, (0.7, 0.9), strict=False):
        receipt = three_attempts(100, run_id=planned.run_id, accuracy=accuracy).receipt
        assert receipt is not None
        place = planned.run_location / "receipt.json"
        emulated.s3.put_object(Bucket=place.bucket, Key=place.key, Body=receipt.model_dump_json().encode())

    rows = [line.split() for line in aws_trainyard("list", "--limit", "3").stdout.splitlines()]
    states = ["STATE", "FAILED", "SUCCEEDED", "SUCCEEDED"]
    assert [row[:2] for row in rows] == [list(row) for row in zip(["RUN", *reversed(ids)], states, strict=True)]
    assert "accuracy 0.900" in aws_trainyard("list", "--sort", "metric", "--limit", "1000").stdout

    def listed(*options: str) -> list[dict[str, Any]]:
        found = json.loads(aws_trainyard("list", "--limit", "1000", "-o", "json", *options).stdout)
        return [run for run in found if run["run_id"] in ids]  # there may be runs of other tests

    failed, _, first = listed("--since", "1h", "--team", "research")
    # Batch gives every ended container the same reason, which is shown only for failures.
    assert (failed["attempts"][0]["exit_code"], failed["attempts"][0]["reason"]) == (
        1,
        "Essential container in task exited",
    )
    assert (first["reason"], first["attempts"][0]["reason"]) == ("", "")
    assert "Essential container" not in aws_trainyard("status", ids[0]).stdout
    best, second, _ = listed("--sort", "metric")
    assert (best["run_id"], best["metric"]) == (ids[1], {"name": "eval_accuracy", "value": 0.9})
    assert (second["run_id"], second["metric"]["value"]) == (ids[0], 0.7)
    assert {run["run_id"] for run in listed("--sort", "cost")[:2]} == set(ids[:2])
    assert listed("--sort", "duration")[0]["run_id"] == ids[1]
    assert best["usd"] > 0
    [failed] = listed("--state", "failed")
    assert (failed["run_id"], failed["usd"], failed["metric"]) == (ids[2], None, None)
    assert listed("--job", "notebook") == []

    nothing = aws_trainyard("list", "--team", "product", expect=0)
    assert nothing.stdout == ""
    assert nothing.stderr == "no runs in stage 'dev' with --since 7d; submit one: trainyard submit SPEC\n"
    assert "next: use one of SUBMITTED, " in aws_trainyard("list", "--state", "DONE", expect=2).stderr


@pytest.mark.parametrize(("text", "ago"), [("90s", 90), ("30m", 1800), ("1 h", 3600), ("7d", 604800)])
def test_since_counts_back_from_now(text: str, ago: int) -> None:
    expected = datetime.now(timezone.utc) - timedelta(seconds=ago)
    assert abs(parse_since(text) - expected) < timedelta(seconds=5)


def test_since_parses_a_time_and_refuses_other_texts() -> None:
    assert parse_since("2026-01-31T12:00:00+01:00") == datetime(2026, 1, 31, 11, tzinfo=timezone.utc)
    assert parse_since("2026-01-31") == datetime(2026, 1, 31, tzinfo=timezone.utc)
    for text in ("yesterday", "9" * 5000 + "d"):
        with pytest.raises(UsageError, match="expected 30m, 12h, 7d"):
            parse_since(text)
    for days in (10**7, 10**30):
        with pytest.raises(UsageError, match=f"--since {days}d is before the year 1"):
            parse_since(f"{days}d")
