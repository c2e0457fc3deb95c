"""The one place that runs git. Nothing that a folder or a repository configures is run by it.

A folder may come from anybody: an archive, a clone, a shared disk. Its configuration can name commands for git to run
(core.fsmonitor, hooks, filters), and so can a bare repository inside a clone. The user's own configuration stays in
force, safe.directory above all.
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
    "safe.bareRepository": "explicit",  # git 2.38; an older git obeys such a repository, whose commands are off below
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "submodule.recurse": "false",
    "fetch.recurseSubmodules": "false",
    "status.submoduleSummary": "false",
}

_FILTER_KEYS = ("clean", "smudge", "process", "required")

_KEPT_VARIABLES = ("GIT_SSL_", "GIT_CONFIG_", "GIT_TRACE", "GIT_EXEC_PATH", "GIT_CEILING_", "GIT_DISCOVERY_")
"""Variables of git that are the user's. The others name a repository, as in a hook, or a program to run."""

_VARIABLES = {
    "GIT_ASKPASS": "",
    "GIT_LFS_SKIP_SMUDGE": "1",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_OPTIONAL_LOCKS": "0",  # others may work with the same index meanwhile
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
    """Return what git prints in a folder.

    It reaches no other repository. `accepted` are the exit codes of success.
    Raises CalledProcessError if git refuses, OSError if it cannot be started, TimeoutExpired after SECONDS.
    """
    environment = {name: value for name, value in os.environ.items() if _is_kept(name)}
    environment |= {**_VARIABLES, "GIT_ALLOW_PROTOCOL": "none"}
    run = functools.partial(_run, folder=folder, environment=environment)
    keys = run([*_flags(_SETTINGS), "config", "--list", "--name-only", "-z"])
    command = [*_flags({**_SETTINGS, **_filters_off(keys)}), "--no-pager", *arguments]
    return run(command, stdin=stdin, accepted=accepted)


def git_error(error: OSError | subprocess.SubprocessError) -> str:
    """Return git's own words for what `run_git` raised, on one line."""
    if isinstance(error, FileNotFoundError):
        return "git is not installed"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"git did not answer within {error.timeout:.0f} s"
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line.strip() for line in error.stderr.splitlines() if line.strip()]
        return lines[0] if lines else f"git ended with exit code {error.returncode}"
    return f"git cannot be started: {error}"


def repository_of(folder: Path) -> Path | None:
    """Return the nearest folder, at or above this one, that has a `.git`. None: there is no repository.

    Without git's help, so that a git that fails is never taken for a folder without a repository.
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
    """Give a new repository with nothing in it and no configuration but the user's, inside the `with` block."""
    with tempfile.TemporaryDirectory(prefix="trainyard-git-") as name:
        folder = Path(name)
        run_git("init", "--quiet", "--template=", folder=folder)
        yield folder


def _is_kept(variable: str) -> bool:
    return not variable.startswith("GIT_") or variable.startswith(_KEPT_VARIABLES)


def _flags(settings: Mapping[str, str]) -> list[str]:
    return [flag for name, value in settings.items() for flag in ("-c", f"{name}={value}")]


def _filters_off(keys: str) -> dict[str, str]:
    """Return the settings that turn off each filter of the configuration: a repository's .gitattributes choose them."""
    found = {}
    for key in keys.split("\0"):
        section, _, rest = key.partition(".")
        name, _, variable = rest.rpartition(".")
        if section == "filter" and variable in _FILTER_KEYS:
            if "=" in name:  # `-c` would take what is behind it for the value
                raise subprocess.CalledProcessError(128, "git", stderr=f"its filter '{name}' cannot be turned off")
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
"""What of this repository an image is built from: Docker's build context, and what decides the revision."""

NOT_SOURCES = ("**/__pycache__", "**/*.pyc", "**/.*")
"""What lies between the sources and gets into no image, in the words of .dockerignore, which are git's too."""

REVISION_VARIABLE = "TRAINYARD_REVISION"

_REVISION_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""What a tag of an image may hold after a release and a hyphen; Docker allows 128 characters in all."""

_DIRTY = "-dirty-"
_DIGITS = 12
_DIRTY_DIGITS = 8


def source_revision(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> str:
    """Return the revision of the sources under `root`: 12 digits of a hash of what the last commit has of them.

    Where they differ from that commit, by a file that git does not know too, `-dirty-` and 8 digits of a hash of what
    differs follow. Raises ConfigurationError where neither git nor TRAINYARD_REVISION knows it, TrainyardError where
    git does not answer.
    """
    try:
        return _revision_in_git(root)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = git_error(error)
    except subprocess.TimeoutExpired as error:
        raise TrainyardError(
            f"git did not answer within {error.timeout:.0f} s what differs in {root} from its last commit",
            next_step=f"see what 'git -C {root} status' waits for, then the same command again",
        ) from None
    given = environment.get(REVISION_VARIABLE, "")
    if not given:
        raise ConfigurationError(
            f"the revision of {root} is not known, and images are tagged by it: {reason}",
            next_step=f"build in a clone of the repository, or set {REVISION_VARIABLE} to the commit it was taken from",
        )
    if not _REVISION_PATTERN.fullmatch(given):
        raise ConfigurationError(
            f"{REVISION_VARIABLE}={given!r} cannot be part of an image's tag",
            next_step="give a revision or a commit's hash: at most 64 letters, digits, '.', '_' and '-'",
        )
    return given


def is_dirty(revision: str) -> bool:
    """Return whether a revision is of sources that differ from the last commit's."""
    return _DIRTY in revision


def source_commit(root: Path = ROOT) -> str | None:
    """Return the hash of the last commit; None where git does not tell."""
    try:
        return run_git("rev-parse", "HEAD", folder=root).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def image_tag(release: str, revision: str) -> str:
    """Return the tag of every image of a release that is built from one revision."""
    return f"{release}-{revision}"


def local_name(image: str, tag: str) -> str:
    """Return the name by which the Docker engine of this machine knows an image."""
    return f"trainyard/{image}:{tag}"


def _revision_in_git(root: Path) -> str:
    """Return the revision as git knows it.

    Raises what `run_git` does, and CalledProcessError where the last commit has no sources in this folder.
    """
    trees = run_git("rev-parse", *(f"HEAD:./{name}" for name in SOURCES), folder=root)
    revision = hashlib.sha256(trees.encode()).hexdigest()[:_DIGITS]
    changed = sorted(_changed(root))
    return f"{revision}{_DIRTY}{_content(root, changed)}" if changed else revision


def _changed(root: Path) -> Iterator[str]:
    """Find the sources below `root` that are not as the last commit has them."""
    excluded = [f"--exclude={pattern}" for pattern in NOT_SOURCES]
    names_only = ("--name-only", "--no-renames", "--no-ext-diff", "--no-textconv", "--ignore-submodules=all")
    yield from _paths(run_git("diff", *names_only, "--relative", "-z", "HEAD", "--", *SOURCES, folder=root))
    # Not what .gitignore names, but what Docker does not see: an ignored file gets into the image all the same.
    yield from _paths(run_git("ls-files", "--others", "-z", *excluded, "--", *SOURCES, folder=root))


def _content(root: Path, paths: list[str]) -> str:
    """Return a hash of the files as they are now, with what git keeps of their mode."""
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
