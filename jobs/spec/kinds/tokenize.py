"""tokenize: turn a corpus into packed token ids for pre-training."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from jobs.spec.arguments import Arguments, Artifact, HubRepository, JobKind, OfKind, Tokenizer


class Tokenize(Arguments):
    """Turn a corpus into token ids, packed into sequences of one length."""

    CHANGEABLE: ClassVar[frozenset[str]] = frozenset({"push_to_hub"})
    HUB_REPOSITORY_TYPE: ClassVar[Literal["model", "dataset"]] = "dataset"

    corpus: Annotated[Artifact, OfKind("corpus")]
    """Corpus from a prepare-corpus run: run://name or its folder."""
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
