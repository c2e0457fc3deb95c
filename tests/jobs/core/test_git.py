"""What a repository of somebody else's configures is not run, whichever way it is asked about."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.core import revision
from jobs.core.errors import ConfigurationError
from jobs.core.git import run_git
from jobs.runs.code_archive import pack_folder
from tests.support.container.scripts import write_files

IDENTITY = ("-c", "user.name=A", "-c", "user.email=a@example.com")


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", folder, *IDENTITY, *arguments], check=True, capture_output=True)


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[Path, Path]:
    """A repository whose configuration names a command wherever git takes one, and the file that these would write."""
    folder, mark = tmp_path / "code", tmp_path / "mark"
    write_files(folder, {f"{name}/a.py": "1\n" for name in revision.SOURCES})
    write_files(folder, {"train.py": "1\n", ".gitattributes": "* filter=evil diff=evil\n"})
    write_files(folder, {".trainyardignore": "jobs/\ntrainyard/\n"})  # names that no code may have
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=first")
    command = tmp_path / "command"
    command.write_text(f"#!/bin/sh\ntouch {mark}\ncat\n")
    command.chmod(0o755)
    for name in ("post-index-change", "post-checkout", "reference-transaction"):
        (folder / ".git/hooks").mkdir(exist_ok=True)
        (folder / ".git/hooks" / name).symlink_to(command)
    for key in (
        *("core.fsmonitor", "core.pager", "core.sshCommand", "core.askPass", "core.editor", "credential.helper"),
        *("diff.external", "diff.evil.command", "diff.evil.textconv", "alias.status", "alias.ls-files"),
        *("filter.evil.clean", "filter.evil.smudge", "filter.evil.process"),
    ):
        git(folder, "config", key, str(command))
    for key, value in {
        "filter.evil.required": "true",
        # A missing object would be fetched from there.
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::{command}",
        "protocol.ext.allow": "always",
    }.items():
        git(folder, "config", key, value)
    # The content is compared only if its times or its size differ.
    (folder / "train.py").write_text("22\n")
    (folder / "jobs/a.py").write_text("22\n")
    return folder, mark


def test_nothing_that_a_repository_configures_is_run(hostile: tuple[Path, Path]) -> None:
    folder, mark = hostile
    pack = pack_folder(folder)
    assert [file.name for file in pack.files] == [".gitattributes", "images/a.py", "train.py"]
    assert pack.dirty
    assert "-dirty-" in revision.source_revision(folder)
    assert not mark.exists()


def test_a_missing_object_is_fetched_from_nowhere(hostile: tuple[Path, Path]) -> None:
    folder, mark = hostile
    with pytest.raises(subprocess.CalledProcessError):
        run_git("cat-file", "blob", "0123" * 10, folder=folder)
    assert not mark.exists()


def test_a_bare_repository_inside_a_clone_is_refused(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    settings = f"[core]\n\tbare = false\n\tworktree = .\n\tfsmonitor = touch {mark}\n"
    part = {"HEAD": "ref: refs/heads/main\n", "config": settings, "objects/a": "", "refs/a": "", "train.py": "1\n"}
    write_files(tmp_path / "clone", {f"examples/{name}": text for name, text in part.items()})
    git(tmp_path / "clone", "init", "--quiet")
    with pytest.raises(ConfigurationError, match="cannot use bare repository"):
        pack_folder(tmp_path / "clone/examples")
    assert not mark.exists()


def test_another_repository_in_the_environment_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN the variables that git sets for a hook
    write_files(tmp_path / "other", {"other.py": ""})
    git(tmp_path / "other", "init", "--quiet")
    write_files(tmp_path / "code", {"train.py": "", "data.csv": "", ".gitignore": "*.csv\n"})
    git(tmp_path / "code", "init", "--quiet")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other/.git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    assert [file.name for file in pack_folder(tmp_path / "code").files] == [".gitignore", "train.py"]


@pytest.mark.parametrize("name", ["a=b", "a.b c"])
def test_a_filter_of_any_name_is_off(tmp_path: Path, name: str) -> None:
    write_files(tmp_path, {"train.py": "1\n"})
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", f"filter.{name}.clean", "touch mark")
    off: Callable[[], str] = lambda: run_git("config", f"filter.{name}.clean", folder=tmp_path)  # noqa: E731
    if "=" in name:  # git's option cannot name it
        with pytest.raises(subprocess.CalledProcessError):
            off()
    else:
        assert off() == "\n"
