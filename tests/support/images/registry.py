"""A real container registry on loopback (docker-registry of Debian), and one before it that refuses as ECR does."""

import http.client
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.http_server import QuietHandler, serving

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
        """Return the digest of what the registry itself has under a tag."""
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


@dataclass
class Refusal:
    """An answer that comes in the registry's place."""

    status: int
    code: str
    message: str


@dataclass
class FrontDoor:
    """A server that hands on what it is asked to a registry, and answers itself where `refuses` says so."""

    registry: Registry
    refuses: Callable[[str, str], Refusal | None] = field(default=lambda method, path: None)
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request."""
    credentials: set[str] = field(default_factory=set)
    """Every Authorization header that came."""
    address: str = ""


@contextmanager
def front_door(registry: Registry) -> Iterator[FrontDoor]:
    door = FrontDoor(registry)

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self._body()
            door.asked.append((self.command, self.path))
            if header := self.headers.get("Authorization"):
                door.credentials.add(header)
            elif self.path == "/v2/":
                # As ECR: nothing without signing in.
                self._answer(401, b"{}", {"WWW-Authenticate": 'Basic realm="stand-in",service="ecr"'})
                return
            if refusal := door.refuses(self.command, self.path):
                error = {"errors": [{"code": refusal.code, "message": refusal.message}]}
                self._answer(refusal.status, json.dumps(error).encode(), {"Content-Type": "application/json"})
                return
            connection = http.client.HTTPConnection(registry.address, timeout=60)
            # The engine sends a header for each kind of manifest that it can read.
            names = {name for name in self.headers if name.lower() not in {"transfer-encoding", "content-length"}}
            sent = {name: ", ".join(self.headers.get_all(name, [])) for name in names}
            connection.request(self.command, self.path, body, {**sent, "Content-Length": str(len(body))})
            answer = connection.getresponse()
            content = answer.read()
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in {"transfer-encoding"}}
            self._answer(answer.status, content, kept)
            connection.close()

        do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815 - http.server's names

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            content = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content

        def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if "Content-Length" not in headers:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    with serving(Handler) as port:
        door.address = f"127.0.0.1:{port}"
        yield door
