"""The links right below a script's folder of checkpoints (`last.ckpt`, `latest`), kept in `checkpoints/links.json`."""

import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from jobs.aws import s3 as object_store
from jobs.container.saving.saved_folder import LeftOut
from jobs.container.saving.script_complete import is_unfinished
from jobs.core.folder_listing import Listing, inner_target, listing_of, make_links
from jobs.core.locations import S3Location
from jobs.core.run import CHECKPOINT_LINKS, CHECKPOINT_TAG

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")


class KeptLinks:
    """The links of one folder of checkpoints, each as it was when what it points to was on S3."""

    def __init__(self, s3: "S3Client", remote: S3Location, folder: Path, left_out: LeftOut) -> None:
        """`folder` holds `checkpoints/`, `remote` is the run's."""
        self._s3 = s3
        self._place = remote / CHECKPOINT_LINKS
        self._folder = folder
        self._root = folder / "checkpoints"
        self._left_out = left_out
        self._links: dict[str, str] = {}
        """As they are on S3."""

    @property
    def entries(self) -> set[str]:
        """The checkpoints, `checkpoints/NAME`, that links on S3 point to."""
        return {f"checkpoints/{target.partition('/')[0]}" for target in self._links.values()}

    def keep(self, entries: Collection[str], *, check: Callable[[], None]) -> None:
        """Write the links that have changed and point to one of the `entries` on S3. `check` is `check_newest`."""
        links = {}
        for path in sorted(self._root.iterdir()):
            if not path.is_symlink() or is_unfinished(path.name):
                continue
            target = inner_target(self._root, path)
            if target is None and path.exists():
                self._left_out.warn({path.name: f"a link to {path.readlink()}"})
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
        """Make the links of earlier attempts again."""
        content = object_store.read(self._s3, self._place)
        try:
            links = {} if content is None else Listing.model_validate_json(content).links
        except ValidationError:
            log.warning("warning: %s is damaged: its links are not restored", self._place)
            return
        refused = make_links(self._root, links)
        self._left_out.warn(refused)
        self._links = {name: target for name, target in links.items() if name not in refused}

    def _entry(self, link: Path) -> str:
        """Return which checkpoint a link leads to in the end."""
        found = os.path.relpath(os.path.realpath(link), os.path.realpath(self._folder))
        return "/".join(found.split("/")[:2])
