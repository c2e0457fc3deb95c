r"""The HPU branch without optimum-habana, with transformers' real classes. Run by test_plain_hpu_contract.py.

    python -m tests.support.container.forked_ranks 2 \
        tests.support.container.transformers_on_hpu finetune-classification --model=… --train-data=… --eval-data=…
    python -m tests.support.container.transformers_on_hpu describe

The first runs the entrypoint. The second prints, as JSON, the arguments of the branch and the resulting values.
Habana's bridge is replaced by modules that report a first-generation HPU, so that transformers and accelerate take
their HPU branches. Its random number generator is one of PyTorch's, and HCCL is gloo under that name. Its tensors
cannot be replaced: a training puts them on the CPU.
"""

import dataclasses
import importlib.machinery
import importlib.metadata
import json
import os
import sys
import types
from typing import Any

import torch
import torch.distributed as dist

from jobs.container.accelerator import Accelerator, of_rank
from jobs.container.kinds import finetune_classification
from jobs.container.rank import run
from jobs.spec.kinds.finetune_classification import FinetuneClassification

PACKAGES = ("transformers", "accelerate")

HPU = Accelerator(name="hpu", devices=8, reason="a test", hpu_trainer="transformers")

ENVIRONMENT = {
    **HPU.environment,
    # Two decisions of accelerate: its device, and that DistributedDataParallel gets none.
    "ACCELERATE_TORCH_DEVICE": "cpu",
    "ACCELERATE_BYPASS_DEVICE_MAP": "true",
}
"""The variables of a training rank, in addition to the launcher's."""


def stand_in_for_the_bridge() -> None:
    """Install modules for the parts of Habana's bridge that transformers and accelerate use."""
    random = torch.Generator()

    def state(*_: Any) -> torch.Tensor:
        torch.rand(
            1, generator=random
        )  # as if steps had drawn from it, so that a state that is not restored is noticed
        return random.get_state()

    drawn = _module(
        "habana_frameworks.torch.hpu.random",
        get_rng_state=state,
        get_rng_state_all=lambda: [state()],
        set_rng_state=random.set_state,
        set_rng_state_all=lambda states: random.set_state(*states),
    )
    hpu = _module(
        "habana_frameworks.torch.hpu",
        random=drawn,
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda _: None,
        manual_seed_all=random.manual_seed,
        memory_stats=lambda: {"InUse": 3 << 29, "MaxInUse": 13 << 28, "Limit": 32 << 30},
    )
    gaudi = types.SimpleNamespace(synDeviceGaudi="first")
    experimental = _module(
        "habana_frameworks.torch.utils.experimental", synDeviceType=gaudi, _get_device_type=lambda: "first"
    )
    _module("habana_frameworks.torch.utils", experimental=experimental)
    hccl = _module("habana_frameworks.torch.distributed.hccl")
    _module("habana_frameworks.torch.distributed", hccl=hccl)
    core = _module("habana_frameworks.torch.core")
    _module("habana_frameworks", torch=_module("habana_frameworks.torch", core=core, hpu=hpu))
    torch.hpu = hpu  # type: ignore[attr-defined]  # what an import of the bridge does
    dist.Backend.register_backend("hccl", dist.ProcessGroupGloo, devices=["cpu"])
    gather = dist.all_gather_into_tensor
    # accelerate passes a tensor of any shape, which NCCL accepts. gloo needs a flat one.
    dist.all_gather_into_tensor = lambda found, own, **options: gather(found, own.flatten(), **options)


def _module(name: str, **content: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    vars(made).update(content)
    sys.modules[name] = made
    return made


def describe() -> dict[str, Any]:
    """Return the arguments passed, the known arguments, and the resulting values."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    HPU.prepare(alone=True)
    trainer, made = HPU.trainer_class(), HPU.training_arguments_class()
    arguments = HPU.training_arguments(alone=True)
    kept = made(output_dir="unused", **arguments)

    from accelerate import Accelerator as HuggingFaceAccelerator

    accelerator = HuggingFaceAccelerator(mixed_precision=os.environ["ACCELERATE_MIXED_PRECISION"])
    with accelerator.autocast():
        autocast = {"hpu": torch.is_autocast_enabled("hpu"), "dtype": str(torch.get_autocast_dtype("hpu"))}
    return {
        "versions": versions,
        "trainer": [f"{each.__module__}.{each.__qualname__}" for each in (trainer, made)],
        "arguments": arguments,
        "arguments_known": [field.name for field in dataclasses.fields(made) if field.init],
        "arguments_kept": {name: getattr(kept, name) for name in arguments},
        "trainer_arguments": HPU.trainer_arguments(),
        "device": str(kept.device),
        "cards": kept.n_gpu,
        "of_accelerate": str(accelerator.device),
        "autocast": autocast,
        "memory": HPU.memory(),
        "imported": sorted(name for name in sys.modules if name.partition(".")[0] == "optimum"),
    }


def train() -> None:
    """Run the entrypoint of a rank."""

    class OnCpu(Accelerator):
        """The accelerator of the HPU branch, changed because a single process would put its model on the HPU."""

        def training_arguments(self, *, alone: bool = False) -> dict[str, Any]:
            return {**super().training_arguments(alone=alone), **({"use_cpu": True} if alone else {})}

    finetune_classification.of_rank = lambda found: OnCpu(**vars(of_rank(found)))  # type: ignore[attr-defined,assignment]
    run(finetune_classification.finetune, FinetuneClassification)


if __name__ == "__main__":
    stand_in_for_the_bridge()
    if sys.argv.pop(1) == "describe":
        print(json.dumps(describe()))
    else:
        train()
