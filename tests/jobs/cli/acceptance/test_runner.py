"""Steps that fail at any moment: the run stops, removes what it created, and continues later."""

import json
import os
import signal
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from jobs.cli.acceptance.runner import Ending, Ids, LimitReachedError, Meter, Running, State, Step, run_steps
from jobs.core.acceptance import DEPLOY, DESTROY, STEPS, AcceptanceRecord, Evidence, Outcome, claims_of
from jobs.core.errors import ConfigurationError, TrainyardError

NEW = AcceptanceRecord(
    stage="dev",
    account="123456789012",
    region="us-east-1",
    emulated=False,
    max_usd=40,
    started_at=datetime(2026, 11, 25, 12, tzinfo=timezone.utc),
    steps=[],
)


@dataclass
class World:
    """An account in which each step creates one resource, and its undo deletes it."""

    path: Path
    breaks: dict[str, tuple[str, BaseException]] = field(default_factory=dict)
    """Steps that fail, with the moment (before or after the id is stored) and the error."""
    cannot_undo: set[str] = field(default_factory=set)
    there: set[str] = field(default_factory=set)
    begun: list[str] = field(default_factory=list)
    undone: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    """Steps that found, by its id, the resource of an earlier start."""
    outcome: Outcome = "proven"

    def steps(self) -> list[Step]:
        return [self._step(name) for name in STEPS]

    def start(self) -> tuple[Ending, dict[str, Outcome], State]:
        self.begun, self.undone, self.found = [], [], []
        state = State.open(self.path, NEW)
        ending = run_steps(self.steps(), state, say=lambda _: None)
        return ending, {step.name: step.outcome for step in state.record.steps}, state

    def _step(self, name: str) -> Step:
        def run(ids: Ids) -> list[Evidence]:
            self.begun.append(name)
            if ids.get("thing") in self.there:
                self.found.append(name)
            moment, error = self.breaks.get(name, ("", None))
            if moment == "before" and error is not None:
                raise error
            self.there.add(name)
            ids["thing"] = name
            if moment == "after" and error is not None:
                raise error
            return [Evidence(claim=claim.name, outcome=self.outcome, text="seen") for claim in claims_of(name)]

        def undo(ids: Ids) -> None:
            self.undone.append(name)
            if name in self.cannot_undo:
                raise TrainyardError(f"{name} is held fast")
            self.there.discard(ids.get("thing", ""))

        return Step(name=name, run=run, undo=undo, sets_up=name == DEPLOY)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "acceptance" / "dev.json")


def test_steps_are_undone_in_reverse_and_not_repeated(world: World) -> None:
    ending, outcomes, state = world.start()
    assert (ending, set(outcomes.values()), state.record.complete) == ("done", {"proven"}, True)
    assert (world.begun, world.undone, world.there) == (list(STEPS), list(reversed(STEPS)), set())
    ending, _, _ = world.start()
    assert (ending, world.begun, world.undone) == ("done", [], [])
    # Steps that could not be proven are not repeated either, and never count as proven.
    world.path.unlink()
    world.outcome = "not proven here"
    assert set(world.start()[1].values()) == {"not proven here"}
    world.start()
    assert world.begun == []


@pytest.mark.parametrize(
    ("error", "expected", "outcome"),
    [
        (KeyError("jobQueue"), "failed", "failed"),
        (LimitReachedError("39.00 USD are spent"), "stopped", "not reached"),
        (KeyboardInterrupt(), "interrupted", "not reached"),
    ],
    ids=["defect", "limit", "Ctrl-C"],
)
@pytest.mark.parametrize(("name", "moment"), [("plan", "before"), ("deploy", "after"), ("reclaim", "before")])
def test_a_failed_step_ends_the_run_and_the_next_start_continues(
    world: World, name: str, moment: str, *, error: BaseException, expected: Ending, outcome: Outcome
) -> None:
    place = STEPS.index(name)
    world.breaks = {name: (moment, error)}
    ending, seen, state = world.start()
    assert ending == expected
    # No later step started, each started step was undone once in reverse order, and nothing is left.
    assert world.begun == list(STEPS[: place + 1])
    assert world.undone == list(reversed(world.begun))
    assert world.there == set()
    assert list(seen.values()) == ["proven"] * place + [outcome] + ["not reached"] * (len(STEPS) - place - 1)
    assert state.record.step(name).error

    world.breaks = {}
    ending, seen, state = world.start()
    assert ending == "done"
    again = {DEPLOY} if place >= STEPS.index(DEPLOY) else set()
    assert set(world.begun) == again | set(STEPS[place:])
    assert set(seen.values()) == {"proven"}
    assert state.record.step(name).error == ""
    assert world.there == set()


def test_a_failed_undo_is_retried_by_the_next_start(world: World) -> None:
    world.cannot_undo = {"reclaim"}
    ending, _, state = world.start()
    assert (ending, world.undone, world.there) == ("failed", list(reversed(STEPS)), {"reclaim"})
    assert state.record.step("reclaim").undo_error == "reclaim is held fast"
    world.cannot_undo = set()
    ending, _, _ = world.start()
    assert (ending, world.begun, world.undone, world.there) == ("done", [], ["reclaim"], set())


def test_a_step_finds_its_resources_after_a_crash(world: World) -> None:
    class Died(BaseException):
        """Stands for kill -9, after which none of our code runs."""

    def die(_ids: Ids) -> None:
        raise Died

    world.breaks = {"reclaim": ("after", Died())}
    with pytest.raises(Died):
        run_steps([replace(each, undo=die) for each in world.steps()], State.open(world.path, NEW), say=lambda _: None)
    assert {"deploy", "reclaim"} <= world.there
    world.breaks = {}
    ending, _, _ = world.start()
    # The stage still exists, so it is not deployed again.
    assert (ending, world.begun) == ("done", list(STEPS[STEPS.index("reclaim") :]))
    assert (world.found, set(world.undone), world.there) == (["reclaim"], set(STEPS), set())


def test_each_id_is_saved_before_the_step_continues(world: World) -> None:
    seen: list[dict[str, object]] = []

    def look(ids: Ids) -> list[Evidence]:
        ids["role"] = "made"
        seen.extend(json.loads(world.path.read_text())["steps"])
        return [Evidence(claim=claim.name, outcome="proven", text="seen") for claim in claims_of(DESTROY)]

    run_steps([Step(name=DESTROY, run=look)], State.open(world.path, NEW), say=lambda _: None)
    [step] = [step for step in seen if step["name"] == DESTROY]
    assert (step["ids"], step["needs_undo"], step["outcome"]) == ({"role": "made"}, True, "not reached")
    assert [path.name for path in world.path.parent.iterdir()] == [world.path.name]


def test_an_invalid_state_file_is_refused(world: World) -> None:
    world.path.parent.mkdir()
    world.path.write_text('{"stage": "dev"}')
    with pytest.raises(ConfigurationError, match="is not the state of an acceptance run"):
        world.start()


def test_a_second_interrupt_does_not_stop_the_undo(world: World) -> None:
    def interrupted(ids: Ids) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        world.there.discard(ids["thing"])

    world.breaks = {DESTROY: ("after", KeyboardInterrupt())}
    steps = [replace(each, undo=interrupted) for each in world.steps()]
    assert run_steps(steps, State.open(world.path, NEW), say=lambda _: None) == "interrupted"
    assert world.there == set()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


BEGIN = datetime(2026, 11, 25, 12, tzinfo=timezone.utc)


@dataclass
class Account:
    """A fake account with running instances and a clock."""

    time: datetime = BEGIN
    running: list[Running] = field(default_factory=list)
    idle_usd_per_hour: float = 0.0
    silent: bool = False
    kept: list[tuple[datetime, float]] = field(default_factory=list)

    def instances(self) -> list[Running]:
        if self.silent:
            raise TimeoutError
        return self.running

    def meter(self, *, limit_usd: float = 40.0, spent_usd: float = 0.0, until: datetime = BEGIN) -> Meter:
        return Meter(
            limit_usd=limit_usd,
            spent_usd=spent_usd,
            until=until,
            instances=self.instances,
            idle_usd_per_hour=lambda: self.idle_usd_per_hour,
            keep=lambda at, usd: self.kept.append((at, usd)),
            now=lambda: self.time,
        )

    def look_after(self, meter: Meter, minutes: float) -> float:
        self.time += timedelta(minutes=minutes)
        meter.look()
        return meter.spent_usd

    def launch(self, name: str, usd_per_hour: float) -> None:
        self.running = [*self.running, Running(id=name, launched_at=self.time, usd_per_hour=usd_per_hour)]


def test_instances_and_idle_costs_are_counted() -> None:
    account = Account(idle_usd_per_hour=0.05)
    meter = account.meter()
    meter.look()
    account.launch("i-1", 12.0)
    assert account.look_after(meter, 30) == pytest.approx(6.0 + 0.025)
    account.launch("i-2", 24.0)
    assert account.look_after(meter, 30) == pytest.approx(12.0 + 12.0 + 0.05)
    account.running = []  # they may have ended just before the look
    assert account.look_after(meter, 1) == pytest.approx(24.05 + 36 / 60 + 0.05 / 60)
    assert account.look_after(meter, 60) == pytest.approx(24.05 + 36 / 60 + 0.05 / 60 + 0.05)
    assert account.kept[-1] == (account.time, meter.spent_usd)
    # A continued run counts instances that ran in the meantime, and nothing twice.
    account = Account()
    account.launch("i-1", 10.0)
    meter = account.meter(spent_usd=5.0, until=BEGIN + timedelta(minutes=30))
    assert account.look_after(meter, 60) == pytest.approx(5.0 + 5.0)


def test_the_run_ends_before_the_money_for_the_undo_is_spent() -> None:
    account = Account()
    meter = account.meter(limit_usd=20.0)
    account.launch("i-1", 16.0)
    account.look_after(meter, 59)
    meter.check()
    account.look_after(meter, 1.5)
    with pytest.raises(LimitReachedError, match=r"20\.00 USD is reached: 16\.13 USD spent, 4\.00 USD reserved"):
        meter.check()


def test_five_minutes_without_an_answer_count_as_the_limit() -> None:
    account = Account()
    meter = account.meter()
    account.launch("i-1", 12.0)
    meter.look()
    account.silent = True
    account.look_after(meter, 4.9)
    meter.check()
    account.look_after(meter, 0.1)
    with pytest.raises(LimitReachedError, match="EC2 has not answered for 5 minutes"):
        meter.check()
    account.silent = False
    assert account.look_after(meter, 1) == pytest.approx(12.0 * 6 / 60)
    meter.check()


def test_the_meter_looks_at_most_every_half_minute() -> None:
    account = Account()
    account.launch("i-1", 12.0)
    meter = account.meter()
    meter.check()
    for seconds, looks in ((29, 1), (1, 2), (10, 2)):
        account.time += timedelta(seconds=seconds)
        meter.check()
        assert len(account.kept) == looks
    assert meter.spent_usd == pytest.approx(12.0 / 120)
