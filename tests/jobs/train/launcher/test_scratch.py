"""Where a job's downloads and passing files lie."""

import signal
import tempfile
from pathlib import Path

import pytest

from jobs.contract.errors import INTERRUPTED_EXIT_CODE
from jobs.contract.launcher_options import ACCELERATOR_VARIABLE, RUN_URI_VARIABLE
from jobs.train.launcher.instance import scratch_folder
from jobs.train.launcher.request import parse
from tests.support.train.launching import Run

LAUNCHER = """
import pathlib, sys
from jobs.train import launch
sys.exit(launch.main(disks=pathlib.Path(sys.argv.pop(1))))
"""
"""The launcher of a container that has its instance's disks at the path of its first argument."""


def test_jobs_on_an_instance_write_to_its_own_disks(run: Run, recipe: tuple[str, ...], tmp_path: Path) -> None:
    disks = tmp_path / "disks"
    disks.mkdir()
    program = ("-c", LAUNCHER, str(disks))
    # WHEN a job trains
    launched = run.start(*recipe, "--epochs=600", program=program, TRAINYARD_ACCELERATOR="cpu")
    launched.wait_for_line("step ")
    # THEN the launcher's own folder, that of its rank, and whatever the rank's libraries make are on the disks
    (rank,) = launched.ranks()
    folders = {Path(rank.environ()[name]) for name in ("TMPDIR", "TRAINYARD_SCRATCH")}
    assert {folder.parent for folder in folders} == {disks}
    assert any(folders.pop().iterdir())
    # AND nothing stays there once it has ended
    assert launched.kill(signal.SIGTERM) == INTERRUPTED_EXIT_CODE, launched.output
    run.wait_until_gone()
    assert not list(disks.iterdir())
    assert not list(run.scratch.iterdir())


@pytest.mark.parametrize(
    ("accelerator", "disks", "used"),
    [
        ("cpu", "disks", "disks"),
        # An image or a definition without the volume; /dev/null stands for what cannot be written to, whoever asks.
        ("cpu", "missing", "temporary"),
        ("cpu", "/dev/null", "temporary"),
        # A laptop's /scratch is somebody else's.
        ("auto", "disks", "temporary"),
    ],
)
def test_where_there_are_no_disks_of_ours_it_is_a_temporary_folder(
    accelerator: str, disks: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("disks", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    arguments = ("--instance-type=dl1.24xlarge", "--nproc-per-node=1", "fabric-check")
    environment = {RUN_URI_VARIABLE: "s3://runs/research/scratch-0a1b/", ACCELERATOR_VARIABLE: accelerator}

    on_instance = parse(arguments, environment).on_instance
    with scratch_folder(tmp_path / disks, on_instance=on_instance) as folder:
        assert folder.is_dir()
        assert folder.parent == tmp_path / used
