"""train-tokenizer: learn a WordPiece vocabulary, like BERT's, from a corpus."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from jobs.spec.arguments import Arguments, Artifact, HubRepository, JobKind, OfKind
from jobs.spec.recipe import MAX_SEED


class TrainTokenizer(Arguments):
    """Learn a WordPiece vocabulary from a sample of a corpus."""

    CHANGEABLE: ClassVar[frozenset[str]] = frozenset({"push_to_hub"})

    corpus: Annotated[Artifact, OfKind("corpus")]
    """Corpus from a prepare-corpus run: run://name or its folder."""
    vocabulary_size: int = Field(default=32_000, ge=100, le=1_000_000)
    """Number of tokens, including special tokens. The default is that of the published tutorial; it is divisible by
    128, which suits HPUs in bf16."""
    sample_fraction: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto"
    """Share of the documents to learn from. auto takes a tenth, but at least 16 MB; texts then have less than 1 % more
    tokens than with all documents."""
    lowercase: bool = True
    """Convert to lower case and strip accents, like BERT uncased; false keeps both, like BERT cased."""
    max_characters: int = Field(default=1000, ge=1, le=100_000)
    """Maximum number of characters that become tokens; rarer characters are unknown. Chinese needs more."""
    model_max_length: int = Field(default=512, ge=8)
    """Maximum input length, in tokens, of the model that will use the tokenizer."""
    seed: int = Field(default=42, ge=0, le=MAX_SEED)
    """Seed of the sample."""
    push_to_hub: HubRepository | None = None
    """Repository on the Hugging Face Hub (org/name) that the tokenizer is also pushed to. Default: none. The repository
    is private; the team's HF_TOKEN is used."""

    @property
    def hub_repository(self) -> str | None:
        return self.push_to_hub


KIND = JobKind(
    name="train-tokenizer",
    summary="learn a WordPiece vocabulary from a corpus",
    entrypoint="jobs.container.kinds.train_tokenizer",
    arguments=TrainTokenizer,
    accelerated=False,
    one_process=True,
    timeout_hours=12,
    makes="tokenizer",
)
