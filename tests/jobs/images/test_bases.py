"""The bases of our images by digest, told by a registry that answers as the OCI Distribution Specification says."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest

from jobs.contract.errors import ConfigurationError
from jobs.contract.image_hierarchy import image
from jobs.contract.releases import release
from jobs.images import bases
from jobs.images.build import Build

DIGEST = "sha256:" + "0a" * 32


class _Registry(BaseHTTPRequestHandler):
    """Has `org/python:3.11`, and gives its digest to who has asked for a token first, as Docker Hub does."""

    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.asked.append(f"HEAD {self.path}")
        own = f"http://{self.headers['Host']}"
        if self.headers.get("Authorization") != "Bearer for-everybody":
            self.send_response(401)
            scope = 'service="registry.example",scope="repository:org/python:pull"'
            self.send_header("WWW-Authenticate", f'Bearer realm="{own}/token",{scope}')
        elif self.path == "/v2/org/python/manifests/3.11" and "image.index" in self.headers["Accept"]:
            self.send_response(200)
            self.send_header("Docker-Content-Digest", DIGEST)
        elif self.path == "/v2/org/silent/manifests/latest":
            self.send_response(200)
        else:
            self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.asked.append(f"GET {self.path}")
        asked = parse_qs(urlsplit(self.path).query)
        pulls = asked == {"service": ["registry.example"], "scope": ["repository:org/python:pull"]}
        content = json.dumps({"token": "for-everybody" if pulls else "for-nobody"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def running() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Registry) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def registry() -> Iterator[str]:
    _Registry.asked.clear()
    with running() as address:
        yield address


def test_a_registry_is_asked_with_a_token_that_everybody_gets(registry: str) -> None:
    assert bases.digest_of(f"{registry}/org/python:3.11") == DIGEST
    assert [asked.partition("?")[0] for asked in _Registry.asked] == [
        "HEAD /v2/org/python/manifests/3.11",
        "GET /token",
        "HEAD /v2/org/python/manifests/3.11",
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("org/python:3.12", "did not say its digest: HTTP Error 404"), ("org/silent", "answered without a digest")],
)
def test_what_a_registry_does_not_say_is_told(registry: str, name: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        bases.digest_of(f"{registry}/{name}")


def test_what_is_known_is_written_and_the_rest_keeps_what_it_had(
    registry: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, there, gone = tmp_path / "bases.txt", f"{registry}/org/python:3.11", "127.0.0.1:1/python:3.11"
    assert bases.lock([gone], file) == 1
    assert not file.exists()
    assert capsys.readouterr().err.endswith("; its tag stays\n")
    file.write_text(f"{gone}@{DIGEST}\n")
    assert bases.lock([there, gone], file) == 1
    assert bases.known(file) == {there: DIGEST, gone: DIGEST}
    said = capsys.readouterr()
    assert said.out == f"{there}@{DIGEST}\n"
    assert said.err.endswith(f"; its digest stays {DIGEST}\n")


@pytest.mark.parametrize("name", ["cpu", "cuda", "gaudi"])
def test_an_image_is_built_on_the_very_base_whose_digest_is_known(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, file = image(name), tmp_path / "bases.txt"
    monkeypatch.setattr(bases, "BASES_FILE", file)
    tag = bases.default_base(root, release())
    assert tag
    assert "@" not in tag
    file.write_text(f"{tag}@{DIGEST}\n")
    assert bases.default_base(root, release()) == f"{tag}@{DIGEST}"

    def command(**build_arguments: str) -> list[str]:
        build = Build(client=docker_client(), release=release(), revision="0" * 12, build_arguments=build_arguments)
        return build._command(root)

    assert f"BASE_IMAGE={tag}@{DIGEST}" in command()
    assert f"trainyard.base={tag}@{DIGEST}" in command()
    assert "BASE_IMAGE=mirror/python:3.11" in command(BASE_IMAGE="mirror/python:3.11")
    assert not [word for word in command(BASE_IMAGE="mirror/python:3.11") if DIGEST in word]


def docker_client() -> Any:
    """No engine is asked how an image would be built."""
    return None


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("python", ("registry-1.docker.io", "library/python", "latest")),
        ("org/python:3.11", ("registry-1.docker.io", "org/python", "3.11")),
        (
            "public.ecr.aws/docker/library/python:3.11-slim-bookworm",
            ("public.ecr.aws", "docker/library/python", "3.11-slim-bookworm"),
        ),
        ("localhost:5000/python", ("localhost:5000", "python", "latest")),
    ],
)
def test_a_name_without_a_registry_is_docker_hubs(reference: str, parts: tuple[str, str, str]) -> None:
    assert bases._parts(reference) == parts
