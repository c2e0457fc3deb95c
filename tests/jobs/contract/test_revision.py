import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.contract import git as git_module
from jobs.contract.errors import ConfigurationError, TrainyardError
from jobs.contract.revision import image_tag, local_name, source_commit, source_revision

Git = Callable[..., str]


@pytest.fixture
def no_git_above(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Has git look for no repository above the test's own folders."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))


@pytest.fixture
def root(no_git_above: None, tmp_path: Path) -> Path:
    root = tmp_path / "source"
    for name in ("images/cpu/Dockerfile", "jobs/contract/spec.py", "trainyard/run.py", "README.md"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    return root


@pytest.fixture
def git(root: Path) -> Git:
    """git in the source, which is committed."""

    def run(*arguments: str) -> str:
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.com")
        return subprocess.run(
            ["git", "-C", root, *identity, *arguments], check=True, capture_output=True, text=True
        ).stdout

    run("init", "--quiet")
    run("add", ".")
    run("commit", "--quiet", "--message", "first")
    return run


def test_a_clean_tree_has_the_revision_of_what_images_are_built_from(root: Path, git: Git) -> None:
    first = source_revision(root)
    assert re.fullmatch("[0-9a-f]{12}", first)
    (root / "README.md").write_text("other\n")
    git("commit", "--quiet", "--all", "--message", "not in any image")
    assert source_revision(root) == first
    (root / "jobs/contract/spec.py").write_text("other\n")
    git("commit", "--quiet", "--all", "--message", "in every image")
    second = source_revision(root)
    assert "-dirty-" not in second != first
    git("revert", "--no-edit", "HEAD")
    assert source_revision(root) == first
    assert source_commit(root) == git("rev-parse", "HEAD").strip()
    # As the module's docstring has a user print it.
    printed = "git rev-parse {0}:images {0}:jobs {0}:trainyard | sha256sum | cut -c 1-12"
    for commit, expected in (("HEAD", first), ("HEAD~1", second)):
        shell = ["sh", "-c", printed.format(commit)]
        assert subprocess.run(shell, cwd=root, check=True, capture_output=True, text=True).stdout.strip() == expected


def test_a_git_that_does_not_answer_is_told(
    root: Path, git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(slow.parent))
    monkeypatch.setattr(git_module, "SECONDS", 0.1)
    with pytest.raises(TrainyardError, match="git did not answer") as caught:
        # Another revision than git's would be taken for it.
        source_revision(root, {"TRAINYARD_REVISION": "0123456789ab"})
    assert "status" in str(caught.value.next_step)


def _edit(path: Path) -> None:
    path.write_text("edited\n")


def _remove(path: Path) -> None:
    path.unlink()


def _make_executable(path: Path) -> None:
    path.chmod(0o755)


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("elsewhere")


def _rename(path: Path) -> None:
    path.rename(path.with_name("renamed.py"))


@pytest.mark.parametrize("change", [_edit, _remove, _make_executable, _link, _rename])
def test_a_change_is_told_by_a_hash_of_its_content(*, root: Path, git: Git, change: Callable[[Path], None]) -> None:
    clean = source_revision(root)
    change(root / "jobs/contract/spec.py")
    dirty = source_revision(root)
    assert dirty.startswith(f"{clean}-dirty-")
    assert len(dirty) == len(clean) + len("-dirty-") + 8
    git("reset", "--quiet", "--hard")
    git("clean", "--quiet", "--force", "jobs")
    assert source_revision(root) == clean


@pytest.mark.parametrize("name", ["jobs/new.py", "images/new/Dockerfile", "images/cpu/ignored.whl"])
def test_a_file_that_git_does_not_have_counts_ignored_or_not(root: Path, git: Git, name: str) -> None:
    (root / ".git/info/exclude").write_text("*.whl\n")
    path = root / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("1")
    first = source_revision(root)
    path.write_text("2")
    assert "-dirty-" in first
    assert source_revision(root) != first


@pytest.mark.parametrize(
    "name", ["jobs/__pycache__/spec.cpython-311.pyc", "jobs/.spec.py.swp", "infra/app.py", "new.py"]
)
def test_what_gets_into_no_image_does_not_count(root: Path, git: Git, name: str) -> None:
    clean = source_revision(root)
    path = root / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("1")
    assert source_revision(root) == clean


def test_without_git_the_environment_says_it(root: Path) -> None:
    assert source_commit(root) is None
    assert source_revision(root, {"TRAINYARD_REVISION": "0123456789ab"}) == "0123456789ab"
    dirty = "0123456789ab-dirty-01234567"
    assert source_revision(root, {"TRAINYARD_REVISION": dirty}) == dirty


@pytest.mark.parametrize("given", ["", "v1 final", "a/b", "-x", "x" * 65])
def test_without_git_and_without_a_revision_nothing_is_built(root: Path, given: str) -> None:
    with pytest.raises(ConfigurationError, match="TRAINYARD_REVISION" if given else "not a git repository"):
        source_revision(root, {"TRAINYARD_REVISION": given})


def test_a_copy_of_the_source_inside_another_repository_is_not_taken_for_a_part_of_it(root: Path) -> None:
    subprocess.run(["git", "init", "--quiet", root.parent], check=True)
    with pytest.raises(ConfigurationError, match="invalid object name 'HEAD'"):
        source_revision(root, {})
    identity = ["git", "-C", str(root.parent), "-c", "user.name=A", "-c", "user.email=a@example.com"]
    subprocess.run([*identity, "commit", "--quiet", "--allow-empty", "--message", "another"], check=True)
    with pytest.raises(ConfigurationError, match="path 'source/images' exists on disk, but not in 'HEAD'"):
        source_revision(root, {})


def test_tags_and_names_tell_release_and_revision() -> None:
    tag = image_tag("1.21.0", "0123456789ab-dirty-01234567")
    assert tag == "1.21.0-0123456789ab-dirty-01234567"
    assert local_name("cpu-notebook", tag) == f"trainyard/cpu-notebook:{tag}"
