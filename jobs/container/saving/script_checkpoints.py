"""The checkpoints of a script that does not use the library: uploaded once complete, restored, and pruned.

Each checkpoint is a folder `checkpoints/step-N/` of the run on S3. Files keep their paths below the script's folder on
this node: `checkpoints/NAME/…`, `output/checkpoint-N/…` if a Trainer writes checkpoints beside its output, or `code/…`
for a checkpoint that the spec's `keep` names. N is the number in a Trainer's folder name; other checkpoints are
numbered in order, so their number is no step.

A checkpoint's manifest records the links inside it and the times of its files. `saved_folder` keeps links beside
checkpoints.

S3 keeps the newest complete version of each checkpoint in the script's folder, and always the two newest checkpoints in
case the newest is damaged. Others that the script removes are deleted.
"""

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.aws import s3 as object_store
from jobs.container.channel import RankStatus
from jobs.container.saving.manifest import (
    IncompleteError,
    Manifest,
    check_newest,
    complete_steps,
    discard,
    fetch,
    list_steps,
    publish,
    read_manifest,
    upload,
    warning_on_failure,
)
from jobs.container.saving.saved_folder import CheckpointLinks, SkippedFiles
from jobs.container.saving.script_complete import (
    MARKER,
    QUIET_SECONDS,
    CompleteCheckpoints,
    Script,
    State,
    pointed_to,
    shard_of_a_rank,
    state_of,
    trainer_step,
)
from jobs.core.errors import TrainyardError
from jobs.core.folder_listing import (
    Contents,
    Listing,
    contents,
    listing_of,
    make_links,
    set_times,
    shown_name,
)
from jobs.core.locations import S3Location
from jobs.core.run import CHECKPOINT_TAG, CHECKPOINTS
from jobs.core.words import size

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


log = logging.getLogger("trainyard")

CODE = "code"
"""The folder of the code, beside those of checkpoints and output."""

_KEPT = 2

_APART_SECONDS = 0.02
"""Time between restoring two checkpoints: file timestamps have a resolution of 4 or 10 ms."""

_COUNTED = re.compile(r"(step|epoch|iter|iteration|checkpoint|ckpt)[-_=]?(\d+)", re.IGNORECASE)


class RestartDetector:
    """Detects from the names of its saves that a script started over, and records its checkpoints in the status.

    The platform restores checkpoints but cannot observe whether the script loads them. A script that saves an earlier
    step again has not resumed from the newest checkpoint.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._restored_steps: dict[Path, int] = {}
        self._status = RankStatus(restored_step=0)

    def restored(self, checkpoints: Mapping[Path, int]) -> None:
        """Record the checkpoints that the script finds, with their steps."""
        self._restored_steps = dict(checkpoints)
        self._status.restored_step = self._status.last_step = max(checkpoints.values(), default=0)
        self._status.write(self._scratch)

    def saved(self, path: Path, step: int) -> None:
        """Record that the script has saved a checkpoint."""
        self._status.last_step, self._status.saved_at = step, datetime.now(timezone.utc)
        if self._status.repeats_from_step is None:
            self._status.repeats_from_step = self._repeats_from(path)
        self._status.write(self._scratch)

    def _repeats_from(self, path: Path) -> int | None:
        """Return the step from which the script repeats, or None if this save does not show that it started over."""
        saved = _number(path.name)
        if saved is None:
            return None
        word, number = saved
        beside = {other.name: step for other, step in self._restored_steps.items() if other.parent == path.parent}
        counted = {_number(name): step for name, step in beside.items()}
        same = {known[1]: step for known, step in counted.items() if known is not None and known[0] == word}
        newest = max(same, default=0)
        # A script may overwrite one numbered name. A Trainer uses another name at each step.
        if number > newest or (number == newest and trainer_step(path.name) is None):
            return None
        began = max((step for known, step in same.items() if known < number), default=0)
        log.warning(
            "warning: the script saves %s again: it started over, and the work of earlier attempts after step %s is "
            "lost. Next: have the script load its newest checkpoint when it starts",
            path.name,
            began,
        )
        return began


def _number(name: str) -> tuple[str, int] | None:
    """Return the word and number in a checkpoint's name, as in `('step', 300)`, or None if there is none."""
    match = _COUNTED.search(name)
    return (match[1].lower(), int(match[2])) if match else None


class ShardedError(TrainyardError):
    """The script's checkpoints cannot be kept, because each node has only a part of them."""


class ScriptCheckpoints:
    """The checkpoints of one script on this node."""

    def __init__(
        self,
        s3: "S3Client",
        run: S3Location,
        scratch: Path,
        *,
        folder: Path,
        arguments: Mapping[str, Any],
        world_size: int,
        ranks_here: int,
        kept: Collection[str] = (),
        nnodes: int = 1,
        attempt: int | None = None,
    ) -> None:
        """`folder` contains `checkpoints/`, `output/` and `code/`; `kept` are names below `code/`."""
        self._run = run
        self._attempt = attempt
        self._s3 = s3
        self._remote = run / CHECKPOINTS
        self._staging = scratch / "staging"
        self._restored = scratch / "restored"
        self._folder = folder
        self._arguments = dict(arguments)
        self._world_size = world_size
        self._nnodes = nnodes
        self._uploaded: dict[str, State] = {}
        """The uploaded state of each entry, `checkpoints/NAME`."""
        self._steps: dict[int, str] = {}
        """The entry of each complete step."""
        self._skipped = SkippedFiles("the script's checkpoints")
        self._links = CheckpointLinks(s3, self._remote, folder, self._skipped)
        self._has_warned = False
        self._restarts = RestartDetector(scratch)
        self._watched = {
            "checkpoints": CompleteCheckpoints(folder / "checkpoints", ranks=ranks_here),
            "output": CompleteCheckpoints(folder / "output", ranks=ranks_here, trainer_only=True),
            CODE: CompleteCheckpoints(folder / CODE, ranks=ranks_here, parts=kept),
        }

    def restore(self, *, allow_changes: bool) -> int | None:
        """Restore the checkpoints of earlier attempts, with their times, and return the newest step, or None.

        The oldest is restored first, so that all file times agree on the order. Raises UsageError if the code or the
        arguments have changed and changes are not allowed.
        """
        fetched: dict[int, Manifest] = {}
        for step in sorted(complete_steps(list_steps(self._s3, self._remote)), reverse=True):
            try:
                manifest = read_manifest(self._s3, self._remote / f"step-{step}")
                entry = _entry(manifest)
                if entry is None:  # the library's checkpoint, which its ranks fetch themselves
                    return None
                if not (fetched and allow_changes):  # allowed changes are logged once, for the newest checkpoint
                    manifest.check_arguments(self._arguments, allow_changes=allow_changes)
                is_older_version = any(self._steps[other] == entry for other in fetched)
                self._steps[step] = entry
                if not is_older_version:
                    fetched[step] = fetch(self._s3, self._remote / f"step-{step}", self._restored / f"step-{step}")
            except IncompleteError as error:  # noqa: PERF203 - few checkpoints
                log.warning("warning: checkpoint step-%s is skipped: %s", step, error)
        for step in fetched:
            path = self._folder / self._steps[step]
            path.parent.mkdir(parents=True, exist_ok=True)
            (self._restored / f"step-{step}" / self._steps[step]).rename(path)
            shutil.rmtree(self._restored / f"step-{step}")
        for step, manifest in sorted(fetched.items(), key=lambda item: (item[1].written_at, item[0])):
            self._restore_listing(step, manifest.listing)
            time.sleep(_APART_SECONDS)
        self._links.restore()
        self._restarts.restored({self._folder / self._steps[step]: step for step in fetched})
        return max(fetched, default=None)

    def newest(self) -> Path | None:
        """Return the newest restored checkpoint, or None. A file that only names another checkpoint does not count."""
        for _, entry in sorted(self._steps.items(), reverse=True):
            path = self._folder / entry
            if path.exists() and pointed_to(path, self._watched_for(entry).candidates()) is None:
                return path
        return None

    def _restore_listing(self, step: int, found: Listing) -> None:
        """Restore the links and times of a checkpoint whose files are in place. Names of other entries are ignored."""
        entry = self._steps[step]
        own = [name for name in (*found.links, *found.times) if f"{name}/".startswith(f"{entry}/")]
        self._skipped.warn(make_links(self._folder, {name: found.links[name] for name in own if name in found.links}))
        for folders in (False, True):
            times = {name: found.times[name] for name in own if name in found.times}
            set_times(self._folder, times, folders=folders)
        path = self._folder / entry
        self._uploaded[entry] = state_of(path)
        self._watched_for(entry).restored(path)
        log.info("restored: checkpoint %s as %s, for the script to read", step, path.name)

    def upload(self, script: Script) -> bool:
        """Upload the checkpoints that have become complete since the last call. Return whether there were any.

        Raises TrainyardError if S3 refuses an upload, SupersededError if a newer attempt has begun, and ShardedError if
        no checkpoint of this script can be complete.
        """
        uploaded = False
        for root, watched in self._watched.items():
            found = list(watched.find(script))
            self._refuse_shards(watched)
            self._withdraw_incomplete(root, watched)
            candidates = watched.candidates()
            named = {path: pointed_to(path, candidates) for path, _ in found}
            for path, state in sorted(found, key=lambda item: named[item[0]] is not None):  # pointers last
                entry, other = f"{root}/{watched.name_of(path)}", named[path]
                if other is not None and f"{root}/{other}" not in self._uploaded:
                    continue  # its target would be missing in the next attempt
                if self._uploaded.get(entry) != state and self._upload(entry, state):
                    self._uploaded[entry] = state
                    uploaded = True
            self._warn_of_unmarked(watched)
        self._links.upload(self._steps.values(), check=self.check_newest)
        if uploaded:
            self._prune()
        return uploaded

    def warn_of_rest(self) -> None:
        """Log a warning that names the entries which were not uploaded in their final state."""
        rest = [
            shown_name(path.name)
            for root, watched in self._watched.items()
            for path in watched.candidates()
            if self._uploaded.get(f"{root}/{watched.name_of(path)}") != state_of(path)
        ]
        if rest:
            log.warning(
                "warning: not uploaded, because it may be incomplete: %s. Next: write a checkpoint under another name "
                "and rename it, or write a file %s into its folder last",
                ", ".join(sorted(rest)),
                MARKER,
            )

    def _refuse_shards(self, watched: CompleteCheckpoints) -> None:
        """Raise ShardedError if each rank of a script on several nodes saves its own part on its own node."""
        shard = next(filter(None, map(shard_of_a_rank, watched.states())), None) if self._nnodes > 1 else None
        if shard is not None:
            raise ShardedError(
                f"{shown_name(shard)} contains only one rank's part, and a script's checkpoints are uploaded only from "
                "the main node, so the parts of ranks on other nodes would be missing",
                next_step="save the full state on rank 0 (Accelerate: fsdp_state_dict_type FULL_STATE_DICT), or train "
                "a Trainer with trainyard.Callback, which keeps the files of all nodes, or use one node",
            )

    def _withdraw_incomplete(self, root: str, watched: CompleteCheckpoints) -> None:
        """Delete the manifest of a folder written in place that has grown since its upload: it was not complete."""
        for name in watched.in_place:
            entry = f"{root}/{name}"
            uploaded = self._uploaded.get(entry, ())
            if uploaded and set(uploaded) < set(state_of(self._folder / entry)):
                step = max(step for step, other in self._steps.items() if other == entry)
                log.warning("warning: %s was uploaded before it was complete, and will be uploaded again", name)
                discard(self._s3, self._remote / f"step-{step}", [], check=self.check_newest)
                del self._steps[step], self._uploaded[entry]

    def _warn_of_unmarked(self, watched: CompleteCheckpoints) -> None:
        if self._has_warned or not watched.in_place:
            return
        self._has_warned = True
        log.warning(
            "warning: %s is written in place, so nothing marks it as complete. Such a folder is uploaded once it has "
            "not changed for %.0f s or a newer one begins. Next: write it under another name and rename it, or "
            "write a file %s into it last",
            shown_name(min(watched.in_place)),
            QUIET_SECONDS,
            MARKER,
        )

    def check_newest(self) -> None:
        """Raise SupersededError if a newer attempt has begun, which now owns the run's files."""
        check_newest(self._s3, self._run, self._attempt)

    def _watched_for(self, entry: str) -> CompleteCheckpoints:
        return self._watched[entry.partition("/")[0]]

    def close(self) -> None:
        for watched in self._watched.values():
            watched.close()

    def _upload(self, entry: str, state: State) -> bool:
        """Upload one checkpoint, its manifest last. Return False if it changed or was removed during the upload."""
        started = time.monotonic()
        path = self._folder / entry
        number = trainer_step(path.name)
        step = number if number is not None else max(self._steps, default=0) + 1
        staged = self._staging / f"step-{step}"
        shutil.rmtree(staged, ignore_errors=True)
        remote = self._remote / f"step-{step}"
        try:
            self.check_newest()
            found = contents(self._folder, part=path)
            if not found.files or self._has_refused_name(remote, found):
                return False
            self._link(found, staged)
            if state_of(path) != state:
                return False
            if step in self._steps:
                # Its manifest must not vouch for a mixture of files.
                discard(self._s3, remote, [], check=self.check_newest)
            files = upload(self._s3, staged, remote, tag=CHECKPOINT_TAG, check=self.check_newest)
            is_changed = _sizes_and_times(contents(staged).files) != _sizes_and_times(found.files)
            # If the script replaced it, it has other files, and the staged ones are the whole previous checkpoint.
            if is_changed or set(state) < set(state_of(path)):
                log.warning("warning: %s changed during its upload, so this version is not kept", path.name)
                return False
        except FileNotFoundError:
            return False  # removed or renamed during the upload
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        self._skipped.warn(found.left_out)
        times = {name: each.st_mtime_ns for name, each in {**found.files, **found.folders}.items()}
        kept = listing_of(found.links, times)
        manifest = Manifest.of(step, self._arguments, files, world_size=self._world_size, listing=kept)
        publish(self._s3, remote, manifest, tag=CHECKPOINT_TAG, check=self.check_newest)
        self._steps[step] = entry
        self._restarts.saved(path, step)
        sent = size(manifest.total_bytes)
        counted = f"step {step} ({path.name})" if number is not None else f"{path.name} (number {step})"
        log.info("checkpoint: %s, %s uploaded in %.1f s", counted, sent, time.monotonic() - started)
        return True

    def _prune(self) -> None:
        """Delete older versions and checkpoints that the script has removed, but keep the two newest."""
        newest = {entry: step for step, entry in sorted(self._steps.items())}
        kept = {step for entry, step in newest.items() if (self._folder / entry).exists()}
        kept |= set(sorted(self._steps)[-_KEPT:])
        kept |= {step for entry, step in newest.items() if entry in self._links.entries}
        gone = [step for step in self._steps if step not in kept]
        if not gone:
            return
        names = list_steps(self._s3, self._remote)
        with warning_on_failure():
            for step in gone:
                discard(self._s3, self._remote / f"step-{step}", names.get(step, []), check=self.check_newest)
                del self._steps[step]

    def _has_refused_name(self, remote: S3Location, found: Contents) -> bool:
        """Return whether S3 refuses the name of a file, and log a warning if so."""
        reasons = {name: object_store.invalid_name_reason(remote / name) for name in found.files}
        refused = {name: reason for name, reason in reasons.items() if reason is not None}
        self._skipped.warn(refused)
        return bool(refused)

    def _link(self, found: Contents, target: Path) -> None:
        """Hard-link the files into `target`, so that the script may remove or rename them during the upload."""
        for name in found.files:
            file, place = self._folder / name, target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, place)
            except FileNotFoundError:
                raise
            except OSError:  # another disk, or a file system without links
                with contextlib.suppress(shutil.SameFileError):
                    shutil.copy2(file, place)


def _sizes_and_times(files: Mapping[str, os.stat_result]) -> dict[str, tuple[int, int]]:
    return {name: (state.st_size, state.st_mtime_ns) for name, state in files.items()}


def _entry(manifest: Manifest) -> str | None:
    """Return a checkpoint's entry, `checkpoints/NAME`, `output/NAME` or `code/…`, or None if it is not a script's."""
    entries = {_entry_of_file(name) for name in manifest.files}
    found = entries.pop() if len(entries) == 1 else ""
    return found if found.startswith(("checkpoints/", "output/", f"{CODE}/")) else None


def _entry_of_file(name: str) -> str:
    parts = name.split("/")
    if parts[0] != CODE:
        return "/".join(parts[:2])
    length = next((number for number, part in enumerate(parts, 1) if trainer_step(part) is not None), len(parts))
    return "/".join(parts[:length])
