"""What is foretold of a run that goes on, held against amounts worked out by hand."""

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from jobs.core.instance_types import instance_type
from jobs.core.log_lines import Progress
from jobs.core.records import Attempt
from jobs.money.outlook import UNSEEN_SECONDS, money_text, outlook, seconds_per_step, time_text

BEGIN = datetime(2026, 11, 1, 12, tzinfo=timezone.utc)
ROW = instance_type("dl1.24xlarge")


def attempt(minutes: float, **changed: Any) -> Attempt:
    fields = {
        "number": 1,
        "started_at": BEGIN,
        "last_seen_at": BEGIN + timedelta(minutes=minutes),
        "training_started_at": BEGIN + timedelta(minutes=6),
        "instance_type": ROW.name,
        "capacity": "spot",
        "accelerator": "hpu",
        "nnodes": 2,
        "world_size": 16,
        **changed,
    }
    return Attempt.model_validate(fields)


def test_money_at_the_end_is_what_it_has_cost_and_the_steps_that_are_left_at_the_pace_until_now() -> None:
    now = BEGIN + timedelta(minutes=60)
    running, progress = attempt(59.5, resumed_from_step=100), Progress(400, 1000)
    pace = seconds_per_step(running, progress, at=now)
    assert pace == pytest.approx(54 * 60 / 300)
    found = outlook([running], progress, pace, now=now)
    assert found.seconds_left == pytest.approx(108 * 60)
    assert found.usd == pytest.approx(2 * ROW.spot_usd_per_hour)
    assert found.usd_at_end == pytest.approx(2 * ROW.spot_usd_per_hour * (1 + 1.8))
    assert found.on_demand_usd_at_end == pytest.approx(2 * ROW.on_demand_usd_per_hour * 2.8)
    assert money_text(found) == "7.86 USD so far, 22.01 USD at the end; On-Demand 26.22 and 73.41 USD"
    assert time_text(found) == "1:48 h to the last step"


def test_where_nothing_is_known_of_the_end_none_is_told_and_a_silent_attempt_counts_no_further() -> None:
    lost, late = attempt(30), BEGIN + timedelta(minutes=30, seconds=UNSEEN_SECONDS + 1)
    assert seconds_per_step(lost, Progress(0, 10), at=late) is None
    found = outlook([lost], Progress(0, 10), None, now=late)
    assert found.usd == pytest.approx(ROW.spot_usd_per_hour)
    assert (found.usd_at_end, found.seconds_left) == (None, None)
    assert money_text(found) == "3.93 USD so far; On-Demand 13.11 USD"
    ended = attempt(30, finished_at=BEGIN + timedelta(minutes=30), capacity="on-demand")
    assert money_text(outlook([ended], None, None, now=late)) == "13.11 USD so far"
    assert money_text(outlook([ended], None, None, now=late), ended=True) == "13.11 USD"
    assert money_text(found, ended=True) == "3.93 USD; On-Demand 13.11 USD"
