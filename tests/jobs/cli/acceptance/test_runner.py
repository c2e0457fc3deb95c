"""Every step fails once, at each of its moments: the run stops there, takes away what was made, and goes on later."""

import json
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import pytest

from jobs.cli.acceptance.runner import EXIT_CODES, Ending, LimitReachedError, Step, run_steps
from jobs.cli.acceptance.state import State
from jobs.contract.acceptance import DEPLOY, DESTROY, STEPS, Evidence, Outcome, claims_of
from jobs.contract.errors import ConfigurationError, TrainyardError


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
    said: list[str] = field(default_factory=list)
    outcome: Outcome = "proven"

    def steps(self) -> list[Step]:
        return [Step(name=name, run=self._run(name), undo=self._undo(name), sets_up=name == DEPLOY) for name in STEPS]

    def start(self, stops: Callable[[], None] = lambda: None) -> tuple[Ending, State]:
        self.begun, self.undone, self.found = [], [], []
        state = self.state()
        return run_steps(self.steps(), state, say=self.said.append, stops=stops), state

    def state(self) -> State:
        return State.open(
            self.path,
            stage="dev",
            account="123456789012",
            region="us-east-1",
            embedded=False,
            max_usd=40,
            now=datetime.now(timezone.utc),
        )

    def _run(self, name: str) -> Callable[[MutableMapping[str, str]], list[Evidence]]:
        def run(ids: MutableMapping[str, str]) -> list[Evidence]:
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

        return run

    def _undo(self, name: str) -> Callable[[MutableMapping[str, str]], None]:
        def undo(ids: MutableMapping[str, str]) -> None:
            self.undone.append(name)
            if name in self.cannot_undo:
                raise TrainyardError(f"{name} is held fast")
            self.there.discard(ids.get("thing", ""))

        return undo


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "acceptance" / "dev.json")


def outcomes(state: State) -> dict[str, Outcome]:
    return {step.name: step.outcome for step in state.record.steps}


def before(name: str) -> list[str]:
    return list(STEPS[: STEPS.index(name)])


def test_all_goes_well_and_all_is_taken_away_last_first(world: World) -> None:
    ending, state = world.start()
    assert (ending, EXIT_CODES[ending]) == ("done", 0)
    assert world.begun == list(STEPS)
    assert world.undone == list(reversed(STEPS))
    assert world.there == set()
    assert set(outcomes(state).values()) == {"proven"}
    assert state.record.complete


ERRORS: dict[str, tuple[BaseException, Ending, int, Outcome]] = {
    "an error": (ConfigurationError("no such role", next_step="make it"), "failed", 1, "failed"),
    "a defect": (KeyError("jobQueue"), "failed", 1, "failed"),
    "the limit": (LimitReachedError("39.00 USD are spent"), "stopped", 1, "not reached"),
    "Ctrl-C": (KeyboardInterrupt(), "interrupted", 130, "not reached"),
}


@pytest.mark.parametrize("what", ERRORS)
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_breaks_ends_the_run_cleanly_and_the_next_start_proves_the_rest(
    world: World, name: str, moment: str, what: str
) -> None:
    error, expected, exit_code, outcome = ERRORS[what]
    world.breaks = {name: (moment, error)}
    ending, state = world.start()
    assert (ending, EXIT_CODES[ending]) == (expected, exit_code)
    # Nothing after it began, everything that began was undone once, last first, and nothing is left.
    assert world.begun == [*before(name), name]
    assert world.undone == list(reversed(world.begun))
    assert world.there == set()
    seen = outcomes(state)
    assert {seen[earlier] for earlier in before(name)} <= {"proven"}
    assert seen[name] == outcome
    assert {seen[later] for later in STEPS if later not in world.begun} <= {"not reached"}
    assert state.record.step(name).error

    world.breaks = {}
    ending, state = world.start()
    assert ending == "done"
    again = {DEPLOY} if name in STEPS[STEPS.index(DEPLOY) :] else set()
    assert set(world.begun) == again | set(STEPS[STEPS.index(name) :])
    assert set(outcomes(state).values()) == {"proven"}
    assert state.record.step(name).error == ""
    assert world.there == set()


def test_a_finished_run_does_nothing_again(world: World) -> None:
    world.start()
    ending, _ = world.start()
    assert (ending, world.begun, world.undone) == ("done", [], [])


def test_what_cannot_be_proven_is_not_done_again_and_is_never_called_proven(world: World) -> None:
    world.outcome = "not proven here"
    _, state = world.start()
    assert set(outcomes(state).values()) == {"not proven here"}
    world.start()
    assert world.begun == []


def test_where_one_undo_fails_the_others_go_on_and_the_next_start_tries_that_one_again(world: World) -> None:
    world.cannot_undo = {"reclaim"}
    ending, state = world.start()
    assert ending == "failed"
    assert world.undone == list(reversed(STEPS))
    assert world.there == {"reclaim"}
    assert state.record.step("reclaim").undo_error == "reclaim is held fast"

    world.cannot_undo = set()
    ending, state = world.start()
    assert (ending, world.begun, world.undone) == ("done", [], ["reclaim"])
    assert world.there == set()


def test_a_laptop_that_died_in_a_step_finds_what_it_had_made(world: World) -> None:
    class Died(BaseException):
        """What no code of ours runs after: kill -9."""

    def die(_ids: MutableMapping[str, str]) -> None:
        raise Died

    world.breaks = {"reclaim": ("after", Died())}
    steps = [Step(name=one.name, run=one.run, undo=die, sets_up=one.sets_up) for one in world.steps()]
    with pytest.raises(Died):
        run_steps(steps, world.state(), say=world.said.append)
    assert {"deploy", "reclaim"} <= world.there

    world.breaks = {}
    ending, _ = world.start()
    assert ending == "done"
    # The stage still stands, so it isn't deployed again.
    assert world.begun == list(STEPS[STEPS.index("reclaim") :])
    assert world.found == ["reclaim"]
    assert set(world.undone) == set(STEPS)
    assert world.there == set()


def test_at_the_limit_no_further_step_begins(world: World) -> None:
    def stops() -> None:
        if len(world.begun) == 3:
            raise LimitReachedError("39.00 USD are spent")

    ending, state = world.start(stops)
    assert ending == "stopped"
    assert world.begun == list(STEPS[:3])
    assert world.there == set()
    assert outcomes(state)[STEPS[3]] == "not reached"


def test_the_state_is_whole_at_every_moment_and_of_its_owner(world: World) -> None:
    seen: list[object] = []

    def look(ids: MutableMapping[str, str]) -> list[Evidence]:
        ids["role"] = "made"
        seen.append(json.loads(world.path.read_text()))
        return [Evidence(claim=claim.name, outcome="proven", text="seen") for claim in claims_of(DESTROY)]

    state = world.state()
    run_steps([Step(name=DESTROY, run=look)], state, say=world.said.append)
    [written] = seen
    assert isinstance(written, dict)
    [step] = [step for step in written["steps"] if step["name"] == DESTROY]
    assert (step["ids"], step["undo_due"], step["outcome"]) == ({"role": "made"}, True, "not reached")
    assert [path.name for path in world.path.parent.iterdir()] == [world.path.name]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"stage": "dev"}'])
def test_a_file_that_is_no_state_is_refused_with_what_to_do(world: World, content: str) -> None:
    world.path.parent.mkdir()
    world.path.write_text(content)
    with pytest.raises(ConfigurationError, match="is not the state of an acceptance run") as refused:
        world.start()
    assert "then remove the file" in str(refused.value)


def test_a_second_interrupt_does_not_keep_the_undo_from_its_end(world: World) -> None:
    import os
    import signal

    def interrupted(ids: MutableMapping[str, str]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        world.there.discard(ids["thing"])

    steps = [Step(name=one.name, run=one.run, undo=interrupted, sets_up=one.sets_up) for one in world.steps()]
    world.breaks = {DESTROY: ("after", KeyboardInterrupt())}
    assert run_steps(steps, world.state(), say=world.said.append) == "interrupted"
    assert world.there == set()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
