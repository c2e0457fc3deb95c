"""Checkpoints on S3: which files make one, when it is complete, which stay, and how one is fetched and verified.

    s3://…/<run>/checkpoints/step-N/…               the files of one checkpoint
    s3://…/<run>/checkpoints/step-N/manifest.json   written last: sizes and SHA-256 of all files

Whatever ends an attempt in the middle of an upload leaves a folder without a manifest, which the next attempt ignores.
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
    """What decides the result of a training: a kind's arguments, or a script with what it is given."""

    def fixed_arguments(self) -> dict[str, Any]:
        """Return the arguments that a run keeps when it is resumed."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """The rule by which complete checkpoints stay on S3."""

    newest: int = 2
    """The number of the newest that stay: the one before is for the day when the newest is corrupt."""
    every_steps: int | None = None
    """The first checkpoint at or after each multiple of it stays too: where measurements choose the steps, few of the
    multiples themselves are saved."""

    def for_good(self, complete: Iterable[int]) -> set[int]:
        """Return those of the complete checkpoints that stay however many newer ones there are."""
        if self.every_steps is None:
            return set()
        first: dict[int, int] = {}
        for step in sorted(complete):
            first.setdefault(step // self.every_steps, step)
        return {step for multiple, step in first.items() if multiple}


class Throughput(BaseModel):
    """Time and samples of the steps that count: those of earlier attempts up to where this one resumed, and its own."""

    train_seconds: float = 0.0
    """Wall time of all steps, checkpoint stalls included."""
    timed_seconds: float = 0.0
    """The same without the warm-up steps of each attempt."""
    timed_samples: int = 0

    @property
    def samples_per_second(self) -> float:
        return self.timed_samples / self.timed_seconds if self.timed_seconds else 0.0

    @property
    def figures(self) -> dict[str, float]:
        """What every result of a training has."""
        return {
            "train_samples_per_second": round(self.samples_per_second, 3),
            "train_runtime_seconds": round(self.train_seconds, 3),
        }


class File(BaseModel):
    """One file of a checkpoint."""

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """The file that makes a checkpoint complete: which files it has, and what it was made with."""

    step: int
    world_size: int
    fingerprint: str
    """Hash of the arguments. A checkpoint is resumed with the same ones only, unless others were asked for."""
    arguments: dict[str, Any]
    """The arguments that decide the result of the training."""
    written_at: datetime
    throughput: Throughput = Throughput()
    files: dict[str, File]
    listing: Listing = Listing()
    """Of a script's checkpoint: its symbolic links, and when its parts were changed."""

    @classmethod
    def of(cls, step: int, arguments: Mapping[str, Any], files: Mapping[str, Any], **more: Any) -> "Manifest":
        """Return the manifest of a checkpoint that is written now. `files` is what `upload` returns."""
        written = {"fingerprint": fingerprint(arguments), "written_at": datetime.now(timezone.utc)}
        return cls.model_validate({"step": step, "arguments": arguments, "files": files, **written, **more})

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def check_arguments(self, arguments: Mapping[str, Any], *, allow_changes: bool) -> None:
        """Raise UsageError if an attempt has other arguments than the checkpoint, and that was not asked for."""
        if self.fingerprint == fingerprint(arguments):
            return
        changes = changes_text(changed(self.arguments, arguments))
        if not allow_changes:
            raise UsageError(
                f"checkpoint step-{self.step} of this run was made with other arguments",
                next_step=f"take back {changes}, or submit a new run; where it is meant: trainyard resume RUN "
                "--allow-changes",
            )
        log.info("changed since checkpoint step-%s, as asked: %s", self.step, changes)


def fingerprint(arguments: Mapping[str, Any]) -> str:
    """Return the hash of the arguments that decide the result of a training."""
    return hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest()


def listing(s3: "S3Client", remote: S3Location) -> dict[int, list[str]]:
    """Return the names of the files below each `step-N/`."""
    steps: dict[int, list[str]] = {}
    for name in object_store.sizes(s3, remote):
        if match := _STEP.fullmatch(name):
            steps.setdefault(int(match[1]), []).append(match[2])
    return steps


def complete(steps: Mapping[int, list[str]]) -> list[int]:
    """Return the steps of a `listing` that have a manifest, in their order."""
    return sorted(step for step, names in steps.items() if MANIFEST in names)


def upload(
    s3: "S3Client", folder: Path, remote: S3Location, *, tag: object_store.Tag, check: Callable[[], None]
) -> dict[str, Any]:
    """Upload the files of a checkpoint, and return size and hash of each, as the manifest has them.

    `check` is `check_newest`.
    """
    names = object_store.files_below(folder)
    sent = object_store.upload_all(s3, folder, names, remote, tag=tag, before_each=check)
    return {name: file._asdict() for name, file in sent.items()}


class SupersededError(TrainyardError):
    """The attempt is not the newest of its run any more: another one goes on with it."""


def check_newest(s3: "S3Client", run: S3Location, attempt: int | None) -> None:
    """Raise SupersededError where a newer attempt of the run has begun, wherever this one was taken for lost.

    Two that write to one run would mix their files. An attempt may stand still at any line, and wake up when a newer
    one has ended: it is asked right before what is written or deleted. None: it has no number, and nothing is known.
    """
    if attempt is None:
        return
    numbers = [recorded_number(name) or 0 for name in object_store.sizes(s3, run / ATTEMPTS)]
    if (newest := max(numbers, default=0)) > attempt:
        raise SupersededError(
            f"attempt {newest} of this run has begun, so this one, attempt {attempt}, ends and saves nothing more",
            next_step=f"none: attempt {newest} goes on with the run",
        )


class IncompleteError(TrainyardError):
    """A checkpoint that must not be used."""


def read_manifest(s3: "S3Client", remote: S3Location) -> Manifest:
    """Return the manifest of the checkpoint at `remote`. Raises IncompleteError if there is none that can be read."""
    content = object_store.read(s3, remote / MANIFEST)
    if content is None:
        raise IncompleteError("it has no manifest: its upload was cut off")
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        raise IncompleteError(f"its manifest is damaged: {error.errors()[0]['msg']}") from None


def fetch(s3: "S3Client", remote: S3Location, local: Path) -> Manifest:
    """Download the checkpoint at `remote` and verify it. Raises IncompleteError with what is wrong with it."""
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
    except NotFoundError as error:  # deleted since it was listed; what is denied is another error, and ends the job
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
    """Write the manifest of a checkpoint that has none: it is complete now. `check` is `check_newest`."""
    content = manifest.model_dump_json(indent=2).encode()
    check()
    if not object_store.create(s3, remote / MANIFEST, content, tag=tag):
        # That of another attempt: of a newer one, which this leaves as it is, or of an older one that came late.
        check()
        object_store.write(s3, remote / MANIFEST, content, tag=tag)


def discard(s3: "S3Client", remote: S3Location, names: Iterable[str], *, check: Callable[[], None]) -> None:
    """Delete a checkpoint, its manifest first: it must not vouch for what is going. `check` is `check_newest`."""
    for group in ([MANIFEST], names):
        check()
        object_store.delete_all(s3, remote, group)


@contextlib.contextmanager
def warning_on_failure() -> Iterator[None]:
    """Warn if old checkpoints cannot be deleted: they cost storage, and the next prune tries it again."""
    try:
        yield
    except SupersededError:
        raise
    except TrainyardError as error:
        log.warning("warning: checkpoints that are no longer needed stay on S3: %s", error.args[0])


def prune(
    s3: "S3Client",
    remote: S3Location,
    retention: Retention,
    *,
    newest: int,
    best: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Delete the checkpoints that are not to stay, now that step `newest` is complete; their manifests go first.

    `best` is a step whose checkpoint stays too. `check` is `check_newest`.

    A complete one of a later step was skipped when this attempt began, since it is damaged. It goes, or it would stand
    among the newest for one that can be used. What has no manifest there is perhaps being uploaded.
    """
    steps = listing(s3, remote)
    whole = complete(steps)
    sound = [step for step in whole if step <= newest]
    kept = {*sound[-retention.newest :], *retention.for_good(sound), best}
    for step, names in steps.items():
        if (step < newest or step in whole) and step not in kept:
            discard(s3, remote / f"step-{step}", names, check=check)
