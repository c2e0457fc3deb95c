"""A real container registry on loopback: Debian's docker-registry."""

import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

START_SECONDS = 30

CONFIGURATION = """
version: 0.1
log: {{level: warn}}
storage:
  filesystem: {{rootdirectory: {folder}/data}}
http: {{addr: 127.0.0.1:{port}}}
"""


@dataclass(frozen=True)
class Registry:
    address: str
    """host:port."""

    def digest(self, repository: str, tag: str) -> str | None:
        """Return the digest that the registry has for a tag."""
        request = urllib.request.Request(f"http://{self.address}/v2/{repository}/manifests/{tag}", method="HEAD")
        request.add_header("Accept", "application/vnd.docker.distribution.manifest.v2+json")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                found: str = answer.headers["Docker-Content-Digest"]
                return found
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise


@contextmanager
def running_registry(folder: Path) -> Iterator[Registry]:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    settings = folder / "registry.yml"
    settings.write_text(CONFIGURATION.format(folder=folder, port=port))
    log = folder / "registry.log"
    with log.open("wb") as output:
        process = subprocess.Popen(["docker-registry", "serve", str(settings)], stdout=output, stderr=output)
    try:
        until = time.monotonic() + START_SECONDS
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"the registry did not start:\n{log.read_text()}")
            time.sleep(0.02)
        yield Registry(f"127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(30)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=5):
            return True
    except OSError:
        return False
