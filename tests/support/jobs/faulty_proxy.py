"""Proxies between a client and its server, and one in front of the emulator that fails as services do."""

import http.client
import json
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

from typing_extensions import Self

from tests.support.running_emulator import passes_on

Message = tuple[str, str, dict[str, str], bytes]
"""Method, path, headers and body of a request."""
Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and body."""


class Proxy:
    """Serves from when it is made until its block ends; `handle` of a subclass passes requests on, or does not."""

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
                """A client that is killed leaves its connection; nobody wants to read that."""

        self._upstream = urlsplit(upstream).netloc
        self._lock = threading.Lock()
        self._server = Server(("127.0.0.1" if host == "localhost" else host, 0), Handler)
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._hop_by_hop = {"connection", "expect"} | (set() if host == "localhost" else {"host"})
        """Headers that are not passed on. The emulator answers to no other name than localhost."""
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
        """Send an answer; `cut`: its first half, after which the connection ends."""
        request.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                request.send_header(name, value)
        # What a HEAD request is told of is not sent along.
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
    """A fault that happens to one request in place of a plain answer."""

    kind: Literal["answer", "cut"]
    """`answer`: an error of the service. `cut`: the connection ends without an answer."""
    taken: Literal["never", "before", "late"] = "never"
    """The moment at which the service gets the request: not at all, before the fault, or just before the next of its
    operation."""
    status: int = 500
    code: str = "InternalFailure"


class FaultyProxy(Proxy):
    """Passes requests on to `upstream`, except where `faults` has something else for an operation."""

    def __init__(self, upstream: str, *, host: str = "localhost") -> None:
        self.faults: dict[str, deque[Fault | None]] = defaultdict(deque)
        """Faults by operation, in lower case (`submitjob`): the first is for its next request, None lets that one
        pass."""
        self.seen: list[str] = []
        """Operations asked for, in order."""
        self.when_over: Callable[[], object] = lambda: None
        """Called when the last of the faults is taken."""
        self._late: dict[str, Message] = {}
        super().__init__(upstream, host=host)
        passes_on(self.url, upstream)

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
