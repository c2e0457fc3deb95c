"""The classes of a classifier's held-out examples: how well each is found, and what is taken for what."""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from jobs.core.labels import shown_name

MAX_CONFUSION_CLASSES = 50
"""Where there are more classes no confusion is recorded: its counts grow with their square."""

MAX_MISTAKES = 20
"""So many of the most confident mistakes are recorded with their texts."""

MAX_CONFUSED = 10
"""So many pairs of classes are recorded, those with the most examples of the one taken for the other."""

MAX_TEXT_CHARACTERS = 500
"""A longer text that was mistaken is recorded up to here."""

_MAX_SHOWN = 20
_MAX_SHOWN_CONFUSED = 5


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ClassScore(_Record):
    """How well one class is found."""

    name: str
    examples: int
    predicted: int
    """Examples, of whichever class, that were taken for it."""
    precision: float
    """Share of `predicted` that is right; 0 where there is none."""
    recall: float
    """Share of `examples` that was found; 0 where there is none."""
    f1: float


class Mistake(_Record):
    """A held-out example that was taken for another class than its own."""

    text: str
    pair: str | None = None
    label: str
    predicted: str
    confidence: float
    """The model's probability of the class that it predicted."""


class Confused(_Record):
    """How many examples of one class were taken for another one."""

    label: str
    predicted: str
    examples: int


class ClassReport(_Record):
    """What `classes.json` holds."""

    classes: list[ClassScore]
    confusion: list[list[int]] | None = None
    """Examples by their class (rows) and the predicted one (columns); None where there are too many classes."""
    confused: list[Confused] = []
    """The pairs with the most mistakes, the worst first; recorded however many classes there are."""
    mistakes: list[Mistake] = []
    """The most confident ones, the surest first."""

    def lines(self) -> Iterator[str]:
        """Yield the scores of each class and the worst pairs, for a terminal.

        Of many classes those with the lowest F1 are shown. Lines have at most 80 characters but for long names.
        """
        shown = self.classes
        if len(shown) > _MAX_SHOWN:
            shown = sorted(shown, key=lambda score: score.f1)[:_MAX_SHOWN]
            yield f"the {_MAX_SHOWN} of {len(self.classes)} classes with the lowest F1:"
        width = max([len("class"), *(len(shown_name(score.name)) for score in shown)])
        yield f"{'class':<{width}}{'held out':>10}{'precision':>11}{'recall':>8}{'F1':>7}"
        for score in shown:
            figures = f"{score.precision:>11.3f}{score.recall:>8.3f}{score.f1:>7.3f}"
            yield f"{shown_name(score.name):<{width}}{score.examples:>10,}{figures}"
        if self.confused:
            yield "most often confused:"
        of_class = {score.name: score.examples for score in self.classes}
        for pair in self.confused[:_MAX_SHOWN_CONFUSED]:
            yield (
                f"  {shown_name(pair.label)} taken for {shown_name(pair.predicted)}: "
                f"{pair.examples:,} of {of_class[pair.label]:,}"
            )
