"""Run git safely, and compute the revision of the sources that images are built from. No other module runs git.

A folder may come from an archive, a clone or a shared disk. Its configuration, or that of a bare repository inside a
clone, can name commands for git to run (core.fsmonitor, hooks, filters). These are disabled here. The user's own
configuration still applies, most importantly safe.directory.

Image tags are `<release>-<revision>`. The revision depends on the content of the sources, not on a commit, so equal
content has the same revision in a shallow clone and after a merge or a revert. To print the revision of a commit, run
this in the root of the repository:

    git rev-parse COMMIT:images COMMIT:jobs COMMIT:trainyard | sha256sum | cut -c 1-12

Without git (CodeBuild gets the source without its history), the environment variable TRAINYARD_REVISION sets the
revision. A work tree with changes has a different revision, so that a tag always stands for the same content.
"""

import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from jobs.core.errors import ConfigurationError, TrainyardError

SECONDS = 60.0

_SETTINGS = {
    "safe.bareRepository": "explicit",  # ignored before git 2.38; the commands are also disabled below
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "submodule.recurse": "false",
    "fetch.recurseSubmodules": "false",
    "status.submoduleSummary": "false",
}

_FILTER_KEYS = ("clean", "smudge", "process", "required")

_KEPT_VARIABLES = ("GIT_SSL_", "GIT_CONFIG_", "GIT_TRACE", "GIT_EXEC_PATH", "GIT_CEILING_", "GIT_DISCOVERY_")
"""Git variables that are passed on. The others name a repository (inside a hook, for example) or a program to run."""

_VARIABLES = {
    "GIT_ASKPASS": "",
    "GIT_LFS_SKIP_SMUDGE": "1",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_OPTIONAL_LOCKS": "0",  # another process may be using the index
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
    "SSH_ASKPASS": "",
}


def run_git(
    *arguments: str,
    folder: Path,
    stdin: bytes = b"",
    accepted: tuple[int, ...] = (0,),
) -> str:
    """Run git in a folder and return its output. Git cannot contact another repository.

    `accepted` are the exit codes that count as success. Raises CalledProcessError for other exit codes, OSError if git
    cannot be started, TimeoutExpired after SECONDS.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(_KEPT_VARIABLES)
    }
    environment |= {**_VARIABLES, "GIT_ALLOW_PROTOCOL": "none"}
    run = functools.partial(_run, folder=folder, environment=environment)
    keys = run([*_flags(_SETTINGS), "config", "--list", "--name-only", "-z"])
    command = [*_flags({**_SETTINGS, **_filters_off(keys)}), "--no-pager", *arguments]
    return run(command, stdin=stdin, accepted=accepted)


def git_error(error: OSError | subprocess.SubprocessError) -> str:
    """Return the message of an error that `run_git` raised, on one line."""
    if isinstance(error, FileNotFoundError):
        return "git is not installed"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"git did not respond within {error.timeout:.0f} s"
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line.strip() for line in error.stderr.splitlines() if line.strip()]
        return lines[0] if lines else f"git ended with exit code {error.returncode}"
    return f"git cannot be started: {error}"


def repository_of(folder: Path) -> Path | None:
    """Return the nearest folder, at or above this one, that contains `.git`; None if there is no repository.

    This does not run git, so that an error of git is never mistaken for a folder without a repository.
    """
    ceilings = os.environ.get("GIT_CEILING_DIRECTORIES", "").split(os.pathsep)
    folder = folder.resolve()
    for place in (folder, *folder.parents):
        if place != folder and str(place) in ceilings:
            return None
        if os.path.lexists(place / ".git"):
            return place
    return None


@contextmanager
def empty_repository() -> Iterator[Path]:
    """Create an empty repository for the duration of the `with` block, configured only by the user's settings."""
    with tempfile.TemporaryDirectory(prefix="trainyard-git-") as name:
        folder = Path(name)
        run_git("init", "--quiet", "--template=", folder=folder)
        yield folder


def _flags(settings: Mapping[str, str]) -> list[str]:
    return [flag for name, value in settings.items() for flag in ("-c", f"{name}={value}")]


def _filters_off(keys: str) -> dict[str, str]:
    """Return settings that disable every configured filter, because a repository's .gitattributes can select them."""
    found = {}
    for key in keys.split("\0"):
        section, _, rest = key.partition(".")
        name, _, variable = rest.rpartition(".")
        if section == "filter" and variable in _FILTER_KEYS:
            if "=" in name:  # `-c` would take the text after it as the value
                raise subprocess.CalledProcessError(128, "git", stderr=f"its filter '{name}' cannot be disabled")
            found[key] = "false" if variable == "required" else ""
    return found


def _run(
    arguments: list[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    stdin: bytes = b"",
    accepted: tuple[int, ...] = (0,),
) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, env=environment, input=stdin, capture_output=True, timeout=SECONDS, check=False)
    if done.returncode not in accepted:
        stderr = done.stderr.decode(errors="replace")
        raise subprocess.CalledProcessError(done.returncode, command, stderr=stderr)
    return os.fsdecode(done.stdout)


ROOT = Path(__file__).parents[2]

SOURCES = ("images", "jobs", "trainyard")
"""The folders that images are built from: they are Docker's build context and determine the revision."""

NOT_SOURCES = ("**/__pycache__", "**/*.pyc", "**/.*")
"""Files among the sources that are not copied into images, as patterns that both .dockerignore and git accept."""

REVISION_VARIABLE = "TRAINYARD_REVISION"

_REVISION_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""Allowed in an image tag after the release and a hyphen; Docker allows 128 characters in total."""

_DIRTY = "-dirty-"
_DIGITS = 12
_DIRTY_DIGITS = 8


def source_revision(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> str:
    """Return the revision of the sources under `root`: 12 hex digits of a hash of their trees in the last commit.

    If files are changed or untracked, `-dirty-` and 8 hex digits of a hash of these files follow. Raises
    ConfigurationError if neither git nor TRAINYARD_REVISION gives a revision, TrainyardError if git does not respond.
    """
    try:
        return _revision_in_git(root)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = git_error(error)
    except subprocess.TimeoutExpired as error:
        raise TrainyardError(
            f"git did not list the changes in {root} within {error.timeout:.0f} s",
            next_step=f"find out what 'git -C {root} status' is waiting for, then run the command again",
        ) from None
    given = environment.get(REVISION_VARIABLE, "")
    if not given:
        raise ConfigurationError(
            f"the revision of {root}, which image tags contain, is unknown: {reason}",
            next_step=f"build in a clone of the repository, or set {REVISION_VARIABLE} to the commit of this copy",
        )
    if not _REVISION_PATTERN.fullmatch(given):
        raise ConfigurationError(
            f"{REVISION_VARIABLE}={given!r} cannot be part of an image's tag",
            next_step="set it to a revision or a commit hash: at most 64 letters, digits, '.', '_' and '-'",
        )
    return given


def is_dirty(revision: str) -> bool:
    """Return whether the sources of a revision differ from the last commit."""
    return _DIRTY in revision


def source_commit(root: Path = ROOT) -> str | None:
    """Return the hash of the last commit, or None if git cannot read it."""
    try:
        return run_git("rev-parse", "HEAD", folder=root).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def image_tag(release: str, revision: str) -> str:
    """Return the image tag of a release built from a revision."""
    return f"{release}-{revision}"


def local_name(image: str, tag: str) -> str:
    """Return the name of an image on the local Docker engine."""
    return f"trainyard/{image}:{tag}"


def _revision_in_git(root: Path) -> str:
    """Return the revision from git.

    Raises the errors of `run_git`, and CalledProcessError if the last commit has no sources in this folder.
    """
    trees = run_git("rev-parse", *(f"HEAD:./{name}" for name in SOURCES), folder=root)
    revision = hashlib.sha256(trees.encode()).hexdigest()[:_DIGITS]
    changed = sorted(_changed(root))
    return f"{revision}{_DIRTY}{_content(root, changed)}" if changed else revision


def _changed(root: Path) -> Iterator[str]:
    """Yield the sources below `root` that differ from the last commit."""
    excluded = [f"--exclude={pattern}" for pattern in NOT_SOURCES]
    names_only = ("--name-only", "--no-renames", "--no-ext-diff", "--no-textconv", "--ignore-submodules=all")
    yield from _paths(run_git("diff", *names_only, "--relative", "-z", "HEAD", "--", *SOURCES, folder=root))
    # Exclude what Docker excludes, not what .gitignore names: git-ignored files are copied into the image.
    yield from _paths(run_git("ls-files", "--others", "-z", *excluded, "--", *SOURCES, folder=root))


def _content(root: Path, paths: list[str]) -> str:
    """Return a hash of the files' content, link targets and execute permissions."""
    digest = hashlib.sha256()
    for name in paths:
        path = root / name
        digest.update(os.fsencode(name) + b"\0")
        if path.is_symlink():
            digest.update(b"link\0" + os.fsencode(path.readlink()))
        elif path.is_file():
            digest.update(b"program\0" if os.access(path, os.X_OK) else b"file\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        else:
            digest.update(b"gone\0")
    return digest.hexdigest()[:_DIRTY_DIGITS]


def _paths(output: str) -> list[str]:
    return [name for name in output.split("\0") if name]
