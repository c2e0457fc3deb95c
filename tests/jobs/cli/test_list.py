"""`trainyard list`, on jobs that the embedded AWS really runs, and the --since of several commands."""

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from jobs.aws.connection import Aws
from jobs.cli.options import parse_since
from jobs.contract.errors import UsageError
from tests.jobs.cli.conftest import Trainyard
from tests.support.jobs.recorded_runs import three_attempts
from tests.support.jobs.submitting import RunCommand


def test_list_shows_runs_as_a_table_and_as_json(aws_trainyard: Trainyard, run_command: RunCommand) -> None:
    good, bad = run_command(["true"]), run_command(["false"])
    table = aws_trainyard("list", "--limit", "2")
    rows = [line.split() for line in table.stdout.splitlines()]
    assert [row[:2] for row in rows] == [
        ["RUN", "STATE"],
        [bad.plan.run_id, "FAILED"],
        [good.plan.run_id, "SUCCEEDED"],
    ]
    listed = json.loads(aws_trainyard("list", "-o", "json", "--since", "1h", "--team", "research").stdout)
    assert [job["run_id"] for job in listed[:2]] == [bad.plan.run_id, good.plan.run_id]
    assert listed[0]["attempts"][0]["exit_code"] == 1
    # Batch's words for each container that has ended are a reason of a failure alone.
    assert listed[0]["attempts"][0]["reason"] == "Essential container in task exited"
    assert (listed[1]["reason"], listed[1]["attempts"][0]["reason"]) == ("", "")
    assert "Essential container" not in aws_trainyard("status", good.plan.run_id).stdout
    nothing = aws_trainyard("list", "--team", "product")
    assert (nothing.returncode, nothing.stdout) == (0, "")
    assert "no runs since 7d" in nothing.stderr


def test_list_shows_results_and_costs_filters_by_state_and_kind_and_sorts_by_them(
    aws_trainyard: Trainyard, run_command: RunCommand, embedded: Aws
) -> None:
    runs = [run_command([command]).plan for command in ("true", "true", "false")]
    accuracies = (0.7, 0.9)
    for planned, accuracy in zip(runs, accuracies, strict=False):
        receipt = three_attempts(100, run_id=planned.run_id, accuracy=accuracy).receipt
        assert receipt is not None
        place = planned.run_location / "receipt.json"
        embedded.s3.put_object(Bucket=place.bucket, Key=place.key, Body=receipt.model_dump_json().encode())

    def listed(*options: str) -> list[dict[str, Any]]:
        found = json.loads(aws_trainyard("list", "--limit", "1000", "-o", "json", *options).stdout)
        ids = [planned.run_id for planned in runs]  # other tests have runs there too
        return [run for run in found if run["run_id"] in ids]

    best, second, _ = listed("--sort", "metric")
    assert (best["run_id"], best["metric"]) == (runs[1].run_id, {"name": "eval_accuracy", "value": 0.9})
    assert (second["run_id"], second["metric"]["value"]) == (runs[0].run_id, 0.7)
    assert {run["run_id"] for run in listed("--sort", "cost")[:2]} == {planned.run_id for planned in runs[:2]}
    assert best["usd"] > 0
    [failed] = listed("--state", "failed")
    assert (failed["run_id"], failed["usd"], failed["metric"]) == (runs[2].run_id, None, None)
    assert listed("--job", "notebook") == []
    table = aws_trainyard("list", "--sort", "metric", "--limit", "1000").stdout
    assert "accuracy 0.900" in table
    refused = aws_trainyard("list", "--state", "DONE")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "next: one of SUBMITTED, " in refused.stderr


@pytest.mark.parametrize(("text", "ago"), [("90s", 90), ("30m", 1800), ("1 h", 3600), ("7d", 604800)])
def test_since_counts_back_from_now(text: str, ago: int) -> None:
    expected = datetime.now(timezone.utc) - timedelta(seconds=ago)
    assert abs(parse_since(text) - expected) < timedelta(seconds=5)


def test_since_takes_a_time_and_refuses_the_rest() -> None:
    assert parse_since("2026-01-31T12:00:00+01:00") == datetime(2026, 1, 31, 11, tzinfo=timezone.utc)
    assert parse_since("2026-01-31") == datetime(2026, 1, 31, tzinfo=timezone.utc)
    for text in ("yesterday", "9" * 5000 + "d"):
        with pytest.raises(UsageError, match="it should look like 30m, 12h, 7d"):
            parse_since(text)


@pytest.mark.parametrize("days", [10**7, 10**30])
def test_since_reaches_no_further_back_than_there_are_years(days: int) -> None:
    with pytest.raises(UsageError, match=f"--since {days}d: that is before the first year there is"):
        parse_since(f"{days}d")
