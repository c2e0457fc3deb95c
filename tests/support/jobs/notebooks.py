"""JupyterLab as a browser talks to it: over HTTP and WebSockets, with the token of its address."""

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
    """Someone who has the address of a notebook."""

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
        """Status and content. `token`: another than one's own; empty: none."""
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
        """Return what a cell prints, up to the state that is waited for. Fails where the cell does."""
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
        """Run a command in a new terminal, whose viewer then leaves."""
        name = self.json("/api/terminals", method="POST")["name"]
        with closing(self._websocket(f"/terminals/websocket/{name}")) as terminal:
            terminal.send(json.dumps(["stdin", text]))
            shown = ""
            while until not in shown:
                kind, *words = json.loads(terminal.recv())
                shown += words[0] if kind == "stdout" else ""

    def shut_down(self) -> None:
        """Do what File > Shut Down does."""
        status, _ = self.ask("/api/shutdown", method="POST")
        assert status == 200

    def _websocket(self, path: str) -> websocket.WebSocket:
        return websocket.create_connection(
            f"ws://127.0.0.1:{self.port}{path}",
            header=[f"Authorization: token {self.token}"],
            # Ours, since it would look for a proxy.
            socket=socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS),
        )
