"""Requests to every operation of the embedded AWS from those who may not: web pages, other names, other users."""

import contextlib
import http.client
import json
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode, urlsplit

import botocore.session

from tests.support.embedded_aws import EmbeddedAws
from tests.support.emulator.web_page import web_page
from tests.support.fuzz.findings import Finding, Nonsense, Round

SERVICES = (
    *(
        "autoscaling",
        "batch",
        "budgets",
        "cloudformation",
        "cloudwatch",
        "codebuild",
        "ec2",
        "ecr",
        "ecs",
        "events",
        "fsx",
    ),
    *(
        "iam",
        "imagebuilder",
        "kms",
        "lambda",
        "logs",
        "s3",
        "secretsmanager",
        "service-quotas",
        "sns",
        "sqs",
        "ssm",
        "sts",
    ),
)
"""Those of the stacks, the command line and the preflight."""

_SIGNED = "AWS4-HMAC-SHA256 Credential={}/20261123/us-east-1/SERVICE/aws4_request, SignedHeaders=host, Signature=0"

_READING = ("Describe", "Get", "List")

_REFUSALS_OF_RAW_REQUESTS = (400, 403, 404, 405, 408, 411, 413, 414, 431, 501, 505)
"""What is no HTTP is refused by the server before the gate sees it, with the status that says why."""

_REQUESTS_OF_A_PAGE_AT_ONCE = 50

_SCRIPT = """
async ([endpoint, requests]) => Promise.all(requests.map(async ([method, path, mode, headers, body]) => {
  try {
    const answer = await fetch(endpoint + path, {method, mode, headers, body});
    return `${answer.type} ${answer.status}`;
  } catch { return "failed"; }
}))
"""


@dataclass(frozen=True)
class Request:
    """One request, without what its sender is known by."""

    method: str
    path: str
    service: str = "s3"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    only_reads: bool = False
    """It changes nothing, whoever sends it."""


def fuzz(round_: Round, aws: EmbeddedAws, *, every: int = 1, in_a_browser: bool = True) -> None:
    """Send operations by hand, as each of the intruders, and from a page in a browser; `every`: one of so many."""
    before = _state(aws)
    requests = [*operations(), *_own_paths()][::every]
    for intruder, headers in _intruders(aws).items():
        for request in requests:
            what = f"{intruder}: {request.method} {request.path} {dict(request.headers)} {request.body}"
            round_.look(what, lambda request=request, headers=headers: refused(aws, request, headers))  # type: ignore[misc]
    for raw in _raw_requests(aws):
        round_.look(raw[:200], lambda raw=raw: _raw(aws, raw))  # type: ignore[misc]
    if in_a_browser:
        _from_a_page(round_, aws, requests)
    if (after := _state(aws)) != before:
        round_.findings.append(Finding("command", "all of them", f"{before} became {after}"))
    # The same requests get through from whoever may send them: it was the sender that was refused.
    # An owner may ask for much at once: how long that takes is no fault, so no limit of time is set.
    let_in = 0
    for request in requests:
        if request.only_reads:
            let_in += 1
            if _status(aws, request, headers_of_owner(aws, request)) == HTTPStatus.FORBIDDEN:
                round_.findings.append(Finding("nonsense", f"the owner: {request}", "the owner was refused, too"))
    round_.notes.append(f"{let_in:,} of the owner answered")


def operations() -> Iterator[Request]:
    """Yield a request for each operation of each service, as its protocol spells it."""
    session = botocore.session.get_session()
    for service in SERVICES:
        model = session.get_service_model(service)
        protocol, version = model.metadata["protocol"], model.api_version
        for name in model.operation_names:
            spelled = model.operation_model(name).http
            if protocol == "json":
                target = {
                    "X-Amz-Target": f"{model.metadata['targetPrefix']}.{name}",
                    "Content-Type": "application/x-amz-json-1.1",
                }
                yield Request("POST", "/", service, target, "{}", only_reads=name.startswith(_READING))
            elif protocol in ("query", "ec2"):
                form = urlencode({"Action": name, "Version": version})
                typed = {"Content-Type": "application/x-www-form-urlencoded"}
                yield Request("POST", "/", service, typed, form, only_reads=name.startswith(_READING))
            else:
                path = re.sub(r"\{[^}]*\}", "x", spelled["requestUri"])
                reads = spelled["method"] in ("GET", "HEAD")
                yield Request(spelled["method"], path, service, {}, "" if reads else "{}", only_reads=reads)


def _own_paths() -> Iterator[Request]:
    for path in (
        "/moto-api/reset",
        "/moto-api/data.json",
        "/moto-api/seed?a=1",
        "/moto-api/",
        "/trainyard/events",
        "/trainyard/x",
    ):
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            yield Request(method, path, only_reads=method == "GET" and path == "/moto-api/data.json")
    for path in (
        "/trainyard/jobs/x/reclaim",
        "/trainyard/environments/x/code",
        "/trainyard/environments/x/result",
        "//moto-api/reset",
    ):
        yield Request("POST", path)


def _intruders(aws: EmbeddedAws) -> dict[str, dict[str, str]]:
    """Return who sends, with the headers that tell: some have the credentials even so."""
    own = urlsplit(aws.endpoint).netloc
    known = _SIGNED.format(aws.credentials.access_key_id)
    return {
        "a page": {"Host": own, "Authorization": known, "Origin": "http://evil.example"},
        "a navigation": {"Host": own, "Authorization": known, "Sec-Fetch-Site": "cross-site"},
        "another name": {"Host": "evil.example", "Authorization": known},
        "a stranger": {"Host": own, "Authorization": _SIGNED.format("test")},
        "nobody": {"Host": own},
    }


def refused(aws: EmbeddedAws, request: Request, headers: Mapping[str, str]) -> bool:
    """Return False, as nothing was accepted. Raises Nonsense for any other answer than 403."""
    status = _status(aws, request, headers)
    if status == HTTPStatus.FORBIDDEN:
        return False
    raise Nonsense(f"the answer was {status}")


def headers_of_owner(aws: EmbeddedAws, request: Request) -> dict[str, str]:
    """Return what a request has to be sent with to be let in."""
    token, key = aws.credentials.secret_access_key, aws.credentials.access_key_id
    is_own = request.path.startswith(("/trainyard/", "/moto-api"))
    return {
        "Host": urlsplit(aws.endpoint).netloc,
        "Authorization": f"Bearer {token}" if is_own else _SIGNED.format(key),
    }


def _status(aws: EmbeddedAws, request: Request, headers: Mapping[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(aws.endpoint).port or 0, timeout=30)
    try:
        sent = {name: value.replace("SERVICE", request.service) for name, value in headers.items()}
        connection.request(request.method, request.path, request.body, {**request.headers, **sent})
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    return answer.status


def _raw_requests(aws: EmbeddedAws) -> Iterator[bytes]:
    """Yield requests that no client library would send."""
    own = urlsplit(aws.endpoint).netloc.encode()
    bearer = b"Authorization: Bearer " + aws.credentials.secret_access_key.encode()
    for line in (
        b"GET / HTTP/1.1",
        b"POST /moto-api/reset HTTP/1.1",
        b"GET / HTTP/9.9",
        b"X",
        b"GET  /  HTTP/1.1",
        b"GET /\0 HTTP/1.1",
    ):
        for host in (
            b"Host: evil.example",
            b"Host: evil.example\r\nHost: " + own,
            b"Host: " + own + b"\r\nHost: evil.example",
            b"host:\tevil.example",
            b"",
        ):
            yield line + b"\r\n" + host + b"\r\n" + bearer + b"\r\nConnection: close\r\n\r\n"
    own_host = b"GET / HTTP/1.1\r\nConnection: close\r\nHost: " + own + b"\r\n"
    for authorization in (
        b"AWS4-x " + b"Credential=" * 5000,
        b"AWS4-" + b" Credential=" * 5000,
        b"AWS " * 10_000,
        b"\xff" * 1000,
        b"AWS4-x Credential=/",
        b"AWS :",
    ):
        yield own_host + b"Authorization: " + authorization + b"\r\n\r\n"
    yield own_host + b"X: y\r\n" * 5000 + b"\r\n"
    yield own_host + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"
    yield own_host + b"Content-Length: -1\r\n\r\n"
    yield (
        b"GET http://"
        + own
        + b"/moto-api/reset HTTP/1.1\r\nHost: evil.example\r\n"
        + bearer
        + b"\r\nConnection: close\r\n\r\n"
    )
    yield b"POST /?X-Amz-Credential=" + b"a" * 60_000 + b" HTTP/1.1\r\nConnection: close\r\nHost: " + own + b"\r\n\r\n"


def _raw(aws: EmbeddedAws, raw: bytes) -> bool:
    with socket.create_connection(("127.0.0.1", urlsplit(aws.endpoint).port or 0), timeout=30) as connection:
        try:
            connection.sendall(raw)
            with contextlib.suppress(OSError):  # it has answered, and hung up already
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := connection.recv(65_536):
                answer += piece
        except ConnectionError:
            return False
    status = re.match(rb"HTTP/\d\.\d (\d{3})", answer)
    if status and int(status[1]) not in _REFUSALS_OF_RAW_REQUESTS:
        raise Nonsense(f"the answer was {status[1].decode()}")
    return False


def _from_a_page(round_: Round, aws: EmbeddedAws, requests: list[Request]) -> None:
    """Have a page try all of it: as a form would, which asks nobody first, and with the headers of a client."""
    key = f"AWS4-HMAC-SHA256 Credential={aws.credentials.access_key_id}/20261123/us-east-1/s3/aws4_request"
    simple = {"Content-Type": "application/x-www-form-urlencoded"}
    with web_page() as page:
        tries = []
        for request in requests:
            body = None if request.method in ("GET", "HEAD") else request.body
            if request.method in ("GET", "HEAD", "POST"):
                tries.append([request.method, request.path, "no-cors", simple if body is not None else {}, body])
            tries.append([request.method, request.path, "cors", {**request.headers, "Authorization": key}, body])
        for start in range(0, len(tries), _REQUESTS_OF_A_PAGE_AT_ONCE):
            some = tries[start : start + _REQUESTS_OF_A_PAGE_AT_ONCE]
            answers = page.evaluate(_SCRIPT, [aws.endpoint, some])
            for asked, answer in zip(some, answers, strict=True):
                round_.look(json.dumps(asked), lambda answer=answer: _unreadable(answer))  # type: ignore[misc]


def _unreadable(answer: str) -> bool:
    if answer == "failed" or answer.startswith("opaque "):
        return False
    raise Nonsense(f"a page could read the answer: {answer}")


def _state(aws: EmbeddedAws) -> dict[str, Any]:
    """Return what a request that came through would have changed."""
    health = aws.health()
    return {
        "buckets": [bucket["Name"] for bucket in aws.client("s3").list_buckets()["Buckets"]],
        "stacks": sorted(stack["StackName"] for stack in aws.client("cloudformation").describe_stacks()["Stacks"]),
        "roles": sorted(role["RoleName"] for role in aws.client("iam").list_roles()["Roles"]),
        "users": aws.client("iam").list_users()["Users"],
        "jobs": health["jobs"],
        "errors": health["server_errors"],
    }
