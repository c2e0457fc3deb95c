"""The tokenizer that a corpus is encoded with: one that a run has learnt, or that of a model."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.aws import s3 as object_store
from jobs.container.data.artifacts import TOKENIZER_KIND, identity_of, open_artifact
from jobs.container.data.sources import hub_folder, is_on_hub
from jobs.core.artifact import POINTER
from jobs.core.errors import NotFoundError
from jobs.core.locations import S3, S3Location, refuse_unresolved
from jobs.core.run import MANIFEST
from jobs.data_checks.model_files import TOKENIZER, TOKENIZER_FILES

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer's files, here."""

    folder: Path
    names: list[str]
    identity: Any
    """What tells it from any other: the artifact's fingerprint, or its files' hashes."""


def tokenizer_files(location: str, *, s3: Callable[[], "S3Client"], scratch: Path) -> TokenizerFiles:
    """Fetch the tokenizer at `location`: an artifact, or a model's folder; on S3, local or on the hub.

    Raises NotFoundError where there is neither, UsageError where it is an artifact of another kind.
    """
    refuse_unresolved(location)
    source: Path | None = None
    if is_on_hub(location):
        source = hub_folder(location, "model", [*TOKENIZER_FILES, MANIFEST])
        there = object_store.files_below(source)
    elif location.startswith(S3):
        there = [*object_store.sizes(s3(), S3Location.parse(location))]
    else:
        source = Path(location)
        there = object_store.files_below(source) if source.is_dir() else []
    if {MANIFEST, POINTER} & {*there}:
        artifact = open_artifact(location, kind=TOKENIZER_KIND, s3=s3, scratch=scratch)
        return TokenizerFiles(
            folder=artifact.download(), names=[*artifact.manifest.files], identity=artifact.manifest.fingerprint
        )
    names = [name for name in TOKENIZER_FILES if name in there]
    if TOKENIZER not in names:
        raise NotFoundError(
            f"{location} is no tokenizer: it holds neither {TOKENIZER} nor {MANIFEST} nor {POINTER}",
            next_step="name what train-tokenizer made, or a model that save_pretrained wrote with its fast tokenizer",
        )
    folder = scratch / "tokenizer"
    folder.mkdir()
    for name in names:
        if source is None:
            object_store.download_below(s3(), S3Location.parse(location), name, folder)
        else:
            shutil.copyfile(source / name, folder / name)
    return TokenizerFiles(folder=folder, names=names, identity=identity_of(str(folder), s3=s3))
