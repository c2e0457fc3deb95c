"""The folder of a job's downloads and temporary files."""

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
"""The launcher of a container with the instance's disks at the path of the first argument."""


def test_jobs_on_an_instance_write_to_its_disks(run: Run, recipe: tuple[str, ...], tmp_path: Path) -> None:
    disks = tmp_path / "disks"
    disks.mkdir()
    program = ("-c", LAUNCHER, str(disks))
    # WHEN a job trains with arguments from a file of the run
    arguments = parse_flags(FinetuneClassification, [*recipe, "--epochs=600"], program="")
    run.write("arguments/0f.json", arguments.model_dump_json(exclude_none=True).encode())
    named = ["--arguments-file=arguments/0f.json"]
    launched = run.start(program=program, options=named, TRAINYARD_ACCELERATOR="cpu")
    launched.wait_for_line("step ")
    # THEN the folders of launcher, rank and the rank's libraries are on the disks
    (rank,) = launched.ranks()
    (folder,) = disks.iterdir()
    assert any(Path(file.path).is_relative_to(folder) for file in rank.open_files())
    assert not list(run.scratch.iterdir())
    # AND nothing is left there after its end
    assert launched.kill(signal.SIGTERM) == INTERRUPTED_EXIT_CODE, launched.output
    run.wait_until_gone()
    assert not list(disks.iterdir())
    assert not list(run.scratch.iterdir())


@pytest.mark.parametrize(
    ("on_instance", "disks", "used"),
    [
        (True, "disks", "disks"),
        # An image or a job definition without the volume. /dev/null is not writable for any user.
        (True, "missing", "temporary"),
        (True, "/dev/null", "temporary"),
        # /scratch of a laptop is not ours.
        (False, "disks", "temporary"),
    ],
)
def test_without_usable_disks_scratch_is_a_temporary_folder(
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
            # While it is used, another attempt of the run gets a different folder
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


def test_a_folder_still_used_by_a_killed_attempt_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
