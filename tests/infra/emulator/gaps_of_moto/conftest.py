"""A stock moto server beside ours: what is claimed to be better here has to fail there."""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.config import Config

from infra.emulator.client import client
from infra.emulator.credentials import Credentials

STOCK_MOTO = """
import os, sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until the test run closes it, or ends in any other way
os._exit(0)
"""


@pytest.fixture(scope="session")
def stock_moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """A boto3 client factory for moto as it comes."""
    log: Path = tmp_path_factory.mktemp("stock-moto") / "moto.log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-c", STOCK_MOTO],
            env={key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "MOTO_"))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert re.fullmatch(r"\d+", port), log.read_text()
        endpoint, once = f"http://localhost:{port}", Config(retries={"total_max_attempts": 1})
        yield functools.cache(lambda service: client(service, endpoint, Credentials.random(), once))
        process.stdin.close()
        process.wait(30)
