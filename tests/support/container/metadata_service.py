"""The metadata service of an instance (IMDSv2), on loopback."""

import json
import threading
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from typing_extensions import Self

NOTICE = "/latest/meta-data/spot/instance-action"
LIFE_CYCLE = "/latest/meta-data/instance-life-cycle"
ZONE = "/latest/meta-data/placement/availability-zone"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class MetadataService:
    """Serves the content of `news` inside its `with` block."""

    def __init__(self) -> None:
        self.news: dict[str, dict[str, str] | str] = {}
        self.answered = threading.Event()
        """Set after the first response with any of `news`."""
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                allowed = self.path == "/latest/api/token" and "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
                self._answer(200 if allowed else 400, b"token")

            def do_GET(self) -> None:
                if self.headers.get("X-aws-ec2-metadata-token") != "token":
                    self._answer(401, b"")
                elif self.path in service.news:
                    service.answered.set()
                    news = service.news[self.path]
                    self._answer(200, (news if isinstance(news, str) else json.dumps(news)).encode())
                else:
                    self._answer(404, b"")

            def _answer(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.environment = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}/"}

    def give_notice(self, seconds: float) -> str:
        """Send a Spot notice for an instance that ends in `seconds`. Returns the launcher's text for it."""
        ends_at = datetime.now(timezone.utc) + timedelta(seconds=seconds)
        self.news[NOTICE] = {"action": "terminate", "time": f"{ends_at:%Y-%m-%dT%H:%M:%SZ}"}
        return f"Spot notice: terminate at {ends_at:%H:%M:%SZ}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()
