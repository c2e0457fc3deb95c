"""Where a job's downloads and passing files lie."""

import signal
from pathlib import Path

import pytest

from jobs.errors import INTERRUPTED_EXIT_CODE
from tests.jobs.train.launching import Run

LAUNCHER = """
import pathlib, sys
from jobs.train import launch
sys.exit(launch.main(disks=pathlib.Path(sys.argv.pop(1))))
"""
"""The launcher of a container that has its instance's disks at the path of its first argument."""


@pytest.mark.parametrize(
    "case",
    [
        ("cpu", "disks", "disks"),
        # An image or a definition without the volume; /dev/null stands for what cannot be written to, whoever asks.
        ("cpu", "missing", "scratch"),
        ("cpu", "/dev/null", "scratch"),
        # A laptop's /scratch is somebody else's.
        ("auto", "disks", "scratch"),
    ],
    ids=str,
)
def test_jobs_on_an_instance_write_to_its_own_disks_where_it_has_some(
    run: Run, recipe: tuple[str, ...], tmp_path: Path, case: tuple[str, str, str]
) -> None:
    """A case is what the job trains on, where it looks for disks, and where it then writes."""
    accelerator, disks, used = case
    (tmp_path / "disks").mkdir()
    program = ("-c", LAUNCHER, str(tmp_path / disks))
    # WHEN a job trains
    launched = run.start(*recipe, "--epochs=600", program=program, TRAINYARD_ACCELERATOR=accelerator)
    launched.wait_for_line("step ")
    # THEN the launcher's own folder, that of its rank, and whatever the rank's libraries make are on the right disk
    (rank,) = launched.ranks()
    folders = {Path(rank.environ()[name]) for name in ("TMPDIR", "TRAINYARD_SCRATCH")}
    assert {folder.parent for folder in folders} == {tmp_path / used}
    assert any(folders.pop().iterdir())
    # AND nothing stays there once it has ended
    assert launched.kill(signal.SIGTERM) == INTERRUPTED_EXIT_CODE, launched.output
    run.wait_until_gone()
    assert not list((tmp_path / "disks").iterdir())
    assert not list(run.scratch.iterdir())
