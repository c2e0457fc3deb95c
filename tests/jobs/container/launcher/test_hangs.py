"""Real ranks that hang and nodes that are lost end the attempt for all, and are named."""

import re
import signal
import time

from tests.support.container.launching import Run, two_nodes
from tests.support.container.listeners import open_to_the_network


def test_a_stopped_rank_ends_the_attempt_and_is_named(run: Run, recipe: tuple[str, ...]) -> None:
    # No checkpoint, for which a rank has more time.
    flags = (*recipe, "--epochs=1000", "--checkpoint-every-steps=100000")
    launched = run.start(*flags, nproc=2, options=["--hang-timeout-seconds=15"])
    launched.wait_for_line("[progress] 4/")
    assert open_to_the_network(launched.process.pid) == []

    # A rank that is asked where it is says so, which the launcher does before it ends one that hangs, and goes on.
    hanging = launched.ranks()[1]
    hanging.send_signal(signal.SIGUSR1)
    launched.wait_for_line("[rank 1]   File ")
    time.sleep(1)  # until it has written the rest
    hanging.suspend()

    assert launched.wait() == 75
    assert re.fullmatch(
        r"interrupted: rank 1 of node 0 \(.*last seen \w.* after step \d+\): no (step|sign of life) for 15 s; "
        r"if it is started again, it starts over: it has saved no checkpoint\n",
        launched.lines[-1],
    ), launched.output
    # The one that trains beside it says no word either, but it is not the cause.
    said = "rank 1 of node 0 wrote last: "
    assert [line for line in launched.lines[-11:-1] if line.startswith(said)] == [
        line.replace("[rank 1] ", said) for line in launched.lines if line.startswith("[rank 1] ")
    ][-10:]
    assert "of node 0 wrote last" not in launched.output.replace(said, "")
    assert run.recorded_attempt(1).reason == launched.lines[-1].removeprefix("interrupted: ").rstrip()
    assert run.receipt().state == "interrupted"
    run.wait_until_gone()
    assert not list(run.scratch.iterdir())


def test_a_lost_node_ends_the_attempt_and_is_named(run: Run, recipe: tuple[str, ...]) -> None:
    nodes = [run.start(*recipe, "--epochs=400", **node) for node in two_nodes()]
    nodes[0].wait_for_line("[progress] 4/")
    # Several nodes listen on the address that the others know, which is loopback here.
    assert [open_to_the_network(node.process.pid) for node in nodes] == [[], []]

    assert nodes[1].kill() == -signal.SIGKILL

    assert nodes[0].wait() == 75
    assert re.fullmatch(
        r"interrupted: node 1 lost: no sign of life for \d+ s; "
        r"if it is started again, it (starts over: it has saved no|resumes from the newest) checkpoint\n",
        nodes[0].lines[-1],
    ), nodes[0].output
    assert run.receipt().state == "interrupted"
    run.wait_until_gone()
