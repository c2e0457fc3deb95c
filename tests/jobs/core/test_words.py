"""Readable names and values of results."""

import pytest

from jobs.core.words import figure, main_result, result_label, result_rows


@pytest.mark.parametrize(
    ("key", "label"),
    [
        ("eval_accuracy", "accuracy"),
        ("train_samples_per_second", "samples/s"),
        # From a transformers Trainer in a custom script
        ("loss", "training loss"),
        ("train_loss", "mean training loss"),
        ("eval_runtime", "evaluation seconds"),
        # From a custom script
        ("eval_macro_f1", "macro F1"),
        ("words_seen", "words seen"),
        ("eval_", "eval_"),
        ("__", "__"),
    ],
)
def test_result_has_a_readable_name(key: str, label: str) -> None:
    assert result_label(key) == label


def test_result_rows_start_with_known_metrics() -> None:
    assert result_rows({"eval_macro_f1": 0.5, "eval_loss": 0.25}) == [("loss", "0.250"), ("macro F1", "0.500")]


def test_a_small_value_is_not_shown_as_zero() -> None:
    assert [figure(value) for value in (2.9e-11, 0.00049, 0.0005, -0.25, 0.0)] == [
        "2.9e-11",
        "0.00049",
        "0.001",
        "-0.250",
        "0.000",
    ]


def test_held_out_metrics_represent_a_run_before_others() -> None:
    assert main_result({"loss": 1.0, "accuracy": 0.9, "val_loss": 2.0}) == ("val_loss", 2.0)
    assert main_result({"loss": 1.0, "score": 0.5}) == ("score", 0.5)
    assert main_result({"epoch": 1.0}) is None


def test_null_metric_is_shown_as_not_a_number() -> None:
    """JSON has no NaN, so a receipt holds null instead."""
    assert result_rows({"eval_loss": None, "eval_accuracy": 0.5}) == [("accuracy", "0.500"), ("loss", "not a number")]
