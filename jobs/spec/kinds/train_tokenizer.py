"""train-tokenizer: a WordPiece vocabulary, as BERT has it, learnt from a corpus."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from jobs.spec.arguments import Arguments, Artifact, HubRepository, JobKind, OfKind
from jobs.spec.recipe import MAX_SEED


class TrainTokenizer(Arguments):
    """Learn a WordPiece vocabulary from a sample of a corpus."""

    CHANGEABLE: ClassVar[frozenset[str]] = frozenset({"push_to_hub"})

    corpus: Annotated[Artifact, OfKind("corpus")]
    """The corpus that prepare-corpus made: run://name or its folder."""
    vocabulary_size: int = Field(default=32_000, ge=100, le=1_000_000)
    """Tokens, special ones included. The published tutorial's, and divisible by 128, which suits the HPU in bf16."""
    sample_fraction: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto"
    """Share of the documents to learn from. `auto` takes a tenth, and 16 MB at least: less than 1 % more
    tokens than with all of them."""
    lowercase: bool = True
    """Lower case and without accents, as BERT uncased. False: as BERT cased."""
    max_characters: int = Field(default=1000, ge=1, le=100_000)
    """Most characters that become tokens; rarer ones are unknown. For Chinese, more."""
    model_max_length: int = Field(default=512, ge=8)
    """Tokens that the model to come can take."""
    seed: int = Field(default=42, ge=0, le=MAX_SEED)
    """Draws the sample."""
    push_to_hub: HubRepository | None = None
    """org/name on the Hugging Face Hub to push to as well. It is private; the team's HF_TOKEN is used."""

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
