"""Checkpoints on S3: how they are declared complete, verified, and deleted once they are no longer needed.

    s3://…/<run>/checkpoints/step-N/…               the files of one checkpoint
    s3://…/<run>/checkpoints/step-N/manifest.json   written last: size and SHA-256 of each file

If an attempt ends during an upload, it leaves a folder without a manifest, which the next attempt ignores.
"""

import contextlib
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel, ValidationError

from jobs.aws import s3 as object_store
from jobs.aws.s3 import sha256
from jobs.core.errors import NotFoundError, TrainyardError, UsageError
from jobs.core.folder_listing import Listing
from jobs.core.locations import S3Location
from jobs.core.run import ATTEMPTS, MANIFEST, recorded_number
from jobs.spec.arguments import changed, changes_text

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

_STEP = re.compile(r"step-(\d+)/(.+)")


class Decisive(Protocol):
    """The arguments of a kind or a script, which decide the result of a training."""

    def fixed_arguments(self) -> dict[str, Any]:
        """Return the arguments that must stay the same when a run resumes."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which complete checkpoints are kept on S3."""

    newest: int = 2
    """Number of newest checkpoints to keep. The second newest is kept in case the newest is damaged."""
    every_steps: int | None = None
    """Also keep the first checkpoint at or after each multiple of this. With an automatic interval, few saves fall on a
    multiple itself."""

    def always_kept(self, complete: Iterable[int]) -> set[int]:
        """Return the steps, out of the complete ones, that `every_steps` keeps."""
        if self.every_steps is None:
            return set()
        first: dict[int, int] = {}
        for step in sorted(complete):
            first.setdefault(step // self.every_steps, step)
        return {step for multiple, step in first.items() if multiple}


class Throughput(BaseModel):
    """Time and samples of the run's steps, without those that a resume repeats."""

    train_seconds: float = 0.0
    """Wall time of all steps, including waits for checkpoints."""
    timed_seconds: float = 0.0
    """The same without each attempt's warm-up steps."""
    timed_samples: int = 0

    @property
    def samples_per_second(self) -> float:
        return self.timed_samples / self.timed_seconds if self.timed_seconds else 0.0

    @property
    def figures(self) -> dict[str, float]:
        """The values that every training reports in its result."""
        return {
            "train_samples_per_second": round(self.samples_per_second, 3),
            "train_runtime_seconds": round(self.train_seconds, 3),
        }


class File(BaseModel):
    """One file of a checkpoint."""

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """The file that declares a checkpoint complete. Lists its files and the arguments it was made with."""

    step: int
    world_size: int
    fingerprint: str
    """Hash of the arguments. A checkpoint resumes only with the same arguments, unless changes are allowed."""
    arguments: dict[str, Any]
    """The arguments that decide the result of the training."""
    written_at: datetime
    throughput: Throughput = Throughput()
    files: dict[str, File]
    listing: Listing = Listing()
    """For a script's checkpoint: its symbolic links, and the modification times of its files and folders."""

    @classmethod
    def of(cls, step: int, arguments: Mapping[str, Any], files: Mapping[str, Any], **more: Any) -> "Manifest":
        """Return the manifest of a checkpoint written now. `files` is the return value of `upload`."""
        written = {"fingerprint": fingerprint(arguments), "written_at": datetime.now(timezone.utc)}
        return cls.model_validate({"step": step, "arguments": arguments, "files": files, **written, **more})

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def check_arguments(self, arguments: Mapping[str, Any], *, allow_changes: bool) -> None:
        """Raise UsageError if an attempt's arguments differ from the checkpoint's and changes are not allowed."""
        if self.fingerprint == fingerprint(arguments):
            return
        changes = changes_text(changed(self.arguments, arguments))
        if not allow_changes:
            raise UsageError(
                f"checkpoint step-{self.step} of this run was made with other arguments",
                next_step=f"undo {changes}, or submit a new run; if the change is intended: trainyard resume RUN "
                "--allow-changes",
            )
        log.info("changed since checkpoint step-%s, as requested: %s", self.step, changes)


def fingerprint(arguments: Mapping[str, Any]) -> str:
    """Return the hash of the arguments that decide the result of a training."""
    return hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()


def list_steps(s3: "S3Client", remote: S3Location) -> dict[int, list[str]]:
    """Return the names of the files in each `step-N/`."""
    steps: dict[int, list[str]] = {}
    for name in object_store.sizes(s3, remote):
        if match := _STEP.fullmatch(name):
            steps.setdefault(int(match[1]), []).append(match[2])
    return steps


def complete_steps(steps: Mapping[int, list[str]]) -> list[int]:
    """Return the steps from `list_steps` that have a manifest, sorted."""
    return sorted(step for step, names in steps.items() if MANIFEST in names)


def upload(
    s3: "S3Client", folder: Path, remote: S3Location, *, tag: object_store.Tag, check: Callable[[], None]
) -> dict[str, Any]:
    """Upload the files of a checkpoint and return each file's size and hash, as in the manifest.

    `check` is `check_newest`, called before each file.
    """
    names = object_store.files_below(folder)
    sent = object_store.upload_all(s3, folder, names, remote, tag=tag, before_each=check)
    return {name: file._asdict() for name, file in sent.items()}


class SupersededError(TrainyardError):
    """This attempt is no longer the newest of its run: a newer attempt has taken over."""


def check_newest(s3: "S3Client", run: S3Location, attempt: int | None) -> None:
    """Raise SupersededError if a newer attempt of the run has begun, because this one was considered lost.

    Two attempts that write to one run would mix their files. A process may freeze at any line and wake up after a newer
    attempt has ended, so call this right before each write and delete. Checks nothing if `attempt` is None.
    """
    if attempt is None:
        return
    numbers = [recorded_number(name) or 0 for name in object_store.sizes(s3, run / ATTEMPTS)]
    if (newest := max(numbers, default=0)) > attempt:
        raise SupersededError(
            f"attempt {newest} of this run has begun, so attempt {attempt} stops and saves nothing more",
            next_step=f"none: attempt {newest} continues the run",
        )


class IncompleteError(TrainyardError):
    """A checkpoint that must not be used."""


def read_manifest(s3: "S3Client", remote: S3Location) -> Manifest:
    """Return the manifest of the checkpoint at `remote`. Raises IncompleteError if it is missing or damaged."""
    content = object_store.read(s3, remote / MANIFEST)
    if content is None:
        raise IncompleteError("it has no manifest: its upload was interrupted")
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        raise IncompleteError(f"its manifest is damaged: {error.errors()[0]['msg']}") from None


def fetch(s3: "S3Client", remote: S3Location, local: Path) -> Manifest:
    """Download and verify the checkpoint at `remote`. Raises IncompleteError with the reason if it is not intact."""
    manifest = read_manifest(s3, remote)
    present = object_store.sizes(s3, remote)
    for name, file in manifest.files.items():
        if name not in present:
            raise IncompleteError(f"{name} is missing")
        if present[name] != file.bytes:
            raise IncompleteError(f"{name} has {present[name]} bytes instead of {file.bytes}")
    shutil.rmtree(local, ignore_errors=True)

    def intact(name: str) -> bool:
        object_store.download_below(s3, remote, name, local)
        return sha256(local / name) == manifest.files[name].sha256

    try:
        found = dict(zip(manifest.files, object_store.in_threads(intact, manifest.files), strict=True))
    except NotFoundError as error:  # deleted since it was listed; denied access is another error, which ends the job
        raise IncompleteError(str(error.args[0])) from None
    damaged = [name for name, is_intact in found.items() if not is_intact]
    if damaged:
        shutil.rmtree(local)
        raise IncompleteError(f"the checksum of {damaged[0]} does not match")
    (local / MANIFEST).write_text(manifest.model_dump_json())
    return manifest


def publish(
    s3: "S3Client", remote: S3Location, manifest: Manifest, *, tag: object_store.Tag, check: Callable[[], None]
) -> None:
    """Write the manifest of a checkpoint, which declares it complete. `check` is `check_newest`."""
    content = manifest.model_dump_json(indent=2).encode()
    check()
    if not object_store.create(s3, remote / MANIFEST, content, tag=tag):
        # Another attempt has written a manifest. If the attempt is newer, `check` raises; an older one is overwritten.
        check()
        object_store.write(s3, remote / MANIFEST, content, tag=tag)


def discard(s3: "S3Client", remote: S3Location, names: Iterable[str], *, check: Callable[[], None]) -> None:
    """Delete a checkpoint, its manifest first, so that it never claims missing files. `check` is `check_newest`."""
    for group in ([MANIFEST], names):
        check()
        object_store.delete_all(s3, remote, group)


@contextlib.contextmanager
def warning_on_failure() -> Iterator[None]:
    """Log a warning if old checkpoints cannot be deleted: they only cost storage, and the next prune tries again."""
    try:
        yield
    except SupersededError:
        raise
    except TrainyardError as error:
        log.warning("warning: checkpoints that are no longer needed remain on S3: %s", error.args[0])


def prune(
    s3: "S3Client",
    remote: S3Location,
    retention: Retention,
    *,
    newest: int,
    best: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Delete checkpoints that are no longer needed, now that step `newest` is complete.

    The checkpoint of step `best` is kept too. `check` is `check_newest`.

    A complete checkpoint of a later step is damaged: this attempt skipped it when it began. It is deleted, because it
    would count as one of the newest. A later checkpoint without a manifest may still be uploading, and is kept.
    """
    steps = list_steps(s3, remote)
    whole = complete_steps(steps)
    sound = [step for step in whole if step <= newest]
    kept = {*sound[-retention.newest :], *retention.always_kept(sound), best}
    for step, names in steps.items():
        if (step < newest or step in whole) and step not in kept:
            discard(s3, remote / f"step-{step}", names, check=check)
