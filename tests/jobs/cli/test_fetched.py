"""A fetched run is read from its folder: no AWS is asked, and none need be set up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.cli import demo
from jobs.cli.options import folder_of
from jobs.client.records import read_fetched_run
from jobs.contract.errors import UsageError
from tests.jobs.cli.conftest import Trainyard
from tests.support.jobs.recorded_runs import files_of, three_attempts, with_samples
from tests.support.jobs.terminal import TRAINYARD

RUN_IDS = ("told-20261101-120000-00ab", "told-20261102-120000-00ab")


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """The folders of two fetched runs."""
    folders = [tmp_path / "runs" / run_id for run_id in RUN_IDS]
    for folder, rate in zip(folders, (3e-5, 1e-4), strict=True):
        recorded = with_samples(three_attempts(100, run_id=folder.name, learning_rate=rate))
        for name, content in files_of(recorded).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    return folders


def test_report_receipt_and_compare_read_folders_without_aws(
    trainyard: Trainyard, runs: list[Path], tmp_path: Path
) -> None:
    one, two = (f"runs/{run.name}" for run in runs)
    written = trainyard("report", one)
    assert (written.returncode, written.stdout) == (0, f"{one}/report.html\n"), written.stderr
    assert "0.874" in (runs[0] / "report.html").read_text()
    receipt = trainyard("receipt", f"{tmp_path}/{two}")
    assert receipt.returncode == 0, receipt.stderr
    shown = dict(line.split(maxsplit=1) for line in receipt.stdout.splitlines() if len(line.split()) == 2)
    assert (shown["run"], shown["state"], shown["attempts"]) == (RUN_IDS[1], "succeeded", "3")
    compared = trainyard("compare", one, two, "-o", "json")
    answer = json.loads(compared.stdout)
    assert [each["run_id"] for each in answer] == list(RUN_IDS)
    assert [each["learning_rate"] for each in answer] == ["3e-05", "0.0001"]
    # AND a folder of something else is none
    (tmp_path / "runs/notes").mkdir()
    nothing = trainyard("receipt", "runs/notes")
    assert nothing.returncode == 2
    assert "error: runs/notes is no folder of a fetched run" in nothing.stderr


def test_a_folder_is_told_from_an_id_a_name_and_a_teams_latest() -> None:
    assert folder_of("runs/x") == Path("runs/x")
    assert [folder_of(text) for text in ("told", RUN_IDS[0], "latest", "research/latest")] == [None] * 4


def test_a_renamed_folder_is_read_by_its_receipt_and_a_damaged_one_is_none(runs: list[Path], tmp_path: Path) -> None:
    renamed = runs[0].rename(tmp_path / "best")
    recorded = read_fetched_run(renamed)
    assert (recorded.run_id, recorded.location) == (RUN_IDS[0], str(renamed))
    assert recorded.receipt is not None
    assert recorded.receipt.stored is None, "what S3 keeps is not known here"
    assert len({line["time"] for line in recorded.utilization}) == 6, "the minutes of all attempts"
    (renamed / "receipt.json").write_text("{")
    with pytest.raises(UsageError, match="is no folder of a fetched run"):
        read_fetched_run(renamed)


def test_the_commands_that_the_demo_ends_with_work_in_its_shell(
    runs: list[Path],
    tmp_path: Path,
    clean_environment: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    # GIVEN the program beside the folder, as `make demo` runs it: on the PATH of make, not on that of the shell
    (tmp_path / ".venv/bin").mkdir(parents=True)
    program = tmp_path / ".venv/bin/trainyard"
    program.symlink_to(TRAINYARD)
    monkeypatch.setattr(sys, "argv", [str(program), "demo"])
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("MAKELEVEL", "1")
    demo._say_next(Path("runs") / runs[0].name)
    steps = [line.strip().split("  ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert steps == [
        f".venv/bin/trainyard receipt runs/{runs[0].name}",
        ".venv/bin/trainyard local up",
        'eval "$(.venv/bin/trainyard local env)"',
    ]
    shell = ["sh", "-c", steps[0]]
    assert subprocess.run(shell, env={**clean_environment, "PATH": "/usr/bin:/bin"}, check=False).returncode == 0
    # WHEN it is on the shell's own PATH, THEN its name is enough
    monkeypatch.delenv("MAKELEVEL")
    demo._say_next(runs[0])
    assert f"\n  trainyard receipt {runs[0]} " in capsys.readouterr().out
