"""Locations of inputs: `hf://org/name`, `s3://bucket/key`, `data://key`, `run://name/path` or a local path.

This module checks only the spelling, on the laptop and in the container. `jobs.data_checks.inputs` and
`jobs.container.data.sources` check what exists there. An invalid location raises ValueError, which pydantic reports
with its path in the spec.
"""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote

from jobs.core.errors import UsageError, did_you_mean

HUB = "hf://"
S3 = "s3://"
DATA = "data://"
"""Prefix of a location in the stage's data bucket, so that specs need not name the bucket."""
RUN = "run://"
"""Prefix of the output of another run of the team, named by its spec or its run id. name@best is a sweep's best
point."""

DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_LINES = (".jsonl", ".ndjson")
JSON = (*JSON_LINES, ".json")
TABLE_SUFFIXES = (*JSON, *DELIMITERS, ".parquet")
TEXT = ".txt"
COMPRESSED = (".gz", ".zst", ".bz2")
"""Suffixes that may follow those of text files: `reviews.csv.gz`."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
"""Wider than S3's rules for new buckets: buckets created before 2018 may have capitals, underscores and longer
names."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_RUN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,99}(@best)?")
_MODEL_OPTIONS = ("revision",)
_TABLE_OPTIONS = ("config", "split", "revision")


@dataclass(frozen=True)
class S3Location:
    """A bucket and a key, or a key prefix."""

    bucket: str
    key: str

    @classmethod
    def parse(cls, uri: str) -> "S3Location":
        """Parse `s3://bucket/key`. Raises UsageError for any other text.

        `uri` is not a URL: `?`, `#`, `%` and all other characters in a key are literal.
        """
        bucket, _, key = uri.removeprefix(S3).partition("/")
        if not uri.startswith(S3) or not bucket:
            raise UsageError(f"'{uri}' is not an S3 location; it should look like s3://bucket/key")
        return cls(bucket, key.lstrip("/"))

    def __truediv__(self, name: str) -> "S3Location":
        return S3Location(self.bucket, f"{self.key.rstrip('/')}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


def model_location(location: str) -> str:
    """Return `location` unchanged. Raises ValueError if it is not a valid location of a model."""
    _check(location, _MODEL_OPTIONS)
    _require_path(location, "model")
    return location


def table_location(location: str) -> str:
    """Return `location` unchanged. Raises ValueError if it is not a valid location of a table."""
    _check(location, _TABLE_OPTIONS)
    if not location.startswith(HUB) and table_suffix(location) not in TABLE_SUFFIXES:
        raise ValueError(
            f"{location} is not a table: its name should end in {', '.join(TABLE_SUFFIXES)}"
            + ("" if table_suffix(location) else hub_suggestion(location))
        )
    return location


def documents_location(location: str) -> str:
    """Return `location` unchanged. Raises ValueError if it is not a valid location of documents."""
    if not location.startswith(HUB) and table_suffix(location) == TEXT:
        _check(location, ())
        return location
    return table_location(location)


def folder_location(location: str) -> str:
    """Return `location` unchanged. Raises ValueError if it is not a valid location of a folder of files."""
    if location.startswith(HUB):
        raise ValueError(f"{location}: a folder is read from {S3}…, {DATA}… or a local path, not from the hub")
    _check(location, ())
    _require_path(location, "notebook")
    return location


def input_location(location: str) -> str:
    """Return `location` unchanged. Raises ValueError if it is not a valid location of a file or folder."""
    _check(location, _MODEL_OPTIONS)
    _require_path(location, "model")
    return location


def artifact_location(location: str) -> str:
    """Return `location` unchanged. Raises ValueError if it is not a valid location of an artifact."""
    _check(location, _MODEL_OPTIONS)
    return location


def refuse_unresolved(location: str) -> None:
    """Raise UsageError for a location that only `trainyard submit` can resolve.

    A plan replaces `data://` and `run://` with S3 locations, so submitted jobs never get them.
    """
    if location.startswith((DATA, RUN)):
        what = "in a stage's data bucket" if location.startswith(DATA) else "the output of a run"
        raise UsageError(
            f"{location} is {what}, which only `trainyard submit` can resolve",
            next_step="submit the job, or use an s3:// location",
        )


def run_parts(location: str) -> tuple[str, str]:
    """Return name and path of `run://name/path`; the path may be empty."""
    name, _, path = location.removeprefix(RUN).partition("/")
    return name, path.strip("/")


def stays_below(name: str) -> bool:
    """Return whether a relative file name or key stays below its folder."""
    return not any(part in ("", ".", "..") for part in name.split("/"))


def table_suffix(location: str) -> str:
    """Return the suffix of a file name in lower case, without that of a compression: `.csv` for `Reviews.CSV.gz`."""
    *others, last = ["", *PurePosixPath(location.lower()).suffixes]
    is_text = others and others[-1] in (*JSON, *DELIMITERS, TEXT)
    return others[-1] if is_text and last in COMPRESSED else last


def hub_parts(location: str) -> tuple[str, dict[str, str]]:
    """Return name and options of `hf://org/name?config=…&split=…&revision=…`.

    Only `&` and `%xx` are special in options: the plus in `split=train+test` and the hash in `revision=v1#2` are
    literal.
    """
    name, _, query = location.removeprefix(HUB).partition("?")
    given = (option.partition("=") for option in query.split("&") if option)
    return name.strip("/"), {unquote(option): unquote(value) for option, _, value in given}


def hub_suggestion(text: str) -> str:
    """Return `"; did you mean hf://text?"` if `text` could be a name on the Hugging Face Hub, else an empty string."""
    return f"; did you mean {HUB}{text}?" if _HUB_NAME.fullmatch(text) else ""


def _check(location: str, options: tuple[str, ...]) -> None:
    if location.startswith(HUB):
        name, given = hub_parts(location)
        if not _HUB_NAME.fullmatch(name):
            raise ValueError(f"{location} is not a name on the hub; it should look like {HUB}org/name")
        for option, value in given.items():
            if option not in options:
                raise ValueError(f"{location}: unknown option '{option}'{did_you_mean(option, options)}")
            if not value:
                raise ValueError(f"{location}: option '{option}' has no value")
    elif location.startswith(S3):
        bucket, _, key = location.removeprefix(S3).partition("/")
        if not _BUCKET.fullmatch(bucket):
            raise ValueError(f"{location}: '{bucket}' is not a valid bucket name; it should look like {S3}bucket/key")
        if not key.strip("/"):
            raise ValueError(f"{location} names a whole bucket; it should look like {S3}{bucket}/key")
    elif location.startswith(DATA):
        if not location.removeprefix(DATA).strip("/"):
            raise ValueError(f"{location} names the whole data bucket; it should look like {DATA}team/key")
    elif location.startswith(RUN):
        name, path = run_parts(location)
        if not _RUN_NAME.fullmatch(name):
            raise ValueError(f"{location}: '{name}' is not a run name; it should look like {RUN}name/path")
        if path and not stays_below(path):
            raise ValueError(f"{location}: '{path}' is not a path below a run's folder")
    elif "://" in location:
        raise ValueError(f"{location}: use {HUB}, {S3}, {DATA}, {RUN} or a local path")
    elif not location:
        raise ValueError(f"is empty; it should be {HUB}…, {S3}…, {DATA}…, {RUN}… or a local path")


def _require_path(location: str, example: str) -> None:
    if location.startswith(RUN) and not run_parts(location)[1]:
        raise ValueError(f"{location} names a whole run; did you mean {location.rstrip('/')}/{example}?")
