"""The receipt of a run whose launcher was killed, which ends when Batch's job ended."""

from datetime import datetime, timedelta, timezone

import pytest

from jobs.container.launcher.accounting import receipt
from jobs.core.instance_types import instance_type
from jobs.core.locations import S3Location
from jobs.core.records import Attempt
from jobs.money.prices import stored
from jobs.money.receipt import stored_text, with_end

STARTED = datetime(2026, 11, 1, tzinfo=timezone.utc)


def test_attempt_without_an_end_is_billed_until_its_jobs_end() -> None:
    row = instance_type("dl1.24xlarge")
    attempt = Attempt(
        number=1,
        job_id="0f0f",
        started_at=STARTED,
        last_seen_at=STARTED,
        instance_type=row.name,
        capacity="spot",
        accelerator="hpu",
        nnodes=1,
        world_size=8,
    )
    written = receipt(
        S3Location("runs", "research/reviews-20261121-120000-00ab/"),
        [attempt],
        job="script",
        instance=row,
        state="running",
        result={},
        on_instance=True,
    )
    assert (written.state, written.estimated_usd) == ("running", 0)

    stopped_at = STARTED + timedelta(hours=2)
    found = with_end(written, job_id="0f0f", stopped_at=stopped_at)

    assert found.state == "failed"
    assert found.attempts[-1].finished_at == stopped_at
    assert found.estimated_usd == pytest.approx(2 * row.spot_usd_per_hour)
    assert found.instance_hours == 2
    assert found.saved_usd == pytest.approx(2 * (row.on_demand_usd_per_hour - row.spot_usd_per_hour))
    # An attempt that has an end, or belongs to an earlier job, is unchanged.
    assert with_end(found, job_id="0f0f", stopped_at=STARTED + timedelta(hours=3)) == found
    assert with_end(written, job_id="1a1a", stopped_at=stopped_at) == written


def test_text_of_stored_files_is_empty_if_s3_was_not_queried() -> None:
    assert stored_text(None) == ""
    kept = stored_text(stored({"checkpoints/step-1/model.safetensors": 2**30, "model/model.safetensors": 2**30}, 0))
    assert kept.startswith("2.15 GB, 1.07 GB of it in checkpoints: 0.0460 USD per month at "), kept
