"""The receipt over all attempts of a run."""

from datetime import datetime, timedelta, timezone

import pytest

from jobs.contract.instance_types import instance_type
from jobs.contract.locations import S3Location
from jobs.contract.queues import Capacity
from jobs.contract.records import Attempt
from jobs.train.launcher.accounting import receipt

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


def test_each_attempt_has_the_price_of_the_instance_type_that_it_ran_on() -> None:
    gaudi, gpus = instance_type("dl1.24xlarge"), instance_type("p4d.24xlarge")
    found = receipt(
        S3Location("runs", "research/reviews-20261121-120000-00ab/"),
        [attempt(1, 2, gaudi.name, "spot"), attempt(2, 3, gpus.name, "on-demand")],
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
    assert found.estimate_note.startswith(
        f"An estimate: instance hours times the dl1.24xlarge prices recorded on {gaudi.price_date} and the "
        f"p4d.24xlarge prices recorded on {gpus.price_date}."
    )
