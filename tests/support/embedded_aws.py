"""The embedded AWS as a real process with its real HTTP API, as tests start it."""

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

import boto3
import pytest
from botocore.config import Config

from infra.emulator import CREDENTIALS, client

START_SECONDS = 60
STOP_TIMEOUT_SECONDS = 100
"""What the instances grant a container after SIGTERM (infra/compute/user_data.py): a busy machine takes long."""
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
