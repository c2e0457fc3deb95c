"""Fetch a pretrained model from the hub, S3 or a local path into a local folder.

A folder that is not a model is refused with what it lacks, before a loader fails with an obscure error.
"""

import contextlib
import importlib.metadata
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.aws import s3 as object_store
from jobs.container.data.sources import hub_errors, is_on_hub, names_below
from jobs.core.errors import NotFoundError, UsageError, raise_all
from jobs.core.locations import S3, S3Location, hub_parts, refuse_unresolved
from jobs.data_checks import model_files

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from torch.nn import Module


def model_folder(
    location: str,
    *,
    s3: Callable[[], "S3Client"],
    scratch: Path,
    max_length: int | None = None,
    weights: bool = True,
) -> Path:
    """Return a local folder with the model at `location`. Downloads it unless it is local.

    `weights`: False downloads only configuration and tokenizer, for a training whose checkpoint has the weights.
    Raises NotFoundError if nothing is there, and UsageError with everything that jobs.data_checks.model_files finds
    wrong, for instance if the model does not take `max_length` tokens.
    """
    if is_on_hub(location):
        folder, names = _model_from_hub(location, weights=weights)
    elif location.startswith(S3):
        names = names_below(location, s3())
        _check_model(names, location)
        folder = scratch / "model"
        object_store.download_all(s3(), S3Location.parse(location), _wanted(names, weights=weights), folder)
    else:
        refuse_unresolved(location)
        folder = Path(location)
        if not folder.is_dir():
            raise NotFoundError(f"model folder {location} does not exist", next_step="check the path")
        names = [path.name for path in folder.iterdir()]
    _check_model(names, location)
    contents = {name: (folder / name).read_bytes() for name in model_files.CHECKED_FILES if name in names}
    raise_all([*model_files.model_errors(location, names, contents, max_length=max_length, is_known=_is_known)])
    return folder


def _wanted(names: Collection[str], *, weights: bool) -> list[str]:
    return [name for name in model_files.model_files(names) if weights or name.endswith(model_files.MODEL_TEXT)]


def positions(model: "Module") -> int | None:
    """Return how many tokens a sequence may have, or None if no table of position embeddings limits it.

    RoBERTa and similar models number positions from after the padding id, so their tables have more rows than that.
    """
    from torch.nn import Embedding

    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, Embedding):
            return part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1)
    return None


@contextlib.contextmanager
def explained_loading(location: str, what: str) -> Iterator[None]:
    """Turn any error that a loader raises for damaged or unsuitable files into a UsageError that names the model."""
    try:
        yield
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UsageError(
            f"{location}: {what}: {reason}", next_step="upload the model's folder again, or name another model"
        ) from error


def _model_from_hub(location: str, *, weights: bool) -> tuple[Path, list[str]]:
    """Download the wanted files. Return their folder, and the names of all files in the repository."""
    from huggingface_hub import HfApi, snapshot_download

    name, options = hub_parts(location)
    revision = options.get("revision")
    with hub_errors(location, "private or gated model"):
        names = [item.rfilename for item in HfApi().model_info(name, revision=revision).siblings or ()]
        _check_model(names, location)
        wanted = _wanted(names, weights=weights)
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted)), names


def _check_model(names: Collection[str], location: str) -> None:
    """Raise UsageError if files with these names are not a model that can be fine-tuned."""
    fault = model_files.missing_file(names, location)
    if fault := fault or model_files.unsafe_pickle(names, location, _torch_version()):
        raise fault


def _is_known(model_type: str) -> bool:
    """Return whether transformers has this model type. Importing it takes seconds, so this is checked last."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def _torch_version() -> str:
    return importlib.metadata.version("torch")


def copy_weights(model: Any) -> None:
    """Copy weights from the memory-mapped file to newly allocated memory.

    The product of a matrix and a single row is summed in another order at another address, and a checkpoint has its
    weights at other positions in its file than a pretrained model. Without the copy, an evaluation of single examples
    would differ in its last digits after a resume.
    """
    for weights in (*model.parameters(), *model.buffers()):
        weights.data = weights.data.clone()
