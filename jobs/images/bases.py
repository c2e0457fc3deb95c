"""The images from elsewhere that ours are built on, each by its digest: images/locks/bases.txt.

    python -m jobs.images.bases        has the Docker engine ask their registries, and writes the digests

A base that is not in that file is what its tag names on the day of a build. If a tag has an index for several
architectures, the digest is that of the index. The file holds only the bases that the Dockerfiles name. A user of
--build-arg BASE_IMAGE pins another base in its value.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import docker
from docker.errors import DockerException

from jobs.core.errors import ConfigurationError
from jobs.core.images import IMAGES_FOLDER, Image, Release, image, images, release, releases
from jobs.core.output import run_program
from jobs.images import engine

BASE_ARGUMENT = "BASE_IMAGE"

BASES_FILE = IMAGES_FOLDER / "locks" / "bases.txt"

_LINE = re.compile(r"(\S+)@(sha256:[0-9a-f]{64})")


def default_base(root: Image, row: Release) -> str:
    """Return the default base of a root, by its digest if that is known.

    Empty if its Dockerfile leaves that to the build.
    """
    reference = _named_base(root, row)
    digest = known(BASES_FILE).get(reference)
    return f"{reference}@{digest}" if digest else reference


def known(file: Path) -> dict[str, str]:
    """Return the digests that are written down, by the name and tag of their bases."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {found[1]: found[2] for line in lines if (found := _LINE.fullmatch(line))}


def digest_of(reference: str, client: docker.DockerClient) -> str:
    """Return the digest of a tag, `sha256:…`. Raises ConfigurationError if its registry does not answer."""
    try:
        digest: str = client.images.get_registry_data(reference).id
    except DockerException as error:
        raise ConfigurationError(f"{reference}: its registry did not answer with a digest: {error}") from None
    return digest


def lock(references: Iterable[str], file: Path, client: docker.DockerClient) -> int:
    """Write and print the digests of bases. Return how many registries did not answer: those digests stay."""
    found, failed = known(file), 0
    for reference in references:
        try:
            found[reference] = digest_of(reference, client)
            print(f"{reference}@{found[reference]}")
        except ConfigurationError as error:  # noqa: PERF203 - each has a registry of its own
            failed += 1
            stays = f"its digest stays {found[reference]}" if reference in found else "its tag stays"
            print(f"{error}; {stays}", file=sys.stderr)
    if found:
        file.write_text("".join(f"{reference}@{digest}\n" for reference, digest in sorted(found.items())))
    return failed


def _named_base(root: Image, row: Release) -> str:
    defaults = dict(re.findall(r"^ARG (\w+)=\"?([^\s\"]+)", root.dockerfile.read_text(), re.MULTILINE))
    given = {**defaults, **row.build_arguments}
    return re.sub(r"\$\{(\w+)\}", lambda found: given.get(found[1], ""), given.get(BASE_ARGUMENT, ""))


def main() -> int:
    roots = [one for one in map(image, images()) if one.parent is None]
    bases = {_named_base(one, release(name)): None for one in roots for name in releases()}
    return 1 if lock([base for base in bases if base], BASES_FILE, engine.connect()) else 0


if __name__ == "__main__":
    run_program(main)
