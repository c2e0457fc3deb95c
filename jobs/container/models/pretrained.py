"""Fetch a pretrained model from the hub, S3 or a local path into a local folder.

Invalid model folders are refused with the names of the missing files, because a loader's errors are obscure.
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
    Raises NotFoundError if nothing is there, and UsageError with all problems that jobs.data_checks.model_files finds,
    for instance that the model does not take `max_length` tokens.
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
    found = [name for name in _wanted(names, weights=weights) if model_files.is_weights(name)]
    beginnings = {name: _beginning_of(folder / name) for name in found if (folder / name).is_file()}
    raise_all(
        [
            *model_files.model_errors(
                location, names, contents, max_length=max_length, is_known=_is_known, weights=beginnings
            )
        ]
    )
    return folder


def _beginning_of(path: Path) -> model_files.Beginning:
    def read(start: int, stop: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    return model_files.beginning_of(path.stat().st_size, read)


def _wanted(names: Collection[str], *, weights: bool) -> list[str]:
    return [name for name in model_files.model_files(names) if weights or name.endswith(model_files.MODEL_TEXT)]


def positions(model: "Module") -> int | None:
    """Return the maximum length of a sequence in tokens, or None if no table of position embeddings limits it.

    RoBERTa and similar models start numbering positions after the padding id, so their tables have extra rows.
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
    error = model_files.missing_file(names, location)
    if error := error or model_files.unsafe_pickle(names, location, _torch_version()):
        raise error


def _is_known(model_type: str) -> bool:
    """Return whether transformers has this model type. Importing it takes seconds, so this is checked last."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def _torch_version() -> str:
    return importlib.metadata.version("torch")


def copy_weights(model: Any) -> None:
    """Copy weights from the memory-mapped file to newly allocated memory.

    The address of a matrix decides the order in which its product with a single row is summed, and weights have other
    positions in a checkpoint's file than in a pretrained model's. Without the copy, an evaluation of single examples
    would differ in its last digits after a resume.
    """
    for weights in (*model.parameters(), *model.buffers()):
        weights.data = weights.data.clone()
