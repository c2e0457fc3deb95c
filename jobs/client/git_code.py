"""Code that lies in a git repository elsewhere: fetched by this machine, at one commit, into a folder to be packed.

git asks its own credential helpers, and nobody at the terminal. Nothing that the repository says is carried out: no
hooks, no submodules, no large files of Git LFS, and only the protocol of the address.
"""

import atexit
import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from jobs.contract.code import GitSource
from jobs.contract.errors import ConfigurationError, NotFoundError, TimedOutError, TrainyardError

_SECONDS = 600

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
    """Return the commit of a tag or a branch; a tag comes first, as in git itself."""
    names = [f"refs/tags/{source.ref}^{{}}", f"refs/tags/{source.ref}", f"refs/heads/{source.ref}"]
    listed = _git(source.url, "ls-remote", "--", source.url, *names)
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
    """Return a folder with all files of a commit, once for all specs that name it."""
    folder = Path(tempfile.mkdtemp(prefix="trainyard-code-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _git(url, "-C", str(folder), "init", "--quiet")
    fetch = ("-C", str(folder), "fetch", "--quiet", "--no-tags", "--no-recurse-submodules")
    try:
        _git(url, *fetch, "--depth=1", "--", url, commit)
    except TrainyardError:
        # Plain files on a web server have no depth, and some servers give branches and tags alone.
        with contextlib.suppress(TrainyardError):
            _git(url, *fetch, "--", url, "+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*")
    try:
        _git(url, "-C", str(folder), "cat-file", "-e", f"{commit}^{{commit}}")
    except TrainyardError:
        # What the first fetch said, unless the repository can be read.
        _git(url, "ls-remote", "--exit-code", "--", url)
        raise NotFoundError(
            f"arguments.code: {url} has no commit {commit}",
            next_step="is it pushed, and on a branch or a tag?",
        ) from None
    _git(url, "-C", str(folder), "checkout", "--quiet", "--detach", "--no-recurse-submodules", commit)
    return folder


def _git(url: str, *arguments: str) -> str:
    """Return what git prints. Raises TrainyardError with its last line where it fails."""
    scheme = url.partition(":")[0]
    settings = {"protocol.allow": "never", f"protocol.{scheme}.allow": "always", "core.hooksPath": os.devnull}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    kept = {
        name: value for name, value in os.environ.items() if name.startswith(("GIT_SSL_", "GIT_CONFIG_", "GIT_TRACE"))
    }
    own = {"GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "", "SSH_ASKPASS": "", "GIT_LFS_SKIP_SMUDGE": "1", "LC_ALL": "C"}
    flags = [flag for name, value in settings.items() for flag in ("-c", f"{name}={value}")]
    try:
        done = subprocess.run(
            ["git", *flags, *arguments],
            env={**environment, **kept, **own},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigurationError(
            "arguments.code names a git repository, and there is no git on this machine",
            next_step="install git, or name a folder",
        ) from None
    except subprocess.TimeoutExpired:
        raise TimedOutError(
            f"arguments.code: {url} was not fetched within {_SECONDS} s",
            next_step="clone it yourself, and name the folder as arguments.code",
        ) from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise TrainyardError(
            f"arguments.code: git cannot get {url}: {lines[0][:_TOLD_CHARACTERS]}",
            next_step=f"see that this works: git ls-remote {url}; git's credential helper is asked for a private one",
        )
    return done.stdout
