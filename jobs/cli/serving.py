"""Serve pages on this machine to the person who started the command, rendered again while runs continue."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

FRESH_SECONDS = 4.0
"""A page older than this is rendered again on request. Browsers ask every five seconds or less often."""


class LivePages:
    """Pages by their paths, each rendered again on request if it is older than FRESH_SECONDS."""

    def __init__(self, render: Callable[[str], str]) -> None:
        """`render` returns the page of a path. It raises NotFoundError if there is none."""
        import secrets

        self.token = secrets.token_urlsafe(24)
        self._render = render
        self._lock = threading.Lock()
        self._pages: dict[str, tuple[str, float]] = {}

    def html(self, path: str = "/") -> str:
        """Return a page. Raises the errors of rendering it."""
        with self._lock:
            now = time.monotonic()
            self._pages = {name: page for name, page in self._pages.items() if now - page[1] <= FRESH_SECONDS}
            if path not in self._pages:
                html = self._render(path)
                self._pages[path] = (html, time.monotonic())
            return self._pages[path][0]


def serving(pages: LivePages, port: int) -> "ThreadingHTTPServer":
    """Return a server on localhost that serves the pages only to requests from its own origin with their token."""
    import hmac
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    from urllib.parse import parse_qs, urlsplit

    from jobs.aws.errors import explain
    from jobs.core.errors import NotFoundError, TrainyardError, UsageError
    from jobs.report.rendering import security_policy

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = self._answer()
            body = content.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"text/{'html' if status == 200 else 'plain'}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            policy = security_policy(content) if status == 200 else "default-src 'none'"
            self.send_header("Content-Security-Policy", f"{policy}; frame-ancestors 'none'")
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def _answer(self) -> tuple[int, str]:
            address = urlsplit(self.path)
            own = {f"{host}:{server.server_port}" for host in ("127.0.0.1", "localhost")}
            given = parse_qs(address.query).get("token", [""])[0]
            # A different host name means DNS rebinding.
            foreign = self.headers.get("Host") not in own or self.headers.get("Sec-Fetch-Site") in _FOREIGN
            if foreign or not hmac.compare_digest(given.encode(), pages.token.encode()):
                return 403, "the token is missing: use the address that trainyard printed\n"
            try:
                return 200, pages.html(address.path)
            except NotFoundError as error:
                return 404, f"{error}\n"
            except Exception as error:  # noqa: BLE001 - the next request may succeed
                explained = error if isinstance(error, TrainyardError) else explain(error)
                return 503, f"{explained.args[0] if explained else error}\n"

        def log_message(self, *_: object) -> None:
            """Log nothing: the address of a request contains the token."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UsageError(f"--port {port}: {error.strerror}", next_step="omit --port to use a free port") from None
    server.daemon_threads = True
    return server


_FOREIGN = ("cross-site", "same-site")
"""Values of Sec-Fetch-Site in requests from other pages. `none` means that a person opened the address."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
