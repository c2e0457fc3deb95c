"""Checkpoints: written and uploaded while the Trainer goes on, complete only once their manifest is there.

    s3://…/<run>/checkpoints/step-N/…               what a Trainer saves: model, optimizer, RNG of each rank, …
    s3://…/<run>/checkpoints/step-N/manifest.json   written last: sizes and SHA-256 of all files

Whatever ends an attempt in the middle of an upload leaves a folder without a manifest, which the next attempt ignores
(jobs/train/trainer/resume.py).
"""

import contextlib
import hashlib
import json
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from transformers import TrainerCallback

from jobs.aws import s3 as object_store
from jobs.contract.arguments import Arguments
from jobs.contract.errors import TrainyardError
from jobs.contract.locations import S3Location
from jobs.contract.run import CHECKPOINT_TAG, CHECKPOINTS, KEPT_CHECKPOINT_TAG, MANIFEST
from jobs.train.trainer.metrics import RunMetrics, Throughput

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

    from jobs.train.rank import Rank

log = logging.getLogger("trainyard")


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


_WAIT_SECONDS = 10.0
"""Time between two heartbeats while an upload is waited for."""

_STEP = re.compile(r"step-(\d+)/(.+)")


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
    throughput: Throughput
    files: dict[str, File]


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


def _complete(steps: Mapping[int, list[str]]) -> list[int]:
    """Return the steps of a `listing` that have a manifest, in their order."""
    return sorted(step for step, names in steps.items() if MANIFEST in names)


class CheckpointUploads(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Uploads what the Trainer saves, in a thread of one rank of each node. `finish` waits for the last one.

    A failed save ends the training at its next step: going on would risk all the hours since the last checkpoint.
    """

    def __init__(
        self,
        rank: "Rank",
        s3: "S3Client | None",
        arguments: Arguments,
        metrics: RunMetrics,
        retention: Retention,
        *,
        waits: Callable[[], None] = lambda: None,
    ) -> None:
        """`s3` is needed on one rank of each node; `metrics` of a step are on S3 before its checkpoint counts.

        `waits` is called now and then while the training stands still for an upload.
        """
        self._rank = rank
        self._s3 = s3
        self._arguments = arguments.decisive()
        self._metrics = metrics
        self._retention = retention
        self._waits = waits
        self._write: Callable[[Path], None] | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.seconds = 0.0
        """Time that the last complete checkpoint took, from its save on."""

    def write_first(self, write: Callable[[Path], None]) -> None:
        """Take what the next save leaves to be written into its folder before that is uploaded."""
        self._write = write

    def on_train_begin(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Set the intervals of this attempt, where the Trainer goes on with those of the checkpoint."""
        state.save_steps, state.logging_steps = args.save_steps, args.logging_steps

    def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Begin the upload. A rank that gets here has written its part, or left it to the thread; the last says so."""
        step, node = state.global_step, self._rank.node
        key = f"checkpoint/{step}"
        if self._rank.store.add(f"{key}/saved/{node}", 1) == self._rank.local_world_size:
            self._rank.store.set(f"{key}/all-saved/{node}", "")
        if self._s3 is None:
            return
        self.finish()
        folder = Path(args.output_dir) / f"checkpoint-{step}"
        throughput = self._metrics.throughput.model_copy()
        work = (self._s3, step, folder, throughput, self._write)
        self._write = None
        self._thread = threading.Thread(target=self._guarded, args=work, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()

    def on_step_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._raise_failure()

    def under_way(self) -> Callable[[], None]:
        """Return a function that waits, in any thread, until the upload that is under way now is complete.

        The function raises where that upload fails.
        """
        thread = self._thread

        def wait() -> None:
            if thread is not None:
                thread.join()
            self._raise_failure()

        return wait

    def finish(self) -> None:
        """Wait for the upload under way. Raises TrainyardError where it failed."""
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(_WAIT_SECONDS)
                self._waits()
            self._thread = None
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error

    def _guarded(
        self,
        s3: "S3Client",
        step: int,
        folder: Path,
        throughput: Throughput,
        write: Callable[[Path], None] | None,
    ) -> None:
        started = time.monotonic()
        try:
            if write is not None:
                write(folder)
            with self._explained_upload(step):
                self._upload(s3, step, folder, throughput)
            self.seconds = time.monotonic() - started
        except Exception as error:  # noqa: BLE001 - a thread's exception would vanish; the training thread raises it
            self._error = error

    @contextlib.contextmanager
    def _explained_upload(self, step: int) -> Iterator[None]:
        try:
            yield
        except TrainyardError as error:
            raise TrainyardError(
                f"checkpoint step-{step} could not be uploaded: {error.args[0]}; the last complete one in "
                f"{self._rank.run / CHECKPOINTS} is untouched",
                next_step="mend that, then trainyard resume RUN",
            ) from error

    def _upload(self, s3: "S3Client", step: int, folder: Path, throughput: Throughput) -> None:
        """Upload this node's files; rank 0 then waits for those of all nodes and writes the manifest."""
        started = time.monotonic()
        rank = self._rank
        store = rank.connect_store()
        remote = rank.run / CHECKPOINTS / f"step-{step}"
        key = f"checkpoint/{step}"
        if rank.is_first:
            complete = _complete(listing(s3, rank.run / CHECKPOINTS))
            if step in complete:
                # One that an earlier attempt wrote is being replaced: it must not vouch for a mixture of files.
                object_store.delete_all(s3, remote, [MANIFEST])
            before = [other for other in complete if other < step]
            store.set(f"{key}/stays", json.dumps(step in self._retention.for_good([*before, step])))
        store.get(f"{key}/all-saved/{rank.node}")
        files = _described(folder)
        tag = KEPT_CHECKPOINT_TAG if json.loads(store.get(f"{key}/stays")) else CHECKPOINT_TAG
        object_store.upload_all(s3, folder, list(files), remote, tag=tag)
        shutil.rmtree(folder)
        store.set(f"{key}/uploaded/{rank.node}", json.dumps(files))
        if not rank.is_first:
            return
        for node in range(rank.nnodes):
            files |= json.loads(store.get(f"{key}/uploaded/{node}"))
        manifest = Manifest.model_validate(
            {
                "step": step,
                "world_size": rank.world_size,
                "fingerprint": fingerprint(self._arguments),
                "arguments": self._arguments,
                "written_at": datetime.now(timezone.utc),
                "throughput": throughput,
                "files": files,
            }
        )
        # A resume keeps the lines up to its checkpoint: they must not be lost with this attempt.
        self._metrics.upload()
        object_store.write(s3, remote / MANIFEST, manifest.model_dump_json(indent=2).encode(), tag=tag)
        megabytes = sum(file.bytes for file in manifest.files.values()) / 1e6
        log.info("checkpoint: step %s, %.1f MB uploaded in %.1f s", step, megabytes, time.monotonic() - started)
        try:
            prune(s3, rank.run / CHECKPOINTS, self._retention, newest=step)
        except TrainyardError as error:  # what stays costs storage, and the next prune tries it again
            log.warning("warning: checkpoints that are no longer needed stay on S3: %s", error.args[0])


def _described(folder: Path) -> dict[str, Any]:
    """Return size and hash of each file, as the manifest has them."""
    names = object_store.files_below(folder)
    digests = object_store.in_threads(lambda name: object_store.sha256(folder / name), names)
    return {
        name: {"bytes": (folder / name).stat().st_size, "sha256": digest}
        for name, digest in zip(names, digests, strict=True)
    }


def prune(s3: "S3Client", remote: S3Location, retention: Retention, *, newest: int) -> None:
    """Delete the checkpoints that are not to stay, now that step `newest` is complete; their manifests go first.

    A complete one of a later step was skipped when this attempt began, since it is damaged. It goes, or it would stand
    among the newest for one that can be used. What has no manifest there is perhaps being uploaded.
    """
    steps = listing(s3, remote)
    complete = _complete(steps)
    sound = [step for step in complete if step <= newest]
    kept = {*sound[-retention.newest :], *retention.for_good(sound)}
    for step, names in steps.items():
        if (step < newest or step in complete) and step not in kept:
            folder = remote / f"step-{step}"
            object_store.delete_all(s3, folder, [MANIFEST])
            object_store.delete_all(s3, folder, names)
