"""The budget of a run over all its attempts."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from jobs.core.errors import UsageError
from jobs.core.instance_types import instance_type
from jobs.core.records import Attempt
from jobs.money.budget import Budget, Spent, budget_stop_reason, spent
from jobs.money.prices import Prices, Quote, recorded
from jobs.spec.plan import ResumedRun, plan
from tests.support.jobs.planning import RUN_ID, STAGE, command_of, spec

DL1, P4D = instance_type("dl1.24xlarge"), instance_type("p4d.24xlarge")
STARTED = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)


def attempt(number: int, minutes: float, **changed: Any) -> Attempt:
    return Attempt(
        number=number,
        started_at=STARTED,
        last_seen_at=STARTED + timedelta(minutes=minutes),
        **{"instance_type": DL1.name, "capacity": "spot", "accelerator": "hpu", "nnodes": 1, "world_size": 8} | changed,
    )


def test_each_attempt_is_priced_by_its_own_capacity() -> None:
    lost = attempt(1, 60)
    on_demand = attempt(2, 1, capacity="on-demand", nnodes=4, finished_at=STARTED + timedelta(minutes=30))
    unknown = attempt(3, 6, capacity=None)
    found = spent([lost, on_demand, unknown])
    assert found.instance_hours == pytest.approx(1 + 2 + 0.1)
    assert found.usd == pytest.approx(DL1.spot_usd_per_hour + 2.1 * DL1.on_demand_usd_per_hour)
    # Time that nodes waited for each other counts, and a clock that was set back gives no credit.
    waited = attempt(1, 60, nnodes=2, waited_instance_seconds=1800)
    assert spent([waited, attempt(2, -240 * 60)]).instance_hours == pytest.approx(2.5)
    # Spot is priced at EC2's price if there is one.
    quoted = attempt(1, 60, instance_type=P4D.name, accelerator="cuda", spot_usd_per_hour=6.5)
    assert spent([quoted]).usd == 6.5
    assert spent([quoted.model_copy(update={"spot_usd_per_hour": None})]).usd == P4D.spot_usd_per_hour
    assert spent([quoted], all_on="on-demand").usd == P4D.on_demand_usd_per_hour


def test_limit_that_is_reached_first_applies() -> None:
    so_far = Spent(instance_hours=2, usd=7)
    both = Budget(max_usd=7 + DL1.spot_usd_per_hour, max_hours=10)
    left = both.left(so_far, usd_per_hour=DL1.spot_usd_per_hour, nnodes=1)
    assert left is not None
    assert left.key == "max_usd"
    assert left.seconds == pytest.approx(3600)
    on_four = Budget(max_usd=1000, max_hours=10).left(so_far, usd_per_hour=DL1.on_demand_usd_per_hour, nnodes=4)
    assert on_four is not None
    assert on_four.key == "max_hours"
    assert on_four.seconds == pytest.approx(2 * 3600)
    assert Budget().left(so_far, usd_per_hour=1, nnodes=1) is None
    assert both.text(so_far) == f"7.00 of {7 + DL1.spot_usd_per_hour:.2f} USD, 2.00 of 10 instance hours"

    def why(**changed: Any) -> str:
        return budget_stop_reason(left, so_far, **{"run_id": RUN_ID, "capacity": "spot", **changed})

    used = "7.00 USD of max_usd 10.93 used, at the recorded Spot price, in 2.00 instance hours"
    kept = "the rest is reserved for saving, 2 minutes"
    assert why() == f"budget: {used}; {kept}. Next: trainyard resume {RUN_ID} --set max_usd=21.86"
    assert "used, at EC2's Spot price of 6.5 USD an hour, in" in why(spot_usd_per_hour=6.5)
    # The points of a sweep share its budget: each needs time to save, or to start.
    assert f"; {kept} for each of the 2 running points. Next: " in why(points=2)
    assert "; the rest does not pay for 5 minutes of another point. Next: " in why(of_new_point=True)
    assert "of another point in addition to the 1 running point. Next: " in why(points=1, of_new_point=True)
    over = replace(left, seconds=-1.0, key="max_hours", limit=10)
    assert "12.00 instance hours of max_hours 10 used, 7.00 USD at the recorded Spot price; nothing is left. " in (
        budget_stop_reason(over, Spent(instance_hours=12, usd=7), run_id=RUN_ID, capacity="spot")
    )


def test_limits_go_to_the_launcher_and_tiny_budgets_are_rejected() -> None:
    command = command_of(plan(spec(max_usd=5, max_hours=8.5), STAGE, run_id=RUN_ID))
    assert {"--capacity=spot", "--max-usd=5.0", "--max-hours=8.5"} <= set(command)
    with pytest.raises(
        UsageError, match=r"max_usd: 0.3 pays for 4.6 more minutes of 1 x dl1.24xlarge \(Spot\); a run"
    ) as no:
        plan(spec(max_usd=0.3), STAGE, run_id=RUN_ID)
    assert no.value.next_step == "set max_usd to more than 0.33"
    # The limits would be enough for a new run.
    resumed = ResumedRun(job_ids=("a",), at=STARTED, spent=Spent(instance_hours=7.99, usd=3))
    for limits, message, least in (
        (
            {"max_hours": 8},
            r"max_hours: 8 pays for 0.6 more minutes .*; 7.99 of 8 instance hours are used up",
            "max_hours",
        ),
        ({"max_usd": 3.1}, r"max_usd: 3.1 pays for 1.5 more minutes .*; 3.00 of 3.10 USD are used up", "max_usd"),
    ):
        with pytest.raises(UsageError, match=message) as no:
            plan(spec(**limits), STAGE, run_id=RUN_ID, resumed=resumed)
        more = {"max_hours": "8.07", "max_usd": "3.33"}[least]
        assert no.value.next_step == f"set {least} to more than {more}"
    # A budget that is too small at the recorded price is enough at EC2's lower price, which is passed to the job.
    stage = replace(STAGE, instance_types=(P4D,))
    with pytest.raises(UsageError, match=r"max_usd: 0.6 pays for 4\.\d more minutes of 1 x p4d.24xlarge \(Spot\)"):
        plan(spec(max_usd=0.6), stage, run_id=RUN_ID)
    said = Prices(on_demand=recorded(P4D).on_demand, spot=Quote(usd_per_hour=6.5, date="2026-11-23", source="EC2"))
    quoted = plan(spec(max_usd=0.6), stage, run_id=RUN_ID, prices_of=lambda _: said)
    assert "--spot-usd-per-hour=6.5" in command_of(quoted)
    assert not any("--spot-usd" in part for part in command_of(plan(spec(), stage, run_id=RUN_ID)))
