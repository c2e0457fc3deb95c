"""The checkpoints of a script that does not use the library: taken when they are complete, put back, pruned.

On S3 each is one of the run's `checkpoints/step-N/`. Its files are called as they are below the script's folder on this
node: `checkpoints/NAME/…`, or `output/checkpoint-N/…` if a Trainer writes them beside its output. N is that of a
Trainer's name; others are counted.

The links inside a checkpoint and the times of its files are in its manifest. `links` keeps those beside checkpoints.

The newest complete version of what the script keeps in its folder stays on S3, and so does the checkpoint before the
newest, in case the newest is damaged. What the script has removed is deleted.
"""

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.aws import s3 as object_store
from jobs.container.saving.saved_folder import LeftOut
from jobs.container.saving.script_began import Began
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
from jobs.container.saving.script_links import KeptLinks
from jobs.container.saving.stored_checkpoints import (
    IncompleteError,
    Manifest,
    check_newest,
    complete,
    discard,
    fetch,
    listing,
    publish,
    read_manifest,
    upload,
    warning_on_failure,
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

_KEPT = 2

_APART_SECONDS = 0.02
"""Between two checkpoints that are put back: the clock of files ticks every 4 or 10 ms."""


class ShardedError(TrainyardError):
    """The script's checkpoints cannot be kept: each node has a part of them."""


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
        nnodes: int = 1,
        attempt: int | None = None,
    ) -> None:
        """`folder` holds `checkpoints/` and `output/`."""
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
        self._taken: dict[str, State] = {}
        """The state in which each entry, `checkpoints/NAME`, is on S3."""
        self._steps: dict[int, str] = {}
        """The entry that each complete step holds."""
        self._left_out = LeftOut("the script's checkpoints")
        self._links = KeptLinks(s3, self._remote, folder, self._left_out)
        self._has_warned = False
        self._began = Began(scratch)
        self._looks = {
            "checkpoints": CompleteCheckpoints(folder / "checkpoints", ranks=ranks_here),
            "output": CompleteCheckpoints(folder / "output", ranks=ranks_here, trainer_only=True),
        }

    def restore(self, *, allow_changes: bool) -> int | None:
        """Put what earlier attempts have left where it was, with its times, and return the newest step, if any.

        The oldest comes first, so that no clock of a file tells another order. Raises UsageError where it was made by
        other code or with other arguments, and that was not asked for.
        """
        fetched: dict[int, Manifest] = {}
        for step in sorted(complete(listing(self._s3, self._remote)), reverse=True):
            try:
                manifest = read_manifest(self._s3, self._remote / f"step-{step}")
                entry = _entry(manifest)
                if entry is None:  # the library's, which its ranks fetch themselves
                    return None
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
            self._put_back(step, manifest.listing)
            time.sleep(_APART_SECONDS)
        self._links.restore()
        self._began.put_back({self._folder / self._steps[step]: step for step in fetched})
        return max(fetched, default=None)

    def _put_back(self, step: int, found: Listing) -> None:
        """Give a checkpoint, whose files are in their place, its links and times. Its listing may name nothing else."""
        entry = self._steps[step]
        own = [name for name in (*found.links, *found.times) if f"{name}/".startswith(f"{entry}/")]
        self._left_out.warn(make_links(self._folder, {name: found.links[name] for name in own if name in found.links}))
        for folders in (False, True):
            times = {name: found.times[name] for name in own if name in found.times}
            set_times(self._folder, times, folders=folders)
        path = self._folder / entry
        self._taken[entry] = state_of(path)
        self._looks[path.parent.name].restored(path)
        log.info("restored: checkpoint step-%s as %s, for the script to read", step, path.name)

    def take(self, script: Script) -> bool:
        """Upload what has become complete since the last look. Returns whether there was any.

        Raises TrainyardError where S3 does not take it, SupersededError where a newer attempt has begun, and
        ShardedError where no checkpoint of this script can be complete.
        """
        took = False
        for root, looks in self._looks.items():
            found = list(looks.find(script))
            self._refuse_shards(looks)
            self._withdraw_torn(root, looks)
            candidates = looks.candidates()
            named = {path: pointed_to(path, candidates) for path, _ in found}
            for path, state in sorted(found, key=lambda item: named[item[0]] is not None):  # after what they name
                entry, other = f"{root}/{path.name}", named[path]
                if other is not None and f"{root}/{other}" not in self._taken:
                    continue  # the next attempt would look for it in vain
                if self._taken.get(entry) != state and self._upload(entry, state):
                    self._taken[entry] = state
                    took = True
            self._warn_of_unmarked(looks)
        self._links.keep(self._steps.values(), check=self.check_newest)
        if took:
            self._prune()
        return took

    def warn_of_rest(self) -> None:
        """Name what is in the folders at the end, and was not taken as it is."""
        rest = [
            shown_name(path.name)
            for root, looks in self._looks.items()
            for path in looks.candidates()
            if self._taken.get(f"{root}/{path.name}") != state_of(path)
        ]
        if rest:
            log.warning(
                "warning: not uploaded, since it may be incomplete: %s. Next: write a checkpoint under another name "
                "and rename it, or write a file %s into its folder last",
                ", ".join(sorted(rest)),
                MARKER,
            )

    def _refuse_shards(self, looks: CompleteCheckpoints) -> None:
        """Raise ShardedError where a script of several nodes saves each rank's part by itself, on its own node."""
        shard = next(filter(None, map(shard_of_a_rank, looks.states())), None) if self._nnodes > 1 else None
        if shard is not None:
            raise ShardedError(
                f"{shown_name(shard)} holds the part of one rank; those of the other nodes' ranks are on their own "
                "disks, and a script's checkpoints are taken from the main node alone",
                next_step="save the full state on rank 0 (Accelerate: fsdp_state_dict_type FULL_STATE_DICT), or train "
                "a Trainer with trainyard.Callback, which keeps the files of all nodes, or use one node",
            )

    def _withdraw_torn(self, root: str, looks: CompleteCheckpoints) -> None:
        """Delete what was taken of a folder written in place that has got more files since: it was not whole."""
        for name in looks.in_place:
            entry = f"{root}/{name}"
            taken = self._taken.get(entry, ())
            if taken and set(taken) < set(state_of(self._folder / entry)):
                step = max(step for step, other in self._steps.items() if other == entry)
                log.warning("warning: %s was taken before it was whole: it is taken again once it is", name)
                discard(self._s3, self._remote / f"step-{step}", [], check=self.check_newest)
                del self._steps[step], self._taken[entry]

    def _warn_of_unmarked(self, looks: CompleteCheckpoints) -> None:
        if self._has_warned or not looks.in_place:
            return
        self._has_warned = True
        log.warning(
            "warning: %s is written in place, so only its writer knows when it is complete. Such a folder is uploaded "
            "once it has not changed for %.0f s or a newer one begins. Next: write it under another name and rename "
            "it, or write a file %s into it last",
            shown_name(min(looks.in_place)),
            QUIET_SECONDS,
            MARKER,
        )

    def check_newest(self) -> None:
        """Raise SupersededError where a newer attempt has begun, to which the run's files belong."""
        check_newest(self._s3, self._run, self._attempt)

    def close(self) -> None:
        for look in self._looks.values():
            look.close()

    def _upload(self, entry: str, state: State) -> bool:
        """Upload one checkpoint, its manifest last. Returns False if it was changed or removed meanwhile."""
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
            if not found.files or self._has_odd_name(remote, found):
                return False
            self._link(found, staged)
            if state_of(path) != state:
                return False
            if step in self._steps:
                # Its manifest must not vouch for a mixture of files.
                discard(self._s3, remote, [], check=self.check_newest)
            files = upload(self._s3, staged, remote, tag=CHECKPOINT_TAG, check=self.check_newest)
            is_changed = _sizes_and_times(contents(staged).files) != _sizes_and_times(found.files)
            # If it was replaced meanwhile it has other files: the staged ones are the whole checkpoint from before.
            if is_changed or set(state) < set(state_of(path)):
                log.warning("warning: %s was changed while it was uploaded, and is not taken as it is", path.name)
                return False
        except FileNotFoundError:
            return False  # removed or renamed meanwhile
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        self._left_out.warn(found.left_out)
        times = {name: each.st_mtime_ns for name, each in {**found.files, **found.folders}.items()}
        kept = listing_of(found.links, times)
        manifest = Manifest.of(step, self._arguments, files, world_size=self._world_size, listing=kept)
        publish(self._s3, remote, manifest, tag=CHECKPOINT_TAG, check=self.check_newest)
        self._steps[step] = entry
        self._began.saved(path, step)
        sent = size(manifest.total_bytes)
        log.info("checkpoint: step %s (%s), %s uploaded in %.1f s", step, path.name, sent, time.monotonic() - started)
        return True

    def _prune(self) -> None:
        """Delete older versions, and what the script has removed, but the newest two."""
        newest = {entry: step for step, entry in sorted(self._steps.items())}
        kept = {step for entry, step in newest.items() if (self._folder / entry).exists()}
        kept |= set(sorted(self._steps)[-_KEPT:])
        kept |= {step for entry, step in newest.items() if entry in self._links.entries}
        gone = [step for step in self._steps if step not in kept]
        if not gone:
            return
        names = listing(self._s3, self._remote)
        with warning_on_failure():
            for step in gone:
                discard(self._s3, self._remote / f"step-{step}", names.get(step, []), check=self.check_newest)
                del self._steps[step]

    def _has_odd_name(self, remote: S3Location, found: Contents) -> bool:
        """Return whether S3 cannot take one of the files, and so not the checkpoint. Warns of it."""
        refusals = {name: object_store.invalid_name_reason(remote / name) for name in found.files}
        odd = {name: why for name, why in refusals.items() if why is not None}
        self._left_out.warn(odd)
        return bool(odd)

    def _link(self, found: Contents, target: Path) -> None:
        """Give the files a second name, so that the script may remove or rename its own meanwhile."""
        for name in found.files:
            file, place = self._folder / name, target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, place)
            except FileNotFoundError:
                raise
            except OSError:  # another disk, or a file system that knows no links
                with contextlib.suppress(shutil.SameFileError):
                    shutil.copy2(file, place)


def _sizes_and_times(files: Mapping[str, os.stat_result]) -> dict[str, tuple[int, int]]:
    return {name: (state.st_size, state.st_mtime_ns) for name, state in files.items()}


def _entry(manifest: Manifest) -> str | None:
    """Return what a checkpoint holds, `checkpoints/NAME` or `output/NAME`; None where it is no script's."""
    entries = {"/".join(name.split("/")[:2]) for name in manifest.files}
    found = entries.pop() if len(entries) == 1 else ""
    return found if found.startswith(("checkpoints/", "output/")) else None
