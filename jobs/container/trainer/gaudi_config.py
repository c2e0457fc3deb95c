"""A gaudi_config.json: how optimum-habana's Trainer uses an HPU (autocast, fused kernels), as a file of one's own."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.aws import s3 as object_store
from jobs.container.accelerator import Accelerator
from jobs.container.data.sources import hub_folder, is_on_hub
from jobs.core.errors import NotFoundError, UsageError, did_you_mean
from jobs.core.locations import S3, S3Location, refuse_unresolved
from jobs.spec.recipe import Recipe

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

    from jobs.container.rank import Rank

log = logging.getLogger("trainyard")

FILE = "gaudi_config.json"

_SWITCHES = ("use_fused_adam", "use_fused_clip_norm", "use_torch_autocast", "use_dynamic_shapes")
_LISTS = ("autocast_bf16_ops", "autocast_fp32_ops")
KEYS = (*_SWITCHES, *_LISTS)
"""The keys of GaudiConfig (optimum-habana 1.18.1, optimum/habana/transformers/gaudi_configuration.py)."""
_RECORDS = ("optimum_version", "transformers_version")
"""What its save_pretrained writes beside them."""


def trainer_arguments(recipe: Recipe, accelerator: Accelerator, rank: "Rank", s3: "S3Client | None") -> dict[str, Any]:
    """Return the further arguments of the Trainer, with the file that the recipe names. All ranks call it.

    `s3` is needed on the first rank of each node. Raises what `read` does.
    """
    location = recipe.gaudi_config
    settings: dict[str, Any] | None = None
    if location is not None:
        settings = rank.once_per_node("gaudi-config", lambda: read(location, s3))
        if rank.is_first and accelerator.name != "hpu":
            log.info("gaudi_config: %s is right, and has no effect on %s", location, accelerator.name)
    return accelerator.trainer_arguments(gaudi_config=settings, fused_adam=recipe.optimizer == "adamw")


def read(location: str, s3: "S3Client | None") -> dict[str, Any]:
    """Return what the file at `location` says, or the one in the folder there.

    Raises NotFoundError where there is none, UsageError where it is not what a GaudiConfig is made of.
    """
    refuse_unresolved(location)
    is_file = location.endswith(".json")
    if is_on_hub(location):
        path = hub_folder(location, "model", [FILE]) / FILE
        content = path.read_bytes() if path.is_file() else None
    elif location.startswith(S3):
        assert s3 is not None  # noqa: S101 - it is there on the one rank that gets here
        place = S3Location.parse(location)
        content = object_store.read(s3, place if is_file else place / FILE)
    else:
        path = Path(location) if is_file else Path(location) / FILE
        content = path.read_bytes() if path.is_file() else None
    if content is None:
        raise NotFoundError(f"gaudi_config: there is no {FILE} at {location}", next_step="check the location")
    try:
        said = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"gaudi_config: {location} is not JSON: {error}", next_step="correct the file") from None
    return _checked(said, location)


def _checked(said: Any, location: str) -> dict[str, Any]:
    if not isinstance(said, Mapping):
        raise UsageError(f"gaudi_config: {location} holds no keys and values", next_step="correct the file")
    for key, value in said.items():
        known = (*KEYS, *_RECORDS)
        if key not in known:
            raise UsageError(
                f"gaudi_config: {location}: unknown key '{key}'{did_you_mean(key, known)}", next_step="correct the file"
            )
        if key in _SWITCHES and not isinstance(value, bool):
            raise UsageError(
                f"gaudi_config: {location}: {key} is {value!r}, not true or false", next_step="correct the file"
            )
        if key in _LISTS and value is not None and not _is_names(value):
            raise UsageError(
                f"gaudi_config: {location}: {key} is {value!r}, not a list of operators", next_step="correct the file"
            )
    return {key: value for key, value in said.items() if key not in _RECORDS}


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
