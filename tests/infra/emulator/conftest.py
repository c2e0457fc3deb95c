"""A Batch with short waiting times, for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.support.emulator.batch_calls import STOP_TIMEOUT_SECONDS, Batch, prepare
from tests.support.running_emulator import run_emulator


@pytest.fixture(scope="session")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Batch]:
    """Start one server for all tests of this folder. A server error fails the last test."""
    settings = {
        "TRAINYARD_STOP_TIMEOUT_SECONDS": STOP_TIMEOUT_SECONDS,
        "TRAINYARD_MINIMUM_TIMEOUT_SECONDS": 1,
        "TRAINYARD_SECRET_OF_THE_SERVER": "not for jobs",
    }
    with run_emulator(tmp_path_factory.mktemp("batch"), environment=settings) as aws:
        yield prepare(aws)
        errors = aws.health()["server_errors"]
        assert not errors, f"{errors}\n{aws.log.read_text()}"
