"""Loops with `trainyard.Run` whose model is sharded: refused before their first step, or gathered as the page says."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING

from tests.jobs.train.script.test_page import blocks
from tests.support.train.launching import NewRun
from tests.support.train.scripts import WARM, script_flags, write_files

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

LOOP = """
import sys, time
import sharding
import torch
import torch.distributed as dist
import trainyard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

def layers():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))

dist.init_process_group("gloo")
torch.manual_seed(3)
model = layers()
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run = trainyard.Run(total_steps=60, save_every_steps=10)
if sys.argv[1] == "sharded":
    flat = FullyShardedDataParallel(layers(), use_orig_params=True, device_id=torch.device("cpu"))
    for name, item in {"fsdp1": flat, "optimizer": optimizer, "states": model.state_dict()}.items():
        try:
            run.save(1, **{name: item})
        except Exception as error:
            print(error, flush=True)
    run.restore(model=model)
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


def test_what_is_sharded_is_refused_at_once_and_gathered_it_is_resumed(
    new_run: NewRun, s3: "S3Client", tmp_path: Path
) -> None:
    [sharding] = [block for block in blocks("python") if "set_state_dict" in block]
    code = write_files(tmp_path / "code", {"train.py": LOOP, "sharding.py": sharding})
    run = new_run()
    refused = run.attempt(*script_flags(s3, code, "train.py sharded"), nproc=2, expect=1, **WARM)
    for name in ("fsdp1", "optimizer", "states"):
        assert f"'{name}' is sharded: each rank has a part of it, and trainyard.Run keeps what rank 0" in refused.output
    assert "'model' is sharded: each rank has a part of it" in refused.lines[-1]
    assert "Next: gather it on all ranks first" in refused.lines[-1]

    flags = script_flags(s3, code, "train.py gathered")
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
