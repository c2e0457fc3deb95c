"""A Hugging Face Hub that takes models: the few endpoints that huggingface_hub pushes to, over real HTTP."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_ofTheTeam"


@dataclass
class Hub:
    """What was pushed, and how it answers."""

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    refuses_commits: bool = False


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer(*self._handled(self.path, body))

        def _handled(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
            if path == "/api/validate-yaml":
                return 200, {"errors": [], "warnings": []}
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return 401, {"error": "Invalid username or password."}
            if path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                if name in hub.private:
                    return 409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"}
                hub.private[name] = asked["private"]
                return 200, {"url": f"{hub.url}/{name}"}
            organization, name, action = path.removeprefix("/api/models/").split("/")[:3]
            if action == "preupload":
                paths = [file["path"] for file in json.loads(body)["files"]]
                modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
                return 200, {"files": modes}
            if hub.refuses_commits:
                return 500, {"error": "out of order"}
            header, *operations = [json.loads(line) for line in body.splitlines()]
            hub.commits.append(header["value"]["summary"])
            hub.files[f"{organization}/{name}"] = {
                operation["value"]["path"]: base64.b64decode(operation["value"]["content"]) for operation in operations
            }
            return 200, {"commitUrl": f"{hub.url}/{organization}/{name}/commit/0", "commitOid": "0"}

        def do_GET(self) -> None:
            self._answer(404, {"error": "Repository not found"})

        do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()
