"""Where a job's downloads and passing files lie."""

import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from jobs.container import instance
from jobs.container.instance import scratch_folder
from jobs.core.errors import INTERRUPTED_EXIT_CODE
from jobs.core.locations import S3Location
from jobs.spec.arguments import parse_flags
from jobs.spec.kinds.finetune_classification import FinetuneClassification
from tests.support.container.launching import Run

LAUNCHER = """
import pathlib, sys
from jobs.container import launch
sys.exit(launch.main(disks=pathlib.Path(sys.argv.pop(1))))
"""
"""The launcher of a container that has its instance's disks at the path of its first argument."""


def test_jobs_on_an_instance_write_to_its_own_disks(run: Run, recipe: tuple[str, ...], tmp_path: Path) -> None:
    disks = tmp_path / "disks"
    disks.mkdir()
    program = ("-c", LAUNCHER, str(disks))
    # WHEN a job trains, whose arguments are those of a file among the run's
    arguments = parse_flags(FinetuneClassification, [*recipe, "--epochs=600"], program="")
    run.write("arguments/0f.json", arguments.model_dump_json(exclude_none=True).encode())
    named = ["--arguments-file=arguments/0f.json"]
    launched = run.start(program=program, options=named, TRAINYARD_ACCELERATOR="cpu")
    launched.wait_for_line("step ")
    # THEN the launcher's own folder, that of its rank, and whatever the rank's libraries make are on the disks
    (rank,) = launched.ranks()
    (folder,) = disks.iterdir()
    assert any(Path(file.path).is_relative_to(folder) for file in rank.open_files())
    assert not list(run.scratch.iterdir())
    # AND nothing stays there once it has ended
    assert launched.kill(signal.SIGTERM) == INTERRUPTED_EXIT_CODE, launched.output
    run.wait_until_gone()
    assert not list(disks.iterdir())
    assert not list(run.scratch.iterdir())


@pytest.mark.parametrize(
    ("on_instance", "disks", "used"),
    [
        (True, "disks", "disks"),
        # An image or a definition without the volume; /dev/null stands for what cannot be written to, whoever asks.
        (True, "missing", "temporary"),
        (True, "/dev/null", "temporary"),
        # A laptop's /scratch is somebody else's.
        (False, "disks", "temporary"),
    ],
)
def test_where_there_are_no_disks_of_ours_it_is_a_temporary_folder(
    on_instance: bool, disks: str, used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("disks", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    run = S3Location("runs", "research/scratch-0a1b/")
    paths = []
    for _ in range(2):
        with scratch_folder(tmp_path / disks, run, node=0, on_instance=on_instance) as folder:
            assert list(folder.iterdir()) == [], "nothing of an attempt that was killed"
            assert folder.parent == tmp_path / used
            paths.append(folder)
            # While it is used, another attempt of the run and another node on this machine get one of their own
            with scratch_folder(tmp_path / disks, run, node=0, on_instance=on_instance) as second:
                assert second.parent == folder.parent
                assert second != folder
        assert not folder.exists()
        folder.mkdir()
        (folder / "left").mkdir()
        (folder / "left/over").touch()
        (folder / "a-file").touch()
        (folder / "a-link").symlink_to(tmp_path)
    assert paths[0] == paths[1], "a run's attempts have the same path"


def test_a_folder_in_which_a_process_of_a_killed_attempt_works_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(instance, "_END_SECONDS", 0.2)
    run = S3Location("runs", "research/scratch-0a1b/")
    with scratch_folder(tmp_path, run, node=0, on_instance=False) as folder:
        pass
    folder.mkdir()
    (folder / "code").mkdir()
    orphan = subprocess.Popen(["sleep", "600"], cwd=folder / "code")
    try:
        with scratch_folder(tmp_path, run, node=0, on_instance=False) as other:
            assert other != folder
        assert (folder / "code").exists()
    finally:
        orphan.kill()
        orphan.wait()
    with scratch_folder(tmp_path, run, node=0, on_instance=False) as again:
        assert again == folder
    with scratch_folder(tmp_path, run, node=1, on_instance=False) as of_another_node:
        assert of_another_node != folder
