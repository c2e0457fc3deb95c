"""tokenize: a corpus as packed token ids, which pre-training reads."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from jobs.spec.arguments import Arguments, Artifact, HubRepository, JobKind, OfKind, Tokenizer


class Tokenize(Arguments):
    """Turn a corpus into token ids, packed into sequences of one length."""

    CHANGEABLE: ClassVar[frozenset[str]] = frozenset({"push_to_hub"})
    HUB_REPOSITORY_TYPE: ClassVar[Literal["model", "dataset"]] = "dataset"

    corpus: Annotated[Artifact, OfKind("corpus")]
    """The corpus that prepare-corpus made: run://name or its folder."""
    tokenizer: Tokenizer
    """The tokenizer that train-tokenizer made, run://name or its folder, or a BERT's: hf://org/name, run://name/model."""
    sequence_length: int = Field(default=512, ge=8, le=65_536)
    """Tokens in a sequence, [CLS] and [SEP] of its documents included."""
    encoder: Literal["auto", "tokenizers"] = "auto"
    """auto: nanotoken if it gives the ids of Hugging Face's tokenizers, else tokenizers itself."""
    push_to_hub: HubRepository | None = None
    """org/name of a data set on the Hugging Face Hub to push to as well. It is private; the team's HF_TOKEN is used."""

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
