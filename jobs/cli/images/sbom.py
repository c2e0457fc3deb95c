"""`trainyard images sbom`: what images, and this machine's own environment, hold, as documents."""

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from jobs.cli import tables
from jobs.contract import image_hierarchy as hierarchy
from jobs.contract.errors import NotFoundError
from jobs.contract.releases import release
from jobs.contract.revision import image_tag, local_name, source_revision
from jobs.images import engine
from jobs.images.sbom import LAPTOP, SUFFIX, syft, write


def sbom(names: Sequence[str], *, release_name: str | None, folder: Path) -> None:
    """Print the path of each document once it is written.

    Raises UsageError for an image that there is not, NotFoundError for one that was not built.
    """
    row = release(release_name)
    chosen = [hierarchy.image(name) for name in dict.fromkeys(names) if name != LAPTOP]
    syft()
    if LAPTOP in names:
        _write(f"dir:{sys.prefix}", title=f"trainyard/{LAPTOP}", tag=version("trainyard"), folder=folder)
    if not chosen:
        return
    client = engine.connect()
    tag = image_tag(row.name, source_revision())
    built = {one.name: local_name(one.name, tag) for one in chosen}
    for name, local in built.items():
        if not client.images.list(name=local):
            raise NotFoundError(
                f"the Docker engine has no {local}", next_step=f"trainyard images build {name} --release {row.name}"
            )
    for name, local in built.items():
        _write(f"docker:{local}", title=f"trainyard/{name}", tag=tag, folder=folder)


def _write(source: str, *, title: str, tag: str, folder: Path) -> None:
    path = folder / f"{title.removeprefix('trainyard/')}-{tag}{SUFFIX}"
    with tables.stderr().status(f"reading {source.partition(':')[2]}"):
        write(source, title=title, tag=tag, path=path)
    tables.stdout().print(str(path), soft_wrap=True, highlight=False, markup=False)
