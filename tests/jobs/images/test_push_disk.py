"""A push and a pull that fill the disk of the engine, as an engine tells it: in an answer that began well."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
from docker import DockerClient

from jobs.aws.connection import Aws
from jobs.contract.errors import ConfigurationError
from jobs.contract.image_hierarchy import Image, image
from jobs.contract.releases import release
from jobs.images.push import Push, Pushed, Registry
from jobs.images.stage_images import StageImages

HOST = "registry.example.com"
TAG = f"{release().name}-0123456789ab"
FULL = "write /var/lib/docker/tmp/GetImageBlob1: no space left on device"


class FullEngine(BaseHTTPRequestHandler):
    """Has an image to push, and no room for another one. Its registry has `cpu` only."""

    removed: list[str] = []  # noqa: RUF012 - the server's own

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.removeprefix("/v1.41")
        if path.startswith("/distribution/"):
            there = "/cpu:" in path
            self._answer(
                *((200, {"Descriptor": {"digest": "sha256:" + "a" * 64}}) if there else (404, {"message": "no"}))
            )
        elif path.startswith("/images/"):
            self._answer(200, {"Id": "sha256:1", "RepoDigests": None})
        else:
            self._answer(500, {"message": FULL})

    def do_POST(self) -> None:
        if "/tag" in self.path:
            self._answer(201, {})
        else:
            self._answer(200, {"error": FULL, "errorDetail": {"message": FULL}})

    def do_DELETE(self) -> None:
        self.removed.append(urlsplit(self.path).path.rpartition("/")[2])
        self._answer(200, [])

    def _answer(self, status: int, value: object) -> None:
        self.close_connection = True
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's own name
        pass


class Watcher:
    """Looks away."""

    def begins(self, image: Image, target: str) -> None:
        pass

    def goes_on(self, *told: Any) -> None:
        pass

    def ends(self, pushed: Pushed) -> None:
        pass


@pytest.fixture
def push(monkeypatch: pytest.MonkeyPatch) -> Iterator[Push]:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), FullEngine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    client = DockerClient(base_url=f"tcp://127.0.0.1:{server.server_port}", version="1.41")
    stage = StageImages(
        stage="dev",
        release=release().name,
        repositories={name: f"{HOST}/{name}" for name in ("cpu", "cpu-ray")},
        recorded={},
        default=(),
    )
    registry = Registry(host=HOST, credentials={"username": "AWS", "password": "x"})
    yield Push(client=client, aws=Aws(region="us-east-1"), stage=stage, registry=registry, tag=TAG)
    client.close()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_push_that_fills_the_disk_says_so_and_leaves_no_name(push: Push) -> None:
    FullEngine.removed.clear()
    with pytest.raises(ConfigurationError) as caught:
        push.run([image("cpu-ray")], Watcher())
    assert str(caught.value).startswith("the disk of the Docker engine is full: 'cpu-ray' was not pushed to ")
    assert FULL in str(caught.value)
    assert "docker builder prune" in str(caught.value.next_step)
    assert FullEngine.removed == [f"cpu-ray:{TAG}"]


def test_a_pull_that_fills_the_disk_says_so(push: Push) -> None:
    with pytest.raises(ConfigurationError) as caught:
        push.fetch(image("cpu"))
    assert str(caught.value).startswith("the disk of the Docker engine is full: 'cpu' was not pulled from ")
    assert FULL in str(caught.value)
