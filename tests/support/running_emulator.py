"""Start the emulator for tests: a real process with its real HTTP API."""

import functools
import json
import os
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
from urllib.parse import quote

import boto3
import pytest
from botocore.config import Config

from infra.emulator import REGION
from infra.emulator.credentials import Credentials, client, session
from infra.emulator.deploy import run_cdk
from tests.support.container import warm_launcher
from tests.support.container.warm_launcher import WarmLauncher

START_SECONDS = 120
STOP_TIMEOUT_SECONDS = 100
"""Stop timeout of containers, as on instances (infra/compute/user_data.py), because a busy machine is slow."""
DEPLOY_SECONDS = 240

_credentials: dict[str, Credentials] = {}


def environment_of(endpoint: str) -> dict[str, str]:
    """Return a client's environment, for a server that this process started or a stand-in that needs no credentials."""
    credentials = _credentials.get(endpoint) or Credentials.random()
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": credentials.access_key_id,
        "AWS_SECRET_ACCESS_KEY": credentials.secret_access_key,
        "AWS_DEFAULT_REGION": REGION,
    }


def register_proxy(proxy: str, upstream: str) -> None:
    """Register `proxy` as an address that forwards to the server at `upstream` and needs its credentials."""
    if upstream in _credentials:
        _credentials[proxy] = _credentials[upstream]


@dataclass(frozen=True, eq=False)
class Emulator:
    """A running emulator, with clients for it."""

    endpoint: str
    credentials: Credentials
    process: "subprocess.Popen[bytes] | WarmLauncher"
    state_file: Path
    log: Path

    @property
    def session(self) -> boto3.Session:
        return session(self.credentials)

    @functools.cache  # noqa: B019 - there are few servers, and creating a client takes longer than using it
    def client(self, service: str) -> Any:
        """Return a boto3 client without retries, so that tests see the errors."""
        return client(service, self.endpoint, self.credentials, Config(retries={"total_max_attempts": 1}))

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.endpoint}/trainyard/health", timeout=30) as answer:
            health: dict[str, Any] = json.load(answer)
            return health

    def post(self, path: str, body: object = None) -> dict[str, Any]:
        """Send a request to a path under /trainyard/, with the token that it needs."""
        request = urllib.request.Request(
            f"{self.endpoint}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.credentials.secret_access_key}"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            received: dict[str, Any] = json.load(answer)
            return received

    def reclaim(self, job_id: str) -> dict[str, Any]:
        """Reclaim the instance of a job, a child `<id>:<index>` or a node `<id>#<index>`."""
        answer = self.post(f"/trainyard/jobs/{quote(job_id)}/reclaim")
        assert answer["reclaimed"]
        return answer

    def cdk(self, *arguments: str, scratch: Path, cwd: Path | None = None) -> tuple[int, str]:
        """Run the CDK CLI on this emulator, in `cwd` (default: `scratch`), and return exit code and output."""
        lines: list[str] = []
        code = run_cdk(
            [*arguments, "--no-notices"],
            endpoint=self.endpoint,
            credentials=self.credentials,
            scratch=scratch,
            cwd=cwd or scratch,
            on_line=lines.append,
        )
        return code, "\n".join(lines)

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the environment of a client process, without this process's AWS variables."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
        return {**kept, **self.credentials.environment, "AWS_ENDPOINT_URL": self.endpoint}


@contextmanager
def run_emulator(
    folder: Path, *arguments: str, environment: Mapping[str, object] = MappingProxyType({})
) -> Iterator[Emulator]:
    """Run a new emulator until the end of the block, or of this process.

    `environment` has its settings. They are not set in this process, where later servers would inherit them.
    """
    state_file, log = folder / "emulator.json", folder / "emulator.log"
    command = [
        *(sys.executable, "-m", "tests.support.container.warm_jobs", "serve", "--state-file", str(state_file)),
        *("--exit-with-pid", str(os.getpid()), *arguments),
    ]
    server_environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        "TRAINYARD_STOP_TIMEOUT_SECONDS": str(STOP_TIMEOUT_SECONDS),
        "TRAINYARD_MINIMUM_TIMEOUT_SECONDS": "1",
        **{name: str(value) for name, value in environment.items()},
    }
    process: subprocess.Popen[bytes] | WarmLauncher
    with log.open("wb") as output:
        if warm_launcher.can_fork(command, server_environment):
            process = warm_launcher.start(command, server_environment, output.fileno())
        else:
            process = subprocess.Popen(
                command, cwd=Path(__file__).parents[2], stdout=output, stderr=subprocess.STDOUT, env=server_environment
            )
    try:
        until = time.monotonic() + START_SECONDS
        while not state_file.exists():
            if process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"the emulator did not start:\n{log.read_text()}")
            time.sleep(0.02)
        state = json.loads(state_file.read_text())
        credentials = Credentials(state["access_key_id"], state["secret_access_key"])
        _credentials[state["endpoint"]] = credentials
        yield Emulator(
            endpoint=state["endpoint"], credentials=credentials, process=process, state_file=state_file, log=log
        )
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_SECONDS)


def deploy_stage(aws: Emulator) -> None:
    """Deploy the project's stage `dev` with the real CDK CLI."""
    deployment = subprocess.run(
        [sys.executable, "-m", "infra.emulator", "deploy", "--endpoint", aws.endpoint],
        env=dict(aws.environment),
        capture_output=True,
        text=True,
        timeout=DEPLOY_SECONDS,
        check=False,
    )
    assert deployment.returncode == 0, deployment.stderr
