"""Which examples make a batch: those of one step are alike in length, so that little is padded and few shapes occur.

Gaudi compiles a graph for each new shape, and ranks that wait for the longest sequence among them gain nothing from
short ones. So the lengths are put into a few buckets, and all ranks take all batches of one step from the same bucket.
What does not fill a step of its bucket moves up to the next wider one. Of the widest, the last step is filled with
examples that occur a second time in that epoch: fewer than one global batch. All others occur once an epoch.
"""

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MULTIPLE = 8
"""Widths are multiples of it; with any batch of 16 or more, so is the number of tokens of 128, which suits the HPU."""

USUAL, COMPILED = 4, 2
"""Widths where the number is `auto`: usually, and on an accelerator that compiles a graph for each."""


def number_of_widths(asked: int | Literal["auto"], *, compiles: bool) -> int:
    if asked != "auto":
        return asked
    return COMPILED if compiles else USUAL


def bucket_widths(lengths: "NDArray[np.integer[Any]]", *, at_most: int) -> list[int]:
    """Choose the `at_most` widths, ascending, to which sequences of these lengths are padded least."""
    ends = np.unique(-(-lengths // MULTIPLE) * MULTIPLE)
    below = np.searchsorted(np.sort(lengths), ends, side="right")
    # tokens[j]: of the best buckets whose widest is ends[j]; one more bucket in each round.
    tokens = ends * below
    chosen = [[int(end)] for end in ends]
    for _ in range(min(at_most, len(ends)) - 1):
        # [i, j]: the best up to ends[i], and one bucket from there to ends[j].
        candidates = tokens[:, None] + ends * np.maximum(below - below[:, None], 0)
        candidates[np.tril_indices(len(ends))] = np.iinfo(np.int64).max
        best = candidates.argmin(axis=0)
        better = candidates.min(axis=0) < tokens
        chosen = [[*chosen[best[j]], int(ends[j])] if better[j] else chosen[j] for j in range(len(ends))]
        tokens = np.where(better, candidates.min(axis=0), tokens)
    return chosen[-1]


def in_batches(
    buckets: "NDArray[np.integer[Any]]", batch: int, chance: "np.random.Generator | None" = None
) -> "NDArray[np.int64]":
    """Return the places of all examples, in whole batches of one bucket each; shuffled where `chance` is given.

    `buckets` has each example's bucket, 0 for the shortest. A place is `bucket * len(buckets) + row`: the bucket that
    the row's batch is padded for, which may be wider than its own.
    """
    count = len(buckets)
    batches: list[NDArray[np.int64]] = []
    left = np.empty(0, np.int64)
    for bucket in range(int(buckets.max()) + 1):
        rows = np.concatenate([left, np.flatnonzero(buckets == bucket)])
        if chance is not None:
            rows = chance.permutation(rows)
        whole = len(rows) - len(rows) % batch
        batches.append(rows[:whole] + bucket * count)
        left = rows[whole:]
    if len(left):
        others = np.setdiff1d(np.arange(count), left)
        if chance is not None:
            others = chance.permutation(others)
        filled = np.resize(np.concatenate([left, others]), batch)
        batches.append(filled + int(buckets.max()) * count)
    together = np.concatenate(batches).reshape(-1, batch)
    return (chance.permutation(together) if chance is not None else together).ravel()
