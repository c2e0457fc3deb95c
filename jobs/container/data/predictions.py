"""Evaluate predictions on held-out examples: metrics, scores of each class, and the worst mistakes."""

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.core.errors import UsageError, did_you_mean
from jobs.core.labels import Problem
from jobs.core.run import CLASSES, PREDICTIONS
from jobs.data_checks.classes import (
    MAX_CONFUSED,
    MAX_CONFUSION_CLASSES,
    MAX_MISTAKES,
    MAX_TEXT_CHARACTERS,
    ClassReport,
    ClassScore,
    Confused,
    Mistake,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def positive_class(names: Sequence[str], requested: str | None, *, glue_task: str | None = None) -> int | None:
    """Return the number of the class whose F1 is `eval_f1`, or None if `eval_f1` is the mean over the classes.

    By default it is class 1 of two if GLUE defines it so or if the classes are only numbered. Otherwise there is none,
    because the alphabetical order of two names means nothing. Raises UsageError for an unknown class.
    """
    if requested is None:
        is_known = glue_task is not None or list(names) in (["0", "1"], ["LABEL_0", "LABEL_1"])
        return 1 if is_known and len(names) == 2 else None
    if requested not in names:
        raise UsageError(
            f"positive_class '{requested}' is not one of the classes{did_you_mean(requested, names)}",
            next_step="name one of the classes",
        )
    return list(names).index(requested)


def metrics(
    problem: Problem,
    logits: "NDArray[np.floating[Any]]",
    labels: "NDArray[Any]",
    *,
    positive: int | None = None,
    glue_task: str | None = None,
) -> dict[str, float]:
    """Return the metrics of held-out examples for what the model predicts."""
    if problem == "regression":
        return regression_metrics(logits[:, 0], labels, glue_task=glue_task)
    if problem == "multi-label":
        return multi_label_metrics(logits, labels, positive=positive)
    return classification_metrics(logits, labels, positive=positive, glue_task=glue_task)


def multi_label_metrics(
    logits: "NDArray[np.floating[Any]]", labels: "NDArray[np.integer[Any]]", *, positive: int | None = None
) -> dict[str, float]:
    """Return F1, accuracy and binary cross-entropy for examples with any number of classes each.

    The micro F1 counts all decisions together. The macro F1 is the mean over the classes, without classes that neither
    occur nor are predicted. The accuracy is the share of examples with all classes right.
    """
    predicted = logits > 0
    right, occurring, guessed = _counts(predicted, labels, logits.shape[-1])
    relevant = occurring + guessed
    f1 = 2 * right / np.maximum(relevant, 1)
    macro_f1 = float(f1[relevant > 0].mean()) if relevant.any() else 0.0
    exact = logits.astype(np.float64)
    return {
        "eval_accuracy": float((predicted == labels).all(axis=-1).mean()),
        "eval_f1": macro_f1 if positive is None else float(f1[positive]),
        "eval_f1_macro": macro_f1,
        "eval_f1_micro": float(2 * right.sum() / max(1, relevant.sum())),
        "eval_loss": float((np.logaddexp(0, exact) - exact * labels).mean()),
    }


def regression_metrics(
    predicted: "NDArray[np.floating[Any]]", labels: "NDArray[np.float64]", *, glue_task: str | None = None
) -> dict[str, float]:
    """Return errors and correlations of predicted numbers, and the error of always predicting the mean.

    GLUE scores STS-B by the mean of the correlations.
    """
    errors = predicted.astype(np.float64) - labels
    pearson, spearman = _correlation(predicted, labels), _correlation(_ranks(predicted), _ranks(labels))
    loss = float(np.square(errors).mean())
    found = {
        "eval_rmse": loss**0.5,
        "eval_mean_rmse": float(labels.std()),
        "eval_mae": float(np.abs(errors).mean()),
        "eval_pearson": pearson,
        "eval_spearman": spearman,
        "eval_loss": loss,
    }
    return {**found, "eval_combined_score": (pearson + spearman) / 2} if glue_task else found


def _correlation(one: "NDArray[Any]", other: "NDArray[Any]") -> float:
    """Return Pearson's correlation, or 0 if all values of one side are equal."""
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


def _ranks(values: "NDArray[Any]") -> "NDArray[np.float64]":
    """Return each value's rank; equal values share the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


def classification_metrics(
    logits: "NDArray[np.floating[Any]]",
    labels: "NDArray[np.integer[Any]]",
    *,
    positive: int | None = None,
    glue_task: str | None = None,
) -> dict[str, float]:
    """Return accuracy, F1 and cross-entropy of held-out examples, and the accuracy of always predicting the top class.

    `eval_f1` is the F1 of the class `positive`, or by default the macro F1: the mean over the classes, without classes
    that neither occur nor are predicted. The micro F1 equals the accuracy if each example has one class; it is included
    because published tables report it. GLUE scores MRPC and QQP by the mean of accuracy and F1, CoLA by Matthews'
    correlation, and its other tasks by accuracy alone.
    """
    predicted = logits.argmax(axis=-1)
    true_positives, support, guessed = _counts(predicted, labels, logits.shape[-1])
    relevant = support + guessed
    f1 = 2 * true_positives / np.maximum(relevant, 1)
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    log_likelihood = shifted[np.arange(len(labels)), labels] - np.log(np.exp(shifted).sum(axis=-1))
    accuracy = float((predicted == labels).mean())
    macro_f1 = float(f1[relevant > 0].mean())
    found = {
        "eval_accuracy": accuracy,
        "eval_f1": macro_f1 if positive is None else float(f1[positive]),
        "eval_f1_macro": macro_f1,
        "eval_f1_micro": accuracy,
        "eval_majority_accuracy": float(support.max() / len(labels)),
        "eval_loss": float(-log_likelihood.mean()),
    }
    if glue_task in ("mrpc", "qqp"):
        found["eval_combined_score"] = (accuracy + found["eval_f1"]) / 2
    if glue_task == "cola":
        found["eval_matthews_correlation"] = _correlation((predicted == 1).astype(int), (labels == 1).astype(int))
    return found


def predicted_columns(
    problem: Problem, logits: "NDArray[np.floating[Any]]", names: Sequence[str]
) -> dict[str, "Sequence[Any] | NDArray[Any]"]:
    """Return the columns of a table of predictions: `predicted`, and for classes also how sure the model is.

    `probabilities` is a matrix with a column per class.
    """
    if problem == "regression":
        return {"predicted": logits[:, 0].astype(np.float64)}
    if problem == "multi-label":
        shares = 1 / (1 + np.exp(-logits.astype(np.float64)))
        return {"predicted": label_values(problem, logits > 0, names), "probabilities": shares}
    shares = probabilities(logits)
    return {
        "predicted": [names[number] for number in logits.argmax(axis=-1).tolist()],
        "confidence": shares.max(axis=-1),
        "probabilities": shares,
    }


def label_values(problem: Problem, labels: "NDArray[Any]", names: Sequence[str]) -> list[Any]:
    """Return labels as in a table: names, lists of names, or numbers."""
    if problem == "regression":
        return list(labels.tolist())
    if problem == "multi-label":
        return [[names[number] for number in np.flatnonzero(row).tolist()] for row in labels]
    return [names[number] for number in labels.tolist()]


def write_predictions(
    folder: Path,
    logits: "NDArray[np.floating[Any]]",
    labels: "NDArray[Any]",
    names: Sequence[str],
    texts: Iterable[Mapping[str, str]],
    *,
    problem: Problem = "single-label",
) -> None:
    """Write the prediction for each example, in order, and a report on all examples into the folder."""
    with (folder / PREDICTIONS).open("w", encoding="utf-8") as lines:

        def write(row: Mapping[str, Any]) -> None:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")

        if problem == "single-label":
            write_report(folder, logits, labels, names, texts, each=write)
            return
        predicted = predicted_columns(problem, logits, names)["predicted"]
        for text, label, guess in zip(texts, label_values(problem, labels, names), predicted, strict=True):
            write({**text, "label": label, "predicted": float(guess) if problem == "regression" else guess})
    if problem == "multi-label":
        write_class_scores(folder, logits, labels, names)


def write_class_scores(
    folder: Path, logits: "NDArray[np.floating[Any]]", labels: "NDArray[np.integer[Any]]", names: Sequence[str]
) -> None:
    """Write the scores of each class into the folder, for examples with any number of classes."""
    report = ClassReport(classes=_scores(logits > 0, labels, names))
    (folder / CLASSES).write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")


def write_report(
    folder: Path,
    logits: "NDArray[np.floating[Any]]",
    labels: "NDArray[np.integer[Any]]",
    names: Sequence[str],
    texts: Iterable[Mapping[str, str]],
    *,
    each: Callable[[Mapping[str, Any]], object] = lambda _: None,
) -> None:
    """Write a report on all examples into the folder. `each` is called with every prediction, in order."""
    predicted = logits.argmax(axis=-1)
    confidences = probabilities(logits).max(axis=-1)
    surest: list[tuple[float, int, Mistake]] = []
    confused: Counter[tuple[int, int]] = Counter()
    for row, (text, label, guess) in enumerate(zip(texts, labels.tolist(), predicted.tolist(), strict=True)):
        values = {"label": names[label], "predicted": names[guess], "confidence": round(float(confidences[row]), 6)}
        each({**text, **values})
        if label != guess:
            confused[label, guess] += 1
            begins = {name: part[:MAX_TEXT_CHARACTERS] for name, part in text.items()}
            heapq.heappush(surest, (values["confidence"], -row, Mistake(**begins, **values)))
            if len(surest) > MAX_MISTAKES:
                heapq.heappop(surest)
    report = ClassReport(
        classes=_scores(predicted, labels, names),
        confusion=_confusion(predicted, labels, len(names)) if len(names) <= MAX_CONFUSION_CLASSES else None,
        confused=[
            Confused(label=names[label], predicted=names[guess], examples=count)
            for (label, guess), count in sorted(confused.items(), key=lambda item: (-item[1], item[0]))[:MAX_CONFUSED]
        ],
        mistakes=[mistake for *_, mistake in sorted(surest, key=lambda item: item[:2], reverse=True)],
    )
    (folder / CLASSES).write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")


def probabilities(logits: "NDArray[np.floating[Any]]") -> "NDArray[np.float64]":
    """Return each example's probability of each class. A diverged model has probabilities of 0."""
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    shares: NDArray[np.float64] = np.nan_to_num(weights / weights.sum(axis=-1, keepdims=True))
    return shares


def _counts(
    predicted: "NDArray[Any]", labels: "NDArray[np.integer[Any]]", classes: int
) -> "tuple[NDArray[Any], NDArray[Any], NDArray[Any]]":
    """Return for each class how often it is rightly predicted, how often it occurs, and how often it is predicted."""
    if labels.ndim == 2:
        return (predicted & (labels > 0)).sum(axis=0), labels.sum(axis=0), predicted.sum(axis=0)
    right = np.bincount(labels[predicted == labels], minlength=classes)
    return right, np.bincount(labels, minlength=classes), np.bincount(predicted, minlength=classes)


def _scores(predicted: "NDArray[Any]", labels: "NDArray[np.integer[Any]]", names: Sequence[str]) -> list[ClassScore]:
    right, occurring, guessed = (counts.tolist() for counts in _counts(predicted, labels, len(names)))
    return [
        ClassScore(
            name=name,
            examples=occurring[number],
            predicted=guessed[number],
            precision=_share(right[number], guessed[number]),
            recall=_share(right[number], occurring[number]),
            f1=_share(2 * right[number], occurring[number] + guessed[number]),
        )
        for number, name in enumerate(names)
    ]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _confusion(
    predicted: "NDArray[np.integer[Any]]", labels: "NDArray[np.integer[Any]]", classes: int
) -> list[list[int]]:
    counts = np.bincount(labels * classes + predicted, minlength=classes * classes)
    rows: list[list[int]] = counts.reshape(classes, classes).tolist()
    return rows
