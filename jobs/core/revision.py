"""The revision of what images are built from, and the tags that tell it: `<release>-<revision>`.

It is made of what the sources hold, not of a commit: a shallow clone, a merge or a revert has the revision of its
content. Of a commit, this prints it, in the root of the repository:

    git rev-parse COMMIT:images COMMIT:jobs COMMIT:trainyard | sha256sum | cut -c 1-12

git knows it. Where there is no git (CodeBuild gets the source without its history) the environment variable
TRAINYARD_REVISION says it. A work tree with changes has a revision of its own content too: one tag is one content.
"""

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from jobs.core.errors import ConfigurationError, TrainyardError
from jobs.core.git import run_git, said

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
        reason = said(error)
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
