"""Real nodes of a gang: fewer begin, all meet again, and it is one training."""

import re
import signal

import pytest

from tests.support.container.gangs import JOB, child
from tests.support.container.launching import Run
from tests.support.container.listeners import open_to_the_network


@pytest.mark.timeout(600)
def test_one_begins_alone_then_two_train_and_meet_again_where_one_is_reclaimed(
    run: Run, recipe: tuple[str, ...]
) -> None:
    # WHEN one of two nodes has waited for the other in vain, THEN it begins alone
    alone = child(run, 1, *recipe, attempt=1, options=("--gang-wait-seconds=1",))
    alone.wait_for_line("[progress] 4/")
    [rank] = alone.ranks()
    rank.suspend()  # a training of many minutes: who comes late is looked for every 15 s only
    # WHEN the other one comes, THEN the one that trains saves, and ends to be resumed
    late = child(run, 0, *recipe, attempt=1)
    reason = "node 0 of 2 came late, and the nodes meet again"
    alone.wait_for_line(reason)
    rank.resume()
    assert alone.wait() == 75
    first = re.fullmatch(rf"interrupted: ({reason}; saved step (\d+))\n", alone.lines[-1])
    assert first, alone.output

    # WHEN it is started again, THEN both go on from there, of which the late one is the main node
    nodes = [late, child(run, 1, *recipe, attempt=2)]
    late.wait_for_line(f"start: resumed from checkpoint step-{first[2]}")
    late.wait_for_line("[progress] 24/")
    assert [open_to_the_network(node.process.pid) for node in nodes] == [[], []]
    # WHEN the one that is not the main node is to end, THEN both save, and end to be resumed
    nodes[1].process.send_signal(signal.SIGTERM)
    assert [node.wait() for node in nodes] == [75, 75]
    assert nodes[0].lines[-1] == nodes[1].lines[-1]
    second = re.fullmatch(r"interrupted: (SIGTERM; saved step (\d+))\n", nodes[0].lines[-1])
    assert second, nodes[0].output
    run.wait_until_gone()

    # WHEN both are started again, THEN they go on together
    nodes = [child(run, index, *recipe, attempt=attempt) for index, attempt in enumerate((2, 3))]
    assert [node.wait() for node in nodes] == [0, 0]
    assert f"start: resumed from checkpoint step-{second[2]}\n" in nodes[0].lines
    receipt = run.receipt()
    assert receipt.state == "succeeded"
    assert [(attempt.number, attempt.job_id, attempt.nnodes) for attempt in receipt.attempts] == [
        (1, JOB, 1),
        (2, JOB, 2),
        (3, JOB, 2),
    ]
    assert [attempt.reason for attempt in receipt.attempts] == [first[1], second[1], None]
    assert not [name for name in run.keys("gang/") if "member" in name]
    assert "[W" not in nodes[1].output
    # AND it was one training: of its 48 steps, on one node or on two, each was done once
    losses = [line for line in run.metrics() if "loss" in line]
    assert [line["step"] for line in losses] == list(range(4, 49, 4))
    assert [line["epoch"] for line in losses] == pytest.approx([step / 12 for step in range(4, 49, 4)])
    assert [line["step"] for line in run.metrics() if "eval_accuracy" in line] == [48]
