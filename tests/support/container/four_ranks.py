"""Four ranks sum the gradients of the same step: as the first step of an attempt, and after other steps.

    python -m tests.support.container.four_ranks FOLDER

Prints as JSON whether both sums are equal bit by bit, without `arrange_gradient_buckets` and with it.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from jobs.container.trainer.determinism import arrange_gradient_buckets

RANKS, LAYERS, WIDTH = 4, 5, 65


class Backwards(torch.nn.Module):
    """Uses its layers in a different order than it defines them, so that gradients arrive in an unexpected order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            batch = torch.tanh(layer(batch))
        return batch


def gradients(batch: torch.Tensor, *, earlier_steps: int, arranged: bool) -> list[torch.Tensor]:
    model = DistributedDataParallel(Backwards())
    if arranged:
        arrange_gradient_buckets(model)
    for _ in range(earlier_steps + 1):
        model.zero_grad()
        with torch.random.fork_rng():
            model(batch).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def rank(number: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=number, world_size=RANKS)
    torch.manual_seed(1 + number)
    batch = torch.randn(8, WIDTH)
    found = {}
    for arranged in (False, True):
        first = gradients(batch, earlier_steps=0, arranged=arranged)
        later = gradients(batch, earlier_steps=2, arranged=arranged)
        assert len(first) == 2 * LAYERS
        assert all(one.abs().sum() > 0 for one in first)
        found["arranged" if arranged else "as it is"] = all(map(torch.equal, first, later))
    if number == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    children = []
    for number in range(RANKS):
        child = os.fork()  # PyTorch is imported once, which takes longer than everything else
        if not child:
            rank(number, Path(sys.argv[1]))
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    sys.exit(any(os.waitpid(child, 0)[1] for child in children))
