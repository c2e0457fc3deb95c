"""The records of a run's attempts, and the receipt over all of them."""

from collections.abc import Callable
from datetime import datetime, timedelta, timezone, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jobs.aws import s3 as object_store
from jobs.container.launcher import accounting
from jobs.container.launcher.accounting import AttemptRecord, RecordedAttempts, receipt
from jobs.container.launcher.outcome import End
from jobs.container.launcher.request import Launch, parse
from jobs.container.launcher.utilization import Utilization
from jobs.core.instance_types import instance_type
from jobs.core.locations import S3Location
from jobs.core.queues import Capacity
from jobs.core.records import Attempt, Receipt
from jobs.money.budget import SAVE_SECONDS
from jobs.money.receipt import savings
from tests.support.container.launching import Run, environment_of
from tests.support.container.metadata_service import LIFE_CYCLE, MetadataService

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


STARTED = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)


def attempt(number: int, hours: float, type_name: str, capacity: Capacity) -> Attempt:
    return Attempt(
        number=number,
        started_at=STARTED,
        last_seen_at=STARTED + timedelta(hours=hours),
        instance_type=type_name,
        capacity=capacity,
        accelerator="hpu",
        nnodes=1,
        world_size=8,
    )


def test_each_attempt_is_priced_by_its_instance_type() -> None:
    gaudi, gpus = instance_type("dl1.24xlarge"), instance_type("p4d.24xlarge")
    # Half an hour to the first step, then 90 steps, a third of which the second attempt repeats.
    training = {"training_started_at": STARTED + timedelta(hours=0.5), "last_step": 90}
    trained = attempt(1, 2, gaudi.name, "spot").model_copy(update=training)
    later = {"training_started_at": STARTED, "resumed_from_step": 60}
    found = receipt(
        S3Location("runs", "research/reviews-20261121-120000-00ab/"),
        [trained, attempt(2, 3, gpus.name, "on-demand").model_copy(update=later)],
        job="finetune-classification",
        instance=gpus,
        state="running",
        result={},
        on_instance=True,
    )
    assert found.instance_hours == 5
    assert found.on_demand_usd == pytest.approx(2 * gaudi.on_demand_usd_per_hour + 3 * gpus.on_demand_usd_per_hour)
    assert found.spot_usd == pytest.approx(2 * gaudi.spot_usd_per_hour + 3 * gpus.spot_usd_per_hour)
    assert found.estimated_usd == pytest.approx(2 * gaudi.spot_usd_per_hour + 3 * gpus.on_demand_usd_per_hour)
    saved = 2 * (gaudi.on_demand_usd_per_hour - gaudi.spot_usd_per_hour)
    assert found.saved_usd == pytest.approx(saved)
    assert found.saved_percent == pytest.approx(100 * saved / found.on_demand_usd, abs=0.05)
    assert found.starting_usd == pytest.approx(0.5 * gaudi.spot_usd_per_hour)
    assert found.lost_usd == pytest.approx(0.5 * gaudi.spot_usd_per_hour)
    assert found.waiting_usd == 0
    stand_in = receipt(
        S3Location("runs", "research/reviews-20261121-120000-00ab/"),
        [trained],
        job="finetune-classification",
        instance=gaudi,
        state="succeeded",
        result={},
        on_instance=False,
    )
    assert stand_in.estimated_usd == pytest.approx(2 * gaudi.spot_usd_per_hour)
    assert (stand_in.saved_usd, stand_in.saved_percent, savings(stand_in)) == (None, None, "")
    assert found.estimate_note == (
        "without storage, data transfer and the boot time of instances, "
        f"with the prices of dl1.24xlarge as of {gaudi.price_date}"
    )


def launch_of(run: S3Location, attempt: int = 1, *options: str) -> Launch:
    flags = [*options, "finetune-classification", "--model=s3://data/model", "--train-data=s3://data/reviews.csv"]
    environment = {"TRAINYARD_RUN_URI": str(run), "AWS_BATCH_JOB_ATTEMPT": str(attempt)}
    return parse(["--instance-type=dl1.24xlarge", "--nproc-per-node=1", *flags], environment)


@pytest.fixture
def a_run(s3: "S3Client", s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Location:
    """A run without records, on the launcher's S3."""
    for name, value in environment_of(s3_endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.delenv("AWS_BATCH_JOB_ID", raising=False)
    return S3Location("runs", f"research/{tmp_path.name}/")


def recorded(run: S3Location, scratch: Path, attempt: int = 1, *options: str) -> AttemptRecord:
    utilization = Utilization("hpu", node=0)
    launch = launch_of(run, attempt, *options)
    return AttemptRecord(launch, accelerator="cpu", scratch=scratch, utilization=utilization)


def test_a_clock_set_back_does_not_shorten_the_receipt(
    a_run: S3Location, s3: "S3Client", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = iter(range(1000))

    class SetBack(datetime):
        """A clock that is set back by ten days at each reading."""

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "SetBack":
            return cls(2026, 11, 21, tzinfo=tz) - timedelta(hours=240 * next(hours))

    monkeypatch.setattr(accounting, "datetime", SetBack)
    record = recorded(a_run, tmp_path, 1, "--capacity=spot", "--spot-usd-per-hour=4.5")
    record.start()
    assert 0 <= record.spent().instance_hours < 0.1
    record.finish(End(code=0, reason=None, cause="done"))

    receipt = Receipt.model_validate_json(object_store.read(s3, a_run / "receipt.json") or b"")
    assert 0 <= receipt.instance_hours < 0.1
    [written] = receipt.attempts
    assert written.finished_at is not None
    assert written.spot_usd_per_hour == 4.5
    assert "Spot at the 4.5 USD an hour that EC2 reported at submission" in receipt.estimate_note
    assert written.started_at <= written.last_seen_at
    assert written.started_at <= written.finished_at


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("1.json", lambda content: content[: len(content) // 2]),
        ("1.json", lambda content: content.replace(b"dl1.24xlarge", b"dl9.24xlarge")),
        ("junk.json", lambda _: b"[" * 100_000),
    ],
)
def test_an_unreadable_record_is_skipped_with_one_warning(
    *,
    name: str,
    damage: Callable[[bytes], bytes],
    a_run: S3Location,
    s3: "S3Client",
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sound = attempt(1, 2, "dl1.24xlarge", "spot").model_dump_json().encode()
    object_store.write(s3, a_run / "attempts" / "2.json", sound.replace(b'"number":1', b'"number":2'))
    damaged = damage(sound)
    object_store.write(s3, a_run / "attempts" / name, damaged)

    record = recorded(a_run, tmp_path, attempt=3)
    record.start()
    assert record.spent().instance_hours == pytest.approx(2, abs=0.1)
    record.finish(End(code=0, reason=None, cause="done"))

    receipt = Receipt.model_validate_json(object_store.read(s3, a_run / "receipt.json") or b"")
    assert [item.number for item in receipt.attempts] == [2, record.number]
    assert object_store.read(s3, a_run / "attempts" / name) == damaged
    assert [line for line in caplog.messages if "warning" in line] == [
        f"warning: {a_run}attempts/{name} cannot be read and is skipped; totals do not include this attempt"
    ]


@pytest.mark.parametrize(("code", "rejoins", "ends_with"), [(75, False, 1), (1, True, 75), (0, False, 0)])
def test_a_superseded_attempt_is_not_retried(
    a_run: S3Location, s3: "S3Client", tmp_path: Path, *, code: int, rejoins: bool, ends_with: int
) -> None:
    older, newer = (recorded(a_run, tmp_path, attempt=number) for number in (1, 2))
    older.start()
    newer.start()
    newer.finish(End(code=0, reason=None, cause="done"))

    end = older.with_outlook(End(code=code, reason="SIGTERM; saved step 7", cause="ended"), rejoins=rejoins)
    older.finish(end)

    assert end.code == ends_with
    receipt = Receipt.model_validate_json(object_store.read(s3, a_run / "receipt.json") or b"")
    assert (receipt.state, [item.number for item in receipt.attempts]) == ("succeeded", [1, 2])
    record = Attempt.model_validate_json(object_store.read(s3, a_run / "attempts" / "1.json") or b"")
    assert record.exit_code == ends_with
    if (code, ends_with) == (75, 1):
        assert record.reason == "SIGTERM; saved step 7; attempt 2 continues the run"
    # The newer attempt may be retried
    assert newer.with_outlook(End(code=75, reason="SIGTERM", cause="ended"), rejoins=False).code == 75


def test_an_interrupted_attempt_says_where_the_next_starts(a_run: S3Location, s3: "S3Client", tmp_path: Path) -> None:
    record = recorded(a_run, tmp_path)
    end = End(code=75, reason="SIGTERM", cause="ended")

    def reason(end: End) -> str | None:
        return record.with_outlook(end, rejoins=False).reason

    assert reason(end) == "SIGTERM; if retried, it starts over: no checkpoint was saved"
    object_store.write(
        s3, a_run / "checkpoints/step-8/model.safetensors", b"half of it"
    )  # interrupted, so it has no manifest
    assert reason(end) == "SIGTERM; if retried, it starts over: no checkpoint was saved"
    object_store.write(s3, a_run / "checkpoints/step-4/manifest.json", b"{}")
    assert reason(end) == "SIGTERM; if retried, it resumes from the newest checkpoint"
    # A reason that already says what was saved, or that is not retried, stays unchanged
    for other in (End(code=75, reason="SIGTERM; saved step 8", cause="done"), End(code=1, reason="no", cause="own")):
        assert record.with_outlook(other, rejoins=False) == other


def test_the_number_of_an_unreadable_record_is_not_reused(a_run: S3Location, s3: "S3Client") -> None:
    records = RecordedAttempts(s3, a_run)
    assert records.next_number(job_id="second", attempt=1) == 1
    object_store.write(s3, a_run / "attempts" / "4.json", b'{"number": 4, "job')
    assert records.next_number(job_id="second", attempt=1) == 5


SECONDS = 30.0
"""Time for the attempt to train. On a slow machine the rank needs half of it to start."""


def test_a_run_saves_and_stops_before_it_exceeds_its_budget(run: Run, recipe: tuple[str, ...]) -> None:
    # GIVEN a budget for an On-Demand instance, which Batch started because Spot had no capacity
    budget = (SAVE_SECONDS + SECONDS) / 3600 * instance_type("dl1.24xlarge").on_demand_usd_per_hour
    options = ("--capacity=spot", f"--max-usd={budget}", "--max-hours=9")
    with MetadataService() as metadata:
        metadata.news[LIFE_CYCLE] = "on-demand"
        # WHEN the training takes longer
        launched = run.start(*recipe, nproc=1, attempt=1, options=options, **metadata.environment)
        launched.wait_for_line("[progress] 4/")
        [rank] = launched.ranks()
        rank.suspend()
        stopped = f"budget: max_usd {budget:g} is nearly used up"
        launched.wait_for_line(f"{stopped}: the training saves and stops")
        rank.resume()
        # THEN it ends and is not retried
        assert launched.wait() == 1, launched.output
    name = str(run.location).strip("/").rpartition("/")[2]
    reason = launched.lines[-1].removeprefix("error: ").strip()
    assert reason.startswith("budget: 0.")
    assert f" USD of max_usd {budget:.2f} used, " in reason
    assert "; the rest is reserved for saving, 2 minutes. " in reason
    assert reason.endswith(f"Next: trainyard resume {name} --set max_usd={2 * budget:g}")
    assert "Traceback" not in launched.output
    # AND its work is saved, and priced On-Demand
    receipt = run.receipt()
    assert receipt.state == "failed"
    [attempt] = receipt.attempts
    assert (attempt.reason, attempt.capacity) == (reason, "on-demand")
    # A regular checkpoint may have been saved before the rank was suspended.
    assert max(run.complete_checkpoints()) == attempt.last_step
    assert f"{stopped}: saving step {attempt.last_step}\n" in launched.lines
    assert receipt.instance_hours * 3600 == pytest.approx(receipt.duration_seconds, abs=0.1)
    assert receipt.estimated_usd is not None
    assert SECONDS / (SAVE_SECONDS + SECONDS) * budget < receipt.estimated_usd < budget
    used = f"{receipt.estimated_usd:.2f} of {budget:.2f} USD, {receipt.instance_hours:.2f} of 9 instance hours"
    assert receipt.budget == used

    # A resumed run without a larger budget starts no rank
    options = ("--capacity=on-demand", *options[1:])
    resumed = run.attempt(*recipe, options=options, expect=1, AWS_BATCH_JOB_ID="9e3a")
    assert f" of max_usd {budget:.2f} used, " in resumed.lines[-1]
    assert "start: " not in resumed.output
    assert run.recorded_attempt(2).last_step == 0
