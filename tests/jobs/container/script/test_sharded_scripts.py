"""Loops with `trainyard.Run` and a model sharded by FSDP2: saved in shards, and resumed on any number of ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from jobs.container.trainer.script_loop import refuse_unknown_shards, refuse_unloadable
from jobs.core.errors import TrainyardError
from tests.support.container.launching import Launched, NewRun
from tests.support.container.scripts import WARM, script_flags, uv_settings, write_files
from tests.support.container.sharding import DEEPSPEED_ON_CPU, DEEPSPEED_TRAINER, FSDP, FSDP_ON_CPU, FSDP_TRAINER

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

DEEPSPEED = ("deepspeed==0.19.8", "einops==0.8.2", "hjson==3.1.0", "msgpack==1.2.4", "py-cpuinfo==9.0.0")


def test_unknown_shards_are_refused() -> None:
    refuse_unknown_shards({"model": torch.nn.Linear(2, 1), "states": {"a": [torch.zeros(2)]}})
    part = torch.zeros(2)
    vars(part)["ds_id"] = 1  # the mark of DeepSpeed's ZeRO 3
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    vars(optimizer.param_groups[0]["params"][0])["ds_id"] = 1
    flat = torch.nn.Linear(2, 1)
    vars(flat.weight)["_fsdp_flattened"] = True  # the mark of FSDP1
    for item in ({"a": [part]}, optimizer, flat):
        with pytest.raises(TrainyardError, match=r"'x' is sharded by .*\nNext: shard it with .*fully_shard"):
            refuse_unknown_shards({"x": item})


def test_objects_that_cannot_be_restored_are_refused_in_the_first_attempt() -> None:
    model = torch.nn.Linear(2, 1)
    refuse_unloadable({"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    with pytest.raises(TrainyardError, match=r"'weight' is a Parameter, .* no load_state_dict\nNext: .*run.state"):
        refuse_unloadable({"weight": model.weight})


def test_a_sharded_loop_resumes_on_any_number_of_ranks(new_run: NewRun, s3: "S3Client", tmp_path: Path) -> None:
    flags = script_flags(s3, write_files(tmp_path / "code", {"train.py": FSDP}), "train.py")
    whole = new_run()
    whole.attempt(*flags, nproc=2, **WARM)
    run = new_run()
    first = run.start(*flags, nproc=2, **WARM)
    first.wait_for_line("[progress] 20/60")
    assert first.kill(signal.SIGTERM) == 75
    step = run.recorded_attempt(1).last_step
    names = {Path(name).name for name in run.keys(f"checkpoints/step-{step}/shards/")}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    saved = _states(first)[step]

    # WHEN the next attempts have another number of ranks, or the script does not shard its model
    ways = [(4, "yes"), (1, "yes"), (1, "no")]
    only: dict[str, Any]
    for attempt, (ranks, shards) in enumerate(ways, 2):
        only = {"RESTORES_ONLY": "1", "SHARDS": shards, "options": ("--allow-changes",)}
        restored = run.attempt(*flags, nproc=ranks, attempt=attempt, **WARM, **only)
        # THEN they have the same weights and optimizer state
        assert _states(restored) == {step: saved}
    # WHEN the number of ranks is the same
    last = run.attempt(*flags, nproc=2, attempt=5, **WARM)
    # THEN the run ends as if uninterrupted
    assert _states(last)[step] == saved
    assert run.read("output/model.pt") == whole.read("output/model.pt")
    assert run.curve() == whole.curve()


def test_a_sharded_trainer_ends_as_if_uninterrupted(new_run: NewRun, s3: "S3Client", tmp_path: Path) -> None:
    files = {"train.py": FSDP_TRAINER, "fsdp_on_cpu.py": FSDP_ON_CPU}
    flags = script_flags(s3, write_files(tmp_path / "code", files), "train.py")
    whole = new_run()
    uninterrupted = whole.attempt(*flags, nproc=2, **WARM)
    assert "the training waits until they are written" not in uninterrupted.output
    run = new_run()
    first = run.start(*flags, nproc=2, **WARM)
    first.wait_for_line("[progress] 14/40")
    assert first.kill(signal.SIGTERM) == 75
    step = run.recorded_attempt(1).last_step
    names = {name.removeprefix(f"checkpoints/step-{step}/") for name in run.keys(f"checkpoints/step-{step}/")}
    assert {"pytorch_model_fsdp_0/__1_0.distcp", "optimizer_0/.metadata", "rng_state_1.pth"} < names
    second = run.attempt(*flags, nproc=2, attempt=2, **WARM)
    assert f"start: resumed from checkpoint step-{step}\n" in second.lines
    assert run.read("output/model/model.safetensors") == whole.read("output/model/model.safetensors")
    assert run.curve() == whole.curve()


def test_a_trainer_with_deepspeed_ends_as_if_uninterrupted(new_run: NewRun, s3: "S3Client", tmp_path: Path) -> None:
    files = {"train.py": DEEPSPEED_TRAINER, "deepspeed_on_cpu.py": DEEPSPEED_ON_CPU}
    flags = script_flags(s3, write_files(tmp_path / "code", files), "train.py")
    # Not among the packages of other scripts: accelerate imports DeepSpeed whenever it is installed.
    packages = tmp_path / "packages"
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--system-certs", "--no-deps", "--target"]
    subprocess.run([*install, packages, *DEEPSPEED], env={**os.environ, **uv_settings()}, check=True)
    options: dict[str, Any] = {"kind": "script", "PYTHONPATH": str(packages)}
    whole = new_run()
    whole.attempt(*flags, nproc=2, **options)
    run = new_run()
    first = run.start(*flags, nproc=2, **options)
    first.wait_for_line("[progress] 14/40")
    assert first.kill(signal.SIGTERM) == 75
    step = run.recorded_attempt(1).last_step
    names = {name.removeprefix(f"checkpoints/step-{step}/") for name in run.keys(f"checkpoints/step-{step}/")}
    parts = {f"global_step{step}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)}
    assert {*parts, "latest", "manifest.json"} < names
    last = run.attempt(*flags, nproc=2, attempt=2, **options)
    assert f"start: resumed from checkpoint step-{step}\n" in last.lines
    assert run.read("output/model/model.safetensors") == whole.read("output/model/model.safetensors")
    assert run.curve() == whole.curve()


def _states(launched: Launched) -> dict[int, str]:
    """Return the hash of the whole state at each step that was saved or restored."""
    words = [line.split() for line in launched.lines if line.startswith("state ")]
    return {int(step): sha256 for _, step, sha256 in words}
