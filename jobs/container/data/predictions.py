"""Evaluate a classifier's predictions on held-out examples: metrics, scores of each class, and the worst mistakes."""

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.core.errors import UsageError, did_you_mean
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
    classes = logits.shape[-1]
    true_positives = np.bincount(labels[predicted == labels], minlength=classes)
    support = np.bincount(labels, minlength=classes)
    relevant = support + np.bincount(predicted, minlength=classes)
    f1 = 2 * true_positives / np.maximum(relevant, 1)
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    log_likelihood = shifted[np.arange(len(labels)), labels] - np.log(np.exp(shifted).sum(axis=-1))
    accuracy = float((predicted == labels).mean())
    macro_f1 = float(f1[relevant > 0].mean())
    metrics = {
        "eval_accuracy": accuracy,
        "eval_f1": macro_f1 if positive is None else float(f1[positive]),
        "eval_f1_macro": macro_f1,
        "eval_f1_micro": accuracy,
        "eval_majority_accuracy": float(support.max() / len(labels)),
        "eval_loss": float(-log_likelihood.mean()),
    }
    if glue_task in ("mrpc", "qqp"):
        metrics["eval_combined_score"] = (accuracy + metrics["eval_f1"]) / 2
    if glue_task == "cola":
        metrics["eval_matthews_correlation"] = _matthews_correlation(predicted == 1, labels == 1)
    return metrics


def _matthews_correlation(predicted: "NDArray[np.bool_]", true: "NDArray[np.bool_]") -> float:
    """Return Matthews' correlation, or 0 if all labels or all predictions are of one class."""
    if predicted.all() or true.all() or not (predicted.any() and true.any()):
        return 0.0
    return float(np.corrcoef(predicted, true)[0, 1])


def write_predictions(
    folder: Path,
    logits: "NDArray[np.floating[Any]]",
    labels: "NDArray[np.integer[Any]]",
    names: Sequence[str],
    texts: Iterable[Mapping[str, str]],
) -> None:
    """Write the prediction for each example, in order, and a report on all examples into the folder."""
    with (folder / PREDICTIONS).open("w", encoding="utf-8") as lines:
        write_report(
            folder,
            logits,
            labels,
            names,
            texts,
            each=lambda row: lines.write(json.dumps(row, ensure_ascii=False) + "\n"),
        )


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


def _scores(
    predicted: "NDArray[np.integer[Any]]", labels: "NDArray[np.integer[Any]]", names: Sequence[str]
) -> list[ClassScore]:
    right = np.bincount(labels[predicted == labels], minlength=len(names)).tolist()
    occurring = np.bincount(labels, minlength=len(names)).tolist()
    guessed = np.bincount(predicted, minlength=len(names)).tolist()
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
