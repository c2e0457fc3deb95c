"""An HTTP server on loopback that runs in a thread of the test."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

POLL_SECONDS = 0.02
"""Longest wait for the server at the end of a test. http.server's default is half a second."""


@contextmanager
def serving(handler: Callable[..., BaseHTTPRequestHandler], preferred_port: int = 0) -> Iterator[int]:
    """Serve until the end of the block and yield the port: the preferred one, or a free one if that is in use."""
    try:
        server = ThreadingHTTPServer(("127.0.0.1", preferred_port), handler)
    except OSError:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(POLL_SECONDS,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class QuietHandler(BaseHTTPRequestHandler):
    """A handler that writes no log."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass


class JsonHandler(QuietHandler):
    """A handler that responds in JSON and closes the connection after each response."""

    def answer(self, status: int, value: object) -> None:
        self.close_connection = True
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
