"""A step fails at each of its moments: the run stops there, takes away what was made, and continues later."""

import json
import os
import signal
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from jobs.cli.acceptance.runner import Ending, Ids, LimitReachedError, State, Step, run_steps
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
    """An account in which each step makes one thing, and its undo takes that away."""

    path: Path
    breaks: dict[str, tuple[str, BaseException]] = field(default_factory=dict)
    """Step to the moment at which it breaks, before or after its id is kept, and how."""
    cannot_undo: set[str] = field(default_factory=set)
    there: set[str] = field(default_factory=set)
    begun: list[str] = field(default_factory=list)
    undone: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    """Steps that found, by its id, what an earlier start of theirs had made."""
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


def test_all_is_taken_away_last_first_and_a_finished_run_does_nothing_again(world: World) -> None:
    ending, outcomes, state = world.start()
    assert (ending, set(outcomes.values()), state.record.complete) == ("done", {"proven"}, True)
    assert (world.begun, world.undone, world.there) == (list(STEPS), list(reversed(STEPS)), set())
    ending, _, _ = world.start()
    assert (ending, world.begun, world.undone) == ("done", [], [])
    # What could not be proven is not repeated either, and is never called proven.
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
def test_a_step_that_breaks_ends_the_run_cleanly_and_the_next_start_proves_the_rest(
    world: World, name: str, moment: str, *, error: BaseException, expected: Ending, outcome: Outcome
) -> None:
    place = STEPS.index(name)
    world.breaks = {name: (moment, error)}
    ending, seen, state = world.start()
    assert ending == expected
    # Nothing after it began, everything that began was undone once, last first, and nothing is left.
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


def test_if_one_undo_fails_the_others_continue_and_the_next_start_tries_it_again(world: World) -> None:
    world.cannot_undo = {"reclaim"}
    ending, _, state = world.start()
    assert (ending, world.undone, world.there) == ("failed", list(reversed(STEPS)), {"reclaim"})
    assert state.record.step("reclaim").undo_error == "reclaim is held fast"
    world.cannot_undo = set()
    ending, _, _ = world.start()
    assert (ending, world.begun, world.undone, world.there) == ("done", [], ["reclaim"], set())


def test_a_laptop_that_died_in_a_step_finds_what_it_had_made(world: World) -> None:
    class Died(BaseException):
        """What no code of ours runs after: kill -9."""

    def die(_ids: Ids) -> None:
        raise Died

    world.breaks = {"reclaim": ("after", Died())}
    with pytest.raises(Died):
        run_steps([replace(each, undo=die) for each in world.steps()], State.open(world.path, NEW), say=lambda _: None)
    assert {"deploy", "reclaim"} <= world.there
    world.breaks = {}
    ending, _, _ = world.start()
    # The stage is still there, so it isn't deployed again.
    assert (ending, world.begun) == ("done", list(STEPS[STEPS.index("reclaim") :]))
    assert (world.found, set(world.undone), world.there) == (["reclaim"], set(STEPS), set())


def test_each_id_is_on_disk_before_the_step_continues(world: World) -> None:
    seen: list[dict[str, object]] = []

    def look(ids: Ids) -> list[Evidence]:
        ids["role"] = "made"
        seen.extend(json.loads(world.path.read_text())["steps"])
        return [Evidence(claim=claim.name, outcome="proven", text="seen") for claim in claims_of(DESTROY)]

    run_steps([Step(name=DESTROY, run=look)], State.open(world.path, NEW), say=lambda _: None)
    [step] = [step for step in seen if step["name"] == DESTROY]
    assert (step["ids"], step["needs_undo"], step["outcome"]) == ({"role": "made"}, True, "not reached")
    assert [path.name for path in world.path.parent.iterdir()] == [world.path.name]


def test_a_file_that_is_no_state_is_refused(world: World) -> None:
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
