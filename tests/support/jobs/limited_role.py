"""An S3 as it answers a role of team `research`, which may list, read and write below `research/` only."""

import contextlib
import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tests.support.embedded_aws import passes_on

DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


@contextlib.contextmanager
def limited_to_research(upstream: str) -> Iterator[str]:
    """URL of a server before the S3 at `upstream`."""
    server = LimitedRole(upstream)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    url = f"http://localhost:{server.server_address[1]}"
    passes_on(url, upstream)
    yield url
    server.shutdown()
    thread.join()
    server.server_close()


class LimitedRole(ThreadingHTTPServer):
    """Stands before an S3 and answers as S3 does to a role that may list, read and write below `research/` only."""

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream).netloc


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LimitedRole

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        _, _, key = url.path.lstrip("/").partition("/")
        prefix = key or parse_qs(url.query).get("prefix", [""])[0]
        connection = http.client.HTTPConnection(self.server.upstream, timeout=30)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        connection.request(self.command, self.path, body, dict(self.headers.items()))
        answer = connection.getresponse()
        content, status = answer.read(), answer.status
        connection.close()
        if not prefix.startswith("research/") or (key and status == 404):
            content, status = DENIED, 403
        self.send_response(status)
        for name, value in answer.getheaders():
            if name.lower() not in {"content-length", "connection", "date", "server", "transfer-encoding"}:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_PUT = do_GET  # noqa: N815 - http.server's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        pass
