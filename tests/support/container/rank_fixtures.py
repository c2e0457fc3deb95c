"""A rank without a launcher, its attempts, and an S3 that denies requests on demand."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from accelerate import data_loader
from transformers import utils

from jobs.container.channel import LOOPBACK, serve_store
from jobs.container.rank import Rank
from jobs.core.locations import S3Location
from tests.support.container.attempts import Attempts
from tests.support.container.faulty_s3 import FaultyS3, try_again_at_once
from tests.support.container.launching import environment_of

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


@pytest.fixture
def first_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[int], Rank]]:
    """Yield a function that returns rank 0 of a run with the given number of ranks, in this process."""
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
            allows_changes=True,  # no test here changes arguments by accident
        )

    yield first_of
    del store  # it must live until here


@pytest.fixture
def faulty(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A proxy to which clients created from now on connect."""
    with FaultyS3(s3_endpoint) as proxy:
        for name, value in environment_of(proxy.url).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        try_again_at_once(monkeypatch)
        yield proxy


@pytest.fixture
def attempts(
    first_rank: Callable[[int], Rank], s3: "S3Client", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Attempts]:
    for module in (utils, utils.import_utils, data_loader):  # _without_datasets changes them
        monkeypatch.setattr(module, "is_datasets_available", module.is_datasets_available)
    rank = first_rank(1)
    made: list[Attempts] = []

    def of_new_run() -> Attempts:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(name, value)  # as torchrun does; a single rank removes them
        place = S3Location("runs", f"research/{tmp_path.name}-{len(made)}/")
        made.append(Attempts(rank, s3, place))
        return made[-1]

    return of_new_run
