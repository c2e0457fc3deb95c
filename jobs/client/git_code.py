"""Code that lies in a git repository elsewhere: fetched by this machine, at one commit, into a folder to be packed.

git asks its own credential helpers, and nobody at the terminal. Nothing that the repository says is carried out: no
hooks, no filters, no submodules, no large files of Git LFS, and only the protocol of the address.
"""

import atexit
import contextlib
import functools
import subprocess
from pathlib import Path

from jobs.contract.code import GitSource
from jobs.contract.errors import ConfigurationError, NotFoundError, TimedOutError, TrainyardError
from jobs.contract.git import empty_repository, run_git, said

_SECONDS = 600

_kept = contextlib.ExitStack()
"""Checked-out repositories, deleted when this process ends."""
atexit.register(_kept.close)

_TOLD_CHARACTERS = 300


def fetched(source: GitSource) -> tuple[Path, str]:
    """Return the folder with the code of a source, and its commit, in full. The folder goes when this process ends.

    Raises NotFoundError where the repository has no such commit, tag, branch or folder, TrainyardError where git
    cannot get it, ConfigurationError where there is no git.
    """
    commit = source.ref if source.is_commit else _resolved(source)
    top = _checked_out(source.url, commit)
    folder = top / source.subdirectory if source.subdirectory else top
    if not folder.is_dir() or not folder.resolve().is_relative_to(top.resolve()):
        raise NotFoundError(
            f"arguments.code: {source} has no folder '{source.subdirectory}' at commit {commit[:12]}",
            next_step="name a folder of the repository: #subdirectory=…",
        )
    return folder, commit


def _resolved(source: GitSource) -> str:
    """Return the commit of a tag or a branch. A tag takes precedence, as in git itself."""
    names = [f"refs/tags/{source.ref}^{{}}", f"refs/tags/{source.ref}", f"refs/heads/{source.ref}"]
    with empty_repository() as folder:
        listed = _git(source.url, folder, "ls-remote", "--", source.url, *names)
    found = {name: digits for digits, _, name in (line.partition("\t") for line in listed.splitlines())}
    commit = next((found[name] for name in names if name in found), None)
    if commit is None:
        raise NotFoundError(
            f"arguments.code: {source.url} has no tag and no branch '{source.ref}'",
            next_step=f"see what it has: git ls-remote {source.url}; a commit has to be written in full",
        )
    return commit


@functools.cache
def _checked_out(url: str, commit: str) -> Path:
    """Return a folder with all files of a commit, fetched once for all specs that name it."""
    folder = _kept.enter_context(empty_repository())
    fetch = ("fetch", "--quiet", "--no-tags", "--no-recurse-submodules")
    try:
        _git(url, folder, *fetch, "--depth=1", "--", url, commit)
    except TimedOutError:
        raise
    except TrainyardError:
        # Plain files on a web server have no depth, and some servers give branches and tags alone.
        _git(url, folder, *fetch, "--", url, "+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*")
    if not _git(url, folder, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}", accepted=(0, 1)):
        raise NotFoundError(
            f"arguments.code: {url} has no commit {commit}", next_step="is it pushed, and on a branch or a tag?"
        )
    _git(url, folder, "checkout", "--quiet", "--detach", "--no-recurse-submodules", commit)
    return folder


def _git(url: str, folder: Path, *arguments: str, accepted: tuple[int, ...] = (0,)) -> str:
    """Return what git prints in a repository of ours. Raises TrainyardError with git's own words if it fails."""
    try:
        protocol = url.partition(":")[0]
        return run_git(*arguments, folder=folder, protocol=protocol, accepted=accepted, seconds=_SECONDS)
    except subprocess.TimeoutExpired:
        raise TimedOutError(
            f"arguments.code: {url} was not fetched within {_SECONDS} s",
            next_step="clone it yourself, and name the folder as arguments.code",
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"arguments.code names a git repository, and {said(error)}", next_step="install git, or name a folder"
        ) from None
    except subprocess.CalledProcessError as error:
        raise TrainyardError(
            f"arguments.code: git cannot get {url}: {said(error)[:_TOLD_CHARACTERS]}",
            next_step=f"see that this works: git ls-remote {url}; git's credential helper is asked for a private one",
        ) from None
