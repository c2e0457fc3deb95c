"""The checkpoints of a script that knows nothing of the platform: taken as they become complete, restored, pruned.

On S3 each is one of the run's `checkpoints/step-N/`, with names that say where it lay: `checkpoints/NAME/…`, or
`output/checkpoint-N/…` of a Trainer that writes them beside its output. N is that of the name, or counts them.

What the script keeps in its folder stays on S3 in its newest complete version, and so does the checkpoint before the
newest, for the day when that is damaged. What the script has removed goes.
"""

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from jobs.aws import s3 as object_store
from jobs.contract.arguments import changed, changes_text
from jobs.contract.errors import TrainyardError, UsageError
from jobs.contract.locations import S3Location
from jobs.contract.run import CHECKPOINT_TAG, CHECKPOINTS, MANIFEST
from jobs.contract.words import size
from jobs.train.channel import RankStatus
from jobs.train.script.complete import CompleteCheckpoints, Script, State, state_of, trainer_step
from jobs.train.stored_checkpoints import (
    IncompleteError,
    Manifest,
    SupersededError,
    Throughput,
    check_newest,
    complete,
    discard,
    fetch,
    fingerprint,
    listing,
    publish,
    upload,
)

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

_KEPT = 2


class ScriptCheckpoints:
    """Those of one script, below its two folders on this node."""

    def __init__(
        self,
        s3: "S3Client",
        run: S3Location,
        scratch: Path,
        *,
        roots: Mapping[str, Path],
        arguments: Mapping[str, Any],
        world_size: int,
        ranks_here: int,
        attempt: int | None = None,
    ) -> None:
        """`roots`: the folder of checkpoints and that of the output, by their names on S3."""
        self._run = run
        self._attempt = attempt
        self._s3 = s3
        self._remote = run / CHECKPOINTS
        self._staging = scratch / "staging"
        self._scratch = scratch
        self._roots = dict(roots)
        self._arguments = dict(arguments)
        self._world_size = world_size
        self._taken: dict[Path, State] = {}
        self._steps: dict[int, str] = {}
        """The entry that each complete step holds: `checkpoints/NAME`."""
        self._resumed_from = 0
        self._looks = {
            name: CompleteCheckpoints(folder, ranks=ranks_here, trainer_only=name == "output")
            for name, folder in self._roots.items()
        }

    def restore(self, *, allow_changes: bool) -> int | None:
        """Put what earlier attempts have left where it lay, and return the newest step; None: there is none.

        Raises UsageError where it was made by other code or with other arguments, and that was not asked for.
        """
        newest = None
        for step in sorted(complete(listing(self._s3, self._remote)), reverse=True):
            local = self._scratch / "restored" / f"step-{step}"
            try:
                manifest = self._manifest(step)
                entry = _entry(manifest)
                if entry is None:  # the library's, which its ranks fetch themselves
                    return None
                self._check(manifest, allow_changes=allow_changes)
                self._steps[step] = entry
                path = self._path(entry)
                if path.exists():
                    continue
                fetch(self._s3, self._remote / f"step-{step}", local)
            except IncompleteError as error:
                log.warning("warning: checkpoint step-%s is skipped: %s", step, error)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            (local / entry).rename(path)
            shutil.rmtree(local)
            self._taken[path] = state_of(path)
            newest = newest or step
            log.info("restored: checkpoint step-%s as %s", step, path.name)
        self._resumed_from = newest or 0
        self._note(newest or 0)
        return newest

    def take(self, script: Script) -> bool:
        """Upload what has become complete since the last look. Returns whether there was any.

        Raises TrainyardError where S3 does not take it, SupersededError where a newer attempt has begun.
        """
        took = False
        for root, looks in self._looks.items():
            for path, state in looks.find(script):
                if self._taken.get(path) != state and self._upload(f"{root}/{path.name}", path, state):
                    self._taken[path] = state
                    took = True
        if took:
            self._prune()
        return took

    def check_newest(self) -> None:
        """Raise SupersededError where a newer attempt has begun, to which the run's files belong."""
        check_newest(self._s3, self._run, self._attempt)

    def close(self) -> None:
        for look in self._looks.values():
            look.close()

    def _upload(self, entry: str, path: Path, state: State) -> bool:
        """Upload one checkpoint, its manifest last. Returns False where it was changed or removed meanwhile."""
        started = time.monotonic()
        number = trainer_step(path.name)
        step = number if number is not None else max(self._steps, default=0) + 1
        staged = self._staging / f"step-{step}"
        shutil.rmtree(staged, ignore_errors=True)
        remote = self._remote / f"step-{step}"
        try:
            self.check_newest()
            self._link(path, staged / entry)
            if state_of(path) != state or not object_store.files_below(staged):
                return False
            if step in self._steps:
                # What it vouches for is being replaced.
                discard(self._s3, remote, [], check=self.check_newest)
            files = upload(self._s3, staged, remote, tag=CHECKPOINT_TAG, check=self.check_newest)
            if [item[1:3] for item in state_of(staged / entry)] != [item[1:3] for item in state]:
                log.warning("warning: %s was changed while it was uploaded, and is not taken as it is", path.name)
                return False
        except FileNotFoundError:
            return False  # removed or renamed meanwhile
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        manifest = Manifest.model_validate(
            {
                "step": step,
                "world_size": self._world_size,
                "fingerprint": fingerprint(self._arguments),
                "arguments": self._arguments,
                "written_at": datetime.now(timezone.utc),
                "throughput": Throughput(),
                "files": files,
            }
        )
        publish(self._s3, remote, manifest, tag=CHECKPOINT_TAG, check=self.check_newest)
        self._steps[step] = entry
        self._note(step)
        sent = size(sum(file.bytes for file in manifest.files.values()))
        log.info("checkpoint: step %s (%s), %s uploaded in %.1f s", step, path.name, sent, time.monotonic() - started)
        return True

    def _prune(self) -> None:
        """Delete older versions, and what the script has removed, but the newest two."""
        newest = {entry: step for step, entry in sorted(self._steps.items())}
        kept = {step for entry, step in newest.items() if self._path(entry).exists()}
        kept |= set(sorted(self._steps)[-_KEPT:])
        gone = [step for step in self._steps if step not in kept]
        if not gone:
            return
        names = listing(self._s3, self._remote)
        try:
            for step in gone:
                discard(self._s3, self._remote / f"step-{step}", names.get(step, []), check=self.check_newest)
                del self._steps[step]
        except SupersededError:
            raise
        except TrainyardError as error:  # what stays costs storage, and the next prune tries it again
            log.warning("warning: checkpoints that are no longer needed stay on S3: %s", error.args[0])

    def _manifest(self, step: int) -> Manifest:
        content = object_store.read(self._s3, self._remote / f"step-{step}" / MANIFEST)
        try:
            return Manifest.model_validate_json(content or b"")
        except ValidationError as error:
            raise IncompleteError(f"its manifest is damaged: {error.errors()[0]['msg']}") from None

    def _check(self, manifest: Manifest, *, allow_changes: bool) -> None:
        if manifest.fingerprint == fingerprint(self._arguments):
            return
        changes = changes_text(changed(manifest.arguments, self._arguments))
        if not allow_changes:
            raise UsageError(
                f"checkpoint step-{manifest.step} of this run was made with other code or arguments: {changes}",
                next_step="take that back, or submit a new run; where it is meant: trainyard resume RUN "
                "--allow-changes",
            )
        log.info("changed since checkpoint step-%s, as asked: %s", manifest.step, changes)

    def _path(self, entry: str) -> Path:
        root, _, name = entry.partition("/")
        return self._roots[root] / name

    def _note(self, step: int) -> None:
        RankStatus(resumed_from_step=self._resumed_from, last_step=step).write(self._scratch)

    def _link(self, source: Path, target: Path) -> None:
        """Give the files a second name, so that the script may remove or rename its own meanwhile."""
        files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
        for file in files:
            place = target if file == source else target / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, place)
            except FileNotFoundError:
                raise
            except OSError:  # another disk, or a file system that knows no links
                with contextlib.suppress(shutil.SameFileError):
                    shutil.copy2(file, place)


def _entry(manifest: Manifest) -> str | None:
    """Return what a checkpoint holds, `checkpoints/NAME` or `output/NAME`; None where it is no script's."""
    entries = {"/".join(name.split("/")[:2]) for name in manifest.files}
    found = entries.pop() if len(entries) == 1 else ""
    return found if found.startswith(("checkpoints/", "output/")) else None
