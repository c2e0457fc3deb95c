"""The images from elsewhere that ours are built on, each by its digest: images/locks/bases.txt.

    python -m jobs.images.bases        asks their registries, and writes what they say

A base that is not in that file is what its tag names on the day of a build. The digest is that of the tag's index,
where it has one for several architectures, so it stands for all of them. Only what the Dockerfiles name by themselves
is in it: another base, by --build-arg BASE_IMAGE, is its user's to pin.
"""

import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from jobs.contract.errors import ConfigurationError
from jobs.contract.image_hierarchy import IMAGES_FOLDER, Image, image, images
from jobs.contract.output import run_program
from jobs.contract.releases import Release, release, releases

BASE_ARGUMENT = "BASE_IMAGE"

BASES_FILE = IMAGES_FOLDER / "locks" / "bases.txt"

_LINE = re.compile(r"(\S+)@(sha256:[0-9a-f]{64})")
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')

_MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
"""An index first: what a client takes decides which digest a registry names."""

_ANSWER_SECONDS = 20


def default_base(root: Image, row: Release) -> str:
    """Return the base of a root where nobody names another, by its digest where that is known.

    Empty where its Dockerfile leaves that to the build.
    """
    reference = _named_base(root, row)
    digest = known(BASES_FILE).get(reference)
    return f"{reference}@{digest}" if digest else reference


def known(file: Path) -> dict[str, str]:
    """Return the digests that are written down, by the name and tag of their bases."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {found[1]: found[2] for line in lines if (found := _LINE.fullmatch(line))}


def digest_of(reference: str) -> str:
    """Ask a registry what a tag stands for. Returns `sha256:…`.

    It is asked as the OCI Distribution Specification says (v1.1, Pulling manifests), and where it wants a token, as
    Docker Hub does, for one that everybody gets (distribution.github.io, Token Authentication Specification). Raises
    ConfigurationError where there is no answer.
    """
    registry, repository, tag = _parts(reference)
    scheme = "http" if registry.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
    url = f"{scheme}://{registry}/v2/{repository}/manifests/{tag}"
    try:
        try:
            headers = _head(url)
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise
            headers = _head(url, token=_token(error.headers.get("WWW-Authenticate", "")))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{reference}: its registry did not say its digest: {error}") from None
    digest = headers.get("Docker-Content-Digest", "")
    if not _LINE.fullmatch(f"x@{digest}"):
        raise ConfigurationError(f"{reference}: its registry answered without a digest")
    return digest


def lock(references: Iterable[str], file: Path) -> int:
    """Write the digests of bases, and say each. Returns how many could not be asked for: they stay as they were."""
    found, failed = known(file), 0
    for reference in references:
        try:
            found[reference] = digest_of(reference)
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


def _parts(reference: str) -> tuple[str, str, str]:
    """Return registry, repository and tag of an image's name, which is Docker Hub's where it names no registry."""
    name, _, tag = reference.rpartition(":") if ":" in reference.rpartition("/")[2] else (reference, "", "latest")
    registry, _, repository = name.partition("/")
    if not repository or not (registry == "localhost" or "." in registry or ":" in registry):
        return "registry-1.docker.io", name if "/" in name else f"library/{name}", tag
    return registry, repository, tag


def _head(url: str, *, token: str | None = None) -> Mapping[str, str]:
    bearer = {"Authorization": f"Bearer {token}"} if token else {}
    asked = urllib.request.Request(  # noqa: S310 - http to this machine alone
        url, headers={"Accept": ", ".join(_MANIFESTS), **bearer}, method="HEAD"
    )
    with urllib.request.urlopen(asked, timeout=_ANSWER_SECONDS) as answer:  # noqa: S310
        headers: Mapping[str, str] = answer.headers
        return headers


def _token(challenge: str) -> str:
    """Return the token that a challenge `Bearer realm="…",service="…",scope="…"` asks for. Raises ValueError."""
    said = dict(_CHALLENGE.findall(challenge))
    realm = said.pop("realm", "")
    if not challenge.startswith("Bearer ") or urlsplit(realm).scheme not in ("http", "https"):
        raise ValueError("it wants credentials")
    with urllib.request.urlopen(f"{realm}?{urlencode(said)}", timeout=_ANSWER_SECONDS) as answer:  # noqa: S310
        content = json.load(answer)
    token: str = content.get("token") or content["access_token"]
    return token


def main() -> int:
    roots = [one for one in map(image, images()) if one.parent is None]
    bases = {_named_base(one, release(name)): None for one in roots for name in releases()}
    return 1 if lock([base for base in bases if base], BASES_FILE) else 0


if __name__ == "__main__":
    run_program(main)
