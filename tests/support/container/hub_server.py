"""A Hugging Face Hub for models and data sets: the endpoints that huggingface_hub uses to push and download, over HTTP.

Large and binary files are uploaded as on the hub: requested by the LFS batch API, uploaded separately, verified, and
referenced in the commit by their hash.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_ofTheTeam"

LARGE_BYTES = 20_000
"""Size in bytes from which a text file uses LFS. The hub's limit is 10 MB."""

_PATH = re.compile(r"(?P<type>model|dataset)s/(?P<name>[^/]+/[^/]+)/(?P<action>preupload|commit)/main")
_LFS = re.compile(r"/(?P<data_sets>datasets/)?(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/(?P<action>batch|verify)")


_LISTED = re.compile(r"/api/(?P<type>model|dataset)s/(?P<name>[^/]+/[^/]+)(/revision/main)?")
_TREE = re.compile(r"/api/(?P<type>model|dataset)s/(?P<name>[^/]+/[^/]+)/tree/[0-9a-f]{40}")
_FILE = re.compile(r"/(?P<name>(datasets/)?[^/]+/[^/]+)/resolve/(main|[0-9a-f]{40})/(?P<file>.+)")

COMMIT = "5c0ff" * 8
"""The commit of every repository with files."""


@dataclass
class Hub:
    """The pushed files, and settings of the server. Data sets are named `datasets/org/name`, as in their URLs."""

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    by_lfs: dict[str, set[str]] = field(default_factory=dict)
    """The files of a repository that were uploaded with LFS."""
    commits: list[str] = field(default_factory=list)
    _objects: dict[str, bytes] = field(default_factory=dict)
    """Uploaded content by its sha256, perhaps not in any commit."""
    refuses_commits: bool = False
    held: threading.Event = field(default_factory=threading.Event)
    """Set when a commit waits for `may_commit`."""
    may_commit: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_commit.set()

    @property
    def environment(self) -> dict[str, Any]:
        """Return the variables of a job that pushes here. They disable Xet, which this server does not have."""
        return {"HF_TOKEN": TOKEN, "HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1"}


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
                name = _address(asked.get("type") or "model", f"{asked['organization']}/{asked['name']}")
                if name in hub.private:
                    return 409, {"error": "You already created this repo", "url": f"{hub.url}/{name}"}
                hub.private[name] = asked.get("visibility") == "private" or asked.get("private", False)
                return 200, {"url": f"{hub.url}/{name}"}
            if lfs := _LFS.fullmatch(path):
                if f"{lfs['data_sets'] or ''}{lfs['name']}" not in hub.private:
                    return 404, {"error": "Repository not found"}
                return self._lfs(lfs["action"], json.loads(body))
            asked_for = _PATH.fullmatch(path.removeprefix("/api/"))
            assert asked_for, path
            name = _address(asked_for["type"], asked_for["name"])
            if name not in hub.private:
                return 404, {"error": "Repository not found"}
            if asked_for["action"] == "preupload":
                modes = [
                    {"path": file["path"], "uploadMode": _upload_mode(file), "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                return 200, {"files": modes}
            if not hub.may_commit.is_set():
                hub.held.set()
                hub.may_commit.wait()
            if hub.refuses_commits:
                return 403, {"error": "out of order"}
            self._commit(name, [json.loads(line) for line in body.splitlines()])
            return 200, {"commitUrl": f"{hub.url}/{name}/commit/0", "commitOid": "0"}

        def _lfs(self, action: str, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            if action == "verify":
                there = len(hub._objects.get(asked["oid"], b"")) == asked["size"]
                return (200, {}) if there else (422, {"error": "not what was put"})
            place = self.path.removesuffix("/batch")
            objects: list[dict[str, Any]] = []
            for item in asked["objects"]:
                actions = {
                    "upload": {"href": f"{hub.url}/lfs/{item['oid']}"},
                    "verify": {"href": f"{hub.url}{place}/verify"},
                }
                objects.append(item if item["oid"] in hub._objects else {**item, "actions": actions})
            return 200, {"transfer": "basic", "objects": objects}

        def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
            header, *operations = lines
            files: dict[str, bytes] = {}
            hub.by_lfs[name] = {line["value"]["path"] for line in operations if line["key"] == "lfsFile"}
            for line in operations:
                value = line["value"]
                by_lfs = line["key"] == "lfsFile"
                files[value["path"]] = hub._objects[value["oid"]] if by_lfs else base64.b64decode(value["content"])
            hub.commits.append(header["value"]["summary"])
            hub.files[name] = files

        def do_PUT(self) -> None:
            """Store an upload to a signed URL of the LFS batch API, which needs no token."""
            content = self.rfile.read(int(self.headers["Content-Length"]))
            oid = self.path.removeprefix("/lfs/")
            assert self.headers.get("Authorization") is None, "the token went to the storage"
            assert hashlib.sha256(content).hexdigest() == oid
            hub._objects[oid] = content
            self._answer(200, {})

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if listed := _LISTED.fullmatch(path):
                name = _address(listed["type"], listed["name"])
                if name in hub.files:
                    siblings = [{"rfilename": file} for file in sorted(hub.files[name])]
                    self._answer(200, {"id": listed["name"], "sha": COMMIT, "siblings": siblings})
                    return
            if listed := _TREE.fullmatch(path):  # of huggingface_hub 2 (its hf_api.py, list_repo_tree)
                name = _address(listed["type"], listed["name"])
                if name in hub.files:
                    self._answer(200, [_entry(file, content) for file, content in hub.files[name].items()])
                    return
            if (asked := _FILE.fullmatch(path)) and (content := hub.files.get(asked["name"], {}).get(asked["file"])):
                self._give(content)
                return
            self._answer(404, {"error": "Repository not found"})

        do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

        def _give(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def _answer(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
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
        hub.may_commit.set()
        server.shutdown()
        thread.join()


def _address(repository_type: str, name: str) -> str:
    return name if repository_type == "model" else f"{repository_type}s/{name}"


def _entry(file: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def _upload_mode(file: dict[str, Any]) -> str:
    """Decide like the hub, by size and by the first bytes."""
    return "lfs" if file["size"] >= LARGE_BYTES or b"\0" in base64.b64decode(file["sample"]) else "regular"
