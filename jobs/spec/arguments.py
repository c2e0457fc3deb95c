"""The arguments of an entrypoint: one pydantic model, checked on the laptop and parsed again in the container.

A spec's `arguments` are validated against the model before anything is submitted, travel as command-line flags (the
container gets arguments and environment only), and become the same model again inside. Nothing here needs torch.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from typing_extensions import Self

from jobs.core.labels import class_name, label_kind
from jobs.core.locations import (
    artifact_location,
    documents_location,
    folder_location,
    input_location,
    model_location,
    table_location,
)
from jobs.spec.flags import to_flags


@dataclass(frozen=True)
class SourceMarker:
    """Marks a field that names something to read: `hf://…`, `s3://…`, `data://…`, `run://…` or a local path."""

    what: str


@dataclass(frozen=True)
class OfKind:
    """Narrows an `Artifact` to one kind: `Annotated[Artifact, OfKind("corpus")]`."""

    kind: str


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What a job reads of a table."""

    texts: tuple[str, ...]
    label: str | None = None
    named_by: str
    """What to do where a column is missing."""
    skips: bool = False
    """True where it leaves out rows that it cannot use."""


MODEL_FOLDER = "a pretrained model's folder"
FILES_FOLDER = "a folder of files"
CONFIGURATION_FOLDER = "a folder with a config.json"
ARTIFACT_FOLDER = "an artifact's folder"
TOKENIZER_FOLDER = "a tokenizer's folder"
TABLE = "a table of examples"
DOCUMENTS = "documents"
FILE_OR_FOLDER = "a file or a folder"

Model = Annotated[str, AfterValidator(model_location), SourceMarker(MODEL_FOLDER)]
"""`hf://org/name`, or a folder that `from_pretrained` loads, on S3 (`data://`, `s3://`) or local."""

Table = Annotated[str, AfterValidator(table_location), SourceMarker(TABLE)]
"""`hf://org/name?config=…&split=…`, or a .jsonl, .csv, .tsv or .parquet file, on S3 (`data://`, `s3://`) or local."""


def _table_locations(value: Any) -> Any:
    """Return `value` as it is. Raises ValueError where it is neither a table nor a list of some."""
    locations = [value] if isinstance(value, str) else value
    if not isinstance(locations, list) or not locations or not all(isinstance(item, str) for item in locations):
        raise ValueError(f"must be a table, or a list of tables, not {value!r}")
    for location in locations:
        table_location(location)
    return value


Tables = Annotated[str | list[str], BeforeValidator(_table_locations), SourceMarker(TABLE)]
"""A table, or a list of tables with the same columns, which are read one after the other as if they were one."""


def _class_name(value: Any) -> Any:
    return class_name(value) if label_kind(value) else value


ClassName = Annotated[str, BeforeValidator(_class_name)]
"""The name of a class: 1, "1" and 1.0 are one, as in a table."""


def _hub_repository(name: str) -> str:
    """Return `name` as it is. Raises ValueError where the hub could have no repository of that name."""
    if "--" in name or ".." in name or name.endswith((".git", "-", ".")):
        raise ValueError(f"'{name}' can be no repository: it has '--' or '..', or ends in '.git', '-' or '.'")
    return name


HubRepository = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=96),
    AfterValidator(_hub_repository),
]
"""org/name on the Hugging Face Hub, to push to, as huggingface_hub's validate_repo_id allows it."""

Documents = Annotated[str, AfterValidator(documents_location), SourceMarker(DOCUMENTS)]
"""A table with a column of text, named as `Table` is, or a .txt file."""

Folder = Annotated[str, AfterValidator(folder_location), SourceMarker(FILES_FOLDER)]
"""A folder of any files, on S3 (`data://`, `s3://`) or local."""

Configuration = Annotated[str, AfterValidator(model_location), SourceMarker(CONFIGURATION_FOLDER)]
"""A model's configuration: `hf://org/name`, or a folder with a config.json, on S3 (`data://`, `s3://`) or local."""

Input = Annotated[str, AfterValidator(input_location), SourceMarker(FILE_OR_FOLDER)]
"""A file or a folder of any kind: `hf://org/name` (a model), on S3 (`data://`, `s3://`, `run://name/path`) or local."""

Artifact = Annotated[str, AfterValidator(artifact_location), SourceMarker(ARTIFACT_FOLDER)]
"""An artifact, which a run made to be read by others: `run://name` (of its spec) or `run://id`, or a folder that holds
artifact.json or manifest.json, on S3 (`data://`, `s3://`) or local, or the `hf://org/name` that it was pushed to."""

Tokenizer = Annotated[str, AfterValidator(artifact_location), SourceMarker(TOKENIZER_FOLDER), OfKind("tokenizer")]
"""An artifact that train-tokenizer made, or a model with a tokenizer.json: `run://name/model`, `hf://org/name`, …"""


_NO_CHARACTER = re.compile("[\x00\ud800-\udfff]")
"""A command line can hold no NUL, and UTF-8 no half of a surrogate pair."""

_MAX_NUMBER = 2**53
"""Beyond it, prices and times are no longer reckoned exactly, and at last not at all."""


class Strict(BaseModel):
    """Base of what users write: refuses unknown keys, infinities, `true` where a number belongs, and the like."""

    # A command that is about one kind builds that kind's validators, not those of all.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, field: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(field.field_name)].annotation
        if isinstance(value, bool) and {int, float} & {annotation, *get_args(annotation)}:
            raise ValueError(f"must be a number, not {value}")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_text_without_bytes(cls, value: Any) -> Any:
        # Before all other validators, whose messages name the value: pydantic can show no half of a surrogate pair.
        texts = value if isinstance(value, list | dict) else [value]  # of a dict its keys: its values come later
        if any(isinstance(text, str) and _NO_CHARACTER.search(text) for text in texts):
            raise ValueError("a NUL or half a surrogate pair is no character of a text")
        return value

    @field_validator("*")
    @classmethod
    def _no_number_beyond_reckoning(cls, value: Any) -> Any:
        if isinstance(value, int | float) and abs(value) > _MAX_NUMBER:
            raise ValueError(f"a number has to lie within {_MAX_NUMBER} of zero")
        return value


class Arguments(Strict):
    """Base of every entrypoint's arguments; a field's docstring is its --help."""

    FREE: ClassVar[frozenset[str]] = frozenset()
    """Fields that may change when a run is resumed, since what it makes does not depend on them."""

    HUB_REPOSITORY_TYPE: ClassVar[Literal["model", "dataset"]] = "model"
    """Kind of the repository on the Hugging Face Hub to which the job pushes what it makes."""

    def sources(self) -> Iterator[tuple[str, str, str]]:
        """Yield `(field, location, what it should be)` of each input that is set, in the order of the fields.

        The inputs of a field that holds a list are `field.0`, `field.1`, …, those of one that has names `field.name`.
        """
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            marker = _marker(field)
            if marker is None or value is None:
                continue
            if isinstance(value, str):
                yield name, value, marker.what
            else:
                named = value.items() if isinstance(value, dict) else enumerate(value)
                yield from ((f"{name}.{key}", item, marker.what) for key, item in named)

    def artifact_kind(self, argument: str) -> str | None:
        """Return the kind of artifact that an argument, by its name in `sources`, has to be.

        None: any kind will do, or the argument is no artifact.
        """
        field = type(self).model_fields[argument.partition(".")[0]]
        return next((item.kind for item in _marks(field) if isinstance(item, OfKind)), None)

    def columns(self, argument: str) -> Columns | None:
        """Return the columns that are read of the table that an argument, by its name in `sources`, names.

        None: it names no table, or whichever columns it has.
        """
        del argument
        return None

    @property
    def longest_sequence(self) -> int | None:
        """Return the tokens that the model gets at once, at most; None: it is not known before the job runs."""
        return None

    @property
    def classifies(self) -> bool:
        """Return whether the model is used as the classifier that it is, and not trained."""
        return False

    def with_sources(self, **locations: str) -> Self:
        """Return a copy in which the named inputs, by the names of `sources`, lie elsewhere."""
        values = self.model_dump()
        for name, location in locations.items():
            field, _, key = name.partition(".")
            if key and isinstance(values[field], dict):
                values[field] = {**values[field], key: location}
            elif key:
                values[field] = [*values[field]]
                values[field][int(key)] = location
            else:
                values[field] = location
        return type(self).model_validate(values)

    def decisive(self) -> dict[str, Any]:
        """Return the arguments that a run keeps when it is resumed: all but `FREE`."""
        return {name: value for name, value in self.model_dump(mode="json").items() if name not in self.FREE}

    def metrics(self) -> tuple[str, ...] | None:
        """Return the metrics that an evaluation during the job has: none of a job that evaluates nothing.

        None: only a script knows.
        """
        return ()

    @property
    def hub_repository(self) -> str | None:
        """Return the repository on the Hugging Face Hub, org/name, that the job pushes to; None: it does not."""
        return None

    @property
    def resumes_on_other_ranks(self) -> bool:
        """Return whether another number of ranks can go on from a checkpoint."""
        return True

    def check(self, *world_sizes: int) -> None:
        """Raise UsageError where these arguments can't work on each of so many ranks.

        Called before anything is submitted, and by the launcher before any rank starts.
        """

    def to_flags(self) -> list[str]:
        """Return `--key=value` for every field that is set, defaults included: the container's own may be older."""
        return to_flags(self)


ArgumentsT = TypeVar("ArgumentsT", bound=Arguments)


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Compare two sets of `decisive` arguments: old and new value of all that differ, None where a key is not there."""
    pairs = {name: (old.get(name), new.get(name)) for name in dict.fromkeys((*old, *new))}
    return {name: (before, now) for name, (before, now) in pairs.items() if before != now}


def changes_text(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Return changes as text: `learning_rate 0.003 -> 0.5, seed 1 -> 2`."""
    return ", ".join(f"{name} {json.dumps(old)} -> {json.dumps(new)}" for name, (old, new) in changes.items())


def _marker(field: FieldInfo) -> SourceMarker | None:
    return next((item for item in _marks(field) if isinstance(item, SourceMarker)), None)


def _marks(field: FieldInfo) -> Iterator[Any]:
    """Yield the marks of a field, also where they stand inside an optional, a list or an optional list."""
    return chain(field.metadata, _inside(field.annotation))


def _inside(annotation: Any) -> Iterator[Any]:
    for part in getattr(annotation, "__args__", ()):
        yield from getattr(part, "__metadata__", ())
        yield from _inside(part)
