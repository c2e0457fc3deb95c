"""What `trainyard images test` copies into a container, and how the tests there detect problems."""

import io
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import ImageNotFound

from images.checks.test_files import is_secret
from images.checks.test_image import PASSWORD_IN_URL, SECRET, fits
from jobs.core.errors import ConfigurationError, NotFoundError
from jobs.core.images import image, release
from jobs.images import check

ROW = release()
"""Gaudi's default."""


def test_container_gets_the_tests_of_the_image_and_its_parents() -> None:
    names = {name: [path.name for path in check.tests_of(image(name))] for name in ("cuda", "cuda-notebook")}
    everywhere = [path.name for path in sorted(Path("images/checks").glob("*.py"))]
    assert names == {
        "cuda": [*everywhere, "test_cuda.py"],
        "cuda-notebook": [*everywhere, "test_cuda.py", "test_notebook.py"],
    }
    with tarfile.open(fileobj=io.BytesIO(check._archive(check.tests_of(image("cpu")), {"image": "cpu"}))) as tar:
        members = {
            member.name.removeprefix("/trainyard-checks/").removeprefix("trainyard-checks/"): member for member in tar
        }
        assert {"conftest.py", "two_ranks.py", "test_cpu.py", "packages/_pytest/main.py"} <= set(members)
        assert {member.mode for member in members.values()} == {0o644}
        facts = tar.extractfile(members["facts.json"])
        assert facts
        assert json.load(facts) == {"image": "cpu"}


def test_missing_pytest_is_reported_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_PYTEST", ("no-such-distribution",))
    with pytest.raises(ConfigurationError, match="no-such-distribution is not installed\nNext: make install"):
        check._archive([], {})


class Engine:
    """An engine whose containers print two lines and end with the given exit codes."""

    def __init__(self, *codes: int, runtimes: tuple[str, ...] = ("runc",)) -> None:
        self.codes, self.runtimes = list(codes), runtimes
        self.created: list[tuple[list[str], dict[str, Any]]] = []
        self.removed = 0
        self.images = self.containers = self

    def get(self, name: str) -> Any:
        if "cpu" not in name and "cuda" not in name:
            raise ImageNotFound("no such image")
        return SimpleNamespace(id="sha256:1", attrs={"Config": {}}, history=list)

    def info(self) -> dict[str, Any]:
        return {"Runtimes": self.runtimes}

    def create(self, image_id: str, command: list[str], **how: Any) -> Any:
        self.created.append((command, how))
        return self

    def put_archive(self, folder: str, archive: bytes) -> None:
        assert (folder, archive) == ("/", b"archive")

    def start(self) -> None: ...

    def logs(self, **_: Any) -> list[bytes]:
        return [b"one li", b"ne\nand ano", b"ther"]

    def wait(self) -> dict[str, int]:
        return {"StatusCode": self.codes[len(self.created) - 1]}

    def remove(self, **_: Any) -> None:
        self.removed += 1


def run(engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, list[str], dict[str, Any]]:
    """Return whether the tests passed, what was printed, and the facts."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(check, "_archive", lambda tests, facts: given.update(facts) or b"archive")
    reported: list[str] = []
    client: Any = engine
    row = release(of=image(name).root)
    passed = check.check(image(name), release=row, revision="0123456789ab", client=client, report=reported.append)
    return passed, reported, given


@pytest.mark.parametrize(("codes", "passed"), [((0, 0), True), ((1, 0), False), ((0, 1), False)])
def test_image_must_pass_its_tests_as_a_job_and_as_root(
    codes: tuple[int, int], passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(*codes)
    assert run(engine, "cpu", monkeypatch)[:2] == (passed, ["one line", "and another"] * 2)
    (as_job, how), (as_root, root_how) = engine.created
    assert [argument for argument in as_root if argument.endswith(".py")] == ["test_files.py"]
    assert "test_files.py" not in as_job
    assert {"test_cpu.py", "test_image.py"} <= set(as_job)
    for options in (how, root_how):
        assert (options["network_mode"], options["cap_drop"], options["init"]) == ("none", ["ALL"], True)
        assert options["security_opt"] == ["no-new-privileges"]
    assert (how.get("user"), root_how["user"], root_how["cap_add"]) == (None, "0:0", ["DAC_READ_SEARCH"])
    assert engine.removed == 2


def test_container_gets_accelerators_if_the_engine_has_a_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    without, with_cards = Engine(0, 0), Engine(0, 0, runtimes=("runc", "nvidia"))
    assert not run(without, "cuda", monkeypatch)[2]["has_card"]
    assert run(with_cards, "cuda", monkeypatch)[2]["has_card"]
    for engine, requests in ((without, None), (with_cards, check.ACCELERATORS["cuda"][1]["device_requests"])):
        [(_, how), (_, root_how)] = engine.created
        assert (how["volumes"], how.get("device_requests")) == (["/scratch"], requests)
        assert "device_requests" not in root_how
    with pytest.raises(NotFoundError, match="the Docker engine has no image trainyard/gaudi:"):
        run(without, "gaudi", monkeypatch)


def test_facts_come_from_the_release_and_the_engine() -> None:
    labels = {"trainyard.transformers": "0", "trainyard.base": "any", "trainyard.commit": "any", "of.the.base": "1"}
    configuration = {"Labels": labels, "Env": ["A=1"], "Cmd": ["python"], "Entrypoint": None}
    found: Any = SimpleNamespace(attrs={"Config": configuration}, history=lambda: [{"CreatedBy": "RUN a"}])
    facts = check._facts(image("gaudi-notebook"), found, release=ROW, revision="0123456789ab")
    assert facts["labels"]["expected"] == {
        "org.opencontainers.image.title": "trainyard/gaudi-notebook",
        "org.opencontainers.image.version": ROW.name,
        "org.opencontainers.image.revision": "0123456789ab",
        "org.opencontainers.image.base.name": f"trainyard/gaudi:{ROW.name}-0123456789ab",
        "trainyard.transformers": ROW.transformers,
    }
    assert (facts["user"], facts["home"], facts["history"], facts["environment"]) == (0, "/root", ["RUN a"], ["A=1"])
    assert facts["versions"].items() >= {"torch": ROW.pytorch, "habana-torch-plugin": f"{ROW.name}.*"}.items()
    assert {"jobs.container.launch", "jobs.container.kinds.finetune.classification"} & set(facts["modules"])
    assert facts["instance_type"] == "dl1.24xlarge"
    cpu = check._facts(image("cpu"), found, release=release(of="cpu"), revision="0123456789ab")
    assert (cpu["user"], cpu["home"]) == (1000, "/home/trainyard")
    assert "org.opencontainers.image.base.name" not in cpu["labels"]["expected"]


@pytest.mark.parametrize(
    ("name", "content", "secret"),
    [
        (".aws/credentials", "a", True),
        (".netrc", "a", True),
        (".netrc", "", False),
        ("id_ed25519", "a", True),
        ("id_ed25519.pub", "a", False),
        ("ssl/own.pem", "-----BEGIN RSA PRIVATE KEY-----\n", True),
        ("ssl/ca.pem", "-----BEGIN CERTIFICATE-----\n", False),
        ("notes.txt", "-----BEGIN PRIVATE KEY-----\n", False),
    ],
)
def test_file_with_credentials_is_detected(tmp_path: Path, name: str, content: str, secret: bool) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    assert is_secret(str(path), path.stat()) is secret


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("HF_TOKEN=hf_a", ["HF_TOKEN"]),
        ("RUN AWS_SECRET_ACCESS_KEY=a b", ["AWS_SECRET_ACCESS_KEY"]),
        ("api_key=a", ["api_key"]),
        ("PATH=/usr/bin", []),
    ],
)
def test_variable_that_looks_like_a_secret_is_detected(text: str, found: list[str]) -> None:
    assert SECRET.findall(text) == found
    assert PASSWORD_IN_URL.search("RUN pip install --index-url https://me:pass@example.com/")
    assert not PASSWORD_IN_URL.search("https://example.com:8080/a@b")


@pytest.mark.parametrize(
    ("found", "expected", "result"),
    [
        ("2.6.0+hpu.git1", "2.6.0", True),
        ("2.6.0", "2.6.0", True),
        ("2.6.0", "2.6.0+cpu", False),
        ("2.6.01", "2.6.0", False),
        ("1.21.0.555", "1.21.0.*", True),
        ("1.21.00.1", "1.21.0.*", False),
        ("missing", "1.0", False),
    ],
)
def test_version_matches(found: str, expected: str, result: bool) -> None:
    assert fits(found, expected) is result
