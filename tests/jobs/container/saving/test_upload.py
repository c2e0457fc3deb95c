"""Which checkpoints are kept, which attempt may write them, and how often they are made with `auto`."""

import contextlib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from jobs.aws import s3 as object_store
from jobs.container.kinds.artifact_job import JobMetrics
from jobs.container.rank import NodeFailedError, Rank
from jobs.container.saving import interval
from jobs.container.saving.interval import ChosenSaves, interval_seconds
from jobs.container.saving.manifest import Manifest, Retention, SupersededError, list_steps, prune
from jobs.container.saving.metrics import MetricsFiles
from jobs.container.saving.resume import newest_complete
from jobs.container.saving.upload import CheckpointUploads
from jobs.container.trainer.training import _upload_model
from jobs.core.errors import TrainyardError
from jobs.core.locations import S3Location
from jobs.core.run import CHECKPOINT_TAG, KEPT_CHECKPOINT_TAG, MANIFEST
from jobs.spec.kinds.pretrain_mlm import PretrainMlm
from tests.support.container.attempts import Attempts, uploads_of
from tests.support.container.faulty_s3 import Fault, FaultyS3

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

HOUR = 3600.0


@pytest.mark.parametrize(
    ("stall_seconds", "reclaim_hours", "complete_seconds", "seconds"),
    [
        pytest.param(0.5, 6, 0, 294, id="Young's"),
        pytest.param(0.005, 1, 0, 60, id="at least"),
        pytest.param(60, 24, 0, 1800, id="at most"),
        pytest.param(240, 6, 0, 2400, id="a tenth of the time"),
        pytest.param(0.5, 6, 400, 400, id="uploads are slow"),
    ],
)
def test_interval_follows_youngs_formula_within_bounds(
    *, stall_seconds: float, reclaim_hours: float, complete_seconds: float, seconds: float
) -> None:
    chosen = interval_seconds(
        stall_seconds=stall_seconds,
        mean_seconds_between_reclaims=reclaim_hours * HOUR,
        complete_seconds=complete_seconds,
    )
    assert chosen == pytest.approx(seconds, abs=0.5)


class Clock:
    """A clock that advances on request."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_step_time_is_measured_end_to_end_without_saves(
    first_rank: Callable[[int], Rank], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainyard")
    clock = Clock()
    monkeypatch.setattr(interval, "time", clock)
    saves = ChosenSaves(first_rank(1), mean_hours_between_reclaims=6, warmup_steps=2, complete_seconds=lambda: 0.0)
    state = SimpleNamespace(global_step=0, max_steps=10_000)
    saves.on_train_begin(None, state, None)
    saved = []
    # In lazy mode the host only queues work, so it finishes a step at once while the card still works
    while state.global_step < 160:
        control = SimpleNamespace(should_save=False)
        saves.on_step_begin(None, state, None)
        clock.now += 100 if state.global_step < 2 else 0.01
        state.global_step += 1
        saves.on_step_end(None, state, control)
        saved += [state.global_step] if control.should_save else []
        clock.now += 0.5 if control.should_save else 1.99
    # A save takes half a second, which gives 294 s by Young's formula; a step takes two seconds
    assert saved == [7, 7 + 147]
    assert caplog.messages == ["checkpoints: every 147 steps (294 s): a save holds up the training for 0.50 s"]


def test_automatic_saves_do_not_change_the_training(
    attempts: Callable[[], Attempts], caplog: pytest.LogCaptureFixture
) -> None:
    fixed, chosen = attempts(), attempts()
    fixed.train()
    with caplog.at_level("INFO", "trainyard"):
        chosen.train(checkpoint_every_steps="auto")
    [line] = [line for line in caplog.messages if line.startswith("checkpoints: every")]
    message_start = r"checkpoints: every [\d,]+ steps? \(\d+ s\): a save holds up the training for \d+\.\d\d s"
    assert re.fullmatch(message_start, line)
    assert chosen.model() == fixed.model()
    assert chosen.curve() == fixed.curve()


@pytest.mark.parametrize(
    ("retention", "stay"),
    [
        (Retention(), [30, 40]),
        (Retention(newest=9), [10, 20, 30, 40]),
        (Retention(newest=1, every_steps=20), [20, 40]),
        # No step is a multiple, so the next saved step is kept.
        (Retention(newest=1, every_steps=25), [30, 40]),
    ],
)
def test_prune_deletes_all_but_kept_checkpoints(
    retention: Retention, stay: list[int], s3: "S3Client", request: pytest.FixtureRequest
) -> None:
    remote = S3Location("runs", f"{request.node.name}/checkpoints")
    # Step 20's neighbour was interrupted long ago, step 50 is uploading now, and step 60 is damaged, so the attempt
    # began before it.
    complete = [f"step-{step}/manifest.json" for step in (10, 20, 30, 40, 60)]
    names = [*complete, *(f"step-{step}/model.safetensors" for step in (10, 20, 21, 30, 40, 50, 60))]
    for name in names:
        s3.put_object(Bucket=remote.bucket, Key=(remote / name).key, Body=b"")
    prune(s3, remote, retention, newest=40)
    kept = {f"step-{step}/{name}" for step in stay for name in ("manifest.json", "model.safetensors")}
    assert object_store.sizes(s3, remote).keys() == {*kept, "step-50/model.safetensors"}


def save(rank: Rank, step: int, *, newest: int = 1, **retention: int) -> CheckpointUploads:
    """Begin the first save of a new attempt."""
    folder = rank.scratch / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    uploads = uploads_of(rank, object_store.connect(), newest=newest, **retention)
    (folder / "model.safetensors").write_bytes(b"weights")
    uploads.on_save(SimpleNamespace(output_dir=str(rank.scratch)), SimpleNamespace(global_step=step), None)
    return uploads


@pytest.mark.usefixtures("faulty")
def test_tags_let_the_bucket_expire_all_but_kept_checkpoints(first_rank: Callable[[int], Rank], s3: "S3Client") -> None:
    rank = first_rank(1)
    for step in (8, 16, 24):
        save(rank, step, every_steps=10).finish()
    tags = {}
    for name in object_store.sizes(s3, rank.run / "checkpoints"):
        place = rank.run / "checkpoints" / name
        [tag] = s3.get_object_tagging(Bucket=place.bucket, Key=place.key)["TagSet"]
        tags[name] = (tag["Key"], tag["Value"])
    names = ("model.safetensors", MANIFEST)
    assert tags == {f"step-{step}/{name}": KEPT_CHECKPOINT_TAG for step in (16, 24) for name in names}
    save(rank, 25, every_steps=10).finish()
    place = rank.run / "checkpoints/step-25/model.safetensors"
    [tag] = s3.get_object_tagging(Bucket=place.bucket, Key=place.key)["TagSet"]
    assert (tag["Key"], tag["Value"]) == CHECKPOINT_TAG


def newer_checkpoints(s3: "S3Client", run: S3Location, steps: Sequence[int]) -> Callable[[], None]:
    """Return a function that does what a newer attempt would: write its checkpoints and delete all others."""

    def act() -> None:
        remote = run / "checkpoints"
        object_store.write(s3, run / "attempts/2.json", b"{}")
        object_store.delete_all(s3, remote, object_store.sizes(s3, remote))
        for step in steps:
            for name in ("model.safetensors", MANIFEST):
                object_store.write(s3, remote / f"step-{step}" / name, b"the newer one's")

    return act


def test_frozen_attempt_changes_nothing_of_a_newer_one(
    first_rank: Callable[[int], Rank], s3: "S3Client", faulty: FaultyS3
) -> None:
    moments, steps = 0, (16, 24)
    for moment in itertools.count(1):
        rank = first_rank(1)
        older = replace(rank, attempt=1, run=rank.run / f"{moment}/", scratch=rank.scratch / str(moment))
        object_store.write(s3, older.run / "attempts/1.json", b"{}")
        save(older, 8).finish()
        # WHEN it freezes before one of its requests to S3, and a newer attempt begins and ends meanwhile
        act, questions = newer_checkpoints(s3, older.run, steps), itertools.count(1)

        def stand_still(
            method: str, _path: str, act: Callable[[], None] = act, number: "itertools.count[int]" = questions
        ) -> bool:
            if method == "GET" and next(number) == moment:  # noqa: B023 - called while it is this one
                act()
            return False

        faulty.denies = stand_still
        with contextlib.suppress(SupersededError):
            save(older, 16).finish()
        faulty.denies = lambda _method, _path: False
        if next(questions) <= moment:
            break  # it has fewer requests
        moments += 1
        # THEN it stops, and what the newer attempt wrote is unchanged
        remote = older.run / "checkpoints"
        left = {name: object_store.read(s3, remote / name) for name in object_store.sizes(s3, remote)}
        names = {f"step-{step}/{name}" for step in steps for name in ("model.safetensors", MANIFEST)}
        assert left == dict.fromkeys(names, b"the newer one's"), f"moment {moment}"
    assert moments > 5
    # Any further save fails at once
    object_store.write(s3, older.run / "attempts/2.json", b"{}")
    message_start = "attempt 2 of this run has begun, so attempt 1 stops and saves nothing more"
    with pytest.raises(SupersededError, match=message_start):
        save(older, 32).finish()
    assert 32 not in list_steps(s3, older.run / "checkpoints")


@pytest.mark.parametrize("answer_is_lost", [False, True])
def test_newest_attempt_replaces_a_late_manifest(
    first_rank: Callable[[int], Rank], s3: "S3Client", faulty: FaultyS3, *, answer_is_lost: bool
) -> None:
    rank = replace(first_rank(1), attempt=2)
    place = rank.run / "checkpoints/step-8" / MANIFEST
    tries = itertools.count(1)

    def come(method: str, path: str) -> Fault | None:
        if method == "PUT" and MANIFEST in path and next(tries) == 1:
            if answer_is_lost:
                return "cut before the answer"
            object_store.write(s3, place, b"an older one's, which has taken its time")
        return None

    faulty.breaks = come
    save(rank, 8).finish()
    assert Manifest.model_validate_json(object_store.read(s3, place) or b"").step == 8
    assert next(tries) > 2


def test_older_attempt_writes_neither_model_nor_metrics(
    first_rank: Callable[[int], Rank], s3: "S3Client", faulty: FaultyS3
) -> None:
    older = replace(first_rank(1), attempt=1)
    folder = older.scratch / "final"
    folder.mkdir(parents=True)
    files, job = MetricsFiles(older, s3, 0), JobMetrics(older, s3)

    def begin(method: str, path: str) -> bool:
        if method == "PUT" and "model.safetensors" in path:
            object_store.write(s3, older.run / "attempts/2.json", b"{}")
        return False

    faulty.denies = begin
    for name in ("model.safetensors", "config.json", "training_args.bin"):
        (folder / name).write_bytes(b"{}")
    files.write(1, {"loss": 0.5})
    writes: list[Callable[[], None]] = [
        lambda: _upload_model(folder, older, object_store.connect()),
        files.close,
        lambda: job.step(1, {"documents": 3}),
    ]
    for write in writes:
        with pytest.raises(SupersededError, match="attempt 2 of this run has begun, so attempt 1 stops"):
            write()
    assert list(object_store.sizes(s3, older.run / "model")) == ["model.safetensors"], "loading needs config.json"


@pytest.mark.parametrize("mends", [True, False])
def test_download_damaged_on_another_node_is_repeated(
    first_rank: Callable[[int], Rank], s3: "S3Client", faulty: FaultyS3, *, mends: bool
) -> None:
    main = first_rank(2)
    save(replace(main, world_size=1, local_world_size=1), 8).finish()
    weights = main.run / "checkpoints/step-8/model.safetensors"
    object_store.write(s3, weights, b"weighty")  # the same number of bytes
    answers = []

    def mend(method: str, path: str) -> bool:
        if method == "GET" and "model.safetensors" in path:
            answers.append(path)
            if mends and len(answers) == 2:
                object_store.write(s3, weights, b"weights")
        return False

    faulty.denies = mend
    other = replace(main, rank=1, local_world_size=1, node=1, nnodes=2, scratch=main.scratch / "other")
    other.store.set("resume/step", "8")  # the step that the main node has found intact
    arguments = PretrainMlm(data="run://tokens")
    if mends:
        resume = newest_complete(other, object_store.connect(), arguments)
        assert resume is not None
        assert (resume.folder / "model.safetensors").read_bytes() == b"weights"
    else:
        message_start = "checkpoint step-8 arrived damaged twice: the checksum of "
        with pytest.raises(NodeFailedError, match=message_start):
            newest_complete(other, object_store.connect(), arguments)
    assert len(answers) == 2


def test_denied_prune_warns_but_a_mixed_checkpoint_fails(
    first_rank: Callable[[int], Rank], s3: "S3Client", faulty: FaultyS3, caplog: pytest.LogCaptureFixture
) -> None:
    rank = first_rank(1)
    remote = rank.run / "checkpoints"
    faulty.denies = lambda method, _path: method == "DELETE"
    for step in (8, 16):
        save(rank, step).finish()
    assert MANIFEST in list_steps(s3, remote)[8]
    [warning] = [message for message in caplog.messages if "trying" not in message]
    assert warning == (
        "warning: checkpoints that are no longer needed remain on S3: cannot delete objects below "
        f"{remote}/step-8: AWS denied DeleteObject: injected"
    )
    with pytest.raises(TrainyardError, match="checkpoint step-16 could not be uploaded: cannot delete objects below"):
        save(rank, 16).finish()
    faulty.denies = lambda _method, _path: False
    save(rank, 24).finish()
    assert sorted(list_steps(s3, remote)) == [24]


def test_best_checkpoint_stays_local_until_a_better_one(first_rank: Callable[[int], Rank]) -> None:
    rank = first_rank(1)
    folders = [rank.scratch / f"checkpoint-{step}" for step in (4, 8, 12)]
    for folder in folders:
        folder.mkdir(parents=True)
    uploads = uploads_of(rank)
    uploads._remove(folders[0], best=4)
    uploads._remove(folders[1], best=4)
    assert [folder.exists() for folder in folders] == [True, False, True]
    uploads._remove(folders[2], best=12)
    assert [folder.exists() for folder in folders] == [False, False, True]
    uploads._kept_here = [folders[1]]  # an earlier attempt's, on another disk
    uploads._remove(folders[2], best=None)
    assert not folders[2].exists()
