"""Upload checkpoints while the training continues, to the places on S3 that `manifest` describes."""

import contextlib
import functools
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.container.channel import write_saved_step
from jobs.container.rank import Callback
from jobs.container.saving.manifest import (
    Decisive,
    Manifest,
    Retention,
    SupersededError,
    Throughput,
    check_newest,
    complete_steps,
    discard,
    list_steps,
    prune,
    publish,
    upload,
    warning_on_failure,
)
from jobs.container.saving.metrics import RunMetrics
from jobs.core.errors import TrainyardError
from jobs.core.run import CHECKPOINT_TAG, CHECKPOINTS, KEPT_CHECKPOINT_TAG
from jobs.core.words import size

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from torch.distributed import Store  # type: ignore[attr-defined]  # re-exported from C++

    from jobs.container.rank import Rank

log = logging.getLogger("trainyard")

_WAIT_SECONDS = 10.0
"""Time between two heartbeats while waiting for an upload."""


class CheckpointUploads(Callback):
    """Uploads the Trainer's saves, in a thread on one rank of each node. `finish` waits for the last upload.

    A failed save ends the training at its next step: continuing would risk all the hours since the last checkpoint.
    """

    def __init__(
        self,
        rank: "Rank",
        s3: "S3Client | None",
        arguments: Decisive,
        metrics: RunMetrics,
        retention: Retention,
        *,
        waits: Callable[[], None] = lambda: None,
        best: Callable[[], int | None] = lambda: None,
        saved: Callable[[int, Path], None] = lambda _step, _folder: None,
    ) -> None:
        """One rank of each node needs `s3`. The `metrics` of a step are uploaded before its checkpoint is complete.

        `waits` is called every few seconds while the training waits for an upload. `best` returns the step whose
        checkpoint is needed at the end, so that it is kept here and on S3. `saved` is called on rank 0 with the step
        and the folder of an uploaded checkpoint, before the folder is deleted.
        """
        self._rank = rank
        self._s3 = s3
        self._arguments = arguments.fixed_arguments()
        self._metrics = metrics
        self._retention = retention
        self._waits = waits
        self._best = best
        self._saved = saved
        self._kept_here: list[Path] = []
        self._write: Callable[[Path], None] | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.seconds = 0.0
        """Duration of the last complete save, from its beginning until its checkpoint was complete."""
        self._began: float | None = None

    @property
    def under_way_seconds(self) -> float:
        """Seconds since the save in progress began, or 0 if none is in progress."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def begin(self) -> None:
        """Wait until the previous save is complete, and start timing the next one."""
        self.finish()
        self._began = time.monotonic()

    def write_first(self, write: Callable[[Path], None]) -> None:
        """Have the thread call `write` with the next save's folder before the upload, to add what the save left out.

        Each rank may leave its part to a thread.
        """
        self._write = write

    def on_train_begin(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Use this attempt's intervals. The Trainer would continue with the checkpoint's."""
        state.save_steps, state.logging_steps = args.save_steps, args.logging_steps

    def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Start the thread that completes and uploads this save."""
        step, write = state.global_step, self._write
        if write is None:
            self._report_written(self._rank.store, step)
        if self._s3 is None and write is None:
            return
        self.finish()
        self._began = self._began or time.monotonic()
        folder = Path(args.output_dir) / f"checkpoint-{step}"
        work: Callable[[], None] | None = None  # if another rank of the node uploads
        if self._s3 is not None:
            throughput = self._metrics.throughput.model_copy()
            work = functools.partial(self._upload, self._s3, step, folder, throughput, self._best())
        self._thread = threading.Thread(
            target=self._guarded,
            args=(step, folder, write, work, self._began),
            name=f"checkpoint-{step}",
            daemon=True,
        )
        self._write = None
        self._thread.start()

    def _report_written(self, store: "Store", step: int) -> None:
        """Report that this rank has written its part. The last rank of a node reports that all have."""
        key, node = f"checkpoint/{step}", self._rank.node
        if store.add(f"{key}/saved/{node}", 1) == self._rank.local_world_size:
            store.set(f"{key}/all-saved/{node}", "")

    def on_step_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._raise_failure()

    def finish(self) -> None:
        """Wait for the upload in progress. Raises TrainyardError if it failed."""
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
        step: int,
        folder: Path,
        write: Callable[[Path], None] | None,
        work: Callable[[], None] | None,
        began: float,
    ) -> None:
        try:
            if write is not None:
                write(folder)
                self._report_written(self._rank.connect_store(), step)
            if work is not None:
                with self._explained_upload(step):
                    work()
            self.seconds, self._began = time.monotonic() - began, None
        except Exception as error:  # noqa: BLE001 - it would be lost in this thread; the training thread raises it
            self._error = error

    @contextlib.contextmanager
    def _explained_upload(self, step: int) -> Iterator[None]:
        try:
            yield
        except SupersededError:
            raise
        except TrainyardError as error:
            raise TrainyardError(
                f"checkpoint step-{step} could not be uploaded: {error.args[0]}; the last complete one in "
                f"{self._rank.run / CHECKPOINTS} is untouched",
                next_step="fix that, then trainyard resume RUN",
            ) from error

    def _upload(self, s3: "S3Client", step: int, folder: Path, throughput: Throughput, best: int | None) -> None:
        """Upload this node's files. Rank 0 then waits for all nodes' files and writes the manifest."""
        started = time.monotonic()
        rank = self._rank
        store = rank.connect_store()
        remote = rank.run / CHECKPOINTS / f"step-{step}"
        key = f"checkpoint/{step}"
        check = functools.partial(check_newest, s3, rank.run, rank.attempt)
        if rank.is_first:
            check()
            whole = complete_steps(list_steps(s3, rank.run / CHECKPOINTS))
            if step in whole:
                # It replaces an earlier attempt's checkpoint, whose manifest must not vouch for a mixture of files.
                discard(s3, remote, [], check=check)
            before = [other for other in whole if other < step]
            store.set(f"{key}/kept", json.dumps(step in self._retention.always_kept([*before, step])))
        store.get(f"{key}/all-saved/{rank.node}")
        tag = KEPT_CHECKPOINT_TAG if json.loads(store.get(f"{key}/kept")) else CHECKPOINT_TAG
        files = upload(s3, folder, remote, tag=tag, check=check)
        if rank.is_first:
            self._saved(step, folder)
        self._remove(folder, best)
        store.set(f"{key}/uploaded/{rank.node}", json.dumps(files))
        if not rank.is_first:
            return
        for node in range(rank.nnodes):
            files |= json.loads(store.get(f"{key}/uploaded/{node}"))
        manifest = Manifest.of(step, self._arguments, files, world_size=rank.world_size, throughput=throughput)
        # A resume keeps the metrics up to its checkpoint, so they must be on S3 before it.
        self._metrics.upload()
        publish(s3, remote, manifest, tag=tag, check=check)
        write_saved_step(rank.scratch, step)
        sent = size(manifest.total_bytes)
        log.info("checkpoint: step %s, %s uploaded in %.1f s", step, sent, time.monotonic() - started)
        with warning_on_failure():
            prune(s3, rank.run / CHECKPOINTS, self._retention, newest=step, best=best, check=check)

    def _remove(self, folder: Path, best: int | None) -> None:
        """Remove the uploaded files, except the best checkpoint's, which stay until there is a better one."""
        kept = f"checkpoint-{best}"
        for other in (folder, *self._kept_here):
            if other.name != kept:
                shutil.rmtree(other, ignore_errors=other != folder)
        self._kept_here = [folder.with_name(kept)] if best is not None else []
