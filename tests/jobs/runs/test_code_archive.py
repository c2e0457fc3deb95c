"""Packing a folder: git chooses the files, and a git that does not answer is an error."""

import contextlib
import gzip
import io
import random
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.core.errors import ConfigurationError, UsageError
from jobs.runs.code_archive import pack_folder, write_archive
from jobs.spec.code import read_archive
from tests.support.container.scripts import write_files

FILES = ("out/keep.txt", "out/sub/y.txt", "src/build/o.txt", "#note.txt", "train.py", "sp ace.txt", "é.txt", ":(top)x")
PATTERNS = ("*.py", "\\#note.txt", "build/", "out/*\n!out/keep.txt", "*\n!*/\n!*.py", "é.txt", "*.txt\r\n", "[")


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def names(folder: Path) -> list[str]:
    return [file.name for file in pack_folder(folder).files]


def test_ignore_files_have_gits_meaning(tmp_path: Path) -> None:
    plain, tracked = tmp_path / "plain", tmp_path / "tracked"
    for folder in (plain, tracked):
        write_files(folder, dict.fromkeys(FILES, "1"))
    write_files(plain, {"__pycache__/a.pyc": "", "venv/bin/python": ""})  # always excluded
    git(tracked, "init", "--quiet")
    for pattern in PATTERNS:
        # GIVEN the files that git itself excludes
        (tracked / ".gitignore").write_text(pattern, encoding="utf-8", newline="")
        listed = git(tracked, "ls-files", "--others", "--exclude-standard", "-z")
        expected = sorted({name for name in listed.split("\0") if name} - {".gitignore"})
        (tracked / ".gitignore").unlink()
        # WHEN the same pattern is in a folder without a repository, or in .trainyardignore
        found = {}
        for ignore_file, folder in ((".gitignore", plain), (".trainyardignore", plain), (".trainyardignore", tracked)):
            (folder / ignore_file).write_text(pattern, encoding="utf-8", newline="")
            found[f"{folder.name}/{ignore_file}"] = [name for name in names(folder) if name != ignore_file]
            (folder / ignore_file).unlink()
        assert found == dict.fromkeys(found, expected), pattern


def test_trainyardignore_also_excludes_tracked_files(tmp_path: Path) -> None:
    write_files(
        tmp_path, {"train.py": "", "big/model.bin": "", ".trainyardignore": "big/\n", "deep/.gitignore": "*.csv"}
    )
    write_files(tmp_path, {"deep/a.csv": "", "deep/a.py": ""})
    assert names(tmp_path) == ["deep/.gitignore", "deep/a.py", "train.py"]
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "add", "--force", "deep/a.csv")
    assert names(tmp_path) == ["deep/.gitignore", "deep/a.csv", "deep/a.py", "train.py"]


def _another_owner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # git's own tests use this variable, so that tests need not run as root.
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setattr("jobs.core.git._KEPT_VARIABLES", ("GIT_TEST_", "GIT_CONFIG_"))


def _moved_work_tree(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / ".git").rename(folder.parent / "moved")
    (folder / ".git").write_text("gitdir: /nonexistent/worktrees/x\n")


def _damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / ".git/HEAD").write_text("garbage\n")


def _damaged_inside_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _damaged(folder, monkeypatch)
    git(folder.parent, "init", "--quiet")


def _of_a_newer_format(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(folder, "config", "core.repositoryFormatVersion", "1")
    git(folder, "config", "extensions.unheardOf", "true")


def _without_git(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize(
    ("breaks", "message", "next_step"),
    [
        (_another_owner, "detected dubious ownership", "git config --global --add safe.directory"),
        (_moved_work_tree, "not a git repository: /nonexistent/worktrees/x", "git -C"),
        (_damaged, "not a git repository", "git -C"),
        (_damaged_inside_another, "git cannot read", "repair"),
        (_of_a_newer_format, "unknown repository extension", "git -C"),
        (_without_git, "only git can list the ignored files", "install git"),
    ],
)
def test_folder_that_git_cannot_read_is_an_error(
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    breaks: Callable[[Path, pytest.MonkeyPatch], None],
    message: str,
    next_step: str,
) -> None:
    folder = tmp_path / "code"
    write_files(folder, {"train.py": "", "part/run.py": "", "part/data.csv": "", ".gitignore": "*.csv\n"})
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=first")
    assert "part/data.csv" not in names(folder)
    breaks(folder, monkeypatch)
    with pytest.raises(ConfigurationError) as refused:
        pack_folder(folder / "part")
    assert message in refused.value.args[0]
    assert next_step in str(refused.value.next_step)


def test_only_the_packed_code_can_be_unpacked(tmp_path: Path) -> None:
    write_files(tmp_path, {"train.py": "print(1)\n" * 99, "run/it.sh": "#!/bin/sh\n"})
    (tmp_path / "run/it.sh").chmod(0o755)
    pack, file = pack_folder(tmp_path), io.BytesIO()
    write_archive(pack, file)
    whole = file.getvalue()

    def files_of(content: bytes) -> list[tuple[str, bool]]:
        found = read_archive(content, location="s3://runs/a", fingerprint=pack.fingerprint)
        return [(file.name, file.executable) for file, _ in found]

    def archive_of(name: str, kind: bytes = tarfile.REGTYPE) -> bytes:
        target = io.BytesIO()
        with tarfile.open(fileobj=target, mode="w:gz") as archive:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "/etc/passwd"
            archive.addfile(entry)
        return target.getvalue()

    assert files_of(whole) == [("run/it.sh", True), ("train.py", False)]
    draw = random.Random(1)
    damaged = [whole[:end] for end in range(0, len(whole), 16)]
    for at in draw.sample(range(10, len(whole) - 8), 64):  # not gzip's header, where some bytes have no meaning
        changed = bytearray(whole)
        changed[at] ^= 1 << draw.randrange(8)
        damaged.append(bytes(changed))
    for content in damaged:
        with contextlib.suppress(UsageError):
            assert files_of(content) == files_of(whole), "unpacked code equals the packed code"
    others = [
        archive_of("train.py"),
        archive_of("../train.py"),
        archive_of("/etc/x"),
        b"garbage",
        gzip.compress(b"x", mtime=0),
    ]
    for content in (*others, archive_of("a", tarfile.SYMTYPE), archive_of("a", tarfile.FIFOTYPE)):
        with pytest.raises(UsageError, match=r"damaged|contains other code|is not "):
            files_of(content)
