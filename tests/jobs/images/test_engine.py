"""Errors of the Docker engine as the user sees them. Those that this machine can cause are really caused."""

from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from time import sleep
from urllib.parse import urlsplit

import pytest
from docker import DockerClient
from docker.errors import DockerException
from requests import ReadTimeout

from jobs.core.errors import ConfigurationError
from jobs.core.images import chosen_releases, release
from jobs.images import engine
from jobs.images.inventory import local_images
from tests.support.http_server import JsonHandler, serving

RELEASE, REVISION = release(of="cpu").name, "0123456789ab"


def _tagged(key: str, *tags: str, created: int) -> dict[str, object]:
    names = [f"trainyard/{tag}" for tag in tags]
    return {"Id": f"sha256:{key}", "RepoTags": names or None, "Created": created, "Size": 400}


IN_CONTAINERD = {
    "/images/json": [
        _tagged("1", "cpu:cpu-2026.11-0123456789ab", created=1_700_000_000),
        _tagged("2", created=1_700_000_001),
        _tagged("3", "cpu:cpu-2026.11-ba9876543210", "cpu:cpu-2026.10-ba9876543210", created=1_700_000_002),
    ],
    **{f"/images/sha256:{key}/json": {"Id": f"sha256:{key}", "Size": 300} for key in "13"},
    **{f"/images/sha256:{key}/history": [{"Size": 0}, {"Size": 400}, {"Size": 600}] for key in "13"},
}
"""Answers of an engine that stores images in containerd: packed sizes of images, unpacked sizes of layers."""


class FakeEngine(JsonHandler, BaseHTTPRequestHandler):
    """An engine that answers pushes late, and everything else with a full disk."""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.removeprefix("/v1.41")
        if path == "/version":
            self.answer(200, {"ApiVersion": "1.41", "Arch": "amd64", "Os": "linux"})
        elif path == "/_ping":
            self.answer(200, "OK")
        elif path in IN_CONTAINERD:
            self.answer(200, IN_CONTAINERD[path])
        else:
            self.answer(500, {"message": "write /var/lib/docker/tmp/x: no space left on device"})

    def do_POST(self) -> None:
        sleep(2)  # while it packs a layer
        self.answer(200, {"status": "done"})


@pytest.fixture
def other_engine() -> Iterator[DockerClient]:
    with serving(FakeEngine) as port, closing(DockerClient(f"tcp://127.0.0.1:{port}", version="1.41")) as client:
        yield client


def _docker(folder: Path, script: str) -> Path:
    path = folder / "docker"
    folder.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_first_docker_command_that_can_build_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Like Docker 23 and later without the buildx plug-in.
    without_buildx = _docker(
        tmp_path / "without",
        'if [ "$DOCKER_BUILDKIT" = 1 ]; then\n'
        "  echo 'ERROR: BuildKit is enabled but the buildx component is missing or broken.' >&2; exit 1\n"
        "fi\n"
        "echo '      --progress string'",
    )
    able = _docker(tmp_path / "able", "echo '      --progress string'")
    for path, named in (
        (str(without_buildx.parent), f"BuildKit: {without_buildx}: ERROR: .*missing or broken.\nNext: install"),
        (str(tmp_path), "no docker command on PATH can build with BuildKit\nNext: install the buildx plug-in"),
    ):
        monkeypatch.setenv("PATH", path)
        engine.build_command.cache_clear()
        with pytest.raises(ConfigurationError, match=named):
            engine.build_command()
    monkeypatch.setenv("PATH", f"{tmp_path}/none:{without_buildx.parent}:{able.parent}")
    engine.build_command.cache_clear()
    assert engine.build_command() == str(able)
    engine.build_command.cache_clear()


def test_push_may_be_silent_for_longer_than_an_answer(
    other_engine: DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", other_engine.api.base_url.replace("http://", "tcp://"))
    monkeypatch.setattr(engine, "ANSWER_SECONDS", 1)
    with closing(engine.connect(engine.TRANSFER_SECONDS)) as client:
        assert list(client.api.push("a", stream=True, decode=True)) == [{"status": "done"}]
    with closing(engine.connect(engine.ANSWER_SECONDS)) as client, pytest.raises(ReadTimeout):
        client.api.push("a", stream=True)


@pytest.mark.parametrize(
    ("revision", "tag"), [(None, f"{RELEASE}-ba9876543210"), ("0123456789ab", f"{RELEASE}-0123456789ab")]
)
def test_image_of_the_current_sources_is_listed_else_the_newest(
    other_engine: DockerClient, revision: str | None, tag: str
) -> None:
    [(name, found)] = local_images(other_engine, chosen_releases(), revision=revision).items()
    assert (name, found.tag, found.revision) == ("cpu", tag, tag.removeprefix(f"{RELEASE}-"))
    # The size is the unpacked one, however the engine stores it.
    assert (found.id, found.size_bytes) == ("sha256:1" if revision else "sha256:3", 1000)


def test_full_disk_is_recognized_in_any_error(other_engine: DockerClient) -> None:
    with pytest.raises(DockerException) as caught:
        other_engine.images.list()
    explained = engine.explain(caught.value)
    assert isinstance(explained, ConfigurationError)
    assert "the disk of the Docker engine is full" in str(explained)
    assert "docker builder prune" in str(explained.next_step)


def test_denied_access_to_the_socket_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    # The error of docker's SDK 7.2 for a user outside the docker group. It is simulated, as root may use any socket.
    text = "Error while fetching server API version: ('Connection aborted.', PermissionError(13, 'Permission denied'))"
    monkeypatch.setenv("DOCKER_HOST", "unix:///var/run/docker.sock")
    explained = engine.explain(DockerException(text))
    assert isinstance(explained, ConfigurationError)
    assert "this user may not use the Docker engine at unix:///var/run/docker.sock" in str(explained)
    assert "--groups docker" in str(explained.next_step)
