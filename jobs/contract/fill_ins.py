"""Held-out texts with some of their tokens masked, and what a masked language model put in those places."""

from pydantic import BaseModel, ConfigDict

MAX_TEXTS = 6
"""So many texts are recorded."""

MAX_TOKENS = 64
"""The tokens of each: the model sees no more of it either."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FillIn(_Record):
    """A masked place."""

    truth: str
    """The token that stood there; `##ing` goes on with the word before."""
    guess: str
    """The token that the model holds for the most likely."""
    confidence: float
    """The model's probability of it."""


class FillIns(_Record):
    """What `fill-ins.json` holds."""

    texts: list[list[str | FillIn]]
    """Each as what stands between its masked places, and those places, in their order."""

    @property
    def places(self) -> list[FillIn]:
        return [part for text in self.texts for part in text if isinstance(part, FillIn)]
