"""Base classes of job kinds and their arguments: pydantic models, checked on the laptop and in the container.

A spec's `arguments` are validated against the kind's model before anything is submitted, passed to the container as
command-line flags, and parsed into the same model there. A field's docstring is its help in `--help`, in the JSON
Schema and in jobs/docs/spec.md. Validation errors are reported in plain words. Nothing here needs torch.
"""

import argparse
import codecs
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from typing_extensions import Self

from jobs.core.labels import SINGLE_LABEL, LabelFormat, class_name, label_kind
from jobs.core.locations import (
    artifact_location,
    documents_location,
    folder_location,
    input_location,
    model_location,
    table_location,
)

ModelT = TypeVar("ModelT", bound=BaseModel)


class Switch:
    """Marks a boolean field whose flag takes no value: `Annotated[bool, Switch()]`. Without the flag it is false."""


def to_flags(model: BaseModel, *, exclude_defaults: bool = False) -> list[str]:
    """Return `--key=value` for every field that is not None."""
    values = model.model_dump(mode="json", exclude_none=True, exclude_defaults=exclude_defaults)
    flags = []
    for name, value in values.items():
        if not _is_switch(type(model).model_fields[name]):
            flags.append(f"{_flag(name)}={value if isinstance(value, str) else json.dumps(value)}")
        elif value:
            flags.append(_flag(name))
    return flags


def parse_flags(model: type[ModelT], flags: Sequence[str], *, program: str) -> ModelT:
    """Parse flags (from `to_flags`, or typed by hand) into the model.

    Exits with status 2 and argparse's message for an unknown flag; raises pydantic.ValidationError for a bad value.
    """
    parser = argparse.ArgumentParser(prog=program, description=model.__doc__, allow_abbrev=False)
    add_flags(parser, model)
    return from_flags(model, vars(parser.parse_args(list(flags))))


def add_flags(parser: argparse.ArgumentParser, model: type[BaseModel]) -> None:
    """Add a flag for every field of the model to `parser`; the field's docstring is its help."""
    for name, field in model.model_fields.items():
        options: dict[str, Any] = {"action": "store_true"} if _is_switch(field) else {"required": field.is_required()}
        parser.add_argument(
            _flag(name),
            dest=name,
            default=argparse.SUPPRESS,
            help=(field.description or "").replace("%", "%%"),
            **options,
        )


def from_flags(model: type[ModelT], given: Mapping[str, Any]) -> ModelT:
    """Build the model from the values of a parser with `add_flags`; other values are ignored."""
    fields = model.model_fields
    return model.model_validate({name: _from_text(fields[name], given[name]) for name in fields if name in given})


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _is_switch(field: FieldInfo) -> bool:
    return any(isinstance(mark, Switch) for mark in field.metadata)


def _from_text(field: FieldInfo, text: str | bool) -> Any:
    """Convert a flag's text for its field: text fields unchanged, other fields from JSON if it is valid JSON."""
    if isinstance(text, bool) or _is_text(field.annotation):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _is_text(annotation: Any) -> bool:
    """Return whether the field accepts only strings, or None."""
    if get_origin(annotation) is Annotated:
        return _is_text(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return all(_is_text(part) or part is NoneType for part in get_args(annotation))
    return annotation is str


@dataclass(frozen=True)
class SourceMarker:
    """Marks a field with the location of an input: `hf://…`, `s3://…`, `data://…`, `run://…` or a local path."""

    what: str
    """Description of the input for messages."""


@dataclass(frozen=True)
class OfKind:
    """Restricts an `Artifact` to one kind: `Annotated[Artifact, OfKind("corpus")]`."""

    kind: str


def delimiter_named(text: str) -> str:
    """Return the delimiter that the text names: one character, or `tab`. Raises ValueError if it is neither."""
    found = {"tab": "\t", "\\t": "\t"}.get(text, text)
    if len(found) != 1 or found in '"\r\n ' or found.isalnum():
        raise ValueError(f"{text!r} cannot separate columns; use one character such as ';' or '|', or tab")
    return found


def encoding_named(name: str) -> str:
    """Return Python's name of an encoding. Raises ValueError if there is no such encoding.

    Latin-1 is read as cp1252, like browsers do: its control characters 0x80-0x9f occur in no text, and files that claim
    to be Latin-1 have cp1252's quotation marks and dashes there.
    """
    try:
        "a".encode(name)
        found = codecs.lookup(name).name
    except (LookupError, ValueError):
        raise ValueError(
            f"unknown encoding '{name}'; known are utf-8, utf-16, cp1252, mac-roman, shift-jis, …"
        ) from None
    return {"iso8859-1": "cp1252", "utf-8-sig": "utf-8"}.get(found, found)


Delimiter = Annotated[str, AfterValidator(delimiter_named)]
Encoding = Annotated[str, AfterValidator(encoding_named)]


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """How the text of tables is read, in the keys of the kinds that read tables."""

    delimiter: str | None = None
    encoding: str = "utf-8"
    quotes_are_text: bool = False
    strip: bool = False

    @classmethod
    def of(cls, arguments: BaseModel) -> Self:
        """Return the format that a kind's arguments set. Some kinds do not have all keys."""
        return cls(**arguments.model_dump(include={item.name for item in fields(cls)}))


DEFAULT_FORMAT = TextFormat()


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns that a job reads from a table, and how it reads them."""

    texts: tuple[str, ...]
    label: str | None = None
    missing_next: str
    """Next step if a column is missing."""
    skip_at_most: int | None = None
    """Maximum number of unusable rows that the job skips. If it is None, an unusable row ends the job."""
    format: TextFormat = DEFAULT_FORMAT
    """How text is decoded, divided into columns and cleaned."""
    trains: bool = False
    """Whether the job learns its classes from this table alone."""
    labels: LabelFormat = SINGLE_LABEL


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
"""`hf://org/name?config=…&split=…`, or a file, on S3 (`data://`, `s3://`) or local: .csv, .tsv, .jsonl, .json,
.parquet."""


def _table_locations(value: Any) -> Any:
    """Return `value` unchanged. Raises ValueError if it is neither a table nor a list of tables."""
    locations = [value] if isinstance(value, str) else value
    if not isinstance(locations, list) or not locations or not all(isinstance(item, str) for item in locations):
        raise ValueError(f"must be a table, or a list of tables, not {value!r}")
    for location in locations:
        table_location(location)
    return value


Tables = Annotated[str | list[str], BeforeValidator(_table_locations), SourceMarker(TABLE)]
"""A table, or a list of tables with the same columns, which are read one after the other as one table."""


ClassName = Annotated[str, BeforeValidator(lambda value: class_name(value) if label_kind(value) else value)]
"""A class name: 1, "1" and 1.0 are the same class, as in a table."""


def _hub_repository(name: str) -> str:
    """Return `name` unchanged. Raises ValueError if the hub does not allow it as the name of a repository."""
    if "--" in name or ".." in name or name.endswith((".git", "-", ".")):
        raise ValueError(f"'{name}' is not a repository: it contains '--' or '..', or ends in '.git', '-' or '.'")
    return name


HubRepository = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=96),
    AfterValidator(_hub_repository),
]
"""A repository to push to on the Hugging Face Hub: org/name, as huggingface_hub's validate_repo_id accepts it."""

Documents = Annotated[str, AfterValidator(documents_location), SourceMarker(DOCUMENTS)]
"""A table with a text column, with the same locations as `Table`, or a .txt file."""

Folder = Annotated[str, AfterValidator(folder_location), SourceMarker(FILES_FOLDER)]
"""A folder of any files, on S3 (`data://`, `s3://`) or local."""

Configuration = Annotated[str, AfterValidator(model_location), SourceMarker(CONFIGURATION_FOLDER)]
"""A model's configuration: `hf://org/name`, or a folder with a config.json, on S3 (`data://`, `s3://`) or local."""

Input = Annotated[str, AfterValidator(input_location), SourceMarker(FILE_OR_FOLDER)]
"""A file or a folder of any kind: `hf://org/name` (a model), on S3 (`data://`, `s3://`, `run://name/path`) or local."""

Artifact = Annotated[str, AfterValidator(artifact_location), SourceMarker(ARTIFACT_FOLDER)]
"""An artifact that another run produced: `run://name` (its spec's name) or `run://id`; a folder with artifact.json or
manifest.json, on S3 (`data://`, `s3://`) or local; or the `hf://org/name` that it was pushed to."""

Tokenizer = Annotated[str, AfterValidator(artifact_location), SourceMarker(TOKENIZER_FOLDER), OfKind("tokenizer")]
"""An artifact of train-tokenizer, or a model with a tokenizer.json: `run://name/model`, `hf://org/name`, …"""


_INVALID_CHARACTER = re.compile("[\x00\ud800-\udfff]")
"""A command line cannot contain NUL, and UTF-8 cannot contain lone surrogates."""

_MAX_NUMBER = 2**53
"""Largest number that a float represents exactly; prices and times are computed with floats."""


class Strict(BaseModel):
    """Base of models that users fill in: rejects unknown keys, infinities, `true` in place of a number, and so on."""

    # defer_build: a command that needs one kind builds only that kind's validators.
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, field: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(field.field_name)].annotation
        if isinstance(value, bool) and {int, float} & {annotation, *get_args(annotation)}:
            raise ValueError(f"must be a number, not {value}")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_invalid_characters(cls, value: Any) -> Any:
        # Runs before other validators, whose messages contain the value: pydantic cannot print lone surrogates.
        texts = value if isinstance(value, list | dict) else [value]  # of a dict the keys; its values are checked later
        if any(isinstance(text, str) and _INVALID_CHARACTER.search(text) for text in texts):
            raise ValueError("must not contain NUL or lone surrogates")
        return value

    @field_validator("*")
    @classmethod
    def _no_inexact_number(cls, value: Any) -> Any:
        if isinstance(value, int | float) and abs(value) > _MAX_NUMBER:
            raise ValueError(f"must be between -{_MAX_NUMBER} and {_MAX_NUMBER}")
        return value


class Arguments(Strict):
    """Base class of every kind's arguments; a field's docstring is its help."""

    CHANGEABLE: ClassVar[frozenset[str]] = frozenset()
    """Fields that may change when a run is resumed, because its results do not depend on them."""

    HUB_REPOSITORY_TYPE: ClassVar[Literal["model", "dataset"]] = "model"
    """Type of the repository on the Hugging Face Hub that the job pushes its results to."""

    def sources(self) -> Iterator[tuple[str, str, str]]:
        """Yield `(name, location, description)` for each input that is set, in the order of the fields.

        An input is named after its field: `field`; in a list `field.0`, `field.1`, …; in a dict `field.key`.
        """
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            marker = next((item for item in _marks(field) if isinstance(item, SourceMarker)), None)
            if marker is None or value is None:
                continue
            if isinstance(value, str):
                yield name, value, marker.what
            else:
                named = value.items() if isinstance(value, dict) else enumerate(value)
                yield from ((f"{name}.{key}", item, marker.what) for key, item in named)

    def artifact_kind(self, argument: str) -> str | None:
        """Return the required artifact kind of an argument, given its name in `sources`.

        None if any kind is accepted, or the argument is not an artifact.
        """
        field = type(self).model_fields[argument.partition(".")[0]]
        return next((item.kind for item in _marks(field) if isinstance(item, OfKind)), None)

    def columns(self, argument: str) -> Columns | None:
        """Return the columns that are read from the table of an argument, given its name in `sources`.

        None if the argument is not a table, or any columns are accepted.
        """
        del argument
        return None

    def named_classes(self) -> Mapping[str, Collection[str]]:
        """Return the class names that arguments contain, by argument. They must be classes of the data."""
        return {}

    def has_conversations(self, argument: str) -> bool:
        """Return whether the lines of an argument's file are conversations, given its name in `sources`."""
        del argument
        return False

    @property
    def longest_sequence(self) -> int | None:
        """Return the maximum number of tokens in one input of the model; None if unknown before the job runs."""
        return None

    @property
    def classifies(self) -> bool:
        """Return whether the model must already be a classifier, because the job does not train it."""
        return False

    def with_sources(self, **locations: str) -> Self:
        """Return a copy with new locations for the named inputs; `sources` yields their names."""
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

    def fixed_arguments(self) -> dict[str, Any]:
        """Return the arguments that a run keeps when it is resumed: all but `CHANGEABLE`."""
        return {name: value for name, value in self.model_dump(mode="json").items() if name not in self.CHANGEABLE}

    def evaluation_metrics(self) -> tuple[str, ...] | None:
        """Return the metrics of an evaluation during the job; empty if the job does not evaluate.

        None for scripts, whose metrics are unknown.
        """
        return ()

    @property
    def hub_repository(self) -> str | None:
        """Return the repository on the Hugging Face Hub, org/name, that the job pushes to, or None."""
        return None

    @property
    def resumes_on_other_ranks(self) -> bool:
        """Return whether a different number of ranks can resume a checkpoint."""
        return True

    def check(self, *world_sizes: int) -> None:
        """Raise UsageError if the arguments do not work with one of these world sizes.

        Called before anything is submitted, and by the launcher before any rank starts.
        """

    def to_flags(self) -> list[str]:
        """Return `--key=value` for every field that is not None, even defaults, which may differ in the container."""
        return to_flags(self)


ArgumentsT = TypeVar("ArgumentsT", bound=Arguments)


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the old and the new value of each argument that differs; None for a missing key."""
    pairs = {name: (old.get(name), new.get(name)) for name in dict.fromkeys((*old, *new))}
    return {name: (before, now) for name, (before, now) in pairs.items() if before != now}


def changes_text(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Return changes as text: `learning_rate 0.003 -> 0.5, seed 1 -> 2`."""
    return ", ".join(f"{name} {json.dumps(old)} -> {json.dumps(new)}" for name, (old, new) in changes.items())


def _marks(field: FieldInfo) -> Iterator[Any]:
    """Yield the markers of a field, including those inside an optional, a list or an optional list."""
    return chain(field.metadata, _inside(field.annotation))


def _inside(annotation: Any) -> Iterator[Any]:
    for part in getattr(annotation, "__args__", ()):
        yield from getattr(part, "__metadata__", ())
        yield from _inside(part)


_WHOLE_NUMBER, _NUMBER, _BOOLEAN = "must be a whole number", "must be a number", "must be true or false"
_TEXT, _LIST, _MAPPING = "must be text", "must be a list", "must be a mapping of keys to values"


def _number(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:.3g}"


_MESSAGES: Mapping[str, str | Callable[[Mapping[str, Any]], str]] = {
    "int_type": _WHOLE_NUMBER,
    "int_parsing": _WHOLE_NUMBER,
    "int_parsing_size": _WHOLE_NUMBER,
    "int_from_float": _WHOLE_NUMBER,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "must be a finite number",
    "bool_type": _BOOLEAN,
    "bool_parsing": _BOOLEAN,
    "string_type": _TEXT,
    "list_type": _LIST,
    "tuple_type": _LIST,
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "greater_than": lambda context: f"must be more than {_number(context['gt'])}",
    "greater_than_equal": lambda context: f"must be at least {_number(context['ge'])}",
    "less_than": lambda context: f"must be less than {_number(context['lt'])}",
    "less_than_equal": lambda context: f"must be at most {_number(context['le'])}",
    "too_short": lambda context: f"must have at least {context['min_length']}",
    "too_long": lambda context: f"must have at most {context['max_length']}",
    "string_too_short": lambda context: (
        "must not be empty" if context["min_length"] == 1 else f"must have at least {context['min_length']} characters"
    ),
    "string_too_long": lambda context: f"must have at most {context['max_length']} characters",
    "literal_error": lambda context: f"must be {context['expected']}",
}
"""Messages by pydantic's error type (https://docs.pydantic.dev/latest/errors/validation_errors/)."""


def error_in_words(item: ErrorDetails, model: type[BaseModel] | None = None) -> str:
    """Return what is wrong with one value, without its path.

    `model` contains the value; the docstring of a field with a pattern describes valid text.
    """
    if item["type"] == "value_error":
        return item["msg"].removeprefix("Value error, ")
    words = _MESSAGES.get(item["type"], item["msg"])
    if callable(words):
        words = words(item["ctx"])
    if item["type"] == "string_pattern_mismatch":
        described = _first_sentence(_description(model, item["loc"])) if model is not None else ""
        return f"{item['input']!r} is not valid{f'; expected {described}' if described else ''}"
    is_hours = item["type"] == "float_parsing" and str(item["loc"][-1]).endswith("hours")
    if is_hours and ":" in str(item["input"]):  # YAML's !!binary gives bytes
        return f"{words}, not {item['input']!r}; write hours as a number: 1.5"
    if words == _LIST and item["input"] and isinstance(item["input"], str):
        return f"{words}: [{item['input']!r}]"
    return words if item["input"] == "" else f"{words}, not {item['input']!r}"


def _description(model: type[BaseModel], path: tuple[int | str, ...]) -> str | None:
    """Return the description of the field at the end of a path, or None if there is no such field."""
    for number, part in enumerate(path, start=1):
        field = model.model_fields.get(str(part))
        if field is None:
            return None
        if number == len(path):
            return field.description
        types = (each for each in (field.annotation, *get_args(field.annotation)) if isinstance(each, type))
        inner = next((each for each in types if issubclass(each, BaseModel)), None)
        if inner is None:
            return None
        model = inner
    return None


def _first_sentence(description: str | None) -> str:
    sentence = " ".join((description or "").split()).partition(". ")[0].partition("; ")[0].rstrip(".")
    return sentence[:1].lower() + sentence[1:]


STOP_IF_IDLE_MINUTES = 30.0
"""Default limit on idle cards. It must allow for some idle minutes before the first step, while a rank prepares, and
after the last, while it saves."""


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """A kind of job: its entrypoint, arguments and instances. Each module of jobs.spec.kinds defines one."""

    name: str
    summary: str
    entrypoint: str
    """Module that every rank runs with `python -m`."""
    arguments: type[Arguments]
    accelerated: bool
    """True to run on the stage's accelerator instances, False to run on its CPU instances."""
    timeout_hours: float
    """Wall-clock limit of one attempt, unless the spec sets one."""
    stop_if_idle_minutes: float = STOP_IF_IDLE_MINUTES
    """Minutes of idle cards after which an accelerated run is stopped, unless the spec sets a limit. 0 disables it."""
    one_process: bool = False
    """True for one process on one node, which uses all cards; False for one rank per card."""
    image: str | None = None
    """Child image under images/, built on the instance type's image. None to run in the instance type's image
    itself."""
    makes: str | None = None
    """Kind of the artifact that the job produces for other runs, or None."""
