"""Figures in the words that people use: durations, amounts, results. On a terminal and on a page they read alike."""

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
    "sequence_length": "tokens a sequence",
    "held_out_documents": "held-out documents",
    "held_out_bytes": "held-out bytes",
    "held_out_tokens": "held-out tokens",
    "held_out_sequences": "held-out sequences",
    "dropped_empty": "empty, left out",
    "dropped_broken": "broken, left out",
    "dropped_duplicates": "duplicates, left out",
    "cuts": "cuts of long ones",
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
    "max_memory_gib": "most memory in use (GiB)",
    "total_memory_gib": "memory of a card (GiB)",
}
"""Results by the words people use. Those whose names a Trainer of transformers makes are among them."""

_MAIN_RESULTS = (
    "eval_accuracy",
    "eval_f1",
    "eval_combined_score",
    "eval_matthews_correlation",
    "eval_perplexity",
    "eval_loss",
)
"""By which of them a run is known where there is room for one, the first that it has."""


def main_result(result: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the figure by which a run is known, with its key; None where it has none."""
    known = ((key, result[key]) for key in _MAIN_RESULTS if isinstance(result.get(key), (int, float)))
    return next(known, None)


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
    """Return a time to wait, as no finer a text than people need: `1:48 h`, `7 min`, `48 s`."""
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60}:{minutes % 60:02d} h"
    return f"{minutes} min" if round(seconds) >= 60 else f"{seconds:.0f} s"


FREE_HERE = "this machine's runs cost nothing: the figures are what they would have cost in AWS"
"""Said below the money of runs on an emulator."""


def cost_label(*, emulated: bool) -> str:
    """Return what stands before the money of a run."""
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
    """Return a number with what it counts: `1 line`, `1,200 lines`. `plural`: if it has another end than -s."""
    return f"{count:,} {name if count == 1 else plural or f'{name}s'}"


def result_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the final metrics as rows of a table, the well-known ones first."""
    keys = [*(key for key in _RESULT_LABELS if key in result), *(key for key in result if key not in _RESULT_LABELS)]
    return [(result_label(key), figure(result[key])) for key in keys]


def result_label(key: str) -> str:
    """Return what people call a result: `macro F1` where a script's own key is `eval_macro_f1`."""
    words = [{"f1": "F1"}.get(word, word) for word in key.removeprefix("eval_").split("_") if word]
    return _RESULT_LABELS.get(key) or " ".join(words) or key


def figure(value: Any) -> str:
    """Return a metric as people read it; None is NaN or infinity, which JSON has no word for."""
    if value is None:
        return "no number"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def baseline_warning(result: Mapping[str, Any]) -> str:
    """Return the warning that a classifier is no better than its largest class; empty where it is, or for all else."""
    accuracy, baseline = result.get("eval_accuracy"), result.get("eval_majority_accuracy")
    if accuracy is None or baseline is None or accuracy > baseline:
        return ""
    return (
        "It learnt nothing that helps: naming the largest class each time has an accuracy of "
        f"{figure(baseline)}, the model one of {figure(accuracy)}."
    )


MAX_SHOWN_CHARACTERS = 1000
"""A longer text is shown without its middle."""

_UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for tabs and line ends, separators of lines, those that turn the direction of writing, and
halves of pairs."""

_COLOUR = re.compile("\x1b\\[[0-9;:]*m")
"""Sets colours and styles of a terminal (ECMA-48, "SGR"), as progress bars do."""


def printable(text: str) -> str:
    """Return the text with an escape, of letters and digits, for each character that no terminal should get."""
    return _UNSHOWABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def printable_name(name: str) -> str:
    """Return the name of a file, which may have line ends too, as one line."""
    return printable(name).replace("\n", "\\n").replace("\t", "\\t")


def log_text(text: str) -> str:
    """Return a line that a job has logged, without its colours and its line end."""
    return printable(_COLOUR.sub("", text.rstrip("\r\n")))


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return the value as JSON that is fit for a terminal: the same characters are escapes of JSON's own."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=str)
    return _UNSHOWABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def shortened(text: str) -> str:
    """Return the text, without its middle where it is long."""
    half = MAX_SHOWN_CHARACTERS // 2
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
