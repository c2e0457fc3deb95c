"""What is left of a run when its attempt is killed, and that the next one ends where an uninterrupted one would."""

import json
import re
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.train.launching import Launched, Run

MODEL = "model/model.safetensors"


@pytest.mark.every_release
def test_an_attempt_after_kill_9_ends_with_the_weights_of_an_uninterrupted_run(
    run: Run, uninterrupted: Callable[[int], Run], recipe: tuple[str, ...], tmp_path: Path
) -> None:
    whole = uninterrupted(2)
    first = run.start(*recipe, nproc=2)
    first.wait_for_line("checkpoint: step 16,")
    assert first.kill() == -signal.SIGKILL
    run.wait_until_gone()  # the ranks too, though nobody told them
    killed = run.recorded_attempt(1)
    assert killed.finished_at is None
    assert killed.exit_code is None
    newest = max(run.complete_checkpoints())
    assert newest < 48, "it was killed too late for this test to mean anything"

    second = run.attempt(*recipe, nproc=2, attempt=2)

    assert f"start: resumed from checkpoint step-{newest}\n" in second.lines
    assert run.read(MODEL) == whole.read(MODEL)
    # One curve: every step once, although the killed attempt may have logged some that were done again.
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


def test_of_two_attempts_that_live_at_once_the_older_ends_and_the_newers_model_is_what_is_left(
    run: Run, recipe: tuple[str, ...], tmp_path: Path
) -> None:
    # GIVEN an attempt whose ranks stand still, so that it is taken for lost
    older = run.start(*recipe)
    older.wait_for_line("checkpoint: step 8,")
    [rank] = older.ranks()
    rank.suspend()
    # WHEN another one goes on with the run, and the older wakes up
    other = replace(run, scratch=tmp_path / "elsewhere")
    other.attempt(*recipe, attempt=2)

    def left() -> dict[str, str]:
        listed = run.s3.list_objects_v2(Bucket=run.location.bucket, Prefix=run.location.key)["Contents"]
        names = {item["Key"].removeprefix(run.location.key): item["ETag"] for item in listed}
        own = ("attempts/1.", "utilization/1.")
        return {name: tag for name, tag in names.items() if not name.startswith(own)}

    before = left()
    rank.resume()
    # THEN that one ends with its sentence, and has written nothing but its own record
    assert older.wait() == 1
    said = "attempt 2 of this run has begun, so this one, attempt 1, ends and saves nothing more"
    assert said in older.output
    assert left() == before
    assert MODEL in before
    assert (run.receipt().state, [item.number for item in run.receipt().attempts]) == ("succeeded", [1, 2])
    assert said in (run.recorded_attempt(1).reason or "")


def test_a_job_that_goes_on_with_a_run_of_another_counts_on_and_keeps_what_that_one_recorded(
    run: Run, recipe: tuple[str, ...]
) -> None:
    recipe = (*recipe, "--epochs=10")  # long enough for two interruptions
    on_spot = run.start(*recipe, AWS_BATCH_JOB_ID="spot")
    on_spot.wait_for_line("checkpoint: step 8,")
    assert on_spot.kill(signal.SIGTERM) == 75
    run.wait_until_gone()
    before = run.read("attempts/1.json")

    # Batch counts from 1 again in each job; the second attempt finds its own first, which is none of the other job.
    for attempt, ends in ((1, False), (2, True)):
        launched = run.start(*recipe, attempt=attempt, AWS_BATCH_JOB_ID="on-demand")
        launched.wait_for_line(f"attempt {attempt + 1} of ")
        if not ends:
            launched.wait_for_line("checkpoint: step ")
            assert launched.kill(signal.SIGTERM) == 75
            run.wait_until_gone()
    assert launched.wait() == 0, launched.output

    assert run.read("attempts/1.json") == before
    receipt = run.receipt()
    assert [(item.number, item.job_id) for item in receipt.attempts] == [
        (1, "spot"),
        (2, "on-demand"),
        (3, "on-demand"),
    ]
    spans = [((item.finished_at or item.last_seen_at) - item.started_at).total_seconds() for item in receipt.attempts]
    assert receipt.duration_seconds == pytest.approx(sum(spans), abs=0.01)
    assert 8 <= receipt.attempts[1].resumed_from_step < receipt.attempts[2].resumed_from_step


def test_sigterm_before_the_ranks_have_started_asks_to_be_started_again_too(run: Run, recipe: tuple[str, ...]) -> None:
    launched = run.start(*recipe)
    launched.wait_for_line("accelerator:")

    assert launched.kill(signal.SIGTERM) == 75

    run.wait_until_gone()
    assert "interrupted: SIGTERM" in launched.lines[-1]


def test_a_killed_rank_ends_the_attempt_for_all_and_is_named(run: Run, recipe: tuple[str, ...]) -> None:
    launched = run.start(*recipe, nproc=2)
    launched.wait_for_line("[progress] 4/48")
    # They were forked, which their names tell, and have loaded nothing of `datasets`, which takes a second of CPU
    for number, rank in enumerate(launched.ranks()):
        assert f"jobs.train.kinds.finetune_classification [rank {number}] " in " ".join(rank.cmdline())
        assert not [module.path for module in rank.memory_maps() if "pyarrow" in module.path]

    launched.ranks()[0].kill()

    assert launched.wait() == 75, "for want of memory, which is not tried again, it was not"
    assert launched.lines[-1].startswith("interrupted: rank 0 of node 0 was killed (SIGKILL), not for want of memory")
    # What it wrote last is said again, beside the end
    said = "rank 0 of node 0 wrote last: "
    newest = [line for line in launched.lines if line.startswith("[progress] ")][-1]
    assert f"{said}{newest}" in launched.lines[-11:-1]
    assert all(line.removeprefix(said) in launched.lines for line in launched.lines[-11:-1] if line.startswith(said))
    run.wait_until_gone()
    assert run.recorded_attempt(1).exit_code == 75
    assert run.receipt().state == "interrupted"


def test_a_full_disk_during_a_checkpoint_is_explained_and_the_last_complete_one_survives(
    run: Run, recipe: tuple[str, ...]
) -> None:
    """A limit on the size of files stands in for the full disk: the kernel refuses the write in the same place."""
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


def test_one_rank_goes_on_where_two_have_stopped_with_the_same_examples_in_each_step(
    run: Run, recipe: tuple[str, ...], tiny_bert: Path, put: Callable[[Path, str], str], tmp_path: Path
) -> None:
    # Without dropout the loss of a step says which examples it had.
    model = shutil.copytree(tiny_bert, tmp_path / "model")
    config = json.loads((model / "config.json").read_bytes())
    changed = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (model / "config.json").write_text(json.dumps({**config, **changed}))
    steady = (*recipe, f"--model={put(model, 'models/steady')}", "--keep-checkpoints=3", "--log-every-steps=5")
    run.attempt(*steady, nproc=2)
    whole = run.metrics()
    assert run.complete_checkpoints() == [32, 40, 48]
    for step in (40, 48):
        run.s3.delete_object(Bucket=run.location.bucket, Key=f"{run.location.key}checkpoints/step-{step}/manifest.json")

    second = run.attempt(*steady, attempt=2)

    assert (
        "checkpoint step-32 was made by 2 ranks and goes on on 1: the steps have the same examples, random numbers "
        "(dropout) become others\n"
    ) in second.lines
    resumed = run.metrics()
    assert [line["step"] for line in resumed] == [line["step"] for line in whole]
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (resumed, whole)]
    # Of the steps 31 to 35 two were logged by nobody before the resume.
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert (run.recorded_attempt(1).world_size, run.recorded_attempt(2).world_size) == (2, 1)


def test_two_nodes_meet_train_and_resume_as_one(
    run: Run, uninterrupted: Callable[[int], Run], recipe: tuple[str, ...]
) -> None:
    """As a Batch multi-node job: the main node has no address of itself, the child is given it."""
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

    # Only the instance of one node is taken away: its launcher alone is told, and all ranks of both save.
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
