"""Tokenized examples, kept on S3: one attempt reads and tokenizes the tables, and all others fetch what it has made.

    s3://<run bucket>/<team>/artifacts/examples-<fingerprint>/…   .npy files, the held-out texts, manifest.json last

The fingerprint is of all that decides what is in the files: the content of the tables, the tokenizer's files, the
arguments, the code and the packages. So every attempt of a run finds them, and so does another run of the team that
trains otherwise on the same data: the members of a sweep, for instance. Of several nodes the main one makes them, and
the others wait and fetch. What is damaged, or was written by half, is made again. None of it fails a training.
"""

import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

import jobs
from jobs.aws import s3 as object_store
from jobs.contract.artifact import ArtifactFile, Manifest, fingerprint, location_in_team_of
from jobs.contract.errors import NotFoundError, TrainyardError, UsageError
from jobs.contract.locations import S3Location
from jobs.contract.model_files import MODEL_TEXT
from jobs.contract.run import CACHE_TAG, MANIFEST
from jobs.kinds.finetune_classification import FinetuneClassification
from jobs.train.data.artifacts import identity_of, open_artifact
from jobs.train.data.labelled_tokens import Prepared
from jobs.train.data.sources import data_set_commit, is_on_hub
from jobs.train.environment import versions_of
from jobs.train.rank import Rank, one_line

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

KIND = "examples"

KEEP_SECONDS = 5.0
"""What one node alone has made in less is not kept: to look for it and to fetch it would take as long."""

_FORMAT = 1
_RECORD = "examples.json"
"""What `Prepared` says of the files, but for their folder."""

_ARGUMENTS = ("max_length", "eval_fraction", "seed", "on_bad_rows", "max_bad_rows")
"""Those that decide what is tokenized, beside tables and columns. None says how it is trained on."""

_CODE = ("contract", "kinds", "train/data")
_PACKAGES = ("datasets", "numpy", "pyarrow", "sentencepiece", "tokenizers", "transformers")
"""What reads tables and tokenizes."""


def fetched_or_made(rank: Rank, kept: "KeptExamples", make: Callable[[], Prepared]) -> Prepared:
    """Return the examples of this node, on its first rank: those that are kept, or what `make` makes."""
    if not rank.is_first:
        is_kept = json.loads(rank.store.get(KIND))
        return (kept.fetch() if is_kept else None) or make()
    prepared = kept.fetch()
    is_kept = prepared is not None
    if prepared is None:
        started = time.monotonic()
        prepared = make()
        is_kept = (rank.nnodes > 1 or time.monotonic() - started >= KEEP_SECONDS) and kept.keep(prepared)
        rank.start_up.done("examples kept")
    if rank.nnodes > 1:
        rank.store.set(KIND, json.dumps(is_kept))
    return prepared


class KeptExamples:
    """The place of the examples that some arguments ask for."""

    def __init__(self, s3: "S3Client", rank: Rank, arguments: FinetuneClassification, model: Path) -> None:
        """`model` is a folder with the tokenizer's files."""
        self._s3 = s3
        self._rank = rank
        self._arguments = arguments
        self._model = model
        self._options: dict[str, Any] = {}
        self._inputs: dict[str, Any] = {}

    def fetch(self) -> Prepared | None:
        """Return the examples that are kept, here and verified; None where there are none that can be used."""
        try:
            self._options, self._inputs = self._made_of()
        except TrainyardError:  # whoever reads the tables meets it, and says it better
            return None
        try:
            artifact = open_artifact(str(self._location), kind=KIND, s3=lambda: self._s3, scratch=self._rank.scratch)
            if artifact.manifest.fingerprint != self._fingerprint:
                raise UsageError(f"{self._location} holds other examples")
        except NotFoundError:
            return None
        except TrainyardError as error:
            self._warn(error)
            return None
        started = time.monotonic()
        try:
            folder = artifact.download()
            prepared = Prepared(folder=folder, **json.loads((folder / _RECORD).read_bytes()))
        except (TrainyardError, ValidationError) as error:
            self._warn(error)
            return None
        self._say("tokenized before", artifact.manifest, started)
        return prepared

    def keep(self, prepared: Prepared) -> bool:
        """Store examples that this attempt has made. Returns whether they are there for others to fetch."""
        started = time.monotonic()
        record = prepared.model_dump_json(exclude={"folder", "widths"})
        (prepared.folder / _RECORD).write_text(record)
        try:
            if self._made_of() != (self._options, self._inputs):
                return False  # the tables were changed while they were read
            names = object_store.files_below(prepared.folder)
            sent = object_store.upload_all(self._s3, prepared.folder, names, self._location, tag=CACHE_TAG)
            manifest = Manifest(
                kind=KIND,
                version=_FORMAT,
                fingerprint=self._fingerprint,
                options=self._options,
                inputs=self._inputs,
                provenance={"run": str(self._rank.run)},
                files={name: ArtifactFile(bytes=file.bytes, sha256=file.sha256) for name, file in sent.items()},
            )
            content = manifest.model_dump_json(indent=2).encode()
            object_store.write(self._s3, self._location / MANIFEST, content, tag=CACHE_TAG)
        except TrainyardError as error:
            log.warning("warning: tokenized examples are not kept for the next attempt: %s", one_line(error))
            return False
        self._say("tokens kept for the next attempt", manifest, started)
        return True

    @functools.cached_property
    def _fingerprint(self) -> str:
        return fingerprint(KIND, version=_FORMAT, options=self._options, inputs=self._inputs)

    @functools.cached_property
    def _location(self) -> S3Location:
        return location_in_team_of(self._rank.run, KIND, self._fingerprint)

    def _made_of(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options and inputs that decide what is in the files. Raises TrainyardError where one is gone."""
        source = self._arguments.inputs()
        tables = {table: self._identity(table) for table in (*source.train, *source.evaluation)}
        texts = sorted(path for path in self._model.iterdir() if path.name.endswith(MODEL_TEXT))
        tokenizer = {path.name: identity_of(str(path), s3=lambda: self._s3) for path in texts}
        options = {
            **{name: getattr(self._arguments, name) for name in _ARGUMENTS},
            "train": source.train,
            "evaluation": source.evaluation,
            "columns": source.columns,
            "code": _code(),
            "packages": versions_of(_PACKAGES),
        }
        return options, {"tables": tables, "tokenizer": tokenizer}

    def _identity(self, table: str) -> Mapping[str, Any]:
        if is_on_hub(table):
            return {"commit": data_set_commit(table)}
        return identity_of(table, s3=lambda: self._s3)

    def _warn(self, error: TrainyardError | ValidationError) -> None:
        log.warning(
            "warning: the tables are read and tokenized again, for what is kept cannot be used: %s", one_line(error)
        )

    def _say(self, what: str, manifest: Manifest, started: float) -> None:
        megabytes, seconds = manifest.total_bytes / 1e6, time.monotonic() - started
        if self._rank.is_first:
            log.info("data: %s, %.1f MB in %.1f s, %s", what, megabytes, seconds, self._location)


@functools.cache
def _code() -> str:
    """Return a hash of the sources that read tables and tokenize, wherever they are changed."""
    root = Path(jobs.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for room in _CODE for path in (root / room).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()
