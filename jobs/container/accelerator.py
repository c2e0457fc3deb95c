"""The accelerator that a job trains on: HPU, CUDA or CPU, chosen once, with its reason.

TRAINYARD_ACCELERATOR says which (`hpu`, `cuda`, `cpu`, `auto`). Asking for `hpu` where there is none is an error: a
silent CPU run at the price of a DL1 instance would be worse. All that differs between the branches is here: the Trainer
and its arguments, the communication backend, the environment of a rank. Nothing else imports optimum.habana.

An HPU has two branches. Gaudi's published runs were made with GaudiTrainer of optimum-habana, in lazy mode; its support
ended on 31 October 2026. The way out is the Trainer of transformers, which has known an HPU since 4.50, with accelerate
1.5 (pull requests 36424 and 3378 of these), and was written for eager mode there.
"""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from jobs.container.imports import imports_that_stay
from jobs.core.errors import ConfigurationError, UsageError, did_you_mean
from jobs.spec.launcher_options import ACCELERATOR_VARIABLE
from jobs.spec.recipe import HpuTrainer

if TYPE_CHECKING:
    import torch

Name = Literal["hpu", "cuda", "cpu"]

AUTO = "auto"

HPU_TRAINER_VARIABLE = "TRAINYARD_HPU_TRAINER"
"""Tells a rank on an HPU whose Trainer to take (`hpu_trainer` of its job); there where it is an HPU."""

HPU_DEVICES = ("/dev/accel", "accel[0-9]*"), ("/dev", "hl[0-9]*")
"""Folders and names of the Gaudi driver's cards: /dev/accel/accelN, older ones /dev/hlN (control nodes are none)."""

GAUDI_CONFIG = {
    "use_fused_adam": True,
    "use_fused_clip_norm": True,
    # bf16 for matrix work, fp32 for losses and embeddings, by the lists of the Gaudi PyTorch bridge.
    "use_torch_autocast": True,
}
"""What the published configurations Habana/bert-base-uncased and -large-… hold."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The kind of device that the ranks of a node train on, and why it was chosen."""

    name: Name
    devices: int
    """Number of cards in this node; 0 for a CPU, which any number of ranks shares."""
    reason: str
    hpu_trainer: HpuTrainer = "optimum-habana"
    """Whose Trainer an HPU has."""
    torch_compile: bool = False
    """The job has PyTorch compile its model."""

    def __str__(self) -> str:
        plain = self.name == "hpu" and not self.has_gaudi_trainer
        return f"{self.name} ({self.reason}){', the Trainer of transformers in eager mode' if plain else ''}"

    @property
    def has_gaudi_trainer(self) -> bool:
        """Return whether it trains with optimum-habana's classes, in lazy mode."""
        return self.name == "hpu" and self.hpu_trainer == "optimum-habana"

    @property
    def backend(self) -> str:
        """The backend of torch.distributed that this accelerator uses."""
        return {"hpu": "hccl", "cuda": "nccl", "cpu": "gloo"}[self.name]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a rank needs before torch is imported; `of_rank` reads the choice back from them."""
        chosen: dict[str, str] = {ACCELERATOR_VARIABLE: self.name}
        if self.name == "hpu":
            # The bridge's default was lazy mode through release 1.19 and is eager mode in later ones (docs.habana.ai,
            # Runtime Environment Variables); `use_lazy_mode` below needs it said, and transformers would take lazy.
            chosen["PT_HPU_LAZY_MODE"] = "1" if self.has_gaudi_trainer else "0"
            chosen[HPU_TRAINER_VARIABLE] = self.hpu_trainer
        return chosen

    @property
    def compiles(self) -> bool:
        """Return whether a graph is compiled for each new shape of a batch."""
        return self.name == "hpu" or self.torch_compile

    @property
    def warmup_steps(self) -> int:
        """The number of first steps of each shape that throughput leaves out: those in which its graph is compiled."""
        # optimum-habana's own examples and its "Accelerating Training" guide give 3 for lazy mode.
        return 3 if self.compiles else 0

    def device(self, local_rank: int) -> "torch.device":
        """Return the device for the tensors of a rank without a Trainer.

        This loads the backend, too, so call it before torch.distributed is initialized.
        """
        import torch

        if self.name == "hpu":
            # The bridge gives each rank its card by the launcher's variables (docs.habana.ai, Distributed Backend
            # Initialization).
            import habana_frameworks.torch.core
            import habana_frameworks.torch.distributed.hccl  # noqa: F401

            return torch.device("hpu")
        if self.name == "cuda":
            torch.cuda.set_device(local_rank)
            return torch.device("cuda", local_rank)
        return torch.device("cpu")

    def synchronize(self) -> None:
        """Wait until the card has done what it was given."""
        if self.name == "hpu":
            from habana_frameworks.torch import core, hpu

            if self.has_gaudi_trainer:
                core.mark_step()  # in lazy mode nothing runs before
            hpu.synchronize()
        elif self.name == "cuda":
            import torch

            torch.cuda.synchronize()

    def memory(self) -> dict[str, float]:
        """Return the memory of this rank's card in GiB: in use by tensors now, at most until now, and in all.

        Nothing on a CPU.
        """
        if self.name == "hpu":
            from habana_frameworks.torch.hpu import memory_stats

            stats = memory_stats()  # these three are what GaudiTrainer logs (optimum-habana, get_hpu_memory_stats)
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
        """Prepare a rank for its Trainer; called once, before that and its model are made.

        `alone`: it is the only one, and trains as a plain process: no process group, and nothing that copies gradients.
        Raises ConfigurationError where the Trainer of transformers would not find the HPU, and train on the CPU.
        """
        if self.name == "hpu" and not self.has_gaudi_trainer:
            self.device(0)  # in eager mode transformers does not load the bridge itself, and asks for HPUs just once
            _check_that_transformers_finds_an_hpu()
        if alone:
            # By these the Trainer would take itself for one of several.
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                os.environ.pop(name, None)
        if alone and self.name == "cuda":
            # A plain process takes all cards that it sees, by nn.DataParallel.
            os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        if alone or self.name != "cpu":
            return
        from torch.serialization import register_package

        # accelerate calls a rank's CPU `cpu:<local rank>` and transformers loads a checkpoint's optimizer to that
        # place, which torch's loader does not know: it knows `cpu` alone.
        register_package(0, lambda _: None, lambda storage, place: storage if place.startswith("cpu:") else None)

    def set_seed(self, seed: int) -> None:
        """Seed all random numbers: Python's, NumPy's, PyTorch's here and on the cards."""
        if self.has_gaudi_trainer:
            from optimum.habana.utils import set_seed
        else:
            from transformers import set_seed
        set_seed(seed)

    def trainer_class(self) -> type[Any]:
        """Return the class of the Trainer: GaudiTrainer or that of transformers. Loading either takes seconds."""
        with imports_that_stay():
            _without_datasets()
            if self.has_gaudi_trainer:
                from optimum.habana import GaudiTrainer

                return cast("type[Any]", GaudiTrainer)
            from transformers import Trainer

            return cast("type[Any]", Trainer)

    def training_arguments_class(self) -> type[Any]:
        """Return the class of the arguments that a Trainer of `trainer_class` takes."""
        if self.has_gaudi_trainer:
            from optimum.habana import GaudiTrainingArguments

            return cast("type[Any]", GaudiTrainingArguments)
        from transformers import TrainingArguments

        return cast("type[Any]", TrainingArguments)

    def training_arguments(self, *, alone: bool = False) -> dict[str, Any]:
        """Return the arguments of `training_arguments_class` that this accelerator sets; the recipe's come on top.

        `alone`: as in `prepare`.
        """
        # One kernel for all of AdamW: on a CPU a step of MiniLM (23M parameters) takes 0.05 s instead of 0.2 s.
        fused = {"optim": "adamw_torch_fused", "ddp_find_unused_parameters": False}
        if self.name == "cpu":
            return {**fused, "use_cpu": True, **({} if alone else {"ddp_backend": self.backend})}
        if self.name == "cuda":
            return {**fused, "bf16": _cuda_has_bf16()}
        if not self.has_gaudi_trainer:
            return {
                "bf16": True,  # autocast, by the bridge's own lists
                # PyTorch takes its fused kernel on an HPU from 2.8 on only (pytorch/pytorch pull request 148666).
                "optim": "adamw_torch",
                # It would need the device's name, which the Trainer cannot hand on (DataLoader's pin_memory_device).
                "dataloader_pin_memory": False,
                "ddp_bucket_cap_mb": 230,  # as below: it is for the same cards and the same HCCL
                "ddp_find_unused_parameters": False,
            }
        return {
            "use_habana": True,
            # Graphs of many operations, compiled once for each shape: the mode that BERT on Gaudi1 was published with.
            "use_lazy_mode": True,
            # Evaluation replays recorded graphs, as in the published runs of BERT and RoBERTa (optimum-habana,
            # tests/configs/examples). GaudiTrainer does so once the training has ended, not in its midst: recording
            # detaches gradients. Training in graphs (`use_hpu_graphs_for_training`) is in none of those runs.
            "use_hpu_graphs_for_inference": True,
            # GaudiTrainer's own throughput; ours (jobs.container.saving.metrics) leaves the same steps out.
            "throughput_warmup_steps": self.warmup_steps,
            # DistributedDataParallel with buckets of 230 MB: optimum-habana's defaults, written down because `fast_ddp`
            # is the alternative, which reduces all gradients after the backward pass instead of during it, in bf16.
            "distribution_strategy": "ddp",
            "ddp_bucket_cap_mb": 230,
            # No parameter of an encoder with its head goes unused; looking for one costs a walk of the graph a step.
            # The published pre-training of BERT (and RoBERTa's, in those configurations) has it on all the same.
            "ddp_find_unused_parameters": False,
        }

    def model_arguments(self) -> dict[str, Any]:
        """Return the arguments with which a model of transformers is made, by `from_pretrained` or `from_config`."""
        if self.name != "hpu":
            return {}
        # GaudiTrainingArguments' own default, for its examples. With PyTorch's fused attention transformers asks the
        # host at every step whether anything is padded; on a first Gaudi it may compute in fp32, step by step [?].
        return {"attn_implementation": "eager"}

    def trainer_arguments(
        self, *, gaudi_config: Mapping[str, Any] | None = None, fused_adam: bool = True
    ) -> dict[str, Any]:
        """Return further arguments of `trainer_class`.

        `gaudi_config` is what an HPU's configuration has, in place of the default. `fused_adam`: False where another
        optimizer than AdamW was asked for.
        """
        if not self.has_gaudi_trainer:
            return {}
        from optimum.habana import GaudiConfig

        settings = dict(GAUDI_CONFIG if gaudi_config is None else gaudi_config)
        # GaudiTrainer takes its AdamW before it looks which optimizer the arguments name.
        settings["use_fused_adam"] = fused_adam and settings.get("use_fused_adam", False)
        return {"gaudi_config": GaudiConfig(**settings)}


CPU = Accelerator(name="cpu", devices=0, reason="asked for")


def choose(
    asked: str, *, nproc_per_node: int, cards: int | None = None, hpu_trainer: HpuTrainer = "optimum-habana"
) -> Accelerator:
    """Choose the accelerator for `nproc_per_node` ranks of this node.

    `cards`: those that its instance should have, where a check of its health will find that some of them are missing.
    `hpu_trainer`: whose Trainer an HPU shall have.

    Raises UsageError on an unknown name or too many ranks, ConfigurationError where the one asked for is not here.
    """
    finders = {"hpu": _hpus, "cuda": _cuda_devices}
    if asked == CPU.name:
        return CPU
    if asked in finders:
        devices, absence = finders[asked]()
        if not devices:
            raise ConfigurationError(
                f"accelerator '{asked}' was asked for, but {absence}",
                next_step="run on an instance and in an image that have it, or ask for 'cpu' or 'auto'",
            )
        if nproc_per_node > devices and not (cards and devices < cards):
            raise UsageError(
                f"{nproc_per_node} ranks need a card each, but this node has {devices} ({asked})",
                next_step=f"--nproc-per-node={devices}, or fewer",
            )
        return Accelerator(name=cast("Name", asked), devices=devices, reason="asked for", hpu_trainer=hpu_trainer)
    if asked != AUTO:
        raise UsageError(f"accelerator '{asked}' is unknown{did_you_mean(asked, (*finders, 'cpu', AUTO))}")
    absences = []
    for name, find in finders.items():
        devices, absence = find()
        if devices >= nproc_per_node:
            reason = f"auto: {devices} found"
            return Accelerator(name=cast("Name", name), devices=devices, reason=reason, hpu_trainer=hpu_trainer)
        absences.append(absence if not devices else f"{devices} {name.upper()} for {nproc_per_node} ranks")
    return Accelerator(name="cpu", devices=0, reason="auto: " + ", ".join(absences))


def of_rank(environment: Mapping[str, str]) -> Accelerator:
    """Return, in a rank, what the launcher chose and wrote there; nothing is looked for again."""
    name = environment.get(ACCELERATOR_VARIABLE, "cpu")
    if name not in ("hpu", "cuda", "cpu"):
        raise UsageError(
            f"{ACCELERATOR_VARIABLE} is '{name}' in a rank", next_step="start it with jobs.container.launch"
        )
    trainer: Any = environment.get(HPU_TRAINER_VARIABLE, "optimum-habana")
    return Accelerator(name=cast("Name", name), devices=0, reason="the launcher's choice", hpu_trainer=trainer)


def _without_datasets() -> None:
    """Keep Trainer and accelerate from loading datasets, which takes a fifth of a rank's start.

    They would only ask whether their data is one of theirs, which ours never is; who reads from the hub imports them.
    """
    from transformers.utils import import_utils

    import_utils._datasets_available = False  # noqa: SLF001 - there is no other way to say so
    from accelerate import data_loader

    if hasattr(data_loader, "is_datasets_available"):  # accelerate asks where there are several ranks
        data_loader.is_datasets_available = lambda: False


def _check_that_transformers_finds_an_hpu() -> None:
    import accelerate
    import transformers

    knows = getattr(transformers.utils, "is_torch_hpu_available", None)
    if knows is None or not knows():
        raise ConfigurationError(
            f"transformers {transformers.__version__} with accelerate {accelerate.__version__} finds no HPU here, and "
            "would train on the CPU",
            next_step="leave out 'hpu_trainer: transformers'; it needs transformers 4.50 and accelerate 1.5, or later",
        )


def _hpus() -> tuple[int, str]:
    """Count the cards, and say why there are none. Imports nothing of Habana's: its modules open the driver."""
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


def _cuda_has_bf16() -> bool:
    import torch

    return bool(torch.cuda.is_bf16_supported())
