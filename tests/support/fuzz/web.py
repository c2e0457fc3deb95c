"""Send requests to every operation of the emulator as intruders: web pages, other host names, other users."""

import http.client
import json
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit

import botocore.session

from tests.support.emulator.web_page import web_page
from tests.support.fuzz.findings import Nonsense, Round
from tests.support.running_emulator import Emulator

SERVICES = """
autoscaling batch budgets cloudformation cloudwatch codebuild ec2 ecr ecs events fsx iam imagebuilder kms lambda logs s3
secretsmanager service-quotas sns sqs ssm sts
"""
"""Services that the stacks, the command line and the preflight use."""

_SIGNED = "AWS4-HMAC-SHA256 Credential={}/20261123/us-east-1/SERVICE/aws4_request, SignedHeaders=host, Signature=0"
_READING = ("Describe", "Get", "List")
_NOT_HTTP = (400, 403, 404, 405, 408, 411, 413, 414, 431, 501, 505)
"""Statuses with which the server refuses malformed HTTP, before its access check sees the request."""
_PAGE_BATCH = 50
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
    """One request, without the headers that identify its sender."""

    method: str
    path: str
    service: str = "s3"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    only_reads: bool = False


def fuzz(round_: Round, aws: Emulator) -> None:
    """Send every operation as each intruder, from a page in a browser, and then as the owner."""
    before = _state(aws)
    requests = [*_operations(), *_server_paths()]
    for intruder, headers in _intruders(aws).items():
        for request in requests:
            what = f"{intruder}: {request.method} {request.path} {dict(request.headers)} {request.body}"
            round_.look(what, lambda request=request, headers=headers: _refused(aws, request, headers))  # type: ignore[misc]
    for raw in _raw_requests(aws):
        round_.look(raw[:200], lambda raw=raw: _raw(aws, raw))  # type: ignore[misc]
    _from_a_page(round_, aws, requests)
    if (after := _state(aws)) != before:
        round_.find("command", "all of them", f"{before} became {after}")
    for request in (request for request in requests if request.only_reads):
        if _status(aws, request, _headers_of_owner(aws)) == 403:
            round_.find("nonsense", request, "the owner was refused too")


def _operations() -> Iterator[Request]:
    """Yield a request for each operation of each service, in the form of its protocol."""
    session = botocore.session.get_session()
    for service in SERVICES.split():
        model = session.get_service_model(service)
        protocol, version = model.metadata["protocol"], model.api_version
        for name in model.operation_names:
            reads = name.startswith(_READING)
            if protocol == "json":
                target = {"X-Amz-Target": f"{model.metadata['targetPrefix']}.{name}"}
                typed = {**target, "Content-Type": "application/x-amz-json-1.1"}
                yield Request("POST", "/", service, typed, "{}", only_reads=reads)
            elif protocol in ("query", "ec2"):
                form = urlencode({"Action": name, "Version": version})
                typed = {"Content-Type": "application/x-www-form-urlencoded"}
                yield Request("POST", "/", service, typed, form, only_reads=reads)
            else:
                spelled = model.operation_model(name).http
                reads = spelled["method"] in ("GET", "HEAD")
                path = re.sub(r"\{[^}]*\}", "x", spelled["requestUri"])
                yield Request(spelled["method"], path, service, {}, "" if reads else "{}", only_reads=reads)


def _server_paths() -> Iterator[Request]:
    for path in ("/moto-api/reset", "/moto-api/data.json", "/moto-api/", "/trainyard/events", "/trainyard/x"):
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            yield Request(method, path)
    for path in ("/trainyard/jobs/x/reclaim", "/trainyard/environments/x/code", "//moto-api/reset"):
        yield Request("POST", path)


def _intruders(aws: Emulator) -> dict[str, dict[str, str]]:
    """Return the headers of each intruder. Some intruders have valid credentials."""
    host = urlsplit(aws.endpoint).netloc
    known = _SIGNED.format(aws.credentials.access_key_id)
    return {
        "a page": {"Host": host, "Authorization": known, "Origin": "http://evil.example"},
        "a navigation": {"Host": host, "Authorization": known, "Sec-Fetch-Site": "cross-site"},
        "another name": {"Host": "evil.example", "Authorization": known},
        "a stranger": {"Host": host, "Authorization": _SIGNED.format("test")},
        "nobody": {"Host": host},
    }


def _headers_of_owner(aws: Emulator) -> dict[str, str]:
    return {
        "Host": urlsplit(aws.endpoint).netloc,
        "Authorization": _SIGNED.format(aws.credentials.access_key_id),
    }


def _refused(aws: Emulator, request: Request, headers: Mapping[str, str]) -> bool:
    if (status := _status(aws, request, headers)) != 403:
        raise Nonsense(f"the answer was {status}")
    return False


def _status(aws: Emulator, request: Request, headers: Mapping[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(aws.endpoint).port or 0, timeout=30)
    try:
        sent = {name: value.replace("SERVICE", request.service) for name, value in headers.items()}
        connection.request(request.method, request.path, request.body, {**request.headers, **sent})
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    return answer.status


def _raw_requests(aws: Emulator) -> Iterator[bytes]:
    """Yield raw requests that no client library would send."""
    host = b"Host: " + urlsplit(aws.endpoint).netloc.encode()
    evil, end = b"Host: evil.example", b"\r\nConnection: close\r\n\r\n"
    bearer = b"Authorization: Bearer " + aws.credentials.secret_access_key.encode()
    for line in (b"GET / HTTP/1.1", b"POST /moto-api/reset HTTP/1.1", b"GET / HTTP/9.9", b"X", b"GET /\0 HTTP/1.1"):
        for hosts in (evil, evil + b"\r\n" + host, host + b"\r\n" + evil, b"host:\tevil.example", b""):
            yield line + b"\r\n" + hosts + b"\r\n" + bearer + end
    for odd in (
        *(b"Authorization: AWS4-x " + b"Credential=" * 5000, b"Authorization: " + b"\xff" * 1000),
        *(b"Authorization: AWS4-x Credential=/", b"X: y\r\n" * 5000, b"Content-Length: -1"),
        b"Transfer-Encoding: chunked\r\n\r\nzz",
    ):
        yield b"GET / HTTP/1.1\r\n" + host + b"\r\n" + odd + end
    yield b"POST /?X-Amz-Credential=" + b"a" * 60_000 + b" HTTP/1.1\r\n" + host + end


def _raw(aws: Emulator, raw: bytes) -> bool:
    answer = b""
    try:
        with socket.create_connection(("127.0.0.1", urlsplit(aws.endpoint).port or 0), timeout=30) as connection:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65_536):
                answer += piece
    except (ConnectionError, OSError):  # the server has already responded and closed the connection
        pass
    status = re.match(rb"HTTP/\d\.\d (\d{3})", answer)
    if status and int(status[1]) not in _NOT_HTTP:
        raise Nonsense(f"the answer was {status[1].decode()}")
    return False


def _from_a_page(round_: Round, aws: Emulator, requests: list[Request]) -> None:
    """Send all requests from a page: like a form, which needs no preflight request, and with a client's headers."""
    key = _SIGNED.format(aws.credentials.access_key_id)
    tries = []
    for request in requests:
        body = None if request.method in ("GET", "HEAD") else request.body
        if request.method in ("GET", "HEAD", "POST"):
            simple = {} if body is None else {"Content-Type": "application/x-www-form-urlencoded"}
            tries.append([request.method, request.path, "no-cors", simple, body])
        tries.append([request.method, request.path, "cors", {**request.headers, "Authorization": key}, body])
    with web_page() as page:
        for start in range(0, len(tries), _PAGE_BATCH):
            some = tries[start : start + _PAGE_BATCH]
            for asked, answer in zip(some, page.evaluate(_SCRIPT, [aws.endpoint, some]), strict=True):
                round_.look(json.dumps(asked), lambda answer=answer: _unreadable(answer))  # type: ignore[misc]


def _unreadable(answer: str) -> bool:
    if answer == "failed" or answer.startswith("opaque "):
        return False
    raise Nonsense(f"a page could read the answer: {answer}")


def _state(aws: Emulator) -> dict[str, Any]:
    """Return the state that a successful request would have changed."""
    health = aws.health()
    return {
        "buckets": [bucket["Name"] for bucket in aws.client("s3").list_buckets()["Buckets"]],
        "stacks": sorted(stack["StackName"] for stack in aws.client("cloudformation").describe_stacks()["Stacks"]),
        "roles": sorted(role["RoleName"] for role in aws.client("iam").list_roles()["Roles"]),
        "jobs": health["jobs"],
        "errors": health["server_errors"],
    }
