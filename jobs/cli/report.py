"""`trainyard report RUN`: a run's records as one HTML page, written, or served while the run goes on."""

import hmac
import secrets
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.options import RUNS_FOLDER, folder_of
from jobs.cli.plain import print_text
from jobs.cli.spec_file import READY_SPECS, read_specs
from jobs.cli.sweep import refuse_sweep
from jobs.core.errors import Detached, TrainyardError, UsageError
from jobs.core.words import printable_name
from jobs.runs import batch, storage
from jobs.runs.read_records import read_fetched_run, read_run
from jobs.runs.recorded_run import RecordedRun
from jobs.runs.storage import StoredRun
from jobs.spec.spec import JobSpec

REPORT = "report.html"
"""Name of the page in a run's folder."""

FRESH_SECONDS = 4.0
"""A page that is served is made anew when it is older: whoever looks at it asks every five seconds."""


def report(aws: Aws, stage_name: str, text: str, *, to: Path | None, follow: bool, port: int) -> None:
    """Run `trainyard report`."""
    if (folder := folder_of(text)) is not None:
        if follow:
            raise UsageError(f"--follow: {folder} was fetched, and does not change", next_step="leave --follow out")
        write_fetched(folder, to or folder / REPORT)
        return
    stage = batch.read_stage(aws, stage_name)
    run = storage.find_run(aws, stage, text)
    refuse_sweep(aws, stage, run, what="a report", command="report")
    path = to or RUNS_FOLDER / run.run_id / REPORT
    if not follow:
        write(path, _page(aws, run))
        print_text(printable_name(str(path)))
        return
    live = LivePage(lambda: _page(aws, run, live=True))
    live.html()  # what cannot be read is said now, not to a browser
    with _listening(live, port) as server:
        print_text(f"http://127.0.0.1:{server.server_port}/?token={live.token}")
        tables.stderr().print(f"served to this machine's browser until Ctrl-C, which leaves {path}")
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            write(path, _page(aws, run))
            raise Detached(f"stopped; the report as of now is {path}", next_step=f"open {path}") from None


def write_fetched(folder: Path, path: Path) -> None:
    """Write the report of a fetched run, and print its path."""
    write(path, _html(read_fetched_run(folder)))
    print_text(printable_name(str(path)))


def write(path: Path, html: str) -> None:
    """Write a page. Raises UsageError where it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", next_step="name another file with --to"
        ) from None


def _page(aws: Aws, run: StoredRun, *, live: bool = False) -> str:
    return _html(read_run(aws, run), live=live)


def _html(recorded: RecordedRun, *, live: bool = False) -> str:
    from jobs.report.page import run_page

    return run_page(recorded, now=datetime.now(timezone.utc), recipe=ready_spec(recorded), live=live)


def ready_spec(run: RecordedRun) -> JobSpec | None:
    """Return the ready spec of the run's name and kind, that it was submitted from; None where there is none."""
    if run.spec is None:
        return None
    for path in sorted(READY_SPECS.glob("*.yaml")):
        if f"name: {run.spec.name}\n" in path.read_text(encoding="utf-8"):
            for spec in read_specs(path):
                if (spec.name, spec.job) == (run.spec.name, run.spec.job):
                    return spec
    return None


class LivePage:
    """A page that is made anew when somebody asks for it and it has become old."""

    def __init__(self, make: Callable[[], str]) -> None:
        self.token = secrets.token_urlsafe(24)
        self._make = make
        self._lock = threading.Lock()
        self._html = ""
        self._made_at = float("-inf")

    def html(self) -> str:
        """Return the page. Raises what making it does."""
        with self._lock:
            if time.monotonic() - self._made_at > FRESH_SECONDS:
                self._html = self._make()
                self._made_at = time.monotonic()
            return self._html


def _listening(live: LivePage, port: int) -> ThreadingHTTPServer:
    """Return a server on loopback that shows the page to whoever has its token, and to no page of another origin."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = self._answer()
            body = content.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"text/{'html' if status == 200 else 'plain'}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def _answer(self) -> tuple[int, str]:
            address = urlsplit(self.path)
            own = {f"{host}:{server.server_port}" for host in ("127.0.0.1", "localhost")}
            given = parse_qs(address.query).get("token", [""])[0]
            # Another name that leads here is a page that was rebound to this machine.
            foreign = self.headers.get("Host") not in own or self.headers.get("Sec-Fetch-Site") in _FOREIGN
            if foreign or not hmac.compare_digest(given.encode(), live.token.encode()):
                return 403, "the address lacks its token: take the one that trainyard report --follow printed\n"
            if address.path != "/":
                return 404, "there is one page here\n"
            try:
                return 200, live.html()
            except Exception as error:  # noqa: BLE001 - boto3's or ours: the next request may fare better
                return 503, f"{error.args[0] if isinstance(error, TrainyardError) else error}\n"

        def log_message(self, *_: object) -> None:
            """Say nothing: the address of a request has the token."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UsageError(
            f"--port {port}: {error.strerror}", next_step="leave --port out: a free one is taken"
        ) from None
    server.daemon_threads = True
    return server


_FOREIGN = ("cross-site", "same-site")
"""What browsers say of a request that another page made; `none` is somebody's own, who typed or clicked."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
