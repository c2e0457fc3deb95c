"""Proxies between a client and a server. One injects service errors; the other limits access to S3."""

import http.client
import json
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import parse_qs, urlsplit

from typing_extensions import Self

from tests.support.running_emulator import register_proxy

Message = tuple[str, str, dict[str, str], bytes]
"""Method, path, headers and body of a request."""
Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and body."""


class Proxy:
    """Serves from its creation until the end of its `with` block. Subclasses decide in `handle` how to respond."""

    def __init__(self, upstream: str, *, host: str = "localhost") -> None:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                proxy.handle(self)

            do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = _handle  # noqa: N815 - http.server's names

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 100

            def handle_error(self, *_: object) -> None:
                """Ignore errors of the connection, which a killed client leaves open."""

        self._upstream = urlsplit(upstream).netloc
        self._lock = threading.Lock()
        self._server = Server(("127.0.0.1" if host == "localhost" else host, 0), Handler)
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._hop_by_hop = {"connection", "expect"} | (set() if host == "localhost" else {"host"})
        """Headers that are not forwarded. The emulator responds only to the host name localhost."""
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        raise NotImplementedError

    def message(self, request: BaseHTTPRequestHandler, body: bytes) -> Message:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in self._hop_by_hop}
        return request.command, request.path, headers, body

    def _pass_on(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        connection = http.client.HTTPConnection(self._upstream, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def _answer(
        self, request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False
    ) -> None:
        """Send a response; with `cut`, only its first half, and then close the connection."""
        request.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                request.send_header(name, value)
        # The response to a HEAD request has no body.
        is_head = request.command == "HEAD"
        request.send_header("Content-Length", headers.get("Content-Length", "0") if is_head else str(len(body)))
        request.end_headers()
        if not is_head:
            request.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            request.wfile.flush()
            self._cut(request)

    @staticmethod
    def _cut(request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True
        request.connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@dataclass(frozen=True)
class Fault:
    """A fault of one request."""

    kind: Literal["answer", "cut"]
    """`answer` for an error response of the service, `cut` to close the connection without a response."""
    taken: Literal["never", "before", "late"] = "never"
    """When the service gets the request: never, before the fault, or just before the next request of its operation."""
    status: int = 500
    code: str = "InternalFailure"


class FaultyProxy(Proxy):
    """Forwards requests to `upstream`, except requests for which `faults` has a fault."""

    def __init__(self, upstream: str, *, host: str = "localhost") -> None:
        self.faults: dict[str, deque[Fault | None]] = defaultdict(deque)
        """Faults by operation in lower case (`submitjob`): the first applies to the next request; None forwards it."""
        self.seen: list[str] = []
        """Requested operations, in order."""
        self.when_over: Callable[[], object] = lambda: None
        """Called when the last fault is used."""
        self._late: dict[str, Message] = {}
        super().__init__(upstream, host=host)
        register_proxy(self.url, upstream)

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        message = self.message(request, request.rfile.read(int(request.headers.get("Content-Length", 0))))
        target = request.headers.get("X-Amz-Target", "")
        operation = (target.rsplit(".", 1)[-1] or request.path.rsplit("/", 1)[-1]).lower()
        with self._lock:
            self.seen.append(operation)
            fault = self.faults[operation].popleft() if self.faults[operation] else None
            if fault is not None and not any(self.faults.values()):
                self.when_over()
            late = self._late.pop(operation, None)
        if late is not None:
            self._pass_on(*late)
        if fault is None:
            self._answer(request, *self._pass_on(*message))
            return
        if fault.taken == "before":
            self._pass_on(*message)
        elif fault.taken == "late":
            self._late[operation] = message
        if fault.kind == "cut":
            self._cut(request)
            return
        text = json.dumps({"__type": fault.code, "message": f"injected {fault.code}"}).encode()
        self._answer(request, fault.status, {"x-amzn-errortype": fault.code}, text)


DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class LimitedRole(FaultyProxy):
    """S3 for a role of team `research`, which may list, read and write only below `research/`."""

    def _pass_on(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        url = urlsplit(path)
        _, _, key = url.path.lstrip("/").partition("/")
        prefix = key or parse_qs(url.query).get("prefix", [""])[0]
        status, answered, content = super()._pass_on(method, path, headers, body)
        if not prefix.startswith("research/") or (key and status == 404):
            return 403, {"Content-Length": str(len(DENIED))}, DENIED
        return status, answered, content
