"""Pinning the bases of our images by digest."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import NotFound

from jobs.core.git import ROOT
from jobs.core.images import chosen_releases, image
from jobs.images import bases
from jobs.images.build import Build

DIGEST = "sha256:" + "0a" * 32
THERE = "registry.example/org/python:3.11"


class _Engine:
    """An engine that knows the digest of one tag, and gets no answer for others."""

    images = property(lambda self: self)

    def get_registry_data(self, reference: str) -> SimpleNamespace:
        if reference != THERE:
            raise NotFound("manifest unknown")
        return SimpleNamespace(id=DIGEST)


def test_known_digests_are_written_and_others_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, there, gone = tmp_path / "bases.txt", THERE, "registry.example/python:3.12"
    client: Any = _Engine()
    assert bases.lock([gone], file, client) == 1
    assert not file.exists()
    assert (
        capsys.readouterr().err
        == f"{gone}: its registry did not answer with a digest: manifest unknown; keeping its tag\n"
    )
    file.write_text(f"{gone}@{DIGEST}\n")
    assert bases.lock([there, gone], file, client) == 1
    assert bases.known(file) == {there: DIGEST, gone: DIGEST}
    printed = capsys.readouterr()
    assert printed.out == f"{there}@{DIGEST}\n"
    assert printed.err.endswith(f"; keeping its digest {DIGEST}\n")


@pytest.mark.parametrize("name", ["cpu", "cuda", "gaudi"])
def test_image_is_built_on_the_base_with_its_known_digest(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, file = image(name), tmp_path / "bases.txt"
    monkeypatch.setattr(bases, "BASES_FILE", file)
    row = chosen_releases()[name]
    tag = bases.default_base(root, row)
    assert tag
    assert "@" not in tag
    file.write_text(f"{tag}@{DIGEST}\n")
    assert bases.default_base(root, row) == f"{tag}@{DIGEST}"

    def command(**build_arguments: str) -> list[str]:
        build = Build(
            client=docker_client(), releases=chosen_releases(), revision="0" * 12, build_arguments=build_arguments
        )
        return build._command(root, ROOT)

    assert f"BASE_IMAGE={tag}@{DIGEST}" in command()
    assert f"trainyard.base={tag}@{DIGEST}" in command()
    assert "BASE_IMAGE=mirror/python:3.11" in command(BASE_IMAGE="mirror/python:3.11")
    assert not [word for word in command(BASE_IMAGE="mirror/python:3.11") if DIGEST in word]


def docker_client() -> Any:
    """Return no client: building a command needs no engine."""
    return None
