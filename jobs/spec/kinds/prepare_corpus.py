"""prepare-corpus: gather documents from tables and text files into a corpus that is fast to read."""

import sys
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from jobs.core.locations import HUB, TEXT, table_suffix
from jobs.spec.arguments import Arguments, Columns, Delimiter, Documents, Encoding, HubRepository, JobKind, TextFormat

COLUMNS_NEXT = "name each input's column in text_columns"


class PrepareCorpus(Arguments):
    """Gather documents into one corpus of shards of about equal size, with a part held out."""

    CHANGEABLE: ClassVar[frozenset[str]] = frozenset({"push_to_hub"})
    HUB_REPOSITORY_TYPE: ClassVar[Literal["model", "dataset"]] = "dataset"

    data: list[Documents] = Field(min_length=1)
    """Documents: hf://org/name?config=…&split=…, or .csv, .tsv, .jsonl, .json, .parquet and .txt files."""
    text_columns: list[str] = Field(default=["text"], min_length=1)
    """Column of the text: one for all inputs, or one for each input. .txt files have no columns."""
    delimiter: Delimiter | None = None
    """Character between the columns of .csv and .tsv files, or tab. Default: a comma in .csv, a tab in .tsv."""
    encoding: Encoding = "utf-8"
    """Encoding of text files, such as cp1252 (Windows) or mac-roman. UTF-16 with a byte order mark needs no key."""
    quotes_are_text: bool = False
    """Read double quotes in .csv and .tsv files as text. By default they enclose texts with delimiters or newlines."""
    text_documents: Literal["lines", "paragraphs"] = "lines"
    """How .txt files are split into documents: at each line, or at empty lines (paragraphs)."""
    held_out_fraction: float = Field(default=0.01, gt=0, lt=1)
    """Share of the documents to hold out, selected by their content."""
    shard_bytes: int = Field(default=128 << 20, ge=1 << 10, le=4 << 30)
    """Bytes of text in one shard. A restarted job builds only the missing shards."""
    max_document_bytes: int = Field(default=8 << 20, ge=1 << 10, le=1 << 30)
    """Maximum bytes of a document; longer documents are split at whitespace."""
    on_broken_text: Literal["error", "skip"] = "error"
    """error ends the job at text that is not in `encoding`; skip counts such text and leaves it out."""
    drop_duplicates: bool = False
    """Drop documents that are equal to an earlier one. Needs about 100 bytes of memory per document. Do not use it for
    data with one sentence per row: dropping repeated sentences would tear texts apart."""

    push_to_hub: HubRepository | None = None
    """Data set on the Hugging Face Hub (org/name) to which the corpus is also pushed. Default: none. The data set is
    private; the team's HF_TOKEN is used."""

    @property
    def hub_repository(self) -> str | None:
        return self.push_to_hub

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if len(self.text_columns) not in (1, len(self.data)):
            raise ValueError(
                f"'text_columns' has {len(self.text_columns)} columns for {len(self.data)} inputs; set one for all, or "
                "one for each"
            )
        twice = {location for location in self.data if self.data.count(location) > 1}
        if twice:
            raise ValueError(f"'data' contains {min(twice)} twice")
        return self

    def column(self, number: int) -> str:
        """Return the text column of an input, by its index."""
        return self.text_columns[number if len(self.text_columns) > 1 else 0]

    def columns(self, argument: str) -> Columns | None:
        number = int(argument.removeprefix("data."))
        if table_suffix(self.data[number]) == TEXT and not self.data[number].startswith(HUB):
            return None
        return Columns(
            texts=(self.column(number),),
            missing_next=COLUMNS_NEXT,
            skip_at_most=sys.maxsize if self.on_broken_text == "skip" else None,
            format=TextFormat.of(self),
        )


KIND = JobKind(
    name="prepare-corpus",
    summary="gather documents into a corpus, with a part held out",
    entrypoint="jobs.container.kinds.prepare_corpus",
    arguments=PrepareCorpus,
    accelerated=False,
    one_process=True,
    timeout_hours=12,
    makes="corpus",
)
