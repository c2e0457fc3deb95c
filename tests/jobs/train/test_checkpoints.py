"""Which checkpoints stay, and how often one is made where that is left to what it costs."""

import hashlib
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from jobs.errors import UsageError
from jobs.kinds.pretrain_mlm import PretrainMlm
from jobs.runs import CHECKPOINT_TAG, KEPT_CHECKPOINT_TAG, S3Location
from jobs.train.checkpoint import File, Manifest, Resume, Retention, fingerprint, newest_complete, prune
from jobs.train.checkpoint_interval import interval
from jobs.train.metrics import Throughput
from jobs.train.rank import Rank, one_line
from tests.jobs.train.launching import NewRun, Run
from tests.jobs.train.test_resuming import MODEL

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

HOUR = 3600.0


@pytest.mark.parametrize(
    ("stall_seconds", "reclaim_hours", "complete_seconds", "seconds", "said"),
    [
        pytest.param(0.5, 6, 9, 147, "by Young's formula 147 s", id="as the formula says"),
        pytest.param(2, 1.5, 0, 147, "by Young's formula 147 s", id="the same of other figures"),
        pytest.param(0.01, 6, 9, 60, "by Young's formula 21 s, at least 60 s", id="a save costs next to nothing"),
        pytest.param(100, 6, 9, 1800, "by Young's formula 2078 s, at most 1800 s", id="saves are long, reclaims rare"),
        pytest.param(30, 0.05, 9, 300, "by Young's formula 104 s, at least 10 times a save", id="reclaims too often"),
        pytest.param(
            0.5,
            6,
            400,
            400,
            "by Young's formula 147 s, at least until the checkpoint before is complete",
            id="uploads are slow",
        ),
    ],
)
def test_the_interval_is_youngs_within_its_bounds(
    *, stall_seconds: float, reclaim_hours: float, complete_seconds: float, seconds: float, said: str
) -> None:
    chosen = interval(
        stall_seconds=stall_seconds,
        mean_seconds_between_reclaims=reclaim_hours * HOUR,
        complete_seconds=complete_seconds,
    )
    assert chosen.seconds == pytest.approx(seconds, abs=0.5)
    assert chosen.reason.endswith(said)
    assert f"a reclaim every {reclaim_hours:g} h is assumed" in chosen.reason


@pytest.mark.parametrize(
    ("retention", "stay"),
    [
        (Retention(), [30, 40]),
        (Retention(newest=1), [40]),
        (Retention(newest=9), [10, 20, 30, 40]),
        (Retention(newest=1, every_steps=20), [20, 40]),
        (Retention(newest=2, every_steps=25), [30, 40]),
    ],
)
def test_what_is_not_to_stay_goes(
    retention: Retention, stay: list[int], s3: "S3Client", request: pytest.FixtureRequest
) -> None:
    remote = S3Location("runs", f"{request.node.name}/checkpoints")
    # Step 20's neighbour was cut off in an upload long ago, step 50's goes on at this moment.
    complete = [f"step-{step}/manifest.json" for step in (10, 20, 30, 40)]
    names = [*complete, *(f"step-{step}/model.safetensors" for step in (10, 20, 21, 30, 40, 50))]
    for name in names:
        s3.put_object(Bucket=remote.bucket, Key=(remote / name).key, Body=b"")
    prune(s3, remote, retention)
    left = s3.list_objects_v2(Bucket=remote.bucket, Prefix=remote.key)["Contents"]
    kept = {f"step-{step}/{name}" for step in stay for name in ("manifest.json", "model.safetensors")}
    assert {item["Key"].removeprefix(f"{remote.key}/") for item in left} == {*kept, "step-50/model.safetensors"}


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


def test_two_ranks_save_as_often_as_is_worth_it_and_keep_what_they_were_told(
    new_run: NewRun, recipe: tuple[str, ...]
) -> None:
    fixed = new_run()
    fixed.attempt(*recipe, "--checkpoint-every-steps=4", "--keep-checkpoints=1", "--keep-every-steps=20", nproc=2)
    assert fixed.complete_checkpoints() == [20, 40, 48]
    # The bucket lets what carries the first tag expire.
    assert {tag_of(fixed, 20), tag_of(fixed, 40)} == {KEPT_CHECKPOINT_TAG}
    assert tag_of(fixed, 48) == CHECKPOINT_TAG

    chosen = new_run()
    launched = chosen.attempt(*recipe, "--checkpoint-every-steps=auto", nproc=2)
    [line] = [line for line in launched.lines if line.startswith("checkpoints: every")]
    assert re.match(
        r"checkpoints: every \d+ steps \(\d+ s\): a save stops the training for \d+\.\d\d s, and a reclaim every 6 h "
        "is assumed: by Young's formula",
        line,
    )
    # The first, after a few steps, is what the interval is taken from, which is longer than this training.
    saved = [int(found[1]) for line in launched.lines if (found := re.match(r"checkpoint: step (\d+),", line))]
    assert saved[0] <= 16
    assert saved[-1] == 48
    assert chosen.read(MODEL) == fixed.read(MODEL), "saving has changed the training"


def tag_of(run: Run, step: int) -> tuple[str, str]:
    tags = {
        (tag["Key"], tag["Value"])
        for name in run.keys(f"checkpoints/step-{step}/")
        for tag in run.s3.get_object_tagging(Bucket=run.location.bucket, Key=f"{run.location.key}{name}")["TagSet"]
    }
    [tag] = tags
    return tag
