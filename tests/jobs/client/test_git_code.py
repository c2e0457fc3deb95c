"""Code of a git repository that is served over HTTP: by git's own server, and as plain files."""

import functools
import os
import subprocess
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from jobs.client.code import packed
from jobs.contract.code import GitSource, Pack
from jobs.contract.errors import NotFoundError, TrainyardError, UsageError
from jobs.contract.spec import parse_spec
from tests.support.http_server import QuietHandler, serving
from tests.support.jobs.planning import STAGE
from tests.support.train.scripts import write_files

IDENTITY = ("-c", "user.name=A", "-c", "user.email=a@example.com")


class GitServer(QuietHandler):
    """`git http-backend`, which is git's own server, behind its CGI."""

    root: str

    def do_GET(self) -> None:  # noqa: N802 - the base's own name
        path, _, query = self.path.partition("?")
        length = int(self.headers.get("Content-Length") or 0)
        environment = {
            **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            "GIT_PROJECT_ROOT": self.root,
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "REQUEST_METHOD": self.command,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(length),
        }
        done = subprocess.run(
            ["git", "http-backend"], env=environment, input=self.rfile.read(length), capture_output=True, check=False
        )
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        lines = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        self.send_response(int(lines.pop("Status", "200").split()[0]))
        for name, value in lines.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815


class Files(SimpleHTTPRequestHandler):
    """Plain files, which git reads by what `git update-server-info` has written."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's own name
        pass


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A bare repository with a tag, and a branch on which the script has changed since; and the commits of both."""
    folder = tmp_path_factory.mktemp("served")
    work = folder / "work"

    def git(*arguments: str, at: Path = work) -> str:
        return subprocess.run(
            ["git", *IDENTITY, "-C", at, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    write_files(work, {"train.py": "1\n", "examples/small/run.py": "small\n", ".gitignore": "*.bin\n"})
    git("init", "--quiet", "--initial-branch=main")
    git("add", ".")
    git("commit", "--quiet", "--message=first")
    git("tag", "--annotate", "v1", "--message=one")
    write_files(work, {"train.py": "2\n", "keys/.env": "A=1\n"})
    git("add", ".")
    git("commit", "--quiet", "--message=second")
    git("clone", "--quiet", "--bare", str(work), str(folder / "code.git"))
    git("update-server-info", at=folder / "code.git")
    return folder, {"v1": git("rev-parse", "v1^{commit}"), "main": git("rev-parse", "main")}


@pytest.fixture(scope="module", params=["git's own server", "plain files"])
def address(request: pytest.FixtureRequest, repository: tuple[Path, dict[str, str]]) -> Iterator[str]:
    folder, _ = repository
    if request.param == "plain files":
        handler = functools.partial(Files, directory=str(folder))
    else:
        handler = type("Served", (GitServer,), {"root": str(folder)})  # type: ignore[assignment]
    with serving(handler) as port:
        yield f"git+http://127.0.0.1:{port}/code.git"


def pack_of(code: str, command: str = "train.py") -> Pack:
    spec = parse_spec({"name": "a", "job": "script", "arguments": {"code": code, "command": command}}, origin="a")
    resolved, pack = packed(spec, STAGE)
    assert pack is not None
    assert resolved.arguments["code"] == f"s3://{STAGE.run_bucket}/research/code/{pack.fingerprint}.tar.gz"
    return pack


def test_a_tag_and_a_commit_are_the_same_code_and_recorded_by_the_commit(
    address: str, repository: tuple[Path, dict[str, str]]
) -> None:
    commits = repository[1]
    by_tag = pack_of(f"{address}@v1")
    by_commit = pack_of(f"{address}@{commits['v1']}")

    assert by_tag.fingerprint == by_commit.fingerprint
    assert [file.name for file in by_tag.files] == [".gitignore", "examples/small/run.py", "train.py"]
    record = by_tag.record(by_tag.location("runs", "research"))
    assert (record.folder, record.commit, record.dirty) == (f"{address}@v1", commits["v1"], False)
    part = pack_of(f"{address}@main#subdirectory=examples/small", command="run.py")
    assert ([file.name for file in part.files], part.commit) == (["run.py"], commits["main"])


def test_what_is_not_there_or_no_code_for_a_job_is_told_of_the_repository(address: str) -> None:
    with pytest.raises(NotFoundError, match=r"code\.git has no tag and no branch 'v2'"):
        pack_of(f"{address}@v2")
    with pytest.raises(NotFoundError, match="has no commit 0123"):
        pack_of(f"{address}@{'0123' * 10}")
    with pytest.raises(NotFoundError, match="has no folder 'docs' at commit "):
        pack_of(f"{address}@v1#subdirectory=docs")
    with pytest.raises(TrainyardError, match=r"git cannot get http://127\.0\.0\.1:\d+/other\.git: .*not found"):
        pack_of(f"{address.replace('code.git', 'other.git')}@v1")
    with pytest.raises(UsageError) as refused:
        pack_of(f"{address}@main")
    assert refused.value.args[0].startswith(f"arguments.code: {address}@main has what looks like a secret")
    with pytest.raises(UsageError) as refused:
        pack_of(f"{address}@v1", command="tain.py")
    missing = f"arguments.command: {address}@v1 has no file 'tain.py'; did you mean 'train.py'?"
    assert refused.value.args[0] == missing


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("git+file:///etc@main", "only git+https:// is fetched"),
        ("git+ssh://github.com/a/b@main", "only git+https:// is fetched"),
        ("git+http://example.com/a/b@main", "only git+https:// is fetched"),
        ("git+ext::sh -c whoami@main", "has a space"),
        ("git+ext::whoami@main", "only git+https:// is fetched"),
        ("ext::whoami", "is no folder"),
        ("https://github.com/a/b", "a repository is written git+https://"),
        ("git+https://me:word@github.com/a/b@main", "names who logs in"),
        ("git+https://token@github.com/a/b@main", "names who logs in"),
        ("git+https://github.com/a/b", "names no commit"),
        ("git+https://github.com/a/b@--upload-pack=whoami", "is no commit, tag or branch"),
        ("git+https://github.com/a/b@main:refs/x", "is no commit, tag or branch"),
        ("git+https://github.com/a/b@a..b", "is no commit, tag or branch"),
        ("git+https://-oProxyCommand=a/b@main", "is no address of a repository"),
        ("git+--upload-pack=whoami@main", "only git+https:// is fetched"),
        ("git+https://github.com/a/b?c=d@main", "names no commit"),
        ("git+https://github.com/a/b@main#subdirectory=../..", "is no folder of the repository"),
        ("git+https://github.com/a/b@main#egg=a", "is no folder of the repository"),
        ("git+https://github.com:many/a/b@main", "Port could not be cast"),
        ("git+https://github.com/a/b@main\n", "has a space"),
    ],
)
def test_a_hostile_address_is_refused_before_git_sees_it(code: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_spec({"name": "a", "job": "script", "arguments": {"code": code, "command": "a.py"}}, origin="a")
    assert message in str(refused.value)
    assert "word" not in str(refused.value)
    assert "token@" not in str(refused.value)


def test_an_address_gives_git_nothing_but_the_repository() -> None:
    source = GitSource.parse("git+https://github.com:443/org/name.git@feature/x#subdirectory=examples/a")
    assert (source.url, source.ref, source.subdirectory) == (
        "https://github.com:443/org/name.git",
        "feature/x",
        "examples/a",
    )
    assert GitSource.parse(f"git+https://github.com/org/name@{'a' * 40}").is_commit
