"""A client of JupyterLab that works like a browser: over HTTP and WebSockets, with the token from the URL."""

import http.client
import json
import socket
import uuid
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import websocket

PATIENCE_SECONDS = 120


@dataclass(frozen=True)
class Browser:
    """A client with the URL of a notebook."""

    port: int
    token: str

    @classmethod
    def at(cls, url: str) -> "Browser":
        parts = urlsplit(url)
        assert (parts.hostname, parts.path) == ("127.0.0.1", "/lab")
        return cls(parts.port or 0, parse_qs(parts.query)["token"][0])

    def ask(
        self, path: str, *, method: str = "GET", body: object = None, token: str | None = None
    ) -> tuple[int, bytes]:
        """Return status and content. `token` replaces the client's token; an empty one sends none."""
        given = self.token if token is None else token
        headers = {"Authorization": f"token {given}"} if given else {}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def json(self, path: str, **options: Any) -> Any:
        status, content = self.ask(path, **options)
        assert status in (200, 201), (status, content)
        return json.loads(content)

    def start_kernel(self) -> str:
        kernel: str = self.json("/api/kernels", method="POST", body={"name": "python3"})["id"]
        return kernel

    def run(self, kernel: str, code: str, *, until: str = "idle") -> str:
        """Run a cell and return its output up to the given state. Fails if the cell fails."""
        message = uuid.uuid4().hex
        request = {
            "header": {
                "msg_id": message,
                "msg_type": "execute_request",
                "username": "",
                "session": "",
                "version": "5.3",
            },
            "parent_header": {},
            "metadata": {},
            "content": {"code": code, "silent": False, "allow_stdin": False},
            "channel": "shell",
        }
        printed = ""
        with closing(self._websocket(f"/api/kernels/{kernel}/channels")) as channel:
            channel.send(json.dumps(request))
            while True:
                answer = json.loads(channel.recv())
                if answer.get("parent_header", {}).get("msg_id") != message:
                    continue
                content = answer["content"]
                assert answer["msg_type"] != "error", content
                printed += content["text"] if answer["msg_type"] == "stream" else ""
                if answer["msg_type"] == "status" and content["execution_state"] == until:
                    return printed

    def type_in_terminal(self, text: str, *, until: str) -> None:
        """Run a command in a new terminal and close the terminal's view."""
        name = self.json("/api/terminals", method="POST")["name"]
        with closing(self._websocket(f"/terminals/websocket/{name}")) as terminal:
            terminal.send(json.dumps(["stdin", text]))
            shown = ""
            while until not in shown:
                kind, *words = json.loads(terminal.recv())
                shown += words[0] if kind == "stdout" else ""

    def shut_down(self) -> None:
        """Shut JupyterLab down like the menu entry File > Shut Down."""
        status, _ = self.ask("/api/shutdown", method="POST")
        assert status == 200

    def _websocket(self, path: str) -> websocket.WebSocket:
        return websocket.create_connection(
            f"ws://127.0.0.1:{self.port}{path}",
            header=[f"Authorization: token {self.token}"],
            # Pass our own socket, because the client would look for a proxy.
            socket=socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS),
        )
