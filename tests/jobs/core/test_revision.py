import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.core import git as git_module
from jobs.core.errors import ConfigurationError, TrainyardError
from jobs.core.revision import image_tag, local_name, source_commit, source_revision

Git = Callable[..., str]


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Sources in no repository; git looks for none above the test's own folders."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    root = tmp_path / "source"
    for name in ("images/cpu/Dockerfile", "jobs/spec/spec.py", "trainyard/run.py", "README.md"):
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
    (root / "jobs/spec/spec.py").write_text("other\n")
    git("commit", "--quiet", "--all", "--message", "in every image")
    second = source_revision(root)
    assert "-dirty-" not in second != first
    assert source_commit(root) == git("rev-parse", "HEAD").strip()
    # As the module's docstring has a user print it.
    printed = "git rev-parse {0}:images {0}:jobs {0}:trainyard | sha256sum | cut -c 1-12"
    for commit, expected in (("HEAD", second), ("HEAD~1", first)):
        shell = ["sh", "-c", printed.format(commit)]
        assert subprocess.run(shell, cwd=root, check=True, capture_output=True, text=True).stdout.strip() == expected


def test_each_change_is_told_by_a_hash_of_its_content(root: Path, git: Git) -> None:
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
    # What git does not have counts too, ignored or not: it gets into the image.
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


def test_without_git_the_environment_says_it(root: Path) -> None:
    assert source_commit(root) is None
    for given in ("0123456789ab", "0123456789ab-dirty-01234567"):
        assert source_revision(root, {"TRAINYARD_REVISION": given}) == given
        assert local_name("cpu", image_tag("1.21.0", given)) == f"trainyard/cpu:1.21.0-{given}"
    for given in ("", "v1 final", "a/b", "-x", "x" * 65):
        with pytest.raises(ConfigurationError, match="TRAINYARD_REVISION" if given else "not a git repository"):
            source_revision(root, {"TRAINYARD_REVISION": given})
    # A copy of the source inside another repository is no part of it.
    identity = ["git", "-C", str(root.parent), "-c", "user.name=A", "-c", "user.email=a@example.com"]
    subprocess.run([*identity, "init", "--quiet"], check=True)
    subprocess.run([*identity, "commit", "--quiet", "--allow-empty", "--message", "another"], check=True)
    with pytest.raises(ConfigurationError, match="path 'source/images' exists on disk, but not in 'HEAD'"):
        source_revision(root, {})
