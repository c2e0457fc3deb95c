"""Commands that a foreign repository configures are never run; and the revision of the sources."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.core.errors import ConfigurationError, TrainyardError
from jobs.core.git import SOURCES, image_tag, local_name, run_git, source_commit, source_revision
from jobs.runs.code_archive import pack_folder
from tests.support.container.scripts import write_files

IDENTITY = ("-c", "user.name=A", "-c", "user.email=a@example.com")


def git_in(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", folder, *IDENTITY, *arguments], check=True, capture_output=True)


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[Path, Path]:
    """A repository that configures a command wherever git allows one, and the file that the command would write."""
    folder, mark = tmp_path / "code", tmp_path / "mark"
    write_files(folder, {f"{name}/a.py": "1\n" for name in SOURCES})
    write_files(folder, {"train.py": "1\n", ".gitattributes": "* filter=evil diff=evil\n"})
    write_files(folder, {".trainyardignore": "jobs/\ntrainyard/\n"})  # names that code must not have
    git_in(folder, "init", "--quiet")
    git_in(folder, "add", ".")
    git_in(folder, "commit", "--quiet", "--message=first")
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
        git_in(folder, "config", key, str(command))
    for key, value in {
        "filter.evil.required": "true",
        # A missing object would be fetched from there.
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::{command}",
        "protocol.ext.allow": "always",
    }.items():
        git_in(folder, "config", key, value)
    # Git compares contents only if times or sizes differ.
    (folder / "train.py").write_text("22\n")
    (folder / "jobs/a.py").write_text("22\n")
    return folder, mark


def test_commands_of_a_repository_are_not_run(hostile: tuple[Path, Path]) -> None:
    folder, mark = hostile
    pack = pack_folder(folder)
    assert [file.name for file in pack.files] == [".gitattributes", "images/a.py", "train.py"]
    assert pack.dirty
    assert "-dirty-" in source_revision(folder)
    assert not mark.exists()


def test_missing_object_is_not_fetched(hostile: tuple[Path, Path]) -> None:
    folder, mark = hostile
    with pytest.raises(subprocess.CalledProcessError):
        run_git("cat-file", "blob", "0123" * 10, folder=folder)
    assert not mark.exists()


def test_bare_repository_inside_a_clone_is_rejected(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    settings = f"[core]\n\tbare = false\n\tworktree = .\n\tfsmonitor = touch {mark}\n"
    part = {"HEAD": "ref: refs/heads/main\n", "config": settings, "objects/a": "", "refs/a": "", "train.py": "1\n"}
    write_files(tmp_path / "clone", {f"examples/{name}": text for name, text in part.items()})
    git_in(tmp_path / "clone", "init", "--quiet")
    with pytest.raises(ConfigurationError, match="cannot use bare repository"):
        pack_folder(tmp_path / "clone/examples")
    assert not mark.exists()


def test_repository_in_the_environment_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN the variables that git sets for a hook
    write_files(tmp_path / "other", {"other.py": ""})
    git_in(tmp_path / "other", "init", "--quiet")
    write_files(tmp_path / "code", {"train.py": "", "data.csv": "", ".gitignore": "*.csv\n"})
    git_in(tmp_path / "code", "init", "--quiet")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other/.git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    assert [file.name for file in pack_folder(tmp_path / "code").files] == [".gitignore", "train.py"]


@pytest.mark.parametrize("name", ["a=b", "a.b c"])
def test_filter_of_any_name_is_disabled(tmp_path: Path, name: str) -> None:
    write_files(tmp_path, {"train.py": "1\n"})
    git_in(tmp_path, "init", "--quiet")
    git_in(tmp_path, "config", f"filter.{name}.clean", "touch mark")
    off: Callable[[], str] = lambda: run_git("config", f"filter.{name}.clean", folder=tmp_path)  # noqa: E731
    if "=" in name:  # git's option cannot name it
        with pytest.raises(subprocess.CalledProcessError):
            off()
    else:
        assert off() == "\n"


Git = Callable[..., str]


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Sources without a repository; git does not look for one above the test's folders."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    root = tmp_path / "source"
    for name in ("images/cpu/Dockerfile", "jobs/spec/spec.py", "trainyard/run.py", "README.md"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    return root


@pytest.fixture
def git(root: Path) -> Git:
    """Runs git in the sources, which are committed."""

    def run(*arguments: str) -> str:
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.com")
        return subprocess.run(
            ["git", "-C", root, *identity, *arguments], check=True, capture_output=True, text=True
        ).stdout

    run("init", "--quiet")
    run("add", ".")
    run("commit", "--quiet", "--message", "first")
    return run


def test_revision_of_a_clean_tree_depends_on_image_sources(root: Path, git: Git) -> None:
    first = source_revision(root)
    assert re.fullmatch("[0-9a-f]{12}", first)
    (root / "README.md").write_text("other\n")
    git("commit", "--quiet", "--all", "--message", "not in any image")
    assert source_revision(root) == first
    (root / "jobs/spec/spec.py").write_text("other\n")
    git("commit", "--quiet", "--all", "--message", "in every image")
    second = source_revision(root)
    assert "-dirty-" not in second != first
    assert source_commit(root) == git("rev-parse", "HEAD").strip()
    # The command of the module's docstring.
    printed = "git rev-parse {0}:images {0}:jobs {0}:trainyard | sha256sum | cut -c 1-12"
    for commit, expected in (("HEAD", second), ("HEAD~1", first)):
        shell = ["sh", "-c", printed.format(commit)]
        assert subprocess.run(shell, cwd=root, check=True, capture_output=True, text=True).stdout.strip() == expected


def test_each_change_has_its_own_dirty_revision(root: Path, git: Git) -> None:
    clean = source_revision(root)
    (root / ".git/info/exclude").write_text("*.whl\n")
    path, found = root / "jobs/spec/spec.py", set()

    def changed() -> None:
        revision = source_revision(root)
        assert re.fullmatch(rf"{clean}-dirty-[0-9a-f]{{8}}", revision)
        assert revision not in found, "each is another content"
        found.add(revision)

    path.write_text("edited\n")
    changed()
    path.chmod(0o755)
    changed()
    path.unlink()
    changed()
    path.symlink_to("elsewhere")
    changed()
    path.rename(path.with_name("renamed.py"))
    changed()
    # Untracked files count too, even ignored ones, because they are copied into the image.
    for name in ("jobs/new.py", "images/cpu/ignored.whl"):
        for content in "12":
            (root / name).write_text(content)
            changed()
    git("reset", "--quiet", "--hard")
    git("clean", "--quiet", "--force", "-x", "jobs", "images")
    for name in ("jobs/__pycache__/spec.cpython-311.pyc", "jobs/.spec.py.swp", "infra/app.py", "new.py"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("in no image")
    assert source_revision(root) == clean


def test_git_that_does_not_respond_is_an_error(
    root: Path, git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(slow.parent))
    monkeypatch.setattr("jobs.core.git.SECONDS", 0.1)
    with pytest.raises(TrainyardError, match="git did not list the changes") as caught:
        # The revision from the environment could differ from git's.
        source_revision(root, {"TRAINYARD_REVISION": "0123456789ab"})
    assert "status" in str(caught.value.next_step)


def test_without_git_the_environment_sets_the_revision(root: Path) -> None:
    assert source_commit(root) is None
    for given in ("0123456789ab", "0123456789ab-dirty-01234567"):
        assert source_revision(root, {"TRAINYARD_REVISION": given}) == given
        assert local_name("cpu", image_tag("1.21.0", given)) == f"trainyard/cpu:1.21.0-{given}"
    for given in ("", "v1 final", "a/b", "-x", "x" * 65):
        with pytest.raises(ConfigurationError, match="TRAINYARD_REVISION" if given else "not a git repository"):
            source_revision(root, {"TRAINYARD_REVISION": given})
    # A copy of the sources inside another repository is not part of that repository.
    identity = ["git", "-C", str(root.parent), "-c", "user.name=A", "-c", "user.email=a@example.com"]
    subprocess.run([*identity, "init", "--quiet"], check=True)
    subprocess.run([*identity, "commit", "--quiet", "--allow-empty", "--message", "another"], check=True)
    with pytest.raises(ConfigurationError, match="path 'source/images' exists on disk, but not in 'HEAD'"):
        source_revision(root, {})
