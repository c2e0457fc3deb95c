"""What the ranks do at which time after a notice."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs.container.channel import RequestFiles
from jobs.container.rank import Rank
from jobs.container.saving.stop import SPARE_SECONDS, Action, Measured, Shutdown, next_action
from tests.support.container.attempts import uploads_of

SAVES_OF_TWO_SECONDS = Measured(save=2, step=0.5)
"""The last save must begin 1.25 * 2 + 2 * 0.5 + 2 seconds before the end."""


@pytest.mark.parametrize(
    ("left", "measured", "has_saved", "expected"),
    [
        # At the notice it saves, and then continues until the last save is due
        (110, SAVES_OF_TWO_SECONDS, False, "save"),
        (110, SAVES_OF_TWO_SECONDS, True, None),
        (5.6, SAVES_OF_TWO_SECONDS, True, None),
        (5.5, SAVES_OF_TWO_SECONDS, True, "stop"),
        # Longer steps and slower saves make it begin earlier, even if only the save in progress is slow
        (10.6, Measured(save=2, step=3), True, None),
        (10.5, Measured(save=2, step=3), True, "stop"),
        (15.5, Measured(save=10, step=0.5), True, "stop"),
        (27.1, Measured(save=10, under_way=24, step=0.5), True, None),
        # It waits for a save in progress if both will be in time
        (14.6, Measured(save=10, under_way=11.4, step=0.5), True, None),
        (14.6, Measured(save=10, under_way=11.5, step=0.5), True, "stop"),
        # Otherwise the save in progress is the last: it began too late or takes too long
        (15.9, Measured(save=10, under_way=9, step=0.5), True, "leave"),
        (15.6, Measured(save=10, under_way=0.1, step=0.5), True, "leave"),
        (40.0, Measured(under_way=38), True, "leave"),
        # The notice is late, or saves are slow: there is only one save
        (5.5, SAVES_OF_TWO_SECONDS, False, "stop"),
        (110, Measured(save=90), False, "stop"),
        (-40, SAVES_OF_TWO_SECONDS, False, "stop"),
        # Nothing has been measured yet
        (110, Measured(), False, "save"),
        (SPARE_SECONDS, Measured(), False, "stop"),
    ],
)
def test_last_save_begins_as_late_as_measurements_allow(
    *, left: float, measured: Measured, has_saved: bool, expected: Action | None
) -> None:
    assert next_action(left, measured, has_saved=has_saved) == expected


def test_evaluation_continues_until_the_last_save_is_due() -> None:
    assert next_action(110, SAVES_OF_TWO_SECONDS, has_saved=False, evaluates=True) == "save"
    assert next_action(110, SAVES_OF_TWO_SECONDS, has_saved=True, evaluates=True) is None
    assert next_action(5.5, SAVES_OF_TWO_SECONDS, has_saved=True, evaluates=True) == "stop"
    assert next_action(110, Measured(step=0.5), has_saved=False, evaluates=True) == "stop"


class Node(threading.Thread):
    """A node with one rank that makes a step every hundredth of a second, together with the other node."""

    def __init__(self, rank: Rank, barrier: threading.Barrier, saves_take: float) -> None:
        super().__init__(daemon=True)
        rank.scratch.mkdir(parents=True)
        self.launcher = RequestFiles(rank.scratch)
        self.saved: list[int] = []
        self.ended_at = 0.0
        uploads = uploads_of(rank)
        uploads.seconds = saves_take
        self.shutdown = Shutdown(rank, uploads)
        self._barrier = barrier
        self.start()

    def run(self) -> None:
        state = SimpleNamespace(global_step=0, max_steps=10_000)
        control = SimpleNamespace(should_save=False, should_training_stop=False)
        while not control.should_training_stop:
            self._barrier.wait(20)  # the gradients of a step need all ranks
            time.sleep(0.01)
            state.global_step += 1
            control.should_save = False
            self.shutdown.on_step_end(None, state, control)
            self.saved += [state.global_step] if control.should_save else []
        self.ended_at = time.time()


@pytest.mark.parametrize("noticed", [[1], [1, 0]], ids=str)
def test_notice_on_any_node_makes_all_save_the_same_two_steps(
    noticed: list[int], first_rank: Callable[[int], Rank], tmp_path: Path
) -> None:
    barrier = threading.Barrier(2)
    first = replace(first_rank(2), local_world_size=1, nnodes=2)
    nodes = [
        Node(replace(first, rank=index, node=index, scratch=tmp_path / f"node-{index}"), barrier, saves_take=0.2)
        for index in (0, 1)
    ]
    time.sleep(0.1)
    by = time.time() + 4
    for later, index in enumerate(noticed):
        nodes[index].launcher.ask("stop", f"notice of node {index}", by=by + later)
    for node in nodes:
        node.join(30)

    assert nodes[0].saved == nodes[1].saved
    early, last = nodes[0].saved
    assert last > early + 10
    assert {node.shutdown.reason for node in nodes} <= {f"notice of node {index}" for index in noticed}
    assert nodes[0].shutdown.reason == nodes[1].shutdown.reason
    # Allow half of the spare time for a busy machine, whose steps become slower.
    assert max(node.ended_at for node in nodes) <= by - SPARE_SECONDS / 2 - 0.2


def test_stop_without_a_deadline_is_immediate_after_a_notice(first_rank: Callable[[int], Rank]) -> None:
    node = Node(first_rank(1), threading.Barrier(1), saves_take=0.2)
    node.launcher.ask("stop", "notice", by=time.time() + 60)
    deadline = time.monotonic() + 20
    while not node.saved:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    node.launcher.ask("stop", "SIGTERM")
    node.join(20)
    assert len(node.saved) == 2
