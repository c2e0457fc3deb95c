"""Trains a tiny model with Ray Train on two workers over gloo, on a Ray of its own that only loopback reaches."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
from ray._common.usage import usage_lib

WORKERS = 2
STEPS = 30


def loop(config: dict[str, Any]) -> None:
    """Train the model; this runs in each worker."""
    context = ray.train.get_context()
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(context.get_world_rank()))
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everywhere = [torch.zeros_like(weights) for _ in range(WORKERS)]
    torch.distributed.all_gather(everywhere, weights)
    facts = {
        "backend": torch.distributed.get_backend(),
        "world_size": context.get_world_size(),
        "alike": all(torch.equal(weights, others) for others in everywhere),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    # In a file: what is reported without a checkpoint does not get into the result.
    torch.save(facts, Path(config["folder"], str(context.get_world_rank())))
    ray.train.report({"loss": losses[-1]})


def listening_elsewhere() -> list[str]:
    """Return the addresses besides loopback that something listens on, in the kernel's notation."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    own = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
    return [fields[1] for fields in lines if fields[3] == "0A" and not fields[1].startswith(own)]


def main() -> None:
    # Two for the workers; Ray Train's controller takes none, but its other actors do.
    context = ray.init(num_cpus=4, _node_ip_address="127.0.0.1", log_to_driver=False)
    if usage_lib.usage_stats_enabled():
        sys.exit("Ray's usage statistics are on")
    if context.dashboard_url:
        sys.exit(f"Ray's dashboard is on, at {context.dashboard_url}")
    if addresses := listening_elsewhere():
        sys.exit(f"Ray listens on more than loopback: {', '.join(addresses)}")
    with tempfile.TemporaryDirectory() as folder:
        ray.train.torch.TorchTrainer(
            loop,
            train_loop_config={"folder": folder},
            torch_config=ray.train.torch.TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=WORKERS),
            run_config=ray.train.RunConfig(storage_path=folder),
        ).fit()
        workers = [torch.load(Path(folder, str(rank))) for rank in range(WORKERS)]
    ray.shutdown()
    for facts in workers:
        if (facts["backend"], facts["world_size"]) != ("gloo", WORKERS) or not facts["alike"]:
            sys.exit(f"the workers did not train together: {facts}")
        if facts["last_loss"] > 0.1 * facts["first_loss"]:
            sys.exit(f"nothing was learned: {facts}")
    losses = f"loss {workers[0]['first_loss']:.3f} to {workers[0]['last_loss']:.3f}"
    print(f"Ray {ray.__version__}: {WORKERS} workers over gloo, {losses}; no usage statistics, no dashboard")


if __name__ == "__main__":
    main()
