"""Turn a recipe, and the gaudi_config.json that it may name, into the arguments of a Trainer."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.aws import s3 as object_store
from jobs.container.accelerator import Accelerator
from jobs.container.data.sources import hub_folder, is_on_hub
from jobs.container.versions import gradient_checkpointing, warmup
from jobs.core.errors import NotFoundError, UsageError, did_you_mean
from jobs.core.locations import S3, S3Location, refuse_unresolved
from jobs.spec.recipe import Recipe

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

    from jobs.container.rank import Rank

log = logging.getLogger("trainyard")

FILE = "gaudi_config.json"
"""How optimum-habana's Trainer uses an HPU: autocast, fused kernels."""

_SWITCHES = ("use_fused_adam", "use_fused_clip_norm", "use_torch_autocast", "use_dynamic_shapes")
_LISTS = ("autocast_bf16_ops", "autocast_fp32_ops")
KEYS = (*_SWITCHES, *_LISTS)
"""The keys of GaudiConfig (optimum-habana 1.18.1, optimum/habana/transformers/gaudi_configuration.py)."""
_RECORDS = ("optimum_version", "transformers_version")
"""Keys that GaudiConfig.save_pretrained adds."""


def training_arguments(recipe: Recipe, rank: "Rank") -> dict[str, Any]:
    """Return the arguments of a rank's Trainer that follow from the recipe."""
    per_rank, accumulation = recipe.batch_of_rank(rank.world_size)
    saves_by_itself = isinstance(recipe.checkpoint_every_steps, int)
    further = recipe.training_arguments.model_dump() if recipe.training_arguments is not None else {}
    further |= gradient_checkpointing(further.pop("gradient_checkpointing", False))
    return {
        "output_dir": str(rank.scratch / "checkpoints"),
        "seed": recipe.seed,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": recipe.lr_scheduler_type,
        **({} if "warmup_steps" in further else warmup(recipe.warmup_ratio)),
        "weight_decay": recipe.weight_decay,
        # The default of BERT (google-research/bert, optimization.py) and of optimum-habana. PyTorch's default is 1e-8,
        # so without this line accelerators would train differently.
        "adam_epsilon": 1e-6,
        "per_device_train_batch_size": per_rank,
        "gradient_accumulation_steps": accumulation,
        "per_device_eval_batch_size": recipe.eval_batch_size,
        "logging_steps": recipe.log_every_steps,
        "save_strategy": "steps" if saves_by_itself else "no",
        **({"save_steps": recipe.checkpoint_every_steps} if saves_by_itself else {}),
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "report_to": [],  # trackers.py reports instead, and never ends a training
        "run_name": rank.run.key.strip("/").rpartition("/")[2],
        # The filter would hide a loss that is not finite: it logs the mean of the other steps, except in
        # optimum-habana. It also makes the host wait for the device at each step.
        "logging_nan_inf_filter": False,
        **further,
    }


def gaudi_arguments(recipe: Recipe, accelerator: Accelerator, rank: "Rank", s3: "S3Client | None") -> dict[str, Any]:
    """Return the Trainer's arguments from the accelerator and the recipe's gaudi_config. All ranks call it.

    The first rank of each node needs `s3`. Raises what `read_gaudi_config` raises.
    """
    location = recipe.gaudi_config
    settings: dict[str, Any] | None = None
    if location is not None:
        settings = rank.once_per_node("gaudi-config", lambda: read_gaudi_config(location, s3))
        if rank.is_first and accelerator.name != "hpu":
            log.info("gaudi_config: %s is valid but has no effect on %s", location, accelerator.name)
    return accelerator.trainer_arguments(gaudi_config=settings, fused_adam=recipe.optimizer == "adamw")


def read_gaudi_config(location: str, s3: "S3Client | None") -> dict[str, Any]:
    """Return the content of the gaudi_config.json at `location`, which may be a file or a folder.

    Raises NotFoundError if there is none, and UsageError if it has unknown keys or wrong values.
    """
    refuse_unresolved(location)
    is_file = location.endswith(".json")
    if is_on_hub(location):
        path = hub_folder(location, "model", [FILE]) / FILE
        content = path.read_bytes() if path.is_file() else None
    elif location.startswith(S3):
        assert s3 is not None  # noqa: S101 - set on the one rank that gets here
        place = S3Location.parse(location)
        content = object_store.read(s3, place if is_file else place / FILE)
    else:
        path = Path(location) if is_file else Path(location) / FILE
        content = path.read_bytes() if path.is_file() else None
    if content is None:
        raise NotFoundError(f"gaudi_config: there is no {FILE} at {location}", next_step="check the location")
    try:
        settings = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"gaudi_config: {location} is not JSON: {error}", next_step="correct the file") from None
    return _checked(settings, location)


def _checked(settings: Any, location: str) -> dict[str, Any]:
    def error(problem: str) -> UsageError:
        return UsageError(f"gaudi_config: {location}{problem}", next_step="correct the file")

    if not isinstance(settings, Mapping):
        raise error(" is not a JSON object")
    for key, value in settings.items():
        known = (*KEYS, *_RECORDS)
        if key not in known:
            raise error(f": unknown key '{key}'{did_you_mean(key, known)}")
        if key in _SWITCHES and not isinstance(value, bool):
            raise error(f": {key} is {value!r}, not true or false")
        if key in _LISTS and value is not None and not _is_names(value):
            raise error(f": {key} is {value!r}, not a list of operators")
    return {key: value for key, value in settings.items() if key not in _RECORDS}


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
