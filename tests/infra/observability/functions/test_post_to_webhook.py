"""Messages reach the chat as it wants them, and nothing ever names the webhook's URL."""

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from infra.observability.functions.post_to_webhook import WebhookError, handler, post
from tests.support.embedded_aws import EmbeddedAws

PATH = "/services/T0000/B0000/very-secret"


class Chat(http.server.ThreadingHTTPServer):
    """An incoming webhook that answers `status`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.status = 200
        self.posted: list[tuple[str, str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://localhost:{self.server_port}{PATH}"


class _Answer(http.server.BaseHTTPRequestHandler):
    server: Chat

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.path, self.headers["Content-Type"], json.loads(body)))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def chat() -> Iterator[Chat]:
    with Chat() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def secret(embedded_aws: EmbeddedAws, chat: Chat, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"chat-{chat.server_port}"
    embedded_aws.client("secretsmanager").create_secret(Name=name, SecretString=f"{chat.url}\n")
    monkeypatch.setenv("WEBHOOK_SECRET", name)
    return name


def notification(*messages: str) -> dict[str, Any]:
    """Return the event with which SNS calls a function."""
    return {"Records": [{"EventSource": "aws:sns", "Sns": {"Type": "Notification", "Message": m}} for m in messages]}


def test_each_message_is_posted_as_text(secret: str, chat: Chat, capfd: pytest.CaptureFixture[str]) -> None:
    handler(notification("tiny failed", "grüße: „two lines“\nof text"), None)
    assert chat.posted == [
        (PATH, "application/json", {"text": "tiny failed"}),
        (PATH, "application/json", {"text": "grüße: „two lines“\nof text"}),
    ]
    assert "very-secret" not in "".join(capfd.readouterr())


def test_of_an_alarm_only_what_people_read_is_posted(secret: str, chat: Chat) -> None:
    alarm = {"AlarmName": "trainyard-dev-FailedJobs", "AlarmDescription": "3 jobs failed", "NewStateValue": "ALARM"}
    handler(notification(json.dumps(alarm), json.dumps({"some": "JSON"}), "17"), None)
    assert [body["text"] for _, _, body in chat.posted] == ["ALARM: 3 jobs failed", '{"some": "JSON"}', "17"]


@pytest.mark.parametrize("status", [404, 410, 500])
def test_a_refusal_is_tried_again_by_lambda_and_names_no_url(
    status: int, secret: str, chat: Chat, capfd: pytest.CaptureFixture[str]
) -> None:
    chat.status = status
    with pytest.raises(WebhookError, match=f"^the webhook answered {status}$") as error:
        handler(notification("tiny failed"), None)
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__
    assert "very-secret" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (f"http://localhost:9{PATH}", "the webhook could not be reached: URLError"),
        (f"http://chat.example{PATH}", "the secret does not hold an https:// URL"),
        ("very-secret", "the secret does not hold an https:// URL"),
        ("https://[very-secret", "the webhook could not be reached: ValueError"),
    ],
)
def test_what_cannot_be_posted_to_is_not_named_either(url: str, told: str) -> None:
    with pytest.raises(WebhookError) as error:
        post(url, "tiny failed")
    assert str(error.value) == told
    assert error.value.__cause__ is None
