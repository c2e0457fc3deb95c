"""`trainyard list` of jobs that run on the emulator, and --since."""

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from jobs.aws.connection import Aws
from jobs.cli.options import parse_since
from jobs.core.errors import UsageError
from tests.jobs.cli.conftest import Trainyard
from tests.support.jobs.proxies import FaultyProxy
from tests.support.jobs.recorded_runs import three_attempts
from tests.support.jobs.submitting import RunCommand
from tests.support.running_emulator import environment_of


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


def test_receipts_of_ended_runs_are_read_once(
    *,
    trainyard: Trainyard,
    run_command: RunCommand,
    emulated: Aws,
    faulty: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    planned = run_command(["true"]).plan
    place = planned.run_location / "receipt.json"

    def write(accuracy: float) -> None:
        receipt = three_attempts(100, run_id=planned.run_id, accuracy=accuracy).receipt
        assert receipt is not None
        emulated.s3.put_object(Bucket=place.bucket, Key=place.key, Body=receipt.model_dump_json().encode())

    def listed() -> tuple[float, int]:
        """Return the run's metric and the number of receipts that were read."""
        faulty.seen.clear()
        done = trainyard("list", "--limit", "1", "-o", "json", environment=environment_of(faulty.url))
        [run] = json.loads(done.stdout)
        assert run["run_id"] == planned.run_id
        return run["metric"]["value"], faulty.seen.count("receipt.json")

    write(0.7)
    assert listed() == (0.7, 1)
    write(0.8)
    assert listed() == (0.8, 1), "just ended: its container may still write"

    monkeypatch.setattr("jobs.runs.storage._SETTLED", timedelta(0))
    assert [listed(), listed()] == [(0.8, 1), (0.8, 0)]
    # WHEN the kept file is damaged, THEN the receipts are read again
    [kept] = Path(tmp_path, "home/.cache/trainyard").glob("receipts-*.json")
    kept.write_text('["half a file"]')
    assert [listed(), listed()] == [(0.8, 1), (0.8, 0)]
    # WHEN the run continues, THEN its job is another one
    kept.write_text(json.dumps({f"earlier-{name}": text for name, text in json.loads(kept.read_text()).items()}))
    assert listed() == (0.8, 1)


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
