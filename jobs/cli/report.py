"""`trainyard report RUN`: a run as one HTML page, written to a file or served while the run continues."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli.options import RUNS_FOLDER, RunOrFolder, folder_of, user_path

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

    from jobs.runs.recorded_run import RecordedRun
    from jobs.spec.spec import JobSpec

REPORT = "report.html"
"""Name of the page in a run's folder."""

FRESH_SECONDS = 4.0
"""A served page older than this is rendered again. Browsers ask every five seconds."""


def report(
    ctx: typer.Context,
    run: RunOrFolder,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", metavar="FILE", parser=user_path, help="Write the page to FILE. Default: runs/RUN/report.html."
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Serve the page on this machine and keep it current until Ctrl-C.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="With --follow: port on localhost. 0 picks a free one.")
    ] = 0,
) -> None:
    """Write a run's report as one HTML page.

    The page has the result, curves, attempts and costs, and needs no network. With --follow, prints the page's address,
    which contains a token, on stdout and keeps the page current. Ctrl-C writes the file; it never ends the run.
    """
    from jobs.cli import tables
    from jobs.cli.sweep_state import refuse_sweep
    from jobs.cli.terminal import print_text, write_page
    from jobs.core.errors import Detached, UsageError
    from jobs.core.words import printable_name
    from jobs.runs import batch, storage
    from jobs.runs.run_records import read_run

    if (folder := folder_of(run)) is not None:
        if follow:
            raise UsageError(f"--follow: {folder} is a fetched run, which does not change", next_step="omit --follow")
        write_fetched(folder, to or folder / REPORT)
        return
    aws = ctx.obj.aws()
    stage = batch.read_stage(aws, ctx.obj.stage)
    found = storage.find_run(aws, stage, run)
    refuse_sweep(aws, stage, found, what="report", command="report")
    path = to or RUNS_FOLDER / found.run_id / REPORT
    if not follow:
        write_page(path, _html(read_run(aws, found)))
        print_text(printable_name(str(path)))
        return
    live = LivePage(lambda: _html(read_run(aws, found), live=True))
    live.html()  # reports an unreadable record here instead of in the browser
    with serving(live, port) as server:
        print_text(f"http://127.0.0.1:{server.server_port}/?token={live.token}")
        tables.stderr().print(f"serving the page on this machine until Ctrl-C, which writes {path}")
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            write_page(path, _html(read_run(aws, found)))
            raise Detached(f"stopped; wrote the current report to {path}", next_step=f"open {path}") from None


def write_fetched(folder: Path, path: Path) -> None:
    """Write the report of a fetched run and print its path."""
    from jobs.cli.terminal import print_text, write_page
    from jobs.core.words import printable_name
    from jobs.runs.run_records import read_fetched_run

    write_page(path, _html(read_fetched_run(folder)))
    print_text(printable_name(str(path)))


def _html(recorded: "RecordedRun", *, live: bool = False) -> str:
    from datetime import datetime, timezone

    from jobs.report.run_page import run_page

    return run_page(recorded, now=datetime.now(timezone.utc), recipe=ready_spec(recorded), live=live)


def ready_spec(run: "RecordedRun") -> "JobSpec | None":
    """Return the ready-made spec with the run's name and kind of job; None if there is none."""
    from jobs.runs.spec_file import READY_SPECS, read_specs

    if run.spec is None:
        return None
    for path in sorted(READY_SPECS.glob("*.yaml")):
        if f"name: {run.spec.name}\n" in path.read_text(encoding="utf-8"):
            for spec in read_specs(path):
                if (spec.name, spec.job) == (run.spec.name, run.spec.job):
                    return spec
    return None


class LivePage:
    """A page that is rendered again on request if it is older than FRESH_SECONDS."""

    def __init__(self, render: Callable[[], str]) -> None:
        import secrets
        import threading

        self.token = secrets.token_urlsafe(24)
        self._render = render
        self._lock = threading.Lock()
        self._html = ""
        self._rendered_at = float("-inf")

    def html(self) -> str:
        """Return the page. Raises the errors of rendering it."""
        import time

        with self._lock:
            if time.monotonic() - self._rendered_at > FRESH_SECONDS:
                self._html = self._render()
                self._rendered_at = time.monotonic()
            return self._html


def serving(live: LivePage, port: int) -> "ThreadingHTTPServer":
    """Return a server on localhost that serves the page only to requests from its own origin with its token."""
    import hmac
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    from urllib.parse import parse_qs, urlsplit

    from jobs.core.errors import TrainyardError, UsageError

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
            # A different host name means DNS rebinding.
            foreign = self.headers.get("Host") not in own or self.headers.get("Sec-Fetch-Site") in _FOREIGN
            if foreign or not hmac.compare_digest(given.encode(), live.token.encode()):
                return 403, "the token is missing: use the address that trainyard report --follow printed\n"
            if address.path != "/":
                return 404, "this server has only one page\n"
            try:
                return 200, live.html()
            except Exception as error:  # noqa: BLE001 - the next request may succeed
                return 503, f"{error.args[0] if isinstance(error, TrainyardError) else error}\n"

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
