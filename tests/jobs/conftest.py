from collections.abc import Iterator

import pytest

from jobs.aws import Aws
from tests.jobs.faulty_proxy import FaultyProxy


@pytest.fixture
def refusing_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A service whose answers are the `faults` of the test and nothing else; the environment points at it."""
    with FaultyProxy("http://localhost:9") as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield proxy


@pytest.fixture
def refusing_aws(refusing_service: FaultyProxy) -> Aws:
    return Aws()
