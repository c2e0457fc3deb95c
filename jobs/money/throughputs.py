"""Published throughputs, a line of throughputs.jsonl each: `trainyard estimate` uses them if the stage has no such run.

A line names what was trained, on which cards, when, and the source. No figure is there that its source does not have;
`start_seconds` is computed from the times in the source, as it says.
"""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What somebody has measured."""

    job: str
    model: str
    """The last part of the model's name; of a pre-training its shape."""
    instance_type: str
    cards: int
    length: int
    """Tokens of a sequence, padding among them."""
    samples_per_second: float
    """Over all cards."""
    start_seconds: float | None = None
    """From the start to the first step that the throughput counts; None: the source does not say."""
    date: str
    source: str


def throughputs() -> list[Throughput]:
    lines = Path(__file__).with_name("throughputs.jsonl").read_text(encoding="utf-8").splitlines()
    return [Throughput(**json.loads(line)) for line in lines]


def model_name(arguments: object) -> str:
    """Return what a model is known by in the rows: the last part of its name, or the shape of one that is new."""
    model = getattr(arguments, "model", None)
    if model is not None:
        return str(model).partition("?")[0].partition("@")[0].rstrip("/").rpartition("/")[2]
    if getattr(arguments, "config", None) is None and hasattr(arguments, "hidden_size"):
        return f"hidden {arguments.hidden_size}, layers {getattr(arguments, 'layers', '?')}"
    return ""
