"""Choose the accelerator that a job trains on (HPU, CUDA or CPU), and set up whatever depends on that choice.

`TRAINYARD_ACCELERATOR` requests an accelerator (`hpu`, `cuda`, `cpu` or `auto`). If `hpu` is requested and there is no
HPU, the job fails: a silent CPU run at the price of a DL1 instance would be worse. This module covers all differences
between accelerators: the Trainer and its arguments, the communication backend, and a rank's environment variables. No
other module imports optimum.habana.

On an HPU, a job has two choices. Gaudi's published runs used GaudiTrainer of optimum-habana in lazy mode; its support
ended on 31 October 2026. The alternative is the Trainer of transformers in eager mode, which supports HPUs since
transformers 4.50 (pull request 36424) with accelerate 1.5 (pull request 3378).
"""

import contextlib
import gc
import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from jobs.core.errors import ConfigurationError, UsageError, did_you_mean
from jobs.spec.launcher_options import ACCELERATOR_VARIABLE
from jobs.spec.recipe import HpuTrainer

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def imports_without_gc() -> Iterator[None]:
    """Disable garbage collection during imports, and exclude the imported objects from later collections.

    Importing the Trainer creates half a million permanent objects. Python rescans all objects whenever their number has
    grown by a quarter, which takes a fifth of the import's CPU time. In forked ranks, scans would also copy shared
    pages.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()


Name = Literal["hpu", "cuda", "cpu"]

AUTO = "auto"

HPU_TRAINER_VARIABLE = "TRAINYARD_HPU_TRAINER"
"""Names the Trainer of a rank on an HPU (`hpu_trainer` of its job). Not set on other accelerators."""

HPU_DEVICES = ("/dev/accel", "accel[0-9]*"), ("/dev", "hl[0-9]*")
"""Folders and names of the cards' device files: /dev/accel/accelN or, with older drivers, /dev/hlN."""

GAUDI_CONFIG = {
    "use_fused_adam": True,
    "use_fused_clip_norm": True,
    # The lists of the Gaudi PyTorch bridge select bf16 for matrix operations, fp32 for losses and embeddings.
    "use_torch_autocast": True,
}
"""The same values as in the published configurations Habana/bert-base-uncased and -large-…."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The device type that the ranks of a node train on, and why it was chosen."""

    name: Name
    devices: int
    """Number of cards in this node. 0 for a CPU, which any number of ranks can share."""
    reason: str
    hpu_trainer: HpuTrainer = "optimum-habana"
    """The library whose Trainer is used on an HPU."""
    torch_compile: bool = False
    """Whether the job compiles its model with torch.compile."""

    def __str__(self) -> str:
        plain = self.name == "hpu" and not self.has_gaudi_trainer
        return f"{self.name} ({self.reason}){', the Trainer of transformers in eager mode' if plain else ''}"

    @property
    def has_gaudi_trainer(self) -> bool:
        """Whether ranks train with optimum-habana's classes, in lazy mode."""
        return self.name == "hpu" and self.hpu_trainer == "optimum-habana"

    @property
    def backend(self) -> str:
        """The backend of torch.distributed for this accelerator."""
        return {"hpu": "hccl", "cuda": "nccl", "cpu": "gloo"}[self.name]

    @property
    def environment(self) -> dict[str, str]:
        """The variables to set before a rank imports torch. `of_rank` reads the choice back from them."""
        chosen: dict[str, str] = {ACCELERATOR_VARIABLE: self.name}
        if self.name == "hpu":
            # The bridge's default was lazy mode up to release 1.19 and is eager mode in later ones (docs.habana.ai,
            # Runtime Environment Variables). `use_lazy_mode` below requires the variable, and without it transformers
            # would use lazy mode.
            chosen["PT_HPU_LAZY_MODE"] = "1" if self.has_gaudi_trainer else "0"
            chosen[HPU_TRAINER_VARIABLE] = self.hpu_trainer
        return chosen

    @property
    def compiles(self) -> bool:
        """Whether each new batch shape compiles a graph."""
        return self.name == "hpu" or self.torch_compile

    @property
    def warmup_steps(self) -> int:
        """The number of steps of each batch shape that throughput excludes because they compile the graph."""
        # optimum-habana's examples and its "Accelerating Training" guide use 3 for lazy mode.
        return 3 if self.compiles else 0

    def device(self, local_rank: int) -> "torch.device":
        """Return the device for the tensors of a rank without a Trainer.

        This also loads the backend, so call it before torch.distributed is initialized.
        """
        import torch

        if self.name == "hpu":
            # The bridge assigns each rank a card by the launcher's variables (docs.habana.ai, Distributed Backend
            # Initialization).
            import habana_frameworks.torch.core
            import habana_frameworks.torch.distributed.hccl  # noqa: F401

            return torch.device("hpu")
        if self.name == "cuda":
            torch.cuda.set_device(local_rank)
            return torch.device("cuda", local_rank)
        return torch.device("cpu")

    def synchronize(self) -> None:
        """Wait until the card has finished all its work."""
        if self.name == "hpu":
            from habana_frameworks.torch import core, hpu

            if self.has_gaudi_trainer:
                core.mark_step()  # in lazy mode nothing runs before this
            hpu.synchronize()
        elif self.name == "cuda":
            import torch

            torch.cuda.synchronize()

    def memory(self) -> dict[str, float]:
        """Return the memory of this rank's card in GiB: used by tensors now, the maximum so far, and the total.

        The dict is empty on a CPU.
        """
        if self.name == "hpu":
            from habana_frameworks.torch.hpu import memory_stats

            stats = memory_stats()  # the three values that GaudiTrainer logs (optimum-habana, get_hpu_memory_stats)
            found = stats["InUse"], stats["MaxInUse"], stats["Limit"]
        elif self.name == "cuda":
            import torch

            card = torch.cuda
            found = card.memory_allocated(), card.max_memory_allocated(), card.mem_get_info()[1]
        else:
            return {}
        names = ("memory_gib", "max_memory_gib", "total_memory_gib")
        return {name: round(size / 1024**3, 2) for name, size in zip(names, found, strict=True)}

    def prepare(self, *, alone: bool = False) -> None:
        """Prepare a rank for its Trainer. Called once, before the Trainer and its model are created.

        With `alone`, the only rank trains as a plain process, without a process group and without copies of gradients.
        Raises ConfigurationError if the Trainer of transformers would not find the HPU and would train on the CPU.
        """
        if self.name == "hpu" and not self.has_gaudi_trainer:
            self.device(0)  # in eager mode transformers does not load the bridge, and looks for HPUs only once
            _check_that_transformers_finds_an_hpu()
        if alone:
            # With these variables the Trainer would expect several ranks.
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                os.environ.pop(name, None)
        if alone and self.name == "cuda":
            # A plain process uses all visible cards, by nn.DataParallel.
            os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        if alone or self.name != "cpu":
            return
        from torch.serialization import register_package

        # transformers loads a checkpoint's optimizer to accelerate's device `cpu:<local rank>`, but torch's loader
        # accepts only `cpu`.
        register_package(0, lambda _: None, lambda storage, place: storage if place.startswith("cpu:") else None)

    def set_seed(self, seed: int) -> None:
        """Seed the random number generators of Python, NumPy, and PyTorch (host and cards)."""
        if self.has_gaudi_trainer:
            from optimum.habana.utils import set_seed
        else:
            from transformers import set_seed
        set_seed(seed)

    def trainer_class(self) -> type[Any]:
        """Return the Trainer class: GaudiTrainer or transformers' Trainer. Importing either takes seconds."""
        with imports_without_gc():
            _without_datasets()
            if self.has_gaudi_trainer:
                from optimum.habana import GaudiTrainer

                return cast("type[Any]", GaudiTrainer)
            from transformers import Trainer

            return cast("type[Any]", Trainer)

    def training_arguments_class(self) -> type[Any]:
        """Return the class of the arguments of `trainer_class`."""
        if self.has_gaudi_trainer:
            from optimum.habana import GaudiTrainingArguments

            return cast("type[Any]", GaudiTrainingArguments)
        from transformers import TrainingArguments

        return cast("type[Any]", TrainingArguments)

    def training_arguments(self, *, alone: bool = False) -> dict[str, Any]:
        """Return this accelerator's values for `training_arguments_class`, to which the recipe's values are added.

        `prepare` explains `alone`.
        """
        # One kernel for all of AdamW: on a CPU a step of MiniLM (23M parameters) takes 0.05 s instead of 0.2 s.
        fused = {"optim": "adamw_torch_fused", "ddp_find_unused_parameters": False}
        if self.name == "cpu":
            return {**fused, "use_cpu": True, **({} if alone else {"ddp_backend": self.backend})}
        if self.name == "cuda":
            import torch

            return {**fused, "bf16": bool(torch.cuda.is_bf16_supported())}
        if not self.has_gaudi_trainer:
            return {
                "bf16": True,  # autocast, by the bridge's lists
                # PyTorch supports its fused kernel on an HPU only since 2.8 (pytorch/pytorch pull request 148666).
                "optim": "adamw_torch",
                # Pinning needs the device's name, which the Trainer cannot pass on (DataLoader's pin_memory_device).
                "dataloader_pin_memory": False,
                "ddp_bucket_cap_mb": 230,  # as below, for the same cards and the same HCCL
                "ddp_find_unused_parameters": False,
            }
        return {
            "use_habana": True,
            # Graphs of many operations, compiled once for each shape: the mode of the published BERT runs on Gaudi1.
            "use_lazy_mode": True,
            # Evaluation replays recorded graphs, as in the published runs of BERT and RoBERTa (optimum-habana,
            # tests/configs/examples). GaudiTrainer does so only after training, because recording detaches gradients.
            # None of those runs uses graphs for training (`use_hpu_graphs_for_training`).
            "use_hpu_graphs_for_inference": True,
            # GaudiTrainer's throughput excludes these steps, as ours does (jobs.container.saving.metrics).
            "throughput_warmup_steps": self.warmup_steps,
            # DistributedDataParallel with buckets of 230 MB: optimum-habana's defaults, set explicitly to rule out
            # `fast_ddp`, which reduces all gradients in bf16 after the backward pass, not during it.
            "distribution_strategy": "ddp",
            "ddp_bucket_cap_mb": 230,
            # An encoder with its head has no unused parameters, and the search for them walks the graph in every step.
            # The published configurations for pre-training BERT and RoBERTa still enable the search.
            "ddp_find_unused_parameters": False,
        }

    def model_arguments(self) -> dict[str, Any]:
        """Return the arguments for `from_pretrained` or `from_config` of a transformers model."""
        if self.name != "hpu":
            return {}
        # The default of GaudiTrainingArguments. With PyTorch's fused attention, transformers checks for padding on the
        # host at every step. Fused attention may also compute in fp32 on a first-generation Gaudi (unconfirmed).
        return {"attn_implementation": "eager"}

    def trainer_arguments(
        self, *, gaudi_config: Mapping[str, Any] | None = None, fused_adam: bool = True
    ) -> dict[str, Any]:
        """Return further arguments of `trainer_class`.

        `gaudi_config` replaces the default configuration of an HPU. `fused_adam` is False for optimizers other than
        AdamW.
        """
        if not self.has_gaudi_trainer:
            return {}
        from optimum.habana import GaudiConfig

        settings = dict(GAUDI_CONFIG if gaudi_config is None else gaudi_config)
        # If True, GaudiTrainer uses its own AdamW and ignores the optimizer that the arguments name.
        settings["use_fused_adam"] = fused_adam and settings.get("use_fused_adam", False)
        return {"gaudi_config": GaudiConfig(**settings)}


CPU = Accelerator(name="cpu", devices=0, reason="requested")


def choose(
    requested: str, *, nproc_per_node: int, cards: int | None = None, hpu_trainer: HpuTrainer = "optimum-habana"
) -> Accelerator:
    """Choose the accelerator for `nproc_per_node` ranks of this node.

    `cards` is the instance type's number of cards if the health check will report missing cards, else None.
    `hpu_trainer` is the library whose Trainer is used on an HPU.

    Raises UsageError on an unknown name or too many ranks, ConfigurationError if the requested accelerator is missing.
    """
    finders = {"hpu": _hpus, "cuda": _cuda_devices}
    if requested == CPU.name:
        return CPU
    if requested in finders:
        devices, absence = finders[requested]()
        if not devices:
            raise ConfigurationError(
                f"accelerator '{requested}' was requested, but {absence}",
                next_step="use an instance and an image that have it, or request 'cpu' or 'auto'",
            )
        if nproc_per_node > devices and not (cards and devices < cards):
            raise UsageError(
                f"{nproc_per_node} ranks need a card each, but this node has {devices} ({requested})",
                next_step=f"--nproc-per-node={devices}, or fewer",
            )
        return Accelerator(name=cast("Name", requested), devices=devices, reason="requested", hpu_trainer=hpu_trainer)
    if requested != AUTO:
        raise UsageError(f"accelerator '{requested}' is unknown{did_you_mean(requested, (*finders, 'cpu', AUTO))}")
    absences = []
    for name, find in finders.items():
        devices, absence = find()
        if devices >= nproc_per_node:
            reason = f"auto: {devices} found"
            return Accelerator(name=cast("Name", name), devices=devices, reason=reason, hpu_trainer=hpu_trainer)
        absences.append(absence if not devices else f"{devices} {name.upper()} for {nproc_per_node} ranks")
    return Accelerator(name="cpu", devices=0, reason="auto: " + ", ".join(absences))


def of_rank(environment: Mapping[str, str]) -> Accelerator:
    """Return the accelerator that the launcher chose, from the environment of a rank."""
    name = environment.get(ACCELERATOR_VARIABLE, "cpu")
    if name not in ("hpu", "cuda", "cpu"):
        raise UsageError(
            f"{ACCELERATOR_VARIABLE} is '{name}' in a rank", next_step="start the rank with jobs.container.launch"
        )
    trainer: Any = environment.get(HPU_TRAINER_VARIABLE, "optimum-habana")
    return Accelerator(name=cast("Name", name), devices=0, reason="chosen by the launcher", hpu_trainer=trainer)


def _without_datasets() -> None:
    """Prevent Trainer and accelerate from importing `datasets`, which takes a fifth of a rank's start.

    They only check whether the data is a `datasets.Dataset`, which ours never is. Code that reads from the hub imports
    `datasets` explicitly.
    """
    from accelerate import data_loader  # checks only with several ranks
    from transformers import utils

    for module in (utils, utils.import_utils, data_loader):
        module.is_datasets_available = lambda: False  # there is no public setting


def _check_that_transformers_finds_an_hpu() -> None:
    import accelerate
    import transformers

    is_available = getattr(transformers.utils, "is_torch_hpu_available", None)
    if is_available is None or not is_available():
        raise ConfigurationError(
            f"transformers {transformers.__version__} with accelerate {accelerate.__version__} finds no HPU "
            "here and would train on the CPU",
            next_step="remove 'hpu_trainer: transformers', which needs transformers 4.50 and accelerate 1.5 or later",
        )


def _hpus() -> tuple[int, str]:
    """Return the number of HPUs, and why there are none. Imports no Habana module, because that opens the driver."""
    cards = max(len(list(Path(folder).glob(pattern))) for folder, pattern in HPU_DEVICES)
    if not cards:
        return 0, "no HPU found"
    if importlib.util.find_spec("habana_frameworks") is None:
        return 0, "no Habana PyTorch (habana_frameworks) installed"
    return cards, ""


def _cuda_devices() -> tuple[int, str]:
    import torch

    devices = torch.cuda.device_count()
    return devices, "" if devices else "no CUDA device found"
