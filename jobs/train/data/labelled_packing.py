"""Several examples in one row, for a model that lets each attend to itself alone
(jobs/train/models/packed_classifiers.py).

A batch has one example of every range of lengths, so all batches have about as many tokens. Its n-th example is always
of the same range, and lies at the same place of the same row: one shape for the whole training, of which Gaudi compiles
one graph.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.train.data.labelled_buckets import MULTIPLE
from jobs.train.data.labelled_tokens import TokenizedExamples

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

WIDEST = 512
"""Tokens that a row has at most, unless an example has more."""

ATTENTION_WIDTH = 1024
"""Attention looks at all pairs of a row's tokens: in rows of this width a token costs about twice as much."""


def in_strata(
    lengths: "NDArray[np.integer[Any]]", batch: int, at_once: int, chance: np.random.Generator
) -> "NDArray[np.int64]":
    """Put the numbers of all examples into steps of `batch`, one example of each of as many ranges of lengths.

    The `at_once` that a rank takes together are one of each range of their own, the longest first. What is missing in
    the last step is filled with examples that occur a second time, of all lengths. Steps do not depend on `at_once`.
    """
    count = len(lengths)
    mixed = chance.permutation(count)
    falling = mixed[np.argsort(-lengths[mixed], kind="stable")]
    if missing := -count % batch:
        ends = np.arange(missing + 1) * count // missing
        twice = falling[chance.integers(ends[:-1], ends[1:])]
        falling = np.concatenate([falling, twice])
        falling = falling[np.argsort(-lengths[falling], kind="stable")]
    steps = chance.permuted(falling.reshape(batch, -1), axis=1).T
    dealt = chance.permuted(steps.reshape(len(steps), at_once, -1), axis=2)
    return np.ascontiguousarray(dealt.swapaxes(1, 2)).ravel()


def rooms(lengths: "NDArray[np.integer[Any]]", at_once: int) -> "NDArray[np.int64]":
    """Return how many tokens each of the `at_once` examples of `in_strata` has at most, falling."""
    count = len(lengths)
    # Those that occur twice are evenly spread, so whichever they are, of the longest an even share are different ones.
    longest: NDArray[np.int64] = np.sort(lengths)[::-1][np.arange(at_once) * count // at_once].astype(np.int64)
    return longest


def laid_out(rooms: "NDArray[np.int64]") -> "tuple[int, int, NDArray[np.int64]]":
    """Lay rooms out in rows at the least cost.

    Returns the number of rows, their width, and where in them, one row after the other, each of the rooms begins.
    """
    layouts = []
    longest = -(-int(rooms.max()) // MULTIPLE) * MULTIPLE
    for width in range(longest, max(longest, WIDEST) + 1, MULTIPLE):
        used: list[int] = []
        starts = []
        for room in rooms.tolist():
            row = next((row for row, tokens in enumerate(used) if tokens + room <= width), len(used))
            used += [0] * (row == len(used))
            starts.append(row * width + used[row])
            used[row] += room
        layouts.append((len(used) * width * (1 + width / ATTENTION_WIDTH), len(used), width, starts))
    _, rows, width, starts = min(layouts)
    return rows, width, np.asarray(starts)


class PackedExamples:
    """Prepared examples, as DataLoader reads them: batches of `at_once` in the order that `order` gives."""

    def __init__(self, examples: TokenizedExamples, at_once: int) -> None:
        self._examples = examples
        self._at_once = at_once
        self.rows, self.width, self._starts = laid_out(rooms(examples.lengths, at_once))

    def __len__(self) -> int:
        return len(self._examples)

    @property
    def padding(self) -> float:
        """The share of the tokens that only fills up."""
        return 1 - float(self._examples.lengths.mean()) * self._at_once / (self.rows * self.width)

    def order(self, batch: int, chance: np.random.Generator) -> "NDArray[np.int64]":
        """Return all examples of an epoch, in whole steps of `batch`."""
        return in_strata(self._examples.lengths, batch, self._at_once, chance)

    def __getitems__(self, numbers: Sequence[int]) -> dict[str, "torch.Tensor"]:
        import torch

        chosen = np.asarray(numbers)
        lengths = self._examples.lengths[chosen]
        within = np.concatenate([np.arange(length) for length in lengths])
        places = np.repeat(self._starts, lengths) + within

        def in_rows(tokens: "NDArray[Any]", padding: int = 0) -> "NDArray[np.int64]":
            flat = np.full(self.rows * self.width, padding, dtype=np.int64)
            flat[places] = tokens
            return flat.reshape(self.rows, self.width)

        batch = {
            "position_ids": in_rows(within),
            "examples": in_rows(np.repeat(np.arange(1, len(chosen) + 1), lengths)),
            "first_tokens": self._starts,
            "labels": self._examples.labels[chosen],
        }
        for column, tokens in self._examples.tokens(chosen).items():
            batch[column] = in_rows(tokens, self._examples.padding[column])
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    @staticmethod
    def collate(batch: dict[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
        """`__getitems__` has made the batch already."""
        return batch
