"""A local folder kept on S3: changes are uploaded, and all files are restored on the next machine.

`output-listing.json` beside the folder `output/` on S3 records what S3 cannot store: links and modification times.
`CheckpointLinks` does the same for links beside a script's checkpoints.
"""

import logging
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from jobs.aws import s3 as object_store
from jobs.container.saving.script_complete import is_below, is_checkpoint_name, is_unfinished
from jobs.core.errors import TrainyardError
from jobs.core.folder_listing import (
    Contents,
    Listing,
    contents,
    inner_target,
    listing_of,
    make_links,
    set_times,
    shown_name,
)
from jobs.core.locations import S3Location
from jobs.core.run import CHECKPOINT_LINKS, CHECKPOINT_TAG, LISTING_SUFFIX
from jobs.core.words import counted

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

LEFT_OUT = (".ipynb_checkpoints", "__pycache__")
"""Folders that are not saved because they are recreated: JupyterLab's copies of notebooks, compiled modules."""

_NAMED = 5
"""The most names in one warning."""

ValueT = TypeVar("ValueT")

_State = tuple[int, int]
"""The state of a file: modification time in nanoseconds, and size in bytes."""


class SkippedFiles:
    """Logs one warning for each file of a folder that is not saved."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._named: set[str] = set()

    def warn(self, reasons: Mapping[str, str]) -> None:
        new = {name: why for name, why in sorted(reasons.items()) if name not in self._named}
        self._named |= set(new)
        if new:
            shown = [f"{shown_name(name)} ({shown_name(why)})" for name, why in list(new.items())[:_NAMED]]
            more = f" and {counted(len(new) - _NAMED, 'other')}" if len(new) > _NAMED else ""
            log.warning("warning: not saved from %s: %s%s", self._folder, ", ".join(shown), more)


class SavedFolder:
    """Keeps the files of `folder`, and the symbolic links that stay inside it, at `place` on S3.

    Links are not followed. Files that cannot be saved are skipped with a warning that names them.
    """

    def __init__(
        self,
        s3: "S3Client",
        folder: Path,
        place: S3Location,
        *,
        without: Callable[[str], bool] = lambda _: False,
        elsewhere: Path | None = None,
        parts: Collection[str] = (),
        check_may_write: Callable[[], None] = lambda: None,
    ) -> None:
        """`without` takes the name of an entry of the folder and returns whether to skip it.

        `parts` are names that are not in `folder` but in the folder `elsewhere`: a script's files beside itself. Their
        checkpoints by name are saved only with `save(checkpoints=True)`.

        `check_may_write` raises if another attempt now owns the place. It is called before each upload and deletion.
        """
        self._s3 = s3
        self._without = without
        self._check_may_write = check_may_write
        self._folder = folder
        self._parts = parts
        self._elsewhere = elsewhere or folder
        self._place = place
        self._saved: dict[str, _State] = {}
        self._listing_place = S3Location(place.bucket, f"{place.key.rstrip('/')}{LISTING_SUFFIX}")
        self._listing = Listing()
        self._skipped = SkippedFiles(folder.name)

    def restore(self, *, outdated: Callable[[str], bool] = lambda _: False) -> int:
        """Download the files, with their times, and return how many. Raises TrainyardError if a file cannot be read.

        `outdated` takes a file's path in the folder and returns whether to skip it. The next save deletes such files.
        """
        saved = list(object_store.sizes(self._s3, self._place))
        left = [name for name in saved if outdated(name)]
        names = [name for name in saved if not outdated(name)]
        self._listing = self._stored_listing()
        for root in (self._folder, self._elsewhere):
            object_store.download_all(self._s3, self._place, [n for n in names if self._root(n) == root], root)
            set_times(root, self._in_root(root, self._listing.times), folders=False)
        found = self._look(checkpoints=True)[0]
        self._saved = {**dict.fromkeys(left, (0, 0)), **{name: found[name] for name in names if name in found}}
        return len(names)

    def restore_links(self) -> None:
        """Recreate the links. Call this after everything that they may point to is restored."""
        for root in (self._folder, self._elsewhere):
            self._skipped.warn(make_links(root, self._in_root(root, self._listing.links)))
            set_times(root, self._in_root(root, self._listing.times), folders=True)

    def save(self, *, checkpoints: bool = False) -> bool:
        """Upload changed files and delete removed files. Return whether there was anything to do.

        A file that changes during its upload is saved again next time. Unreadable files and refused deletions are
        logged as warnings and tried again next time. Raises TrainyardError if S3 refuses an upload; files uploaded
        before count as saved. Raises what `check_may_write` raises.
        """
        found, listing = self._look(checkpoints=checkpoints)
        changed = [name for name, state in found.items() if self._saved.get(name) != state]
        gone = [name for name in self._saved if name not in found and (checkpoints or not self._is_checkpoint(name))]

        def upload(name: str) -> None:
            self._check_may_write()
            try:
                object_store.upload(self._s3, self._root(name) / name, self._place / name)
            except FileNotFoundError:
                return  # deleted since it was found
            except OSError as error:  # it must not block the other files
                self._skipped.warn({name: error.strerror or str(error)})
                return
            self._saved[name] = found[name]

        object_store.in_threads(upload, changed)
        if gone:
            self._check_may_write()
        try:
            object_store.delete_all(self._s3, self._place, gone)
        except TrainyardError as error:
            log.warning("warning: files deleted from %s remain on S3: %s", self._folder.name, error.args[0])
        else:
            for name in gone:
                del self._saved[name]
        has_other_links = listing.links != self._listing.links
        if listing != self._listing:
            self._check_may_write()
            object_store.write(self._s3, self._listing_place, listing.model_dump_json().encode())
            self._listing = listing
        return bool(changed or gone or has_other_links)

    def _look(self, *, checkpoints: bool) -> tuple[dict[str, _State], Listing]:
        """Return the files that can be saved, and the folder's listing. Log a warning for all others.

        `checkpoints` includes those of `parts`.
        """
        found = self._contents()
        for name in [name for name in found.files if not checkpoints and self._is_checkpoint(name)]:
            del found.files[name]
        refusals = {name: object_store.invalid_name_reason(self._place / name) for name in found.files}
        self._skipped.warn({**found.left_out, **{name: why for name, why in refusals.items() if why is not None}})
        states = {
            name: (state.st_mtime_ns, state.st_size) for name, state in found.files.items() if refusals[name] is None
        }
        times = {name: state.st_mtime_ns for name, state in {**found.files, **found.folders}.items()}
        return states, listing_of(found.links, times)

    def _contents(self) -> Contents:
        """Return the contents of both folders."""
        found = contents(self._folder, skipped=self._is_skipped)
        for part in self._parts:
            each = contents(self._elsewhere, part=self._elsewhere / part, skipped=self._is_skipped)
            for kind in ("files", "folders", "links", "left_out"):
                before, more = getattr(found, kind), getattr(each, kind)
                kept = {name: value for name, value in before.items() if not is_below(name, [part])}
                found = found._replace(**{kind: {**kept, **more}})
        return found

    def _is_skipped(self, name: str) -> bool:
        *above, last = name.split("/")
        return last in LEFT_OUT or ((not above or is_below(name, self._parts)) and self._without(last))

    def _is_checkpoint(self, name: str) -> bool:
        return is_below(name, self._parts) and is_checkpoint_name(name)

    def _root(self, name: str) -> Path:
        return self._elsewhere if is_below(name, self._parts) else self._folder

    def _in_root(self, root: Path, values: Mapping[str, ValueT]) -> dict[str, ValueT]:
        return {name: value for name, value in values.items() if self._root(name) == root}

    def _stored_listing(self) -> Listing:
        content = object_store.read(self._s3, self._listing_place)
        try:
            return Listing() if content is None else Listing.model_validate_json(content)
        except ValidationError:
            log.warning("warning: %s is damaged: links and times of its files are not restored", self._listing_place)
            return Listing()


class CheckpointLinks:
    """The links right below a script's folder of checkpoints (`last.ckpt`, `latest`), kept in `checkpoints/links.json`.

    A changed link is saved only once its new target is on S3.
    """

    def __init__(self, s3: "S3Client", remote: S3Location, folder: Path, skipped: SkippedFiles) -> None:
        """`folder` contains `checkpoints/`; `remote` is the run's `checkpoints/`."""
        self._s3 = s3
        self._place = remote / CHECKPOINT_LINKS
        self._folder = folder
        self._root = folder / "checkpoints"
        self._skipped = skipped
        self._links: dict[str, str] = {}
        """The links on S3."""

    @property
    def entries(self) -> set[str]:
        """The checkpoints, `checkpoints/NAME`, to which links on S3 point."""
        return {f"checkpoints/{target.partition('/')[0]}" for target in self._links.values()}

    def upload(self, entries: Collection[str], *, check: Callable[[], None]) -> None:
        """Upload changed links to one of `entries`, which are on S3. `check` is `check_newest`."""
        links = {}
        for path in sorted(self._root.iterdir()):
            if not path.is_symlink() or is_unfinished(path.name):
                continue
            target = inner_target(self._root, path)
            if target is None and path.exists():
                self._skipped.warn({path.name: f"a link to {path.readlink()}"})
            elif target is None or self._entry(path) not in entries:
                target = self._links.get(path.name)
            if target is not None:
                links[path.name] = target
        kept = listing_of(links, {}).links
        if kept != self._links:
            check()
            content = Listing(links=kept).model_dump_json().encode()
            object_store.write(self._s3, self._place, content, tag=CHECKPOINT_TAG)
            self._links = kept

    def restore(self) -> None:
        """Recreate the links of earlier attempts."""
        content = object_store.read(self._s3, self._place)
        try:
            links = {} if content is None else Listing.model_validate_json(content).links
        except ValidationError:
            log.warning("warning: %s is damaged: its links are not restored", self._place)
            return
        refused = make_links(self._root, links)
        self._skipped.warn(refused)
        self._links = {name: target for name, target in links.items() if name not in refused}

    def _entry(self, link: Path) -> str:
        """Return the checkpoint that a link resolves to."""
        found = os.path.relpath(os.path.realpath(link), os.path.realpath(self._folder))
        return "/".join(found.split("/")[:2])
