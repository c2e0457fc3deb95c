"""Runs whose attempts are killed: the next attempt ends like an uninterrupted run."""

import json
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.container.launching import Launched, Run

MODEL = "model/model.safetensors"


@pytest.mark.every_release
def test_run_resumed_after_kill_9_ends_like_any_other(
    run: Run, uninterrupted: Callable[[int], Run], recipe: tuple[str, ...], tmp_path: Path
) -> None:
    whole = uninterrupted(2)
    first = run.start(*recipe, nproc=2)
    first.wait_for_line("checkpoint: step 16,")
    assert first.kill() == -signal.SIGKILL
    run.wait_until_gone()  # the ranks end too, without a signal
    killed = run.recorded_attempt(1)
    assert killed.finished_at is None
    assert killed.exit_code is None
    newest = max(run.complete_checkpoints())
    assert newest < 48, "it was killed too late for this test to mean anything"

    second = run.attempt(*recipe, nproc=2, attempt=2)

    assert f"start: resumed from checkpoint step-{newest}\n" in second.lines
    assert run.read(MODEL) == whole.read(MODEL)
    # One curve with every step once, although the killed attempt may have logged steps that were repeated.
    assert [line["step"] for line in run.metrics()] == [line["step"] for line in whole.metrics()]
    assert [line.get("loss") for line in run.metrics()] == [line.get("loss") for line in whole.metrics()]
    shown = run.tensorboard_losses(tmp_path / "events")
    assert [step for step, _ in shown] == list(range(4, 49, 4))
    losses = {line["step"]: line["loss"] for line in whole.metrics() if "loss" in line}
    assert dict(shown) == pytest.approx(losses)
    attempt = run.recorded_attempt(2)
    assert (attempt.number, attempt.resumed_from_step, attempt.last_step) == (2, newest, 48)
    receipt = run.receipt()
    assert receipt.state == "succeeded"
    assert [item.number for item in receipt.attempts] == [1, 2]
    lost = (killed.last_seen_at - killed.started_at).total_seconds()
    assert receipt.duration_seconds > lost
    assert receipt.result["train_runtime_seconds"] > 0


def test_new_job_that_resumes_a_run_continues_its_attempts(run: Run, recipe: tuple[str, ...]) -> None:
    on_spot = run.start(*recipe, AWS_BATCH_JOB_ID="spot")
    on_spot.wait_for_line("checkpoint: step 8,")
    assert on_spot.kill(signal.SIGTERM) == 75
    run.wait_until_gone()
    before = run.read("attempts/1.json")

    # Batch counts from 1 again in each job.
    launched = run.attempt(*recipe, attempt=1, AWS_BATCH_JOB_ID="on-demand")

    assert any(line.startswith("attempt 2 of ") for line in launched.lines)
    assert run.read("attempts/1.json") == before
    first, second = run.receipt().attempts
    assert [(item.number, item.job_id) for item in (first, second)] == [(1, "spot"), (2, "on-demand")]
    spans = [((item.finished_at or item.last_seen_at) - item.started_at).total_seconds() for item in (first, second)]
    assert run.receipt().duration_seconds == pytest.approx(sum(spans), abs=0.01)
    assert second.resumed_from_step >= 8


def test_sigterm_before_the_ranks_start_requests_a_retry(run: Run, recipe: tuple[str, ...]) -> None:
    launched = run.start(*recipe)
    launched.wait_for_line("accelerator:")

    assert launched.kill(signal.SIGTERM) == 75

    run.wait_until_gone()
    assert "interrupted: SIGTERM" in launched.lines[-1]


def test_full_disk_during_a_checkpoint_is_explained(run: Run, recipe: tuple[str, ...]) -> None:
    """A file size limit simulates the full disk: the kernel refuses the write in the same place."""
    launched = run.start(*recipe)
    launched.wait_for_line("checkpoint: step 8,")
    [rank] = launched.ranks()
    rank.rlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    assert launched.wait() == 1

    assert re.match(
        r"error: checkpoint step-\d+ could not be written to .* \(\d+\.\d GB free\): .*; the last complete one in "
        rf"{run.location}checkpoints/ is untouched\. Next: give the instance a larger volume",
        launched.lines[-1],
    )
    assert "Traceback" not in launched.output
    assert run.recorded_attempt(1).reason == launched.lines[-1].removeprefix("error: ").rstrip()
    survivor = max(run.complete_checkpoints())
    manifest = json.loads(run.read(f"checkpoints/step-{survivor}/manifest.json"))
    for name, file in manifest["files"].items():
        assert len(run.read(f"checkpoints/step-{survivor}/{name}")) == file["bytes"]

    second = run.attempt(*recipe, attempt=2)
    assert f"start: resumed from checkpoint step-{survivor}\n" in second.lines


def test_two_nodes_train_and_resume_as_one(
    run: Run, uninterrupted: Callable[[int], Run], recipe: tuple[str, ...]
) -> None:
    """Like a Batch multi-node job: the main node has no variable with its address, but the child node has."""
    whole = uninterrupted(2)

    def nodes(attempt: int) -> list[Launched]:
        environment: dict[str, Any] = {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"}
        main: dict[str, Any] = {"AWS_BATCH_JOB_ID": "7c1e#0", "AWS_BATCH_JOB_NODE_INDEX": "0"}
        child: dict[str, Any] = {
            "AWS_BATCH_JOB_ID": "7c1e#1",
            "AWS_BATCH_JOB_NODE_INDEX": "1",
            "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "127.0.0.1",
        }
        return [run.start(*recipe, attempt=attempt, **environment, **own) for own in (main, child)]

    # Only one node's instance is reclaimed: only its launcher gets the notice, but the ranks of both nodes save.
    first = nodes(1)
    first[0].wait_for_line("[progress] 4/48")
    assert [node.kill(signal.SIGTERM) if node is first[1] else node.wait() for node in reversed(first)] == [75, 75]
    assert re.fullmatch(r"interrupted: SIGTERM; saved step \d+\n", first[0].lines[-1]), first[0].output
    run.wait_until_gone()

    second = nodes(2)
    assert [node.wait() for node in second] == [0, 0], "".join(node.output for node in second)
    assert "start: resumed from checkpoint step-" in second[0].output
    assert run.read(MODEL) == whole.read(MODEL)
    assert run.recorded_attempt(2).nnodes == 2
    assert run.receipt().instance_hours == pytest.approx(run.receipt().duration_seconds * 2 / 3600, abs=1e-5)
