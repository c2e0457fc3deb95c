"""Which checkpoints another number of ranks can go on from."""

import hashlib
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from jobs.errors import UsageError
from jobs.kinds.pretrain_mlm import PretrainMlm
from jobs.runs import S3Location
from jobs.train.checkpoint import File, Manifest, Resume, fingerprint, newest_complete
from jobs.train.metrics import Throughput
from jobs.train.rank import Rank, one_line

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


@pytest.fixture
def first_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[int], Rank]]:
    """The first of so many ranks of one run, in this process."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C++

    store = TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
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


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_what_deepspeed_has_saved_in_parts_is_refused_by_another_number_of_ranks(
    zero_stage: Literal[0, 1],
    first_rank: Callable[[int], Rank],
    s3: "S3Client",
    caplog: pytest.LogCaptureFixture,
) -> None:
    arguments = PretrainMlm(data="run://tokens", deepspeed_zero_stage=zero_stage)
    decisive, content = arguments.decisive(), b"a part of each rank"
    manifest = Manifest(
        step=16,
        world_size=8,
        fingerprint=fingerprint(decisive),
        arguments=decisive,
        written_at=datetime.now(timezone.utc),
        throughput=Throughput(),
        files={"states": File(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())},
    )
    checkpoint = first_rank(8).run / "checkpoints" / "step-16"
    for name, written in (("states", content), ("manifest.json", manifest.model_dump_json().encode())):
        s3.put_object(Bucket=checkpoint.bucket, Key=(checkpoint / name).key, Body=written)

    def resumed(ranks: int) -> Resume:
        found = newest_complete(first_rank(ranks), s3, arguments)
        assert found is not None
        return found

    assert (resumed(8).folder / "states").read_bytes() == content
    caplog.set_level("INFO", "trainyard")
    if zero_stage == 0:
        assert resumed(4).step == 16
        assert "checkpoint step-16 was made by 8 rank(s) and goes on on 4" in caplog.text
        return
    with pytest.raises(UsageError) as refused:
        resumed(4)
    assert one_line(refused.value) == (
        "checkpoint step-16 has the optimizer's states in 8 parts, one a rank (deepspeed_zero_stage); 4 ranks cannot "
        "resume it. Next: start 8 ranks, or submit a new run"
    )
