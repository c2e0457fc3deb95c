"""An embedded AWS of these tests' own, with nothing in it, and answers of services that it cannot give."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from infra.emulator import CREDENTIALS
from infra.preflight.account import Account, ask
from infra.preflight.finding import Finding
from infra.stages import Stage, Team
from tests.support.embedded_aws import EmbeddedAws, run_embedded_aws

Ask = Callable[..., list[Finding]]


@pytest.fixture(scope="module")
def empty_aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedAws]:
    with run_embedded_aws(tmp_path_factory.mktemp("empty-aws")) as aws:
        yield aws
        assert aws.health()["server_errors"] == []


@pytest.fixture
def connected(empty_aws: EmbeddedAws, monkeypatch: pytest.MonkeyPatch) -> EmbeddedAws:
    """Let this process's boto3 talk to that AWS, as the preflight's does."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", empty_aws.endpoint)
    return empty_aws


@pytest.fixture
def asked(connected: EmbeddedAws) -> Ask:
    """Return what one check finds out about a stage with the given settings."""

    def of(question: Callable[[Account, Stage], Iterator[Finding]], **settings: Any) -> list[Finding]:
        stage = stage_of(**settings)
        account = Account.of(stage)
        return ask(account, "check", lambda: question(account, stage))

    return of


def stage_of(**settings: Any) -> Stage:
    return Stage(**{"name": "test", "teams": (Team(name="research"),), "region": "us-east-1", **settings})


@pytest.fixture
def play(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str, Callable[[dict[str, Any]], tuple[int, Any]]], None]]:
    """`play("SERVICE_QUOTAS", answer)`: a JSON service that answers each request with the status and body of `answer`.

    For what the embedded AWS does not know: quotas of EC2, and refusals by IAM.
    """
    servers: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def start(service: str, answer: Callable[[dict[str, Any]], tuple[int, Any]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
                request["operation"] = self.headers["X-Amz-Target"].rpartition(".")[2]
                status, body = answer(request)
                text = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/x-amz-json-1.1")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", f"http://127.0.0.1:{server.server_port}")

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()
