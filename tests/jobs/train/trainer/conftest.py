"""A rank of no launcher, and an S3 that can be told what to deny."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs.contract.locations import S3Location
from jobs.train.rank import Rank
from jobs.train.store import LOOPBACK, serve_store
from tests.support.train.faulty_s3 import FaultyS3
from tests.support.train.launching import environment_of


@pytest.fixture
def first_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[int], Rank]]:
    """The first of so many ranks of one run, in this process."""
    store = serve_store(LOOPBACK)
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    run = S3Location("runs", f"research/{tmp_path.name}/")

    def first_of(ranks: int) -> Rank:
        return Rank(
            rank=0,
            local_rank=0,
            world_size=ranks,
            local_world_size=ranks,
            node=0,
            nnodes=1,
            run=run,
            scratch=tmp_path / str(ranks),
            allows_changes=True,  # which this is none of
        )

    yield first_of
    del store  # it has served the ranks until here


@pytest.fixture
def faulty(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A proxy, to which clients that are made from now on connect."""
    with FaultyS3(s3_endpoint) as proxy:
        for name, value in environment_of(proxy.url).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        yield proxy
