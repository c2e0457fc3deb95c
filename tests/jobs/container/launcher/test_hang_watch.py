"""When ranks count as hung, by what their heartbeats say."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jobs.container.channel import Heartbeat, HeartbeatFile, read_heartbeats
from jobs.container.launcher.watchdog import START_SECONDS, HangWatch, Silence

STARTING = Heartbeat(rank=0, node=0, pid=1, number=1, place=1, step=0, doing="starting", slow=True)
WORKING = Heartbeat(rank=0, node=0, pid=1, number=0, place=0, step=0, doing="working", paced=False)
TRAINING = dataclasses.replace(STARTING, number=9, place=9, step=42, doing="training", slow=False)


class Job:
    """Heartbeats of two ranks in a real folder, looked at by a clock of our own."""

    def __init__(self, scratch: Path, hang_timeout_seconds: float = 120, silence: Silence | None = None) -> None:
        self.scratch = scratch
        self.now = 0.0
        self.watch = HangWatch(world_size=2, hang_timeout_seconds=hang_timeout_seconds, silence=silence)
        self.files = [HeartbeatFile(scratch, rank) for rank in range(2)]

    def give(self, rank: int, sign: Heartbeat, **changed: Any) -> None:
        self.files[rank].write(dataclasses.replace(sign, rank=rank, **changed))

    def reason(self, *, after_seconds: float, states: dict[int, str] | None = None) -> str | None:
        """Expect a hang, when so much time has passed and nobody has given another sign."""
        self.watch.look(self.now, read_heartbeats(self.scratch), states or {})
        self.now += after_seconds
        hang = self.watch.look(self.now, read_heartbeats(self.scratch), states or {})
        return hang.reason if hang else None


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_who_prepares_ends_or_waits_for_one_that_prepares_may_take_its_time_but_not_be_stopped(job: Job) -> None:
    assert job.reason(after_seconds=1e6) is None
    ending = dataclasses.replace(TRAINING, doing="ending", paced=False)
    for first, second, state in (
        (WORKING, WORKING, "last seen working"),
        (STARTING, WORKING, "last seen working"),
        (ending, ending, "last seen ending after step 42"),
    ):
        job.give(0, first)
        job.give(1, second)
        assert job.reason(after_seconds=1e6) is None
        assert job.reason(after_seconds=119, states={1: "stopped"}) is None
        reason = job.reason(after_seconds=1, states={1: "stopped"})
        assert reason == f"rank 1 of node 0 (stopped, {state}): no sign of life for 120 s"
        # One that goes on is looked at anew when it is stopped again
        assert job.reason(after_seconds=1) is None
        assert job.reason(after_seconds=119, states={1: "stopped"}) is None


def test_the_start_a_save_and_a_compilation_have_the_longer_limit(job: Job) -> None:
    job.give(0, STARTING)
    assert job.reason(after_seconds=START_SECONDS - 1) is None
    # One of the two has not come as far as that
    assert job.reason(after_seconds=1) == "rank 1 gave no sign at all: no step for 900 s"
    # What is slow for one is for the others that wait for it, and their time begins when it has ended
    job.give(0, TRAINING, doing="saving", slow=True)
    job.give(1, TRAINING)
    assert job.reason(after_seconds=500) is None
    job.give(0, TRAINING, number=10)
    assert job.reason(after_seconds=119) is None
    assert job.reason(after_seconds=1) is not None


def test_those_behind_are_named_else_those_that_are_held_else_all(job: Job) -> None:
    rank = "rank {} of node 0 (last seen training after step 42)"
    for number in range(2):
        job.give(number, TRAINING)
    assert job.reason(after_seconds=119) is None
    assert job.reason(after_seconds=1) == f"{rank.format(0)}; {rank.format(1)}: no step for 120 s"
    stopped = "rank 1 of node 0 (stopped, last seen training after step 42): no step for 120 s"
    assert job.reason(after_seconds=0, states={1: "stopped"}) == stopped
    job.give(0, TRAINING, number=10, place=10)
    assert job.reason(after_seconds=120) == f"{rank.format(1)}: no step for 120 s"
    # As soon as there is a sign all is well
    job.give(1, TRAINING, number=10, place=10)
    assert job.reason(after_seconds=119) is None


def test_zero_turns_the_watch_off_and_a_longer_limit_holds_for_the_start_too(tmp_path: Path) -> None:
    off, patient = Job(tmp_path, 0), Job(tmp_path, 5000)
    for rank in range(2):
        off.give(rank, STARTING)
    assert off.reason(after_seconds=1e6) is None
    assert patient.reason(after_seconds=4999) is None
    assert patient.reason(after_seconds=1) is not None


def test_a_rank_that_says_how_long_it_is_busy_has_that_time_and_no_more(job: Job, tmp_path: Path) -> None:
    job.give(0, TRAINING, doing="busy", patience_seconds=5000)
    job.give(1, TRAINING)
    assert job.reason(after_seconds=4999) is None
    assert (job.reason(after_seconds=1) or "").endswith("no step for 5000 s")
    job.give(0, TRAINING, number=10)
    assert job.reason(after_seconds=120) is not None, "its next step ends it"


def test_a_script_without_a_pace_that_is_busy_may_be_silent_until_then(tmp_path: Path) -> None:
    job = Job(tmp_path, silence=Silence(100, lambda: 0.0))
    job.give(0, WORKING, number=1, doing="busy", patience_seconds=5000)
    assert job.reason(after_seconds=4999) is None
    assert job.reason(after_seconds=1) == "the script has printed nothing and written no file for 5000 s"
    job.give(0, WORKING, number=2)
    assert job.reason(after_seconds=99) is None
    assert job.reason(after_seconds=1) == "the script has printed nothing and written no file for 100 s"
