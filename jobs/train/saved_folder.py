"""A local folder whose files are kept on S3 while they are worked on: what changed is saved, all is restored."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.aws import s3 as object_store
from jobs.contract.errors import TrainyardError
from jobs.contract.locations import S3Location

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

LEFT_OUT = (".ipynb_checkpoints", "__pycache__")
"""Folders that are not saved, since they are made anew: JupyterLab's own copies of notebooks, compiled modules."""

LARGE_BYTES = 100_000_000_000
"""A folder of this size takes a quarter of an hour to upload at 1 Gbit/s: more than any notice leaves."""

_State = tuple[int, int]
"""The state of a file: when it was changed, in nanoseconds, and its size in bytes."""


class SavedFolder:
    """Keeps the files of `folder` at `place` on S3. Symbolic links are not followed: what they lead to is not saved."""

    def __init__(
        self,
        s3: "S3Client",
        folder: Path,
        place: S3Location,
        *,
        without: Callable[[str], bool] = lambda _: False,
        check_may_write: Callable[[], None] = lambda: None,
    ) -> None:
        """`without` returns whether what is called so right below the folder is not to be saved.

        `check_may_write` raises where the place is somebody else's to write by now; it is asked before each
        file that is written, and before any is deleted.
        """
        self._s3 = s3
        self._without = without
        self._check_may_write = check_may_write
        self._folder = folder
        self._place = place
        self._saved: dict[str, _State] = {}
        self._has_warned = False

    def restore(self, *, outdated: Callable[[str], bool] = lambda _: False) -> int:
        """Bring back what is saved. Returns the number of files. Raises TrainyardError where one cannot be read.

        `outdated` returns whether a file, by its name below the folder, is not wanted again: the next save deletes it.
        """
        saved = list(object_store.sizes(self._s3, self._place))
        left = [name for name in saved if outdated(name)]
        names = [name for name in saved if not outdated(name)]
        object_store.download_all(self._s3, self._place, names, self._folder)
        self._saved = {**dict.fromkeys(left, (0, 0)), **dict(self._states())}
        return len(names)

    def save(self) -> bool:
        """Save what has changed since the last time, and delete what is gone. Returns True if there was anything to do.

        A file that changes meanwhile is saved again the next time. What S3 does not delete costs a warning, and the
        next save tries it again. Raises TrainyardError where S3 does not take a file; what it took counts as saved.
        Raises what `check_may_write` does.
        """
        found = dict(self._states())
        changed = [name for name, state in found.items() if self._saved.get(name) != state]
        gone = [name for name in self._saved if name not in found]
        self._warn(sum(size for _, size in found.values()))

        def upload(name: str) -> None:
            self._check_may_write()
            try:
                object_store.upload(self._s3, self._folder / name, self._place / name)
            except FileNotFoundError:
                return  # deleted since it was found
            self._saved[name] = found[name]

        object_store.in_threads(upload, changed)
        if gone:
            self._check_may_write()
        try:
            object_store.delete_all(self._s3, self._place, gone)
        except TrainyardError as error:
            log.warning("warning: files that are gone from %s stay on S3: %s", self._folder.name, error.args[0])
        else:
            for name in gone:
                del self._saved[name]
        return bool(changed or gone)

    def _warn(self, size_bytes: int) -> None:
        if size_bytes <= LARGE_BYTES or self._has_warned:
            return
        self._has_warned = True
        log.warning(
            "warning: %s has %.1f GB by now. All of it is uploaded to %s, and downloaded by each further attempt. "
            "Next: write what is not to be kept elsewhere, below $TMPDIR for instance",
            self._folder,
            size_bytes / 1e9,
            self._place,
        )

    def _states(self) -> Iterator[tuple[str, _State]]:
        for folder, subfolders, names in os.walk(self._folder):
            is_top = Path(folder) == self._folder
            subfolders[:] = [
                name for name in subfolders if name not in LEFT_OUT and not (is_top and self._without(name))
            ]
            for name in names:
                path = Path(folder, name)
                try:
                    state = path.lstat()
                except FileNotFoundError:
                    continue
                if path.is_file() and not path.is_symlink():
                    yield str(path.relative_to(self._folder)), (state.st_mtime_ns, state.st_size)
