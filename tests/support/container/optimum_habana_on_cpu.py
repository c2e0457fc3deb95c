r"""The HPU branch on a CPU, with the real classes of optimum-habana. Run by test_optimum_habana_contract.py.

    python -m tests.support.container.forked_ranks 2 \
        tests.support.container.optimum_habana_on_cpu finetune-classification --model=… --train-data=… --eval-data=…
    python -m tests.support.container.optimum_habana_on_cpu describe

The first runs the entrypoint with an accelerator that changes only what a CPU requires. The second prints, as JSON, the
arguments of the HPU branch and what optimum-habana makes of them. Two parts of Habana's are replaced, because no
registry has them: the version of habana-torch-plugin, and the memory of a card. To describe the arguments for
DeepSpeed, an empty module replaces it, because it only needs to be found when arguments are created.
"""

import dataclasses
import importlib.metadata
import inspect
import json
import os
import runpy
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest import mock

from jobs.container.accelerator import Accelerator
from jobs.container.kinds import finetune_classification, pretrain_mlm
from jobs.container.rank import run
from jobs.core.images import releases
from jobs.spec.kinds.finetune_classification import FinetuneClassification
from jobs.spec.kinds.pretrain_mlm import PretrainMlm

PACKAGES = ("optimum-habana", "transformers", "accelerate")

SEEDED = "stand-in: the cards' random numbers begin at"
"""Printed by a rank, with the seed, instead of seeding the generators of an HPU."""

MEMORY = {"memory_allocated (GB)": 1.5, "max_memory_allocated (GB)": 3.25, "total_memory_available (GB)": 31.73}
"""The fake memory of an HPU, with the names of optimum-habana (optimum/habana/utils.py)."""


class HpuOnCpu(Accelerator):
    """The accelerator of the HPU branch with all its arguments, but without an HPU."""

    def training_arguments(self, *, alone: bool = False) -> dict[str, Any]:
        # Lazy mode and its graphs are refused without an HPU.
        refused = dict.fromkeys(("use_habana", "use_lazy_mode", "use_hpu_graphs_for_inference"), False)
        return {**super().training_arguments(alone=alone), **refused, "use_cpu": True}

    def set_seed(self, seed: int) -> None:
        """Seed with optimum-habana's function and a replacement for the cards' generators."""

        def manual_seed_all(given: int) -> None:
            print(f"{SEEDED} {given}", flush=True)

        package = "habana_frameworks.torch.hpu"
        names = ["habana_frameworks", "habana_frameworks.torch", package, f"{package}.random"]
        modules = {name: types.ModuleType(name) for name in names}
        modules[package].random = modules[f"{package}.random"]  # type: ignore[attr-defined]
        modules[f"{package}.random"].manual_seed_all = manual_seed_all  # type: ignore[attr-defined]
        with mock.patch.dict(sys.modules, modules):
            super().set_seed(seed)

    def prepare(self, *, alone: bool = False) -> None:
        super().prepare(alone=alone)
        Accelerator(name="cpu", devices=0, reason="a checkpoint is loaded to one").prepare(alone=alone)


def stand_in_for_habana() -> None:
    """Import optimum.habana, which would otherwise fail because a package is missing in `pip list`."""
    real = subprocess.run
    version = importlib.metadata.version("optimum-habana")
    row = next(row for row in releases().values() if row.optimum_habana == version)

    def answer(command: Any, *args: Any, **options: Any) -> Any:
        if command == "pip list | grep habana-torch-plugin":
            listed = f"habana-torch-plugin {row.name}.{row.build}\n"
            return subprocess.CompletedProcess(command, 0, stdout=listed, stderr="")
        return real(command, *args, **options)

    subprocess.run = answer  # type: ignore[assignment]  # overloaded
    import optimum.habana.transformers.trainer as gaudi

    gaudi.get_hpu_memory_stats = lambda _device=None: dict(MEMORY)


def stand_in_for_deepspeed(folder: Path) -> None:
    """Make DeepSpeed importable from `folder`. Called before transformers is imported."""
    (folder / "deepspeed.py").touch()
    described = folder / "deepspeed-0.16.1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.16.1\n")
    sys.path.append(str(folder))


def synchronise_ranks() -> None:
    """Make ranks on CPUs count as HPU ranks: GaudiAccelerator wraps only those in DistributedDataParallel."""
    from optimum.habana.accelerate import state

    if hasattr(state, "GaudiPartialState"):
        _synchronise_ranks_before_release_1_21(state.GaudiPartialState)
        return
    from accelerate import Accelerator as HuggingFaceAccelerator
    from accelerate.utils import DistributedType
    from optimum.habana.accelerate import GaudiAccelerator

    def distributed_type(self: Any) -> Any:
        real = HuggingFaceAccelerator.distributed_type.fget(self)
        return DistributedType.MULTI_HPU if real == DistributedType.MULTI_CPU else real

    GaudiAccelerator.distributed_type = property(distributed_type)


def _synchronise_ranks_before_release_1_21(partial_state: type[Any]) -> None:
    """Give GaudiAccelerator's state, in which a CPU is always alone, an HPU named `cpu`.

    This also replaces Habana's function that reads a rank's place from its environment.
    """
    names = ["habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.distributed"]
    hccl = types.ModuleType("habana_frameworks.torch.distributed.hccl")
    hccl.initialize_distributed_hpu = lambda: tuple(  # type: ignore[attr-defined]
        int(os.environ[name]) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    )
    sys.modules |= {name: types.ModuleType(name) for name in names} | {hccl.__name__: hccl}
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    real = partial_state.__init__

    def initialise(self: Any, cpu: bool = False, **options: Any) -> None:
        real(self, cpu=False, **{**options, "backend": "gloo"})

    partial_state.__init__ = initialise


def describe() -> dict[str, Any]:
    """Return the arguments passed, the known arguments, and the resulting values."""
    import torch
    from optimum import habana

    passed_to_config: dict[str, Any] = {}

    class RecordingConfig(habana.GaudiConfig):  # type: ignore[misc]  # optimum has no types
        def __init__(self, **values: Any) -> None:
            passed_to_config.update(values)
            super().__init__(**values)

    class OnAnyDevice(habana.GaudiTrainingArguments):  # type: ignore[misc]
        """Training arguments that check their values as on an HPU, without opening one."""

        _setup_devices = torch.device("cpu")
        distributed_state = None

    hpu = Accelerator(name="hpu", devices=8, reason="described")
    known = {field.name: field.default for field in dataclasses.fields(habana.GaudiTrainingArguments) if field.init}
    arguments = hpu.training_arguments()
    checked = OnAnyDevice(output_dir="unused", **{name: arguments[name] for name in arguments if name in known})
    real_config, habana.GaudiConfig = habana.GaudiConfig, RecordingConfig
    trainer_arguments = hpu.trainer_arguments()
    config = vars(trainer_arguments["gaudi_config"])
    of_default = dict(passed_to_config)
    custom = hpu.trainer_arguments(gaudi_config={"use_fused_adam": True, "autocast_bf16_ops": ["mm"]}, fused_adam=False)
    return {
        "versions": {
            name: importlib.metadata.version(name) for name in ("optimum-habana", "transformers", "accelerate")
        },
        "trainer": [hpu.trainer_class().__name__, hpu.training_arguments_class().__name__],
        "arguments": arguments,
        "arguments_known": sorted(known),
        "arguments_default": {name: known[name] for name in arguments if name in known},
        "arguments_kept": {name: getattr(checked, name) for name in arguments if name in known},
        "model_arguments": hpu.model_arguments(),
        "attention_default": known.get("attn_implementation"),
        "trainer_arguments": sorted(trainer_arguments),
        "trainer_arguments_known": sorted(inspect.signature(habana.GaudiTrainer.__init__).parameters),
        "config": of_default,
        "config_known": sorted(vars(real_config())),
        "config_kept": {name: config.get(name) for name in of_default},
        "config_of_a_file": {
            name: vars(custom["gaudi_config"])[name]
            for name in ("use_fused_adam", "autocast_bf16_ops", "use_torch_autocast")
        },
    }


def _force(made: type[Any], **values: Any) -> None:
    """Make all objects of a class get these values, whatever is requested."""
    real = made.__init__

    def initialise(self: Any, *args: Any, **given: Any) -> None:
        real(self, *args, **{**given, **values})

    made.__init__ = initialise


def run_script(command: list[str]) -> None:
    """Run a custom script that uses optimum-habana's classes, with the changes that a CPU requires."""
    # From PyTorch 2.5 on, peft expects that it has been imported.
    import torch.distributed.tensor  # noqa: F401
    from optimum import habana

    _force(habana.GaudiTrainingArguments, use_habana=False, use_lazy_mode=False, use_cpu=True)
    sys.argv = command
    sys.path[0] = str(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")


def preload() -> None:
    """Import the modules that all ranks need."""
    stand_in_for_habana()


if __name__ == "__main__":
    if sys.argv[1:] == ["describe"]:
        with tempfile.TemporaryDirectory() as name:
            stand_in_for_deepspeed(Path(name))
            stand_in_for_habana()
            print(json.dumps(describe()))
    else:
        stand_in_for_habana()
        synchronise_ranks()
        hpu = HpuOnCpu(name="hpu", devices=0, reason="a test")
        kind = sys.argv.pop(1)
        if kind == "script":
            run_script(sys.argv[1:])
        elif kind == "pretrain-mlm":
            pretrain_mlm.of_rank = lambda _: hpu  # type: ignore[attr-defined,assignment]
            run(pretrain_mlm.pretrain, PretrainMlm)
        else:
            finetune_classification.of_rank = lambda _: hpu  # type: ignore[attr-defined,assignment]
            run(finetune_classification.finetune, FinetuneClassification)
