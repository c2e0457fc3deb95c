"""Pin the external base images of our images by digest, in images/locks/bases.txt.

    python -m jobs.images.bases        fetches the digests from the registries through the Docker engine

If a base is not in the file, a build uses whatever its tag names on that day. If a tag has an index of several
architectures, the digest is the index's. The file lists only bases that the Dockerfiles name. To pin another base, put
its digest into --build-arg BASE_IMAGE.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import docker
from docker.errors import DockerException

from jobs.core.errors import ConfigurationError
from jobs.core.images import IMAGES_FOLDER, Image, Release, image, images, release, releases_of
from jobs.core.output import run_program
from jobs.images import engine

BASE_ARGUMENT = "BASE_IMAGE"

BASES_FILE = IMAGES_FOLDER / "locks" / "bases.txt"

_LINE = re.compile(r"(\S+)@(sha256:[0-9a-f]{64})")


def default_base(root: Image, row: Release) -> str:
    """Return the default base of a root image, with its digest if it is known.

    Empty if the Dockerfile has no default base.
    """
    reference = _named_base(root, row)
    digest = known(BASES_FILE).get(reference)
    return f"{reference}@{digest}" if digest else reference


def known(file: Path) -> dict[str, str]:
    """Return the recorded digests, by the name and tag of the base."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {found[1]: found[2] for line in lines if (found := _LINE.fullmatch(line))}


def digest_of(reference: str, client: docker.DockerClient) -> str:
    """Return a tag's digest, `sha256:…`. Raises ConfigurationError if the registry does not answer."""
    try:
        digest: str = client.images.get_registry_data(reference).id
    except DockerException as error:
        raise ConfigurationError(f"{reference}: its registry did not answer with a digest: {error}") from None
    return digest


def lock(references: Iterable[str], file: Path, client: docker.DockerClient) -> int:
    """Write and print the digests of bases. Return how many could not be fetched; their old digests are kept."""
    found, failed = known(file), 0
    for reference in references:
        try:
            found[reference] = digest_of(reference, client)
            print(f"{reference}@{found[reference]}")
        except ConfigurationError as error:  # noqa: PERF203 - other bases have other registries
            failed += 1
            kept = f"keeping its digest {found[reference]}" if reference in found else "keeping its tag"
            print(f"{error}; {kept}", file=sys.stderr)
    if found:
        file.write_text("".join(f"{reference}@{digest}\n" for reference, digest in sorted(found.items())))
    return failed


def _named_base(root: Image, row: Release) -> str:
    defaults = dict(re.findall(r"^ARG (\w+)=\"?([^\s\"]+)", root.dockerfile.read_text(), re.MULTILINE))
    given = {**defaults, **row.build_arguments}
    return re.sub(r"\$\{(\w+)\}", lambda found: given.get(found[1], ""), given.get(BASE_ARGUMENT, ""))


def main() -> int:
    roots = [img for img in map(image, images()) if img.parent is None]
    bases = {_named_base(img, release(name)): None for img in roots for name in releases_of(img.name)}
    return 1 if lock([base for base in bases if base], BASES_FILE, engine.connect()) else 0


if __name__ == "__main__":
    run_program(main)
