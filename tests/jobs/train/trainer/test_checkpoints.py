"""Which checkpoints stay, and how often one is made where that is left to what it costs."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from jobs.aws import s3 as object_store
from jobs.contract.errors import TrainyardError
from jobs.contract.locations import S3Location
from jobs.contract.run import CHECKPOINT_TAG, KEPT_CHECKPOINT_TAG, MANIFEST
from jobs.kinds.pretrain_mlm import PretrainMlm
from jobs.train.rank import Rank
from jobs.train.trainer.checkpoint import CheckpointUploads, Retention, listing, prune
from jobs.train.trainer.checkpoint_interval import interval
from jobs.train.trainer.metrics import RunMetrics, Throughput
from tests.jobs.train.trainer.test_resuming import MODEL
from tests.support.train.faulty_s3 import FaultyS3
from tests.support.train.launching import NewRun, Run

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

HOUR = 3600.0


@pytest.mark.parametrize(
    ("stall_seconds", "reclaim_hours", "nnodes", "complete_seconds", "seconds", "said"),
    [
        pytest.param(0.5, 6, 1, 9, 147, "by Young's formula 147 s", id="as the formula says"),
        pytest.param(2, 1.5, 1, 0, 147, "by Young's formula 147 s", id="the same of other figures"),
        pytest.param(0.5, 6, 4, 9, 73, "by Young's formula 73 s", id="any of four nodes may be taken away"),
        pytest.param(0.01, 6, 1, 9, 60, "by Young's formula 21 s, at least 60 s", id="a save costs next to nothing"),
        pytest.param(
            100, 6, 1, 9, 1800, "by Young's formula 2078 s, at most 1800 s", id="saves are long, reclaims rare"
        ),
        pytest.param(
            30, 0.05, 1, 9, 300, "by Young's formula 104 s, at least 10 times a save", id="reclaims too often"
        ),
        pytest.param(
            0.5,
            6,
            1,
            400,
            400,
            "by Young's formula 147 s, at least until the checkpoint before is complete",
            id="uploads are slow",
        ),
    ],
)
def test_the_interval_is_youngs_within_its_bounds(
    *, stall_seconds: float, reclaim_hours: float, nnodes: int, complete_seconds: float, seconds: float, said: str
) -> None:
    chosen = interval(
        stall_seconds=stall_seconds,
        mean_seconds_between_reclaims=reclaim_hours * HOUR,
        nnodes=nnodes,
        complete_seconds=complete_seconds,
    )
    assert chosen.seconds == pytest.approx(seconds, abs=0.5)
    assert chosen.reason.endswith(said)
    of_each = f" of each of {nnodes} nodes" if nnodes > 1 else ""
    assert f"a reclaim{of_each} every {reclaim_hours:g} h is assumed" in chosen.reason


@pytest.mark.parametrize(
    ("retention", "stay"),
    [
        (Retention(), [30, 40]),
        (Retention(newest=1), [40]),
        (Retention(newest=9), [10, 20, 30, 40]),
        (Retention(newest=1, every_steps=20), [20, 40]),
        # No step is a multiple of these: what was saved next stays.
        (Retention(newest=1, every_steps=25), [30, 40]),
        (Retention(newest=1, every_steps=7), [10, 20, 30, 40]),
    ],
)
def test_what_is_not_to_stay_goes(
    retention: Retention, stay: list[int], s3: "S3Client", request: pytest.FixtureRequest
) -> None:
    remote = S3Location("runs", f"{request.node.name}/checkpoints")
    # Step 20's neighbour was cut off in an upload long ago, step 50's goes on at this moment; step 60's is damaged, so
    # the attempt began before it.
    complete = [f"step-{step}/manifest.json" for step in (10, 20, 30, 40, 60)]
    names = [*complete, *(f"step-{step}/model.safetensors" for step in (10, 20, 21, 30, 40, 50, 60))]
    for name in names:
        s3.put_object(Bucket=remote.bucket, Key=(remote / name).key, Body=b"")
    prune(s3, remote, retention, newest=40)
    left = s3.list_objects_v2(Bucket=remote.bucket, Prefix=remote.key)["Contents"]
    kept = {f"step-{step}/{name}" for step in stay for name in ("manifest.json", "model.safetensors")}
    assert {item["Key"].removeprefix(f"{remote.key}/") for item in left} == {*kept, "step-50/model.safetensors"}


def test_old_ones_that_may_not_be_deleted_cost_a_warning_and_a_mixture_of_two_ends_the_training(
    first_rank: Callable[[int], Rank], s3: "S3Client", faulty: FaultyS3, caplog: pytest.LogCaptureFixture
) -> None:
    rank = first_rank(1)
    remote = rank.run / "checkpoints"
    faulty.denies = lambda method, _path: method == "DELETE"
    rank.scratch.mkdir()

    def save(step: int) -> CheckpointUploads:
        """Each is the first of an attempt of its own."""
        metrics = RunMetrics(
            rank, None, resumed_from_step=0, throughput=Throughput(), samples_per_step=1, warmup_steps=0
        )
        arguments = PretrainMlm(data="run://tokens")
        uploads = CheckpointUploads(rank, object_store.connect(), arguments, metrics, Retention(newest=1))
        folder = rank.scratch / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        uploads.on_save(SimpleNamespace(output_dir=str(rank.scratch)), SimpleNamespace(global_step=step), None)
        return uploads

    for step in (8, 16):
        save(step).finish()
    assert MANIFEST in listing(s3, remote)[8]
    [warning] = [message for message in caplog.messages if "trying" not in message]
    assert warning == (
        "warning: checkpoints that are no longer needed stay on S3: cannot remove objects below "
        f"{remote}/step-8: AWS denied DeleteObject: injected"
    )

    with pytest.raises(TrainyardError, match="checkpoint step-16 could not be uploaded: cannot remove objects below"):
        save(16).finish()

    faulty.denies = lambda _method, _path: False
    save(24).finish()
    assert sorted(listing(s3, remote)) == [24]


def test_two_ranks_save_as_often_as_is_worth_it_and_keep_what_they_were_told(
    new_run: NewRun, recipe: tuple[str, ...]
) -> None:
    fixed = new_run()
    fixed.attempt(*recipe, "--checkpoint-every-steps=4", "--keep-checkpoints=1", "--keep-every-steps=18", nproc=2)
    assert fixed.complete_checkpoints() == [20, 36, 48]
    # The bucket lets what carries the first tag expire.
    assert {tag_of(fixed, 20), tag_of(fixed, 36)} == {KEPT_CHECKPOINT_TAG}
    assert tag_of(fixed, 48) == CHECKPOINT_TAG

    chosen = new_run()
    by_default = tuple(flag for flag in recipe if not flag.startswith("--checkpoint-every-steps"))
    launched = chosen.attempt(*by_default, nproc=2)
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
