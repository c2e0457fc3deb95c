"""Commands that read a fetched run from its folder, without AWS."""

import json
import sys
from pathlib import Path

import pytest

from jobs.cli import demo
from jobs.cli.options import folder_of
from tests.jobs.cli.conftest import Trainyard
from tests.support.jobs.recorded_runs import files_of, three_attempts, with_samples
from tests.support.jobs.terminal import TRAINYARD

RUN_IDS = ("early-20261101-120000-00ab", "early-20261102-120000-00ab")


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Return the folders of two fetched runs."""
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
    # A renamed folder is identified by its receipt.
    runs[0].rename(tmp_path / "best")
    compared = trainyard("compare", "./best", two, "-o", "json")
    answer = json.loads(compared.stdout)
    assert [each["run_id"] for each in answer] == list(RUN_IDS)
    assert [each["learning_rate"] for each in answer] == ["3e-05", "0.0001"]
    (tmp_path / "best/receipt.json").write_text("{")
    (tmp_path / "runs/notes").mkdir()
    for folder in ("runs/notes", f"{tmp_path}/best"):
        nothing = trainyard("receipt", folder)
        assert f"error: {folder} is not the folder of a fetched run" in nothing.stderr
        assert nothing.returncode == 2
    # Names, ids and a team's latest are not folders.
    assert [folder_of(text) for text in ("early", RUN_IDS[0], "latest", "research/latest")] == [None] * 4


@pytest.mark.parametrize(("makelevel", "program"), [("1", ".venv/bin/trainyard"), (None, "trainyard")])
def test_the_demo_ends_with_commands_that_work_in_its_shell(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    makelevel: str | None,
    program: str,
) -> None:
    # GIVEN the program on the PATH of `make demo` only, or of the user's shell
    monkeypatch.chdir(tmp_path)
    here = tmp_path / ".venv/bin/trainyard"
    here.parent.mkdir(parents=True)
    here.symlink_to(TRAINYARD)
    monkeypatch.setattr(sys, "argv", [str(here), "demo"])
    monkeypatch.setenv("PATH", f"{here.parent}:/usr/bin:/bin")
    monkeypatch.delenv("MAKELEVEL", raising=False)
    if makelevel:
        monkeypatch.setenv("MAKELEVEL", makelevel)
    demo._show_next(Path("runs") / RUN_IDS[0])
    steps = [line.strip().split("  ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert steps == [
        f"{program} receipt runs/{RUN_IDS[0]}",
        f"{program} local up",
        f'eval "$({program} local env)"',
    ]
