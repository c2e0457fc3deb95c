"""Fetch a pretrained model into a local folder, from the hub, from S3 or from a local path.

What is no model is refused with what it lacks, before a loader fails over it with an error that nobody understands.
"""

import importlib.metadata
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.aws import s3 as object_store
from jobs.contract.errors import NotFoundError, UsageError
from jobs.contract.locations import S3, S3Location, hub_parts, refuse_unresolved
from jobs.train.data.sources import hub_errors, is_on_hub, names_below

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

MODEL_TEXT = (".json", ".txt", ".model")
"""How the files end that are no weights: configuration, vocabulary, merges, SentencePiece models."""


_SAFE_PICKLES = (2, 6)
"""The release of PyTorch from which on it loads a pickle without running what is in it (CVE-2025-32434)."""


def model_folder(location: str, *, s3: Callable[[], "S3Client"], scratch: Path) -> Path:
    """Return a local folder with the model at `location`, downloaded where it is not local.

    Raises NotFoundError where nothing is there, UsageError where it is no model.
    """
    if is_on_hub(location):
        folder = _model_from_hub(location)
    elif location.startswith(S3):
        names = names_below(location, s3())
        _check_model(names, location)
        folder = scratch / "model"
        object_store.download_all(s3(), S3Location.parse(location), _model_files(names), folder)
    else:
        refuse_unresolved(location)
        folder = Path(location)
        if not folder.is_dir():
            raise NotFoundError(f"model folder {location} does not exist", next_step="check the path")
    _check_model([path.name for path in folder.iterdir()], location)
    _check_configuration(folder / "config.json", location)
    return folder


def _model_from_hub(location: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    name, options = hub_parts(location)
    revision = options.get("revision")
    with hub_errors(location, "private or gated model"):
        names = [item.rfilename for item in HfApi().model_info(name, revision=revision).siblings or ()]
        _check_model(names, location)
        return Path(snapshot_download(name, revision=revision, allow_patterns=_model_files(names)))


def _model_files(names: Iterable[str]) -> list[str]:
    """Choose the files that `from_pretrained` reads: not the same weights twice, nor those of other frameworks."""
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if name.endswith(".safetensors")] or [name for name in top if _is_pickle(name)]
    return [name for name in top if name.endswith(MODEL_TEXT)] + weights


def _check_model(names: Iterable[str], location: str) -> None:
    """Raise UsageError where files of these names are no model that can be fine-tuned."""
    files = _model_files(names)
    weights = [name for name in files if not name.endswith(MODEL_TEXT)]
    vocabularies = [name for name in files if name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece"))]
    for found, what in (
        (["config.json"] if "config.json" in files else [], "config.json"),
        (weights, "weights (model.safetensors or pytorch_model.bin)"),
        (vocabularies, "tokenizer (tokenizer.json or a vocabulary)"),
    ):
        if not found:
            there = ", ".join(sorted(names)[:8]) or "nothing"
            raise UsageError(
                f"{location} is no model: it has no {what}; there is {there}",
                next_step="name the folder that save_pretrained wrote, with its tokenizer",
            )
    if any(_is_pickle(name) for name in weights) and _torch_release() < _SAFE_PICKLES:
        raise UsageError(
            f"{location} has its weights in {weights[0]} only, a pickle, and PyTorch {_torch_version()} may run code "
            "that is hidden in one (CVE-2025-32434)",
            next_step="save the model once more with save_pretrained(…, safe_serialization=True), which makes "
            "model.safetensors, or take a release with PyTorch 2.6 or later",
        )


def _torch_version() -> str:
    return importlib.metadata.version("torch")


def _torch_release() -> tuple[int, ...]:
    """Return the first two numbers of PyTorch's version; Habana's has letters behind them (2.5.1a0+git…)."""
    return tuple(int(number) for number in re.findall(r"\d+", _torch_version())[:2])


def _check_configuration(path: Path, location: str) -> None:
    """Raise UsageError on a config.json of no model.

    Transformers would answer with the error of a list's index, or with the names of all models that it knows.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{location} is no model: its config.json is not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise UsageError(
            f"{location} is no model: its config.json has no model_type",
            next_step="name the folder that save_pretrained wrote, with its tokenizer",
        )


def _is_pickle(name: str) -> bool:
    return name.startswith("pytorch_model") and name.endswith(".bin")
