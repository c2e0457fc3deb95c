"""`trainyard compare`: runs side by side in a table, as JSON and as a page."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.app import app
from jobs.cli.compare import comparison_table
from jobs.core.errors import UsageError
from jobs.core.stage import DeployedStage
from jobs.report.comparison import facts
from jobs.runs.recorded_run import RecordedRun
from tests.support.jobs.recorded_runs import files_of, sweep


@pytest.fixture
def runs(emulated: Aws, stage: DeployedStage) -> list[RecordedRun]:
    found = sweep()
    for run in found:
        for name, content in files_of(run).items():
            emulated.s3.put_object(Bucket=stage.run_bucket, Key=f"research/{run.run_id}/{name}", Body=content)
    return found


def test_two_runs_are_columns_and_seven_are_rows(
    runs: list[RecordedRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [run.run_id for run in runs]
    page = tmp_path / "pages" / "two.html"
    app(["compare", *ids[2:4], "--html", str(page)], standalone_mode=False)
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ids[2:4]
    assert ["accuracy", "0.850", "0.880"] in lines
    assert ["learning_rate", "2e-05", "3e-05"] in lines
    assert str(page) in err
    assert "Comparison of 2 runs" in page.read_text()
    app(["compare", *ids], standalone_mode=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:3] == ["RUN", "STATE", "ACCURACY"]
    assert [line[:3] for line in lines[1:]] == [
        [name, "succeeded", accuracy]
        for name, accuracy in zip(ids, ["0.790", "0.820", "0.850", "0.880", "0.850", "0.820", "0.790"], strict=True)
    ]
    app(["compare", *ids[2:4], "-o", "json"], standalone_mode=False)
    answer = json.loads(capsys.readouterr().out)
    assert [row["learning_rate"] for row in answer] == ["2e-05", "3e-05"]
    assert answer[1]["result"]["eval_accuracy"] == 0.88
    with pytest.raises(UsageError, match=rf"^only one run to compare, {ids[-1]}"):
        app(["compare", ids[-1], "massive"], standalone_mode=False)


def test_ids_and_values_are_not_cut_at_80_columns(runs: list[RecordedRun]) -> None:
    def shown(some: list[RecordedRun]) -> str:
        console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
        tables.show(comparison_table(some, facts(some), width=console.width), on=console)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    few, many = shown(runs[:4]), shown(runs)
    assert max(len(line.rstrip()) for line in [*few.splitlines(), *many.splitlines()]) <= 80
    assert "…" not in few + many
    # Ids wrap. With a row per run, the columns that do not fit are left out.
    heading = few.partition("state")[0]
    assert heading.count("massive-2026") == 4
    assert [line.split()[0] for line in many.splitlines()[1:]] == [run.run_id for run in runs]
    assert "ACCURACY" in many.splitlines()[0]
