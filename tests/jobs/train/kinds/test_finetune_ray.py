"""A fine-tuning whose ranks Ray Train starts, against the same one whose ranks the launcher starts.

One start of Ray costs as much as eight ranks: a dozen processes, each of which loads Python's packages.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from jobs.contract.errors import UsageError
from jobs.contract.log_lines import Progress
from jobs.kinds.finetune_ray import FinetuneRay
from jobs.train.accelerator import Accelerator, Name
from jobs.train.kinds.finetune_ray import cluster
from jobs.train.kinds.finetune_ray import entrypoint as finetune_ray
from jobs.train.kinds.finetune_ray.cluster import error_file, worker_resources
from tests.support.train import launching
from tests.support.train.launching import Run
from tests.support.train.listeners import open_to_the_network

MODEL = "model/model.safetensors"

INTERRUPTED_AT = 24


@pytest.fixture
def short_folder() -> Iterator[str]:
    """Ray's sockets need one: pytest's own folders have longer names than those of a job's container."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as name:
        yield name


@pytest.mark.timeout(1200)
def test_it_goes_on_with_a_run_and_ends_with_the_weights_of_the_launchers_own_ranks(
    run: Run,
    uninterrupted: Callable[[int], Run],
    recipe: tuple[str, ...],
    short_folder: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launching, "PATIENCE_SECONDS", 500)
    whole = uninterrupted(2)
    _leave_as_if_interrupted(whole, run)

    launched = run.start(*recipe, "--num-workers=2", kind="finetune-ray", attempt=2, TMPDIR=short_folder)
    launched.wait_for_line("start: resumed from")
    processes = psutil.Process(launched.process.pid).children(recursive=True)
    assert [process.name() for process in processes if process.name() == "raylet"]
    assert open_to_the_network(launched.process.pid) == []
    code = launched.wait()

    assert code == 0, launched.output
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive, "Ray has left processes behind"
    assert not [path for path in Path(short_folder).rglob("*") if path.is_file()]
    assert f"start: resumed from checkpoint step-{INTERRUPTED_AT}\n" in launched.output
    assert run.read(MODEL) == whole.read(MODEL)
    # The command line draws the same bar from its log as from others': Ray only puts a worker's name before a line.
    lines = [line for line in launched.output.splitlines() if "[progress]" in line]
    bar = [found for line in lines if (found := Progress.parse(line)) and line.endswith(str(found))]
    assert len(bar) == len(lines)
    steps = [progress.step for progress in bar]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1], {progress.total_steps for progress in bar}) == (INTERRUPTED_AT, 48, {48})
    assert any(progress.time_left for progress in bar), "how long it still takes"
    # One curve, and nothing done twice or left out.
    assert [line["step"] for line in run.metrics()] == [line["step"] for line in whole.metrics()]
    assert [line.get("loss") for line in run.metrics()] == [line.get("loss") for line in whole.metrics()]
    receipt = run.receipt()
    assert (receipt.state, receipt.job) == ("succeeded", "finetune-ray")
    assert receipt.attempts[-1].resumed_from_step == INTERRUPTED_AT
    for name in ("eval_accuracy", "eval_loss"):
        assert receipt.result[name] == whole.receipt().result[name]
    # Ray itself has the final metrics, with the last checkpoint.
    [told] = [line for line in launched.output.splitlines() if "ray: last report with " in line]
    place, _, values = told.partition(": last report with ")[2].partition(": ")
    assert place == "checkpoint-48"
    assert f"step 48, accuracy {receipt.result['eval_accuracy']:.4g}, " in f"{values}, "
    assert f"training seconds {receipt.result['train_runtime_seconds']:.4g}" in values
    assert max(run.complete_checkpoints()) == 48


def _leave_as_if_interrupted(whole: Run, run: Run) -> None:
    """What a run has on S3 that was killed four steps after a checkpoint."""
    for name in whole.keys(f"checkpoints/step-{INTERRUPTED_AT}/"):
        run.write(name, whole.read(name))
    lines = [line for line in whole.metrics() if line["step"] <= INTERRUPTED_AT + 4]
    assert lines[-1]["step"] == INTERRUPTED_AT + 4
    run.write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())


def test_each_worker_has_a_card_of_its_own_over_the_cards_own_fabric() -> None:
    names: tuple[Name, ...] = ("hpu", "cuda", "cpu")
    of = {name: Accelerator(name=name, devices=8, reason="asked for") for name in names}
    assert {name: (chosen.backend, worker_resources(chosen)) for name, chosen in of.items()} == {
        "hpu": ("hccl", {"CPU": 1.0, "HPU": 1.0}),
        "cuda": ("nccl", {"CPU": 1.0, "GPU": 1.0}),
        "cpu": ("gloo", {"CPU": 1.0}),
    }


def test_ray_leaves_the_list_of_hpus_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.accelerators.hpu import HPUAcceleratorManager

    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "0,1")
    with cluster._environment(cluster._settings(2, tmp_path)):
        HPUAcceleratorManager.set_current_process_visible_accelerator_ids(["1"])
        assert os.environ["HABANA_VISIBLE_MODULES"] == "0,1"


def test_the_global_batch_divides_over_rays_workers() -> None:
    arguments = FinetuneRay.model_validate({"model": "m", "train_data": "t.jsonl", "num_workers": 3})
    with pytest.raises(
        UsageError, match=r"global_batch_size 32 does not divide over 3 ranks\nNext: set it to 30 or 33"
    ):
        arguments.check(1)
    with pytest.raises(UsageError, match="Ray starts its workers itself"):
        finetune_ray.check(arguments.model_copy(update={"num_workers": 2}), 2)


def test_the_worker_that_was_killed_or_else_failed_first_is_the_cause(tmp_path: Path) -> None:
    failures = SimpleNamespace(worker_failures={2: ValueError(), 0: RuntimeError(), 1: RuntimeError()})
    for worker, text in ((2, "worker 2: ValueError: odd"), (0, "worker 0: RuntimeError: line is closed")):
        error_file(tmp_path, worker).write_text(text)

    killed = finetune_ray.failure(tmp_path, failures)
    error_file(tmp_path, 1).write_text("worker 1: RuntimeError: line is closed")
    told = finetune_ray.failure(tmp_path, failures)

    assert str(killed).startswith("worker 1 of Ray was killed, most often for want of memory")
    assert str(told) == "worker 2: ValueError: odd"
