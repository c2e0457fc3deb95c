"""Widths that sequences are padded to, as a recipe asks for them by their number."""

from collections.abc import Callable, Mapping
from typing import Any

from jobs.train.data.labelled_buckets import FORWARD, Pass, Widths, choose_widths


def widths_of(number: int, max_length: int) -> Callable[[Mapping[str, Any]], Widths]:
    """Return what chooses so many widths from the lengths of all parts."""

    def chosen(lengths: Mapping[str, Any]) -> Widths:
        passes = [Pass(lengths=part, batch=1, operations=FORWARD) for part in lengths.values()]
        return choose_widths(passes, asked=number, max_length=max_length, row=None, ranks=1, parameters=lambda: 0)

    return chosen
