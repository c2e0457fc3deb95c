"""What tests of several folders share: the embedded AWS, as a real process with its real HTTP API."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import boto3
import pytest
from botocore.config import Config
from xdist.scheduler import LoadFileScheduling

# moto's jsonschema loads a grammar of IRIs where it finds one: two seconds in each process that collects tests.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # None: not to be found

from infra.emulator import CREDENTIALS, client  # noqa: E402 - after that

pytest_plugins = ["tests.docker_engine"]


ALONE = ("tests/jobs/train/test_resuming.py", "tests/jobs/train/test_pretrain_mlm.py")
"""Long files at the end of a run whose tests share nothing: the last process to work would work alone."""


class FileOrImagesScheduling(LoadFileScheduling):  # type: ignore[misc] # pytest-xdist has no types
    """Tests of a file run in one process, and those of images in one too: each image is built once for all of them."""

    def _split_scope(self, nodeid: str) -> str:
        folder, file = "tests/images/", nodeid.partition("::")[0]
        return folder if nodeid.startswith(folder) else nodeid if file in ALONE else file


def pytest_configure() -> None:
    # Programs that tests start get Ctrl-C as users' do: a shell starts what runs in the background without it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The CDK library's own check of templates takes as long as the rest of a synthesis. The test that runs the app as
    # cdk.json says has it made (tests/infra/test_app.py), and cfn-lint looks at all templates (test_templates.py).
    os.environ["CDK_VALIDATION"] = "false"
    # More processes work than there are cores: threads that wait for each other in one would take the others' time.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileOrImagesScheduling | None:
    return FileOrImagesScheduling(config, log) if config.option.dist == "loadfile" else None


START_SECONDS = 60
STOP_TIMEOUT_SECONDS = 100
"""What the instances grant a container after SIGTERM (infra/constructs/user_data.py): a busy machine takes long."""
DEPLOY_SECONDS = 240


@dataclass(frozen=True, eq=False)
class EmbeddedAws:
    """A running server and ways to talk to it."""

    endpoint: str
    process: "subprocess.Popen[bytes]"
    state_file: Path
    log: Path

    @property
    def session(self) -> boto3.Session:
        return client.session()

    @functools.cache  # noqa: B019 - there are few servers, and a client takes longer to make than to use
    def client(self, service: str) -> Any:
        """A boto3 client that does not try again: an error is what the test wants to see."""
        return client.client(service, self.endpoint, Config(retries={"total_max_attempts": 1}))

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.endpoint}/trainyard/health", timeout=30) as answer:
            health: dict[str, Any] = json.load(answer)
            return health

    @property
    def environment(self) -> Mapping[str, str]:
        """For a process that should talk to it, whatever this one's environment says about AWS."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
        return {**kept, **CREDENTIALS, "AWS_ENDPOINT_URL": self.endpoint}


@contextmanager
def run_embedded_aws(
    folder: Path, *arguments: str, environment: Mapping[str, object] = MappingProxyType({})
) -> Iterator[EmbeddedAws]:
    """A server of its own that ends with the block, and with this process whatever happens to it.

    `environment`: its settings. They stay out of this process, where they would be those of later servers too.
    """
    state_file, log = folder / "emulator.json", folder / "emulator.log"
    command = [sys.executable, "-m", "infra.emulator", "serve", "--state-file", str(state_file)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--exit-with-pid", str(os.getpid()), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "TRAINYARD_STOP_TIMEOUT_SECONDS": str(STOP_TIMEOUT_SECONDS),
                "TRAINYARD_MINIMUM_TIMEOUT_SECONDS": "1",
                **{name: str(value) for name, value in environment.items()},
            },
        )
    try:
        until = time.monotonic() + START_SECONDS
        while not state_file.exists():
            if process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"the embedded AWS did not start:\n{log.read_text()}")
            time.sleep(0.02)
        state = json.loads(state_file.read_text())
        yield EmbeddedAws(endpoint=state["endpoint"], process=process, state_file=state_file, log=log)
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="session")
def embedded_aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedAws]:
    """One server for all tests. Any answer of 500 it ever gave fails the last of them."""
    with run_embedded_aws(tmp_path_factory.mktemp("embedded-aws")) as aws:
        yield aws
        errors = aws.health()["server_errors"]
        if errors:
            pytest.fail(f"the embedded AWS failed inside: {json.dumps(errors, indent=2)}\n{aws.log.read_text()}")


@pytest.fixture
def fresh_aws(tmp_path: Path) -> Iterator[EmbeddedAws]:
    """A server for one test alone: one that breaks it, stops it or counts what is in it."""
    with run_embedded_aws(tmp_path) as aws:
        yield aws


@pytest.fixture(scope="session")
def deployed_aws(embedded_aws: EmbeddedAws) -> EmbeddedAws:
    """The server with the project's stage `dev` deployed to it by the real CDK CLI."""
    deployment = subprocess.run(
        [sys.executable, "-m", "infra.emulator", "deploy", "--endpoint", embedded_aws.endpoint],
        capture_output=True,
        text=True,
        timeout=DEPLOY_SECONDS,
        check=False,
    )
    assert deployment.returncode == 0, deployment.stderr
    return embedded_aws
