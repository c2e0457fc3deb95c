"""The phases of a run, from hand-written records of its attempts."""

from datetime import datetime, timedelta, timezone

import pytest

from jobs.core.records import Attempt, CardUse
from jobs.money.phases import lost_steps, phases, usd_by_phase

START = datetime(2026, 11, 1, tzinfo=timezone.utc)


def attempt(
    number: int, *, minutes: float, training_after: float | None = 2, steps: tuple[int, int] = (0, 0), **further: object
) -> Attempt:
    """An attempt on one Spot DL1 that starts at the full hour of its number."""
    started_at = START + timedelta(hours=number)
    training = None if training_after is None else started_at + timedelta(minutes=training_after)
    fields = {
        "number": number,
        "started_at": started_at,
        "last_seen_at": started_at + timedelta(minutes=minutes),
        "instance_type": "dl1.24xlarge",
        "capacity": "spot",
        "accelerator": "hpu",
        "nnodes": 1,
        "world_size": 8,
        "training_started_at": training,
        "resumed_from_step": steps[0],
        "last_step": steps[1],
    }
    return Attempt.model_validate({**fields, **further})


def minutes_of(*attempts: Attempt) -> list[tuple[int, str, float]]:
    found = phases(attempts)
    for phase in found:
        taken = (phase.ended_at - phase.started_at).total_seconds()
        assert phase.instance_seconds == pytest.approx(taken * attempts[phase.attempt - 1].nnodes)
    return [(phase.attempt, phase.name, phase.instance_seconds / 60) for phase in found]


def test_repeated_steps_are_lost_at_the_mean_step_time() -> None:
    # 100 steps in 50 minutes, of which the second attempt repeats 40.
    first = attempt(1, minutes=52, steps=(0, 100))
    second = attempt(2, minutes=12, steps=(60, 80))
    assert lost_steps(first, [second]) == 40
    assert minutes_of(first, second) == [
        (1, "starting", 2),
        (1, "working", pytest.approx(30)),
        (1, "lost", pytest.approx(20)),
        (2, "starting", 2),
        (2, "working", 10),
    ]


def test_attempt_loses_at_most_its_own_steps() -> None:
    first, second = attempt(1, minutes=52, steps=(50, 100)), attempt(2, minutes=12, steps=(0, 20))
    assert lost_steps(first, [second]) == 50
    assert [name for _, name, _ in minutes_of(first, second)] == ["starting", "lost", "starting", "working"]


def test_steps_repeated_by_a_third_attempt_are_lost_by_both() -> None:
    first, second = attempt(1, minutes=52, steps=(0, 50)), attempt(2, minutes=52, steps=(50, 100))
    third = attempt(3, minutes=52, steps=(20, 100))
    assert lost_steps(first, [second, third]) == 30
    assert lost_steps(second, [third]) == 50
    assert lost_steps(third, []) == 0


def test_script_loses_the_time_after_its_last_checkpoint() -> None:
    saved_at = START + timedelta(hours=1, minutes=40)
    first = attempt(1, minutes=60, steps=(0, 4), training_after=None, restored_step=0, saved_at=saved_at)
    second = attempt(2, minutes=60, steps=(0, 8), training_after=None, restored_step=4)
    assert second.may_repeat
    assert minutes_of(first, second) == [(1, "working", 40), (1, "lost", 20), (2, "working", 60)]
    # It saves step 2 again, so it did not load step 4, and repeats the first attempt's work.
    again = second.model_copy(update={"repeats_from_step": 1})
    assert not again.may_repeat
    assert minutes_of(first, again) == [(1, "working", 10), (1, "lost", 50), (2, "working", 60)]
    # An attempt that saved nothing is lost completely once another attempt starts.
    nothing = attempt(1, minutes=60, training_after=None, restored_step=0)
    assert minutes_of(nothing) == [(1, "working", 60)]
    assert minutes_of(nothing, second.model_copy(update={"restored_step": 0}))[0] == (1, "lost", 60)


def test_waiting_of_nodes_is_a_phase_before_the_attempt() -> None:
    group = attempt(1, minutes=12, nnodes=4, waited_instance_seconds=600)
    assert minutes_of(group) == [(1, "waiting", 10), (1, "starting", 8), (1, "working", 40)]
    cost = usd_by_phase([group])
    assert cost == pytest.approx(
        {
            "waiting": 3.93 / 6,
            "starting": 3.93 * 8 / 60,
            "compiling": 0,
            "working": 3.93 * 40 / 60,
            "saving": 0,
            "idle": 0,
            "lost": 0,
        }
    )


def test_attempt_without_a_step_is_only_starting() -> None:
    early, later = attempt(1, minutes=5, training_after=None), attempt(2, minutes=12)
    assert minutes_of(early, later) == [(1, "starting", 5), (2, "starting", 2), (2, "working", 10)]
    assert minutes_of(early) == [(1, "working", 5)]


def test_clock_set_back_makes_no_phase_negative() -> None:
    assert minutes_of(attempt(1, minutes=-3, steps=(0, 10)), attempt(2, minutes=-1)) == []


def test_idle_time_reduces_only_working_time() -> None:
    cards = CardUse(utilization_percent=0.0, memory_percent=3.0, mean_utilization_percent=40.0, idle_seconds=240.0)
    one = attempt(1, minutes=12).model_copy(update={"cards": cards})
    assert minutes_of(one) == [(1, "starting", 2), (1, "working", 6), (1, "idle", 4)]
    never = one.model_copy(update={"cards": cards.model_copy(update={"idle_seconds": 6000.0})})
    assert minutes_of(never) == [(1, "starting", 2), (1, "idle", 10)]


def test_compiling_and_saving_explain_idle_cards() -> None:
    cards = CardUse(utilization_percent=0.0, memory_percent=3.0, mean_utilization_percent=40.0, idle_seconds=240.0)
    one = attempt(1, minutes=12, nnodes=2, compiling_seconds=120, saving_seconds=60, cards=cards)
    assert minutes_of(one) == [
        (1, "starting", 4),
        (1, "compiling", 4),
        (1, "working", 12),
        (1, "saving", 2),
        (1, "idle", 2),
    ]
    # 100 steps in the remaining 7 minutes, of which half are repeated.
    first = attempt(1, minutes=12, steps=(0, 100), compiling_seconds=120, saving_seconds=60)
    found = minutes_of(first, attempt(2, minutes=2, steps=(50, 50)))
    assert found[:4] == [
        (1, "starting", 2),
        (1, "compiling", 2),
        (1, "working", pytest.approx(3.5)),
        (1, "saving", 1),
    ]
    assert found[4][:2] == (1, "lost")
    assert found[4][2] == pytest.approx(3.5)


def test_compiling_time_is_limited_to_the_attempts_time() -> None:
    one = attempt(1, minutes=5, compiling_seconds=600, saving_seconds=60)
    assert minutes_of(one) == [(1, "starting", 2), (1, "compiling", 3)]
