"""Numbers and text as people read them: durations, amounts, results, and text that is safe to print.

The terminal and the HTML pages use the same functions. Text from elsewhere is stripped of characters that control a
terminal and shortened if it is long.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

_RESULT_LABELS = {
    "eval_accuracy": "accuracy",
    "eval_majority_accuracy": "majority class",
    "eval_f1": "F1",
    "eval_f1_macro": "macro F1",
    "eval_f1_micro": "micro F1",
    "eval_combined_score": "mean of accuracy, F1",
    "eval_matthews_correlation": "Matthews correlation",
    "eval_rmse": "RMSE",
    "eval_mean_rmse": "RMSE of the mean",
    "eval_mae": "MAE",
    "eval_pearson": "Pearson correlation",
    "eval_spearman": "Spearman correlation",
    "eval_perplexity": "perplexity",
    "eval_loss": "loss",
    "best_step": "best step",
    "eval_samples": "held-out examples",
    "train_samples_per_second": "samples/s",
    "train_runtime_seconds": "training seconds",
    "loss": "training loss",
    "train_loss": "mean training loss",
    "train_runtime": "training seconds",
    "train_steps_per_second": "steps/s",
    "eval_runtime": "evaluation seconds",
    "eval_samples_per_second": "evaluated samples/s",
    "eval_steps_per_second": "evaluated steps/s",
    "total_flos": "floating-point operations",
    "sequence_length": "tokens per sequence",
    "held_out_documents": "held-out documents",
    "held_out_bytes": "held-out bytes",
    "held_out_tokens": "held-out tokens",
    "held_out_sequences": "held-out sequences",
    "dropped_empty": "empty, left out",
    "dropped_broken": "broken, left out",
    "dropped_duplicates": "duplicates, left out",
    "cuts": "cuts in long documents",
    "special_tokens_in_text": "special tokens in texts",
    "encoder_reason": "why this encoder",
    "tokens_per_second": "tokens/s",
    "bytes_per_second": "bytes/s",
    "vocabulary_size": "vocabulary",
    "sample_documents": "sampled documents",
    "sample_bytes": "sampled bytes",
    "sampling_seconds": "sampling seconds",
    "text_bytes": "bytes of text",
    "samples_per_second": "samples/s",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "memory_gib": "memory in use (GiB)",
    "max_memory_gib": "peak memory in use (GiB)",
    "total_memory_gib": "memory per card (GiB)",
}
"""Readable names of metrics, including the metrics of transformers' Trainer."""

HELD_OUT = ("eval_", "val_", "valid_", "validation_", "dev_", "test_")
"""Beginnings of the names of metrics of held-out data. Our kinds and transformers use the first."""

_MEASURES = ("accuracy", "acc", "f1", "combined_score", "matthews_correlation", "rmse", "score", "perplexity", "loss")
_MAIN_RESULTS = (*(f"{part}{measure}" for part in (*HELD_OUT, "") for measure in _MEASURES), "train_loss")
"""Metrics that can represent a run; the first one that a run has is used."""


def main_result(result: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the metric that represents a run, as key and value; None if it has none of them."""
    known = ((key, result[key]) for key in _MAIN_RESULTS if isinstance(result.get(key), (int, float)))
    return next(known, None)


def smaller_is_better(metric: str) -> bool:
    """Return whether smaller values of a metric are better."""
    return metric.endswith(("loss", "perplexity", "rmse", "mae"))


_OF_A_PHASE = re.compile(r"(train|eval|test|predict)_(.*_)?(runtime|per_second|time|samples)|total_flos|epoch")


def is_of_a_whole_phase(metric: str) -> bool:
    """Return whether a metric describes a whole training or evaluation, such as its time, and has no curve."""
    return _OF_A_PHASE.fullmatch(metric) is not None or metric == "num_input_tokens_seen"


def duration(seconds: float) -> str:
    """Return a duration as text: `48 s`, `12 min 05 s`, `3 h 20 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def time_left(seconds: float) -> str:
    """Return a remaining time as short text: `1:48 h`, `7 min`, `48 s`."""
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60}:{minutes % 60:02d} h"
    return f"{minutes} min" if round(seconds) >= 60 else f"{seconds:.0f} s"


FREE_HERE = "runs on this machine are free; the amounts are what they would have cost in AWS"
"""Printed below the costs of runs on the emulator."""


def cost_label(*, emulated: bool) -> str:
    """Return the label of a run's cost."""
    return "in AWS it would cost" if emulated else "estimated cost"


def usd(amount: float) -> str:
    return f"{amount:.2f} USD" if amount >= 0.1 or amount == 0 else f"{amount:.4f} USD"


def size(size_bytes: float) -> str:
    """Return a size as text: `312 B`, `29.8 kB`, `4.1 MB`, `1.34 GB`."""
    if size_bytes < 1e3:
        return f"{size_bytes:.0f} B"
    for unit, power in (("kB", 1e3), ("MB", 1e6)):
        if size_bytes < 1e3 * power:
            return f"{size_bytes / power:.3g} {unit}"
    return f"{size_bytes / 1e9:.3g} GB"


def counted(count: int, name: str, plural: str = "") -> str:
    """Return a count with its noun: `1 line`, `1,200 lines`. Pass `plural` if the noun does not take -s."""
    return f"{count:,} {name if count == 1 else plural or f'{name}s'}"


def result_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the final metrics as table rows, well-known metrics first."""
    keys = [*(key for key in _RESULT_LABELS if key in result), *(key for key in result if key not in _RESULT_LABELS)]
    return [(result_label(key), figure(result[key])) for key in keys]


def result_label(key: str) -> str:
    """Return the readable name of a metric: `macro F1` for a script's `eval_macro_f1`."""
    words = [{"f1": "F1"}.get(word, word) for word in key.removeprefix("eval_").split("_") if word]
    return _RESULT_LABELS.get(key) or " ".join(words) or key


def figure(value: Any) -> str:
    """Return a metric as text. None stands for NaN or infinity, which JSON cannot represent."""
    if value is None:
        return "not a number"
    if isinstance(value, float):
        if 0 < abs(value) < 0.0005:
            return f"{value:.2g}"
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def baseline_warning(result: Mapping[str, Any]) -> str:
    """Return a warning if a model is no better than always predicting the largest class or the mean; else ""."""
    rmse, of_mean = result.get("eval_rmse"), result.get("eval_mean_rmse")
    if rmse is not None and of_mean is not None and rmse >= of_mean:
        shown = f"always predicting the mean has RMSE {figure(of_mean)}, the model {figure(rmse)}"
        return f"The model learned nothing useful: {shown}."
    accuracy, baseline = result.get("eval_accuracy"), result.get("eval_majority_accuracy")
    if accuracy is None or baseline is None or accuracy > baseline:
        return ""
    return (
        "The model learned nothing useful: always predicting the largest class has accuracy "
        f"{figure(baseline)}, the model {figure(accuracy)}."
    )


MAX_SHOWN_CHARACTERS = 1000
"""The middle of longer texts is left out."""

_UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters other than tab and newline, line separators, characters that change the writing direction, and
lone surrogates."""

_COLOUR = re.compile("\x1b\\[[0-9;:]*m")
"""Escape sequences for colours and styles (ECMA-48, "SGR"), as progress bars print them."""


def printable(text: str) -> str:
    """Return the text with each character that is unsafe on a terminal replaced by an escape sequence."""
    return _UNSHOWABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def printable_name(name: str) -> str:
    """Return a file name as one printable line, even if it contains newlines or tabs."""
    return printable(name).replace("\n", "\\n").replace("\t", "\\t")


def log_text(text: str) -> str:
    """Return a line of a job's log without colours and newline."""
    return printable(_COLOUR.sub("", text.rstrip("\r\n")))


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return the value as JSON that is safe on a terminal: unsafe characters become JSON escapes."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=str)
    return _UNSHOWABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def shortened(text: str) -> str:
    """Return the text, with the middle left out if it is longer than MAX_SHOWN_CHARACTERS."""
    half = MAX_SHOWN_CHARACTERS // 2
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
