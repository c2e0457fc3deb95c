"""Record how well a classifier recognizes each class of the held-out examples, and which classes it confuses."""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from jobs.core.labels import shown_name

MAX_CONFUSION_CLASSES = 50
"""Number of classes above which no confusion matrix is recorded, because it grows with their square."""

MAX_MISTAKES = 20
"""Number of most confident mistakes that are recorded with their texts."""

MAX_CONFUSED = 10
"""Number of most confused pairs of classes that are recorded."""

MAX_TEXT_CHARACTERS = 500
"""Length to which the text of a mistake is truncated."""

_MAX_SHOWN = 20
_MAX_SHOWN_CONFUSED = 5


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ClassScore(_Record):
    """Scores of one class."""

    name: str
    examples: int
    predicted: int
    """Examples of any class that were predicted as this class."""
    precision: float | None
    """Share of `predicted` that is correct; None if there are none."""
    recall: float | None
    """Share of `examples` that was recognized; None if there are none."""
    f1: float | None
    """None if there are neither examples nor predictions of the class."""

    def figures(self) -> tuple[str, str, str]:
        """Return precision, recall and F1 as text: `-` for those that nothing was counted for."""
        return _figure(self.precision), _figure(self.recall), _figure(self.f1)


class Mistake(_Record):
    """A held-out example with a wrong prediction."""

    text: str
    pair: str | None = None
    label: str
    predicted: str
    confidence: float
    """The model's probability of the predicted class."""


class Confused(_Record):
    """Number of examples of one class that were predicted as another."""

    label: str
    predicted: str
    examples: int


class ClassReport(_Record):
    """The content of `classes.json`."""

    classes: list[ClassScore]
    confusion: list[list[int]] | None = None
    """Examples by class (rows) and predicted class (columns). None if there are too many classes."""
    confused: list[Confused] = []
    """The pairs with the most mistakes, the worst first. Recorded for any number of classes."""
    mistakes: list[Mistake] = []
    """The most confident mistakes, most confident first."""

    def lines(self) -> Iterator[str]:
        """Yield the scores of the classes and the worst pairs as text for a terminal.

        If there are many classes, only those with the lowest F1 are shown. Lines have at most 80 characters, except for
        long names.
        """
        shown = self.classes
        if len(shown) > _MAX_SHOWN:
            shown = sorted(shown, key=by_f1)[:_MAX_SHOWN]
            yield f"the {_MAX_SHOWN} of {len(self.classes)} classes with the lowest F1:"
        width = max([len("class"), *(len(shown_name(score.name)) for score in shown)])
        yield f"{'class':<{width}}{'held out':>10}{'precision':>11}{'recall':>8}{'F1':>7}"
        for score in shown:
            precision, recall, f1 = score.figures()
            yield f"{shown_name(score.name):<{width}}{score.examples:>10,}{precision:>11}{recall:>8}{f1:>7}"
        if self.confused:
            yield "most often confused:"
        examples_of = {score.name: score.examples for score in self.classes}
        for pair in self.confused[:_MAX_SHOWN_CONFUSED]:
            yield (
                f"  {shown_name(pair.label)} predicted as {shown_name(pair.predicted)}: "
                f"{pair.examples:,} of {examples_of[pair.label]:,}"
            )


def by_f1(score: ClassScore) -> tuple[bool, float]:
    """Sort classes by their F1, the lowest first, and classes without F1 last."""
    return score.f1 is None, score.f1 or 0.0


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
