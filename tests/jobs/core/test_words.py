"""What results are called where people read them."""

import pytest

from jobs.core.words import result_label, result_rows


@pytest.mark.parametrize(
    ("key", "label"),
    [
        ("eval_accuracy", "accuracy"),
        ("train_samples_per_second", "samples/s"),
        # Of a Trainer of transformers in a script
        ("loss", "training loss"),
        ("train_loss", "mean training loss"),
        ("eval_runtime", "evaluation seconds"),
        # A script's own
        ("eval_macro_f1", "macro F1"),
        ("words_seen", "words seen"),
        ("eval_", "eval_"),
        ("__", "__"),
    ],
)
def test_a_result_is_called_what_people_call_it(key: str, label: str) -> None:
    assert result_label(key) == label


def test_the_rows_of_a_result_begin_with_what_is_known() -> None:
    assert result_rows({"eval_macro_f1": 0.5, "eval_loss": 0.25}) == [("loss", "0.250"), ("macro F1", "0.500")]


def test_a_metric_that_was_not_a_number_is_called_so() -> None:
    """A receipt is JSON, which has no NaN: it holds null."""
    assert result_rows({"eval_loss": None, "eval_accuracy": 0.5}) == [("accuracy", "0.500"), ("loss", "no number")]
