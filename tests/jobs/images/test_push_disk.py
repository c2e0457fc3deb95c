"""A push and a pull that fill the disk of the engine, as an engine tells it: in an answer that began well."""

from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

import pytest
from docker import DockerClient

from jobs.aws.connection import Aws
from jobs.contract.errors import ConfigurationError
from jobs.contract.image_hierarchy import image
from jobs.contract.releases import release
from jobs.images.push import Push, Registry
from jobs.images.stage_images import StageImages
from tests.support.http_server import JsonHandler, serving

HOST = "registry.example.com"
TAG = f"{release().name}-0123456789ab"
FULL = "write /var/lib/docker/tmp/GetImageBlob1: no space left on device"


class FullEngine(JsonHandler, BaseHTTPRequestHandler):
    """An engine that has an image to push and no room for another one. Its registry has `cpu` only."""

    removed: list[str] = []  # noqa: RUF012 - the server's own

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.removeprefix("/v1.41")
        if path.startswith("/distribution/"):
            there = "/cpu:" in path
            self.answer(
                *((200, {"Descriptor": {"digest": "sha256:" + "a" * 64}}) if there else (404, {"message": "no"}))
            )
        elif path.startswith("/images/"):
            self.answer(200, {"Id": "sha256:1", "RepoDigests": None})
        else:
            self.answer(500, {"message": FULL})

    def do_POST(self) -> None:
        if "/tag" in self.path:
            self.answer(201, {})
        else:
            self.answer(200, {"error": FULL, "errorDetail": {"message": FULL}})

    def do_DELETE(self) -> None:
        self.removed.append(urlsplit(self.path).path.rpartition("/")[2])
        self.answer(200, [])


@pytest.fixture
def push(monkeypatch: pytest.MonkeyPatch) -> Iterator[Push]:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    stage = StageImages(
        stage="dev",
        release=release().name,
        repositories={name: f"{HOST}/{name}" for name in ("cpu", "cpu-notebook")},
        recorded={},
        default=(),
    )
    registry = Registry(host=HOST, credentials={"username": "AWS", "password": "x"})
    with serving(FullEngine) as port, closing(DockerClient(f"tcp://127.0.0.1:{port}", version="1.41")) as client:
        yield Push(client=client, aws=Aws(region="us-east-1"), stage=stage, registry=registry, tag=TAG)


def test_a_push_that_fills_the_disk_says_so_and_leaves_no_name(push: Push) -> None:
    FullEngine.removed.clear()
    with pytest.raises(ConfigurationError) as caught:
        push.run([image("cpu-notebook")], print)
    assert str(caught.value).startswith("the disk of the Docker engine is full: 'cpu-notebook' was not pushed to ")
    assert FULL in str(caught.value)
    assert "docker builder prune" in str(caught.value.next_step)
    assert FullEngine.removed == [f"cpu-notebook:{TAG}"]


def test_a_pull_that_fills_the_disk_says_so(push: Push) -> None:
    with pytest.raises(ConfigurationError) as caught:
        push.fetch(image("cpu"))
    assert str(caught.value).startswith("the disk of the Docker engine is full: 'cpu' was not pulled from ")
    assert FULL in str(caught.value)
