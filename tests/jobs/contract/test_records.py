from datetime import datetime, timedelta, timezone

import pytest
from pydantic import ValidationError

from jobs.contract.records import Attempt, Receipt

NOON = datetime(2026, 11, 21, 12, 0, 5, tzinfo=timezone.utc)


def test_attempts_and_receipts_survive_json() -> None:
    attempt = Attempt(
        number=1,
        started_at=NOON,
        last_seen_at=NOON + timedelta(minutes=5),
        instance_type="dl1.24xlarge",
        accelerator="hpu",
        nnodes=1,
        world_size=8,
    )
    receipt = Receipt(
        run_id="reviews-20261121-120005-00ab",
        team="research",
        job="finetune-classification",
        state="running",
        attempts=[attempt],
        duration_seconds=300.0,
        instance_hours=1 / 12,
        instance_type="dl1.24xlarge",
        on_demand_usd=1.09,
        spot_usd=0.33,
        price_date="2022-08-24",
        price_source="a page",
        estimate_note="an estimate",
        result={"eval_accuracy": 0.81},
    )
    assert Receipt.model_validate_json(receipt.model_dump_json()) == receipt
    assert receipt.attempts[0].exit_code is None


def test_a_receipt_of_another_release_is_refused_rather_than_half_read() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Attempt.model_validate({"number": 1, "flux_capacitor": True})
