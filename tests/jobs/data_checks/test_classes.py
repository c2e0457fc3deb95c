"""Scores of classes, as shown in a terminal."""

import pytest

from jobs.core.words import baseline_warning
from jobs.data_checks.classes import ClassReport, ClassScore, Confused


def score(name: str, *, f1: float = 0.5, examples: int = 4) -> ClassScore:
    return ClassScore(name=name, examples=examples, predicted=3, precision=2 / 3, recall=0.5, f1=f1)


def test_classes_and_most_confused_pairs_are_shown() -> None:
    pairs = [
        Confused(label="games ", predicted="sport", examples=1200),
        Confused(label="sport", predicted="x", examples=1),
    ]
    report = ClassReport(classes=[score("games ", examples=3000), score("sport", f1=4 / 7)], confused=pairs)
    assert list(report.lines()) == [
        "class     held out  precision  recall     F1",
        "'games '     3,000      0.667   0.500  0.500",
        "sport            4      0.667   0.500  0.571",
        "most often confused:",
        "  'games ' predicted as sport: 1,200 of 3,000",
        "  sport predicted as x: 1 of 4",
    ]


def test_scores_without_examples_are_not_zero() -> None:
    missing = ClassScore(name="missing", examples=0, predicted=0, precision=None, recall=None, f1=None)
    wrong = ClassScore(name="wrong", examples=0, predicted=2, precision=0, recall=None, f1=0)
    _, *rows = ClassReport(classes=[missing, wrong]).lines()
    assert [row.split() for row in rows] == [["missing", "0", "-", "-", "-"], ["wrong", "0", "0.000", "-", "0.000"]]
    many = [missing, *(score(f"class {number}") for number in range(20))]
    assert "missing" not in "".join(ClassReport(classes=many).lines()), "it is not the class with the lowest F1"


def test_only_the_worst_of_many_classes_are_shown() -> None:
    report = ClassReport(classes=[score(f"class {number}", f1=number / 100) for number in range(77, 0, -1)])
    heading, _, *rows = report.lines()
    assert heading == "the 20 of 77 classes with the lowest F1:"
    assert [row.split()[1] for row in rows] == [str(number) for number in range(1, 21)]


@pytest.mark.parametrize(
    ("result", "warns"),
    [
        ({"eval_accuracy": 0.5, "eval_majority_accuracy": 0.5}, True),
        ({"eval_accuracy": 0.4, "eval_majority_accuracy": 0.5}, True),
        ({"eval_accuracy": 0.51, "eval_majority_accuracy": 0.5}, False),
        ({"eval_loss": 0.4}, False),
        ({"eval_rmse": 0.51, "eval_mean_rmse": 0.5}, True),
        ({"eval_rmse": 0.4, "eval_mean_rmse": 0.5}, False),
    ],
)
def test_warning_if_the_largest_class_or_the_mean_is_as_good(result: dict[str, float], warns: bool) -> None:
    text = baseline_warning(result)
    assert bool(text) == warns
    if warns:
        assert "0.500, the model 0." in text
