"""Real ranks that hang and nodes that are lost end the attempt for all, and are named."""

import re
import signal
import time
from typing import Any

from tests.support.train.launching import Run
from tests.support.train.listeners import open_to_the_network


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
    environment: dict[str, Any] = {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"}
    main: dict[str, Any] = {"AWS_BATCH_JOB_ID": "8d2f#0", "AWS_BATCH_JOB_NODE_INDEX": "0"}
    child: dict[str, Any] = {
        "AWS_BATCH_JOB_ID": "8d2f#1",
        "AWS_BATCH_JOB_NODE_INDEX": "1",
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "127.0.0.1",
    }
    nodes = [run.start(*recipe, "--epochs=400", **environment, **own) for own in (main, child)]
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


def test_a_start_that_is_never_complete_ends_and_names_the_node_that_is_missing(
    run: Run, recipe: tuple[str, ...]
) -> None:
    environment: dict[str, Any] = {
        "AWS_BATCH_JOB_ID": "8d2f#0",
        "AWS_BATCH_JOB_NUM_NODES": "2",
        "AWS_BATCH_JOB_NODE_INDEX": "0",
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    }
    launched = run.attempt(*recipe, options=["--start-timeout-seconds=0.5"], expect=75, **environment)

    said = "node 1 did not come within 0.5 s; if it is started again, it starts over: it has saved no checkpoint"
    assert launched.lines[-1] == f"interrupted: {said}\n"
    assert run.recorded_attempt(1).reason == said


def test_a_loss_that_is_no_number_ends_a_run_that_asks_for_it(run: Run, recipe: tuple[str, ...]) -> None:
    launched = run.attempt(*recipe, "--learning-rate=9e15", "--stop-on-nan=true", expect=1)

    assert re.fullmatch(
        r"error: the loss at step \d+ is (nan|inf), and stop_on_nan is set\. Next: submit again with a lower "
        r"learning_rate or more warm-up, and look at the data\n",
        launched.lines[-1],
    ), launched.output
    assert "Traceback" not in launched.output
