"""Documents as they come out of the inputs of a corpus, one by one, from wherever a reader wants to go on.

Nothing is left out silently: what is broken is handed out as such, with its place, to be refused or counted.
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.aws import s3 as object_store
from jobs.contract.errors import NotFoundError, TrainyardError, UsageError
from jobs.contract.locations import DATA, DELIMITERS, HUB, RUN, S3, TEXT, hub_parts, table_suffix
from jobs.contract.runs import S3Location
from jobs.train.data import artifacts
from jobs.train.data.byte_stream import open_stream
from jobs.train.data.document_files import delimited_rows, json_rows, parquet_rows, text_documents
from jobs.train.data.document_pieces import RECORD_TO_DOCUMENT, At, Read, as_text, is_longer, no_column, too_long

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input of a corpus."""

    location: str
    column: str
    """Of the text; a .txt file has none."""
    paragraphs: bool
    """A document of a .txt file ends at an empty line, not at each line's end."""
    max_document_bytes: int
    s3: Callable[[], "S3Client"]

    def read(self, start: At) -> Iterator[Read]:
        """The documents from there on.

        Raises UsageError where the input is not what its name says, or holds a document that no memory may hold,
        NotFoundError where there is none.
        """
        after = start
        try:
            for document in self._documents(start):
                after = document.after
                yield document
        except MemoryError:
            in_rows = self.location.startswith(HUB) or table_suffix(self.location) == ".parquet"
            unit = "row" if in_rows else "line"
            raise UsageError(
                f"{self.location}: the document after {unit} {after.line} does not fit into memory",
                next_step="split the document, or take an instance type with more memory",
            ) from None

    def _documents(self, start: At) -> Iterator[Read]:
        if self.location.startswith((DATA, RUN)):
            raise UsageError(
                f"{self.location} is a name that only `trainyard submit` can resolve",
                next_step="submit the job, or give an s3:// location",
            )
        if self.location.startswith(HUB):
            return _hub_rows(self, start)
        suffix = table_suffix(self.location)
        if suffix == ".parquet":
            return parquet_rows(self, start)
        if suffix == TEXT:
            return text_documents(self, start)
        return delimited_rows(self, start) if suffix in DELIMITERS else json_rows(self, start)

    @property
    def max_record_bytes(self) -> int:
        """Of a row, or of the text in it."""
        return RECORD_TO_DOCUMENT * self.max_document_bytes

    def open(self) -> io.BufferedReader:
        return open_stream(self.location, s3=self.s3)

    def identity(self) -> Any:
        """What tells its content from any other. Raises NotFoundError where there is none."""
        if not self.location.startswith(HUB):
            return artifacts.identity_of(self.location, s3=self.s3)
        name, options = hub_parts(self.location)
        if Path(name).is_dir():  # which `datasets` prefers to the hub's of that name
            return {**options, "files": artifacts.identity_of(name, s3=self.s3)}
        return {**options, "data_set": name, "commit": _commit(self.location, name, options.get("revision"))}

    def size(self) -> int | None:
        """Of what `At.offset` counts; None where nobody knows."""
        if self.location.startswith(HUB) or table_suffix(self.location) == ".parquet":
            return None
        if not self.location.startswith(S3):
            return Path(self.location).stat().st_size
        return object_store.size(self.s3(), S3Location.parse(self.location))


def _hub_rows(source: Input, start: At) -> Iterator[Read]:
    """Streamed, so that no data set has to fit on the disk."""
    import datasets
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    name, options = hub_parts(source.location)
    datasets.disable_progress_bars()
    row = start.offset
    try:
        rows = datasets.load_dataset(
            name,
            options.get("config"),
            split=options.get("split", "train"),
            revision=options.get("revision"),
            streaming=True,
        )
        if rows.column_names is not None and source.column not in rows.column_names:
            raise no_column(source.location, source.column, rows.column_names)
        for values in rows.skip(row) if row else rows:
            row += 1
            place = f"{source.location}, row {row}"
            if source.column not in values:
                raise no_column(place, source.column, values)
            if is_longer(values[source.column], source.max_record_bytes):
                raise too_long(place, source.max_record_bytes)
            yield Read(as_text(values[source.column], source.column, place), At(row, row))
    except DatasetNotFoundError as error:
        raise NotFoundError(
            f"{source.location}: {error}", next_step="check the name; a gated one needs HF_TOKEN"
        ) from None
    except (ValueError, OSError, RuntimeError, DatasetsError) as error:
        raise UsageError(f"{source.location} cannot be read after row {row}: {error}") from error


def _commit(location: str, name: str, revision: str | None) -> str:
    """Of a data set on the hub: what it holds today may be something else tomorrow."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        return str(HfApi().dataset_info(name, revision=revision).sha)
    except HFValidationError as error:
        raise UsageError(f"{location}: {error}") from None
    except HfHubHTTPError as error:
        raise NotFoundError(
            f"{location}: {' '.join([line for line in str(error).splitlines() if line][:2])}",
            next_step="check the name; a gated data set needs HF_TOKEN",
        ) from error
    except (OSError, OfflineModeIsEnabled) as error:
        raise TrainyardError(f"{location}: the Hugging Face Hub could not be reached: {error}") from error
