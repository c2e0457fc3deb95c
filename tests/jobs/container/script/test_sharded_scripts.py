"""Loops with `trainyard.Run` and a sharded model: refused before the first step, or gathered as documented."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from jobs.container.trainer.script_loop import refuse_sharded
from jobs.core.errors import TrainyardError
from tests.jobs.container.script.test_page import blocks
from tests.support.container.launching import NewRun
from tests.support.container.scripts import WARM, script_flags, write_files

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

LOOP = """
import time
import sharding
import torch
import torch.distributed as dist
import trainyard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def layers():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))

dist.init_process_group("gloo")
torch.manual_seed(3)
model = layers()
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run = trainyard.Run(total_steps=60, save_every_steps=10)
step = sharding.restore(run, model, optimizer)
torch.manual_seed(dist.get_rank()) if step == 0 else None
while step < 60 and not run.should_stop():
    loss = model(torch.randn(4, 8)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    time.sleep(0.05)
    run.step(step)
    if step % 10 == 0:
        run.log(step, loss=loss)
    if run.should_save():
        sharding.save(run, step, model, optimizer)
state, _ = sharding.get_state_dict(model, optimizer, options=sharding.full)
if step == 60 and dist.get_rank() == 0:
    torch.save(state, trainyard.output() / "model.pt")
"""


def test_a_sharded_checkpoint_is_refused() -> None:
    part = torch.zeros(2)
    refuse_sharded({"model": torch.nn.Linear(2, 1), "states": {"a": [part]}})
    part.placements = ()  # type: ignore[attr-defined]  # as a DTensor has them
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    vars(optimizer.param_groups[0]["params"][0])["ds_id"] = 1  # the mark of DeepSpeed's ZeRO 3
    flat = torch.nn.Linear(2, 1)
    vars(flat.weight)["_fsdp_flattened"] = True  # the mark of FSDP1
    for item in ({"a": [part]}, optimizer, flat):
        error = r"'x' is sharded: each rank has a part of it, and trainyard\.Run saves only .*\nNext: gather it on all"
        with pytest.raises(TrainyardError, match=error):
            refuse_sharded({"x": item})


def test_a_gathered_checkpoint_is_resumed(new_run: NewRun, s3: "S3Client", tmp_path: Path) -> None:
    [sharding] = [block for block in blocks("python") if "set_state_dict" in block]
    flags = script_flags(s3, write_files(tmp_path / "code", {"train.py": LOOP, "sharding.py": sharding}), "train.py")
    whole = new_run()
    whole.attempt(*flags, nproc=2, **WARM)
    run = new_run()
    first = run.start(*flags, nproc=2, **WARM)
    first.wait_for_line("[progress] 20/60")
    assert first.kill(signal.SIGTERM) == 75
    second = run.attempt(*flags, nproc=2, attempt=2, **WARM)
    assert any("start: resumed from checkpoint step-" in line for line in second.lines)
    assert run.read("output/model.pt") == whole.read("output/model.pt")
    assert run.curve() == whole.curve()
