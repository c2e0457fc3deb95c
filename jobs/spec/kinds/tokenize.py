"""tokenize: turn a corpus into packed token ids for pre-training."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from jobs.core.locations import HUB, table_suffix
from jobs.spec.arguments import Arguments, Artifact, HubRepository, JobKind, OfKind, Table, Tokenizer


class Tokenize(Arguments):
    """Turn a corpus, or a table of token ids, into sequences of one length."""

    CHANGEABLE: ClassVar[frozenset[str]] = frozenset({"push_to_hub"})
    HUB_REPOSITORY_TYPE: ClassVar[Literal["model", "dataset"]] = "dataset"

    corpus: Annotated[Artifact, OfKind("corpus")] | None = None
    """Corpus from a prepare-corpus run: run://name or its folder."""
    token_table: Table | None = None
    """A table whose column input_ids has the ids of texts, in place of corpus: hf://org/name?split=… or a .parquet
    file. tokenizer must be the one that made them. Padding is removed."""
    held_out_fraction: float = Field(default=0.01, gt=0, lt=1)
    """Share of the rows of token_table to hold out, selected by their content. A corpus has its own."""
    tokenizer: Tokenizer
    """Tokenizer from a train-tokenizer run (run://name or its folder), or of a model that pretrain-mlm takes
    (hf://org/name, run://name/model)."""
    sequence_length: int = Field(default=512, ge=8, le=65_536)
    """Tokens per sequence, including those around a text."""
    encoder: Literal["auto", "tokenizers"] = "auto"
    """Library that encodes the text. auto uses nanotoken if it gives the same ids as Hugging Face's tokenizers."""
    push_to_hub: HubRepository | None = None
    """Data set on the Hugging Face Hub (org/name) to which the tokens are also pushed. Default: none. The data set is
    private; the team's HF_TOKEN is used."""

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if (self.corpus is None) == (self.token_table is None):
            raise ValueError("set 'corpus' or 'token_table'")
        table = self.token_table
        if table is not None and not table.startswith(HUB) and table_suffix(table) != ".parquet":
            raise ValueError("token_table: must be on the hub (hf://…) or a .parquet file")
        return self

    @property
    def hub_repository(self) -> str | None:
        return self.push_to_hub


KIND = JobKind(
    name="tokenize",
    summary="turn a corpus into packed token ids",
    entrypoint="jobs.container.kinds.tokenize",
    arguments=Tokenize,
    accelerated=False,
    one_process=True,
    timeout_hours=12,
    makes="packed-tokens",
)
