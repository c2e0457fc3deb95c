"""Pack a folder of code for a job: choose files as git would, check them, upload one archive, and fetch it."""

import gzip
import hashlib
import io
import os
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.core.errors import (
    ConfigurationError,
    NotFoundError,
    TimedOutError,
    UsageError,
    did_you_mean,
)
from jobs.core.git import empty_repository, git_error, repository_of, run_git
from jobs.core.locations import S3Location
from jobs.core.records import parse_record, read_record
from jobs.core.stage import DeployedStage
from jobs.runs.secrets import MAX_CHECKED_BYTES, secret_content, secret_name
from jobs.spec.code import (
    CODE_RECORD,
    MAX_CODE_BYTES,
    MAX_CODE_FILES,
    OWN_NAMES,
    CodeFile,
    CodeRecord,
    Pack,
    is_packed,
    read_archive,
    write_file,
)
from jobs.spec.plan import Plan
from jobs.spec.spec import JobSpec

if TYPE_CHECKING:
    from jobs.spec.kinds.script import Script

IGNORE_FILE = ".trainyardignore"

_NEVER = (
    *("__pycache__/", ".venv/", "venv/", "node_modules/", ".ipynb_checkpoints/", ".mypy_cache/", ".pytest_cache/"),
    *("*.pyc", ".DS_Store"),
)
"""Patterns that are excluded in a folder without a git repository."""

_NAMED = 5
"""Maximum number of files named in a message."""


def pack_code(spec: JobSpec, stage: DeployedStage) -> tuple[JobSpec, Pack | None]:
    """Return the spec with its code's location on S3, and the code to upload.

    The code is None if the spec has none or its code is already on S3. Raises UsageError for code that must not be
    uploaded.
    """
    pack = packed(spec)
    if pack is None:
        return spec, None
    location = pack.location(stage.run_bucket, spec.team)
    return spec.model_copy(update={"arguments": {**spec.arguments, "code": str(location)}}), pack


def packed(spec: JobSpec) -> Pack | None:
    """Return the code to upload, or None like `pack_code`. Raises UsageError for code that must not be uploaded."""
    arguments = spec.entrypoint_arguments()
    code = getattr(arguments, "code", None)
    if code is None or is_packed(code):
        return None
    pack = pack_folder(Path(os.path.expanduser(code)))  # noqa: PTH111 - leaves an unknown ~user unchanged
    _check_command(arguments, pack)  # type: ignore[arg-type]  # the one kind with code
    return pack


def pack_folder(folder: Path) -> Pack:
    """Choose the files of a folder and check each.

    Raises NotFoundError if there is no such folder, UsageError if it has no files or some that must not be uploaded.
    """
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 - keeps symbolic links
    if not folder.is_dir():
        raise NotFoundError(
            f"arguments.code: {folder} {'is not a folder' if folder.exists() else 'does not exist'}",
            next_step="name the script's folder; a relative path starts at the working directory",
        )
    commit, dirty = _commit(folder)
    names = _without_ignored(folder, _names(folder))
    if not names:
        raise UsageError(
            f"arguments.code: {folder} has no files for a job",
            next_step=f"check what its .gitignore and {IGNORE_FILE} exclude",
        )
    _check_names(folder, names)
    files = tuple(_code_file(folder, name) for name in names)
    return Pack(folder=folder, files=files, commit=commit, dirty=dirty)


def put_code(aws: Aws, plan: Plan) -> bool:
    """Upload the plan's code to S3 and record it in the run's folder. Return False if S3 already has it.

    Raises UsageError if a file has changed since the spec was checked.
    """
    pack = plan.pack
    assert pack is not None  # noqa: S101 - callers have checked
    place = S3Location.parse(getattr(plan.spec.entrypoint_arguments(), "code"))  # noqa: B009 - of one kind only
    is_new = not object_store.exists(aws.s3, place)
    if is_new:
        with tempfile.TemporaryFile() as file:
            write_archive(pack, file)
            file.seek(0)
            aws.s3.upload_fileobj(file, place.bucket, place.key)
    record = plan.run_location / CODE_RECORD
    content = pack.record(place).model_dump_json(indent=2).encode()
    aws.s3.put_object(Bucket=record.bucket, Key=record.key, Body=content, ContentType="application/json")
    return is_new


def write_archive(pack: Pack, target: "io.BufferedIOBase | tempfile._TemporaryFileWrapper[bytes]") -> None:
    """Write the files as a reproducible archive: the same files give the same bytes.

    Raises UsageError if a file has changed since it was checked.
    """
    with (
        gzip.GzipFile(fileobj=target, mode="wb", mtime=0, filename="") as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for file in sorted(pack.files):
            content = (pack.folder / file.name).read_bytes()
            if hashlib.sha256(content).hexdigest() != file.sha256:
                raise UsageError(
                    f"{pack.folder / file.name} has changed since it was checked", next_step="submit again"
                )
            entry = tarfile.TarInfo(file.name)
            entry.size, entry.mode = len(content), 0o755 if file.executable else 0o644
            archive.addfile(entry, io.BytesIO(content))


def read_code_record(aws: Aws, run: S3Location) -> CodeRecord | None:
    """Read the record of a run's code, or return None if the run has no code or the record cannot be read."""
    return read_record(CodeRecord, object_store.read_once(aws.s3, run / CODE_RECORD), place=run / CODE_RECORD)


def fetch_code(aws: Aws, run: S3Location, target: Path) -> Iterator[Path]:
    """Download a run's code to `target`, yielding each path.

    Raises NotFoundError if the run has no code, UnreadableError if its record cannot be read, UsageError if the archive
    on S3 is damaged or has other content. In these cases nothing is written.
    """
    text = object_store.read_once(aws.s3, run / CODE_RECORD)
    if text is None:
        raise NotFoundError(f"{run} has no code: only runs of kind 'script' have code")
    record = parse_record(CodeRecord, text, place=run / CODE_RECORD)
    content = object_store.read_once(aws.s3, S3Location.parse(record.location))
    if content is None:
        raise NotFoundError(f"{record.location}, named by {run / CODE_RECORD}, no longer exists")
    for file, data in read_archive(content, location=record.location, fingerprint=record.fingerprint):
        yield write_file(file, data, target)


def _names(folder: Path) -> list[str]:
    """Return the names of a folder's files that git tracks or would track.

    Outside a repository, git lists the folder from an empty repository, and files that no job needs are excluded too.
    """
    if _in_repository(folder):
        listed = _git(folder, "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", ".")
        return sorted(name for name in _split(listed) if os.path.lexists(folder / name))
    with _explained(folder), empty_repository() as place:
        unneeded = (f"--exclude={pattern}" for pattern in _NEVER)
        command = (f"--git-dir={place / '.git'}", f"--work-tree={folder}", "ls-files", "--others", "-z")
        return sorted(_split(run_git(*command, "--exclude-per-directory=.gitignore", *unneeded, folder=folder)))


def _split(listed: str) -> set[str]:
    return {name for name in listed.split("\0") if name}


def _in_repository(folder: Path) -> bool:
    """Return whether a folder is in a git repository. Raises ConfigurationError if git cannot read that repository."""
    nearest = repository_of(folder)
    if nearest is None:
        return False
    found = _git(folder, "rev-parse", "--show-toplevel").removesuffix("\n")
    if Path(found) != nearest:  # git skips a damaged .git and looks further up
        raise ConfigurationError(
            f"arguments.code: git cannot read {nearest}/.git and uses {found} as the repository of {folder}",
            next_step=f"repair {nearest}/.git or delete it",
        )
    return True


def _without_ignored(folder: Path, names: list[str]) -> list[str]:
    """Return the names that IGNORE_FILE does not exclude. git matches the patterns, in an empty repository."""
    path = folder / IGNORE_FILE
    if not path.is_file():
        return names
    with _explained(folder), empty_repository() as place:
        (place / ".git/info").mkdir()
        (place / ".git/info/exclude").write_bytes(path.read_bytes())
        listed = run_git(
            *("-c", f"core.excludesFile={os.devnull}", "check-ignore", "--no-index", "--stdin", "-z"),
            folder=place,
            stdin=b"\0".join(os.fsencode(f"./{name}") for name in names),  # a leading ":" would be pathspec magic
            accepted=(0, 1),  # 1: none is ignored
        )
    ignored = {name.removeprefix("./") for name in _split(listed)}
    return [name for name in names if name not in ignored and name != IGNORE_FILE]


def _check_names(folder: Path, names: list[str]) -> None:
    secrets = [f"{name} ({why})" for name in names if (why := secret_name(name)) is not None]
    if secrets:
        raise _secrets(folder, secrets)
    own = sorted({name.split("/")[0].removesuffix(".py") for name in names} & set(OWN_NAMES))
    if own:
        raise UsageError(
            f"arguments.code: {folder} has '{own[0]}' at its top level, which the script would import instead of the "
            "platform's package of that name",
            next_step=f"rename it, or list it in {IGNORE_FILE}",
        )
    if len(names) > MAX_CODE_FILES:
        raise UsageError(
            f"arguments.code: {folder} has {len(names)} files, more than {MAX_CODE_FILES}",
            next_step=f"list what the script does not need in {IGNORE_FILE}",
        )
    sizes = {name: (folder / name).stat().st_size for name in names if (folder / name).is_file()}
    total = sum(sizes.values())
    if total > MAX_CODE_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:_NAMED]
        shown = ", ".join(f"{name} ({sizes[name] / 1e6:.1f} MB)" for name in largest)
        raise UsageError(
            f"arguments.code: {folder} has {total / 1e6:.0f} MB, more than {MAX_CODE_BYTES / 1e6:.0f}: {shown}",
            next_step=f"list everything but code in {IGNORE_FILE}, and pass data as arguments.inputs",
        )


def _code_file(folder: Path, name: str) -> CodeFile:
    path = folder / name
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        raise UsageError(
            f"arguments.code: {path} is a link to {path.resolve()}, outside the folder",
            next_step=f"put the file itself there, or list the link in {IGNORE_FILE}",
        )
    if not path.is_file():
        kind = "a link to a folder, or a broken link" if path.is_symlink() else "another repository, or not a file"
        raise UsageError(f"arguments.code: {path} is {kind}", next_step=f"list it in {IGNORE_FILE}")
    content = path.read_bytes()
    if len(content) <= MAX_CHECKED_BYTES and (what := secret_content(content, name)) is not None:
        raise _secrets(folder, [f"{name} (it seems to hold {what})"])
    return CodeFile(
        name=name,
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        executable=os.access(path, os.X_OK),
    )


def _secrets(folder: Path, named: list[str]) -> UsageError:
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return UsageError(
        f"arguments.code: {folder} has what looks like a secret, but the whole team can read code: "
        f"{', '.join(named[:_NAMED])}{more}",
        next_step=f"remove it from the folder, or list it in {IGNORE_FILE}",
    )


def _check_command(arguments: "Script", pack: Pack) -> None:
    """Raise UsageError if the folder lacks a file that the command, the requirements or the environment needs."""
    names = [file.name for file in pack.files]
    if not any(name.startswith(arguments.folder) for name in names):
        folders = {name.rpartition("/")[0] for name in names} - {""}
        raise UsageError(
            f"arguments.workdir: {pack.folder} has no folder '{arguments.workdir}' among the packed files"
            + did_you_mean(arguments.folder.rstrip("/"), sorted(folders)),
            next_step="the working directory is relative to the code folder",
        )
    for argument, name in (
        ("command", arguments.script),
        ("requirements", arguments.requirements),
        ("environment", arguments.lock),
    ):
        if name is not None and name not in names:
            ignored = (pack.folder / name).exists()
            similar_names = [other for other in names if other.endswith(Path(name).suffix)]
            hint = "" if ignored else did_you_mean(name, similar_names)
            raise UsageError(
                f"arguments.{argument}: {pack.folder} has no file '{name}'"
                + (f" among the packed files: .gitignore or {IGNORE_FILE} excludes it" if ignored else hint),
                next_step="paths in the command are relative to the code folder, or to workdir if that is set",
            )
    if arguments.words[0] == "-m" and len(arguments.words) > 1:
        module = arguments.words[1].replace(".", "/")
        roots = {arguments.folder, "", "src/"}
        local = any(name.startswith(f"{root}{module.split('/')[0]}/") for name in names for root in roots)
        files = {f"{root}{module}{end}" for root in roots for end in (".py", "/__main__.py")}
        if local and not files & set(names):
            raise UsageError(f"arguments.command: {pack.folder} has no module '{arguments.words[1]}'")


def _commit(folder: Path) -> tuple[str | None, bool]:
    """Return the last commit of a folder's repository, or None, and whether the folder differs from that commit."""
    if not _in_repository(folder):
        return None, False
    options = ("--porcelain=v2", "--branch", "--untracked-files=normal", "--ignore-submodules=all")
    lines = _git(folder, "status", *options, "--", ".").splitlines()
    headers = dict(line.split(" ", 2)[1:] for line in lines if line.startswith("# "))
    commit = headers["branch.oid"]
    if commit == "(initial)":
        return None, False
    return commit, any(not line.startswith("# ") for line in lines)


def _git(folder: Path, *arguments: str) -> str:
    with _explained(folder):
        return run_git(*arguments, folder=folder)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn git's errors into ConfigurationError with its message, or TimedOutError if git does not answer."""
    try:
        yield
    except subprocess.TimeoutExpired as error:
        raise TimedOutError(
            f"arguments.code: {git_error(error)} about {folder}",
            next_step=f"check what 'git -C {folder} status' waits for, or write simpler patterns: *.csv, data/",
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"arguments.code: only git can list the ignored files of {folder}, and {git_error(error)}",
            next_step="install git, or correct PATH",
        ) from None
    except subprocess.CalledProcessError as error:
        words = git_error(error)
        trusted = f"git config --global --add safe.directory {shlex.quote(str(repository_of(folder)))}"
        raise ConfigurationError(
            f"arguments.code: git refuses to read {folder}: {words}",
            next_step=f"if you trust it: {trusted}"
            if "dubious ownership" in words
            else f"check what 'git -C {folder} status' prints, or name a copy of the folder outside any repository",
        ) from None
