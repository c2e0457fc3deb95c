"""Metrics of a classification, computed from its logits, and the reports of its predictions."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from jobs.container.data.predictions import (
    classification_metrics,
    multi_label_metrics,
    positive_class,
    regression_metrics,
    write_predictions,
)
from jobs.core.errors import UsageError
from jobs.data_checks.classes import ClassReport, Confused, Mistake
from jobs.spec.kinds.evaluate import Evaluate


def figures(
    labels: list[int],
    predicted: list[int],
    *,
    classes: int,
    positive: int | None = None,
    glue_task: str | None = None,
) -> dict[str, float]:
    """Return the metrics of logits that give the predicted class three times the weight of any other."""
    logits = np.full((len(labels), classes), 7.0, dtype=np.float32)
    logits[np.arange(len(labels)), predicted] += math.log(3)
    return classification_metrics(logits, np.asarray(labels), positive=positive, glue_task=glue_task)


@pytest.mark.parametrize(
    ("positive", "f1"),
    [
        # Class 1: two found, one missed, one false. Class 0: one found, one missed, one false.
        (1, 2 * 2 / (2 * 2 + 1 + 1)),
        (0, 2 * 1 / (2 * 1 + 1 + 1)),
        (None, (2 / 3 + 1 / 2) / 2),
    ],
)
def test_f1_is_the_positive_classes_or_the_mean(positive: int | None, f1: float) -> None:
    # Three of five predictions are right.
    assert figures([1, 1, 1, 0, 0], [1, 1, 0, 0, 1], classes=2, positive=positive) == pytest.approx(
        {
            "eval_accuracy": 3 / 5,
            "eval_f1": f1,
            "eval_f1_macro": (2 / 3 + 1 / 2) / 2,
            "eval_f1_micro": 3 / 5,
            "eval_majority_accuracy": 3 / 5,
            "eval_loss": -(3 * math.log(3 / 4) + 2 * math.log(1 / 4)) / 5,
        }
    )


@pytest.mark.parametrize(
    ("names", "asked", "glue_task", "number"),
    [
        (["fraud", "legit"], None, None, None),
        (["fraud", "legit"], "fraud", None, 0),
        (["not_equivalent", "equivalent"], None, "mrpc", 1),
        (["no", "maybe", "yes"], None, "mnli", None),
        (["LABEL_0", "LABEL_1"], None, None, 1),
        (["0", "1"], "0", None, 0),
    ],
)
def test_positive_class_is_named_or_known(
    names: list[str], asked: str | None, glue_task: str | None, number: int | None
) -> None:
    assert positive_class(names, asked, glue_task=glue_task) == number


def test_unknown_positive_class_is_refused() -> None:
    with pytest.raises(UsageError, match="positive_class 'frd' is not one of the classes; did you mean 'fraud'"):
        positive_class(["fraud", "legit"], "frd")
    for written in (1, "1", 1.0, "1.0"):
        assert Evaluate(model="m", data="t.csv", positive_class=written).positive_class == "1"


@pytest.mark.parametrize(
    ("task", "more"),
    [("mrpc", {"eval_combined_score": (3 / 5 + 2 / 3) / 2}), ("qqp", {"eval_combined_score": (3 / 5 + 2 / 3) / 2})]
    + [(task, {}) for task in ("mnli", "sst2")],
)
def test_glue_scores_paraphrases_by_mean_of_accuracy_and_f1(task: str, more: dict[str, float]) -> None:
    plain = figures([1, 1, 1, 0, 0], [1, 1, 0, 0, 1], classes=2, positive=1)
    scored = figures([1, 1, 1, 0, 0], [1, 1, 0, 0, 1], classes=2, positive=1, glue_task=task)
    assert scored == pytest.approx({**plain, **more})


@pytest.mark.parametrize(
    ("labels", "predicted", "expected"),
    [
        # (true positives x true negatives - false positives x false negatives) / sqrt of the four margins.
        ([1, 1, 1, 0, 0], [1, 1, 0, 0, 1], (2 * 1 - 1 * 1) / math.sqrt(3 * 3 * 2 * 2)),
        ([1, 0], [1, 0], 1.0),
        ([1, 0], [1, 1], 0.0),
        ([1, 1], [1, 0], 0.0),
    ],
)
def test_glue_scores_cola_by_matthews_correlation(labels: list[int], predicted: list[int], expected: float) -> None:
    scored = figures(labels, predicted, classes=2, glue_task="cola")
    assert scored["eval_matthews_correlation"] == pytest.approx(expected)


def test_macro_f1_is_the_mean_over_classes_that_occur() -> None:
    # Class 0: 2 of 3, none false. Class 1: 1 of 2, one false. Class 2: 1 of 1, one false. Class 3: nowhere.
    assert figures([0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 2, 2], classes=4) == pytest.approx(
        {
            "eval_accuracy": 4 / 6,
            "eval_f1": (4 / 5 + 2 / 4 + 2 / 3) / 3,
            "eval_f1_macro": (4 / 5 + 2 / 4 + 2 / 3) / 3,
            # Over all classes: 4 true positives, 2 false ones, 2 missed.
            "eval_f1_micro": 2 * 4 / (2 * 4 + 2 + 2),
            "eval_majority_accuracy": 3 / 6,
            "eval_loss": -(4 * math.log(3 / 6) + 2 * math.log(1 / 6)) / 6,
        }
    )


def test_degenerate_predictions_have_metrics() -> None:
    # A class that is predicted but does not occur counts as zero in the mean
    assert figures([0, 0], [0, 2], classes=3)["eval_f1"] == pytest.approx((2 / 3 + 0) / 2)
    # The positive class neither occurs nor is predicted
    assert figures([0, 0], [0, 0], classes=2, positive=1)["eval_f1"] == 0
    logits = np.asarray([[1000.0, -1000.0], [-1000.0, 1000.0]], dtype=np.float32)
    assert classification_metrics(logits, np.asarray([1, 1]))["eval_loss"] == pytest.approx(1000)


def report_of(folder: Path, labels: list[int], logits: list[list[float]], names: list[str]) -> ClassReport:
    texts = iter([{"text": f"text {row} " + "x" * 600, "pair": "und"} for row in range(len(labels))])
    write_predictions(folder, np.asarray(logits, dtype=np.float32), np.asarray(labels), names, texts)
    return ClassReport.model_validate_json((folder / "classes.json").read_bytes())


def test_predictions_are_written_with_texts_and_class_scores(tmp_path: Path) -> None:
    sure, unsure = math.log(9), math.log(3)
    logits = [[sure, 0], [0, unsure], [0, sure], [unsure, 0], [float("nan")] * 2]
    report = report_of(tmp_path, [0, 0, 0, 1, 0], logits, ["bad", "good"])
    # Rows are true classes: two of four bad ones were found, and the good one was predicted as bad.
    assert report.confusion == [[2, 2], [1, 0]]
    assert report.confused == [
        Confused(label="bad", predicted="good", examples=2),
        Confused(label="good", predicted="bad", examples=1),
    ]
    bad, good = report.classes
    assert (bad.name, bad.examples, bad.predicted, bad.precision, bad.recall) == ("bad", 4, 3, 2 / 3, 2 / 4)
    assert bad.f1 == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert (good.examples, good.predicted, good.precision, good.recall, good.f1) == (1, 2, 0, 0, 0)
    # The most confident mistake comes first, with the beginning of its text.
    assert [mistake.confidence for mistake in report.mistakes] == pytest.approx([0.9, 0.75, 0.75])
    first = Mistake(text=f"text 2 {'x' * 493}", pair="und", label="bad", predicted="good", confidence=0.9)
    assert report.mistakes[0] == first
    lines = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert [line["predicted"] for line in lines] == ["bad", "good", "good", "bad", "bad"]
    assert lines[1] == {
        "text": f"text 1 {'x' * 600}",
        "pair": "und",
        "label": "bad",
        "predicted": "good",
        "confidence": 0.75,
    }
    assert lines[4]["confidence"] == 0, "a diverged model has no confidence"


def test_class_without_examples_and_predictions_has_no_scores(tmp_path: Path) -> None:
    none = report_of(tmp_path, [0], [[1.0, 0.0]], ["bad", "good"]).classes[1]
    assert (none.precision, none.recall, none.f1) == (None, None, None)


def test_report_omits_confusion_above_50_classes(tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(51)]
    logits = [[float(column == 0) for column in range(51)] for _ in range(51)]
    report = report_of(tmp_path, list(range(51)), logits, names)
    assert report.confusion is None
    assert [(pair.label, pair.predicted) for pair in report.confused] == [(name, names[0]) for name in names[1:11]]
    assert len(report.classes) == 51
    assert [mistake.label for mistake in report.mistakes] == names[1:21]


def test_multi_label_metrics_count_each_decision() -> None:
    labels = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0]], dtype=np.uint8)
    logits = np.array([[2, -1, -1, -1], [-1, -1, 1, -1], [1, -1, 3, -1]], dtype=np.float32)
    found = multi_label_metrics(logits, labels)
    # Two of three examples have a wrong class. Class 0 has F1 1, class 1 0, class 2 2/3; class 3 does not occur.
    assert found["eval_accuracy"] == pytest.approx(1 / 3)
    assert found["eval_f1_macro"] == found["eval_f1"] == pytest.approx((1 + 0 + 2 / 3) / 3)
    assert found["eval_f1_micro"] == pytest.approx(2 * 3 / (2 * 3 + 1 + 1))
    loss = torch.nn.functional.binary_cross_entropy_with_logits(torch.tensor(logits), torch.tensor(labels).float())
    assert found["eval_loss"] == pytest.approx(float(loss))


def test_regression_metrics_give_equal_numbers_equal_ranks() -> None:
    found = regression_metrics(np.array([1, 2, 2, 9], dtype=np.float32), np.array([1, 2, 3, 4.0]), glue_task="stsb")
    assert found["eval_mae"] == pytest.approx(1.5)
    assert found["eval_rmse"] == pytest.approx(math.sqrt(26 / 4))
    assert found["eval_mean_rmse"] == pytest.approx(math.sqrt(1.25))
    ranks = [1, 2.5, 2.5, 4]
    assert found["eval_spearman"] == pytest.approx(np.corrcoef(ranks, [1, 2, 3, 4])[0, 1])
    assert found["eval_combined_score"] == pytest.approx((found["eval_pearson"] + found["eval_spearman"]) / 2)
    constant = regression_metrics(np.ones(4, dtype=np.float32), np.array([1, 2, 3, 4.0]))
    assert constant["eval_pearson"] == constant["eval_spearman"] == 0
