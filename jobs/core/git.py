"""The one place that runs git. Nothing that a folder or a repository configures is run by it.

A folder may come from anybody: an archive, a clone, a shared disk. Its configuration can name commands for git to run
(core.fsmonitor, hooks, filters), and so can a bare repository inside a clone. The user's own configuration stays in
force, safe.directory above all.
"""

import functools
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

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


def said(error: OSError | subprocess.SubprocessError) -> str:
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
