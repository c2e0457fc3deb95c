"""`trainyard costs`: adds up receipts on S3."""

import csv
import io
import json
from datetime import datetime, timezone
from pathlib import Path

import pytest
from rich.console import Console

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.app import app
from jobs.cli.costs import costs_table
from jobs.core.stage import DeployedStage
from jobs.money.costs import costs, month_of
from jobs.money.phases import UNPRODUCTIVE
from tests.support.jobs.recorded_runs import files_of, sweep


def test_costs_are_printed_as_a_table_csv_and_json(
    emulated: Aws, stage: DeployedStage, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prefix = f"{stage.teams[0]}/"
    runs = sweep()[:2]
    for run in runs:
        key = f"{prefix}{run.run_id}/receipt.json"
        emulated.s3.put_object(Bucket=stage.run_bucket, Key=key, Body=files_of(run)["receipt.json"])
    broken = f"{prefix}broken-20261101-120000-00ab/receipt.json"
    emulated.s3.put_object(Bucket=stage.run_bucket, Key=broken, Body=b"{}")

    def printed(output: str, month: str = "2026-11") -> tuple[str, str]:
        arguments = ["costs", "--by", "run", "--month", month, "--team", stage.teams[0], "-o", output]
        app(arguments, standalone_mode=False)
        out, err = capsys.readouterr()
        assert "broken-20261101-120000-00ab" in err
        return out, err

    try:
        out, err = printed("table")
        assert "at the prices named there" in err
        lines = [line.split() for line in out.splitlines()]
        assert lines[0][:4] == ["RUN", "RUNS", "HOURS", "USD"]
        assert [line[0] for line in lines[1:]] == [*(run.run_id for run in runs), "all"]
        assert lines[-1][3:7] == ["0.71", "2.37", "70", "%"]
        assert "STORAGE" in lines[0]
        assert "STORAGE is what the runs' files cost a month now" in err
        rows = list(csv.DictReader(io.StringIO(printed("csv")[0])))
        assert rows == [
            {key: "" if value is None else str(value) for key, value in row.items()}
            for row in json.loads(printed("json")[0])
        ]
        assert [row["run"] for row in rows] == [run.run_id for run in runs]
        key = f"{prefix}{runs[0].run_id}/checkpoints/step-1/x"
        for size in (2**20, 3 * 2**20):  # the first one is then an old version
            emulated.s3.put_object(Bucket=stage.run_bucket, Key=key, Body=bytes(size))
        emulated.s3.put_object(Bucket=stage.run_bucket, Key=f"{broken}/large", Body=bytes(2**20))
        with_file, other = json.loads(printed("json")[0])
        assert with_file["stored_bytes"] - int(rows[0]["stored_bytes"]) == 4 * 2**20
        assert with_file["stored_usd_per_month"] == pytest.approx(with_file["stored_bytes"] / 2**30 * 0.023, abs=1e-6)
        assert other["stored_bytes"] == int(rows[1]["stored_bytes"])
        page = tmp_path / "costs.html"
        arguments = ["costs", "--by", "run", "--month", "2026-11", "--team", stage.teams[0], "-o", "csv"]
        app([*arguments, "--html", str(page)], standalone_mode=False)
        assert f"page: {page}" in capsys.readouterr().err
        assert runs[0].run_id in page.read_text()
        app(["costs", "--by", "run", "--month", "all", "--team", "no-such-team"], standalone_mode=False)
        assert "no run of stage 'dev' cost anything yet" in capsys.readouterr().err
        assert printed("json", "2020-01") == ("[]\n", printed("table", "2020-01")[1])
    finally:
        emulated.s3.delete_object(Bucket=stage.run_bucket, Key=broken)


def test_columns_without_money_are_left_out_at_80_columns() -> None:
    receipts = [run.receipt for run in sweep() if run.receipt is not None]
    found = costs(receipts, by="job", month=month_of("all", now=datetime.now(timezone.utc)))
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    tables.show(costs_table(found, by="job", width=console.width), on=console)
    assert isinstance(console.file, io.StringIO)
    heading, *rows = [line.split() for line in console.file.getvalue().splitlines()]
    assert {"JOB", "USD", "ON-DEMAND", "SAVED"} < set(heading)
    assert not {name.upper() for name in UNPRODUCTIVE} <= set(heading)
    assert "…" not in console.file.getvalue()
    assert rows[0][0] == found[0].name
    everything = costs_table(found, by="job", width=200)
    assert [str(column.header) for column in everything.columns][7:] == [name.upper() for name in UNPRODUCTIVE]
