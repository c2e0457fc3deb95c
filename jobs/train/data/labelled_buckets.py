"""Which examples make a batch: those of one step are alike in length, so that little is padded and few shapes occur.

Gaudi compiles a graph for each new shape, and ranks that wait for the longest sequence among them gain nothing from
short ones. So the lengths are put into a few buckets, and all ranks take all batches of one step from the same bucket.
What does not fill a step of its bucket moves up to the next wider one. Of the widest, the last step is filled with
examples that occur a second time in that epoch: fewer than one global batch. All others occur once an epoch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jobs.contract.instance_types import InstanceType

if TYPE_CHECKING:
    from numpy.typing import NDArray

MULTIPLE = 8
"""Widths are multiples of it; with any batch of 16 or more, so is the number of tokens of 128, which suits the HPU."""


AUTO: Literal["auto"] = "auto"

USUAL = 4
"""The widths that are chosen where another one costs nothing but a batch that is not full: on CPU and CUDA."""

MOST = 8
"""So many are looked at where each costs a compilation."""

FORWARD, FORWARD_AND_BACKWARD = 2, 6
"""Operations for each parameter and token (Kaplan et al., arXiv 2001.08361): of an evaluation, and of a training."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What goes through the model, in batches of which each has one width."""

    lengths: "NDArray[np.integer[Any]]"
    batch: int
    """Sequences of all ranks that share a width."""
    times: float = 1.0
    operations: int
    """For each parameter and token."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a number of widths costs beyond the work on the tokens themselves."""

    widths: list[int]
    shapes: int
    """Graphs that are compiled: one for each width of the training, one for each of the evaluation."""
    compiling_seconds: float
    padding_seconds: float

    @property
    def seconds(self) -> float:
        return self.compiling_seconds + self.padding_seconds

    def __str__(self) -> str:
        return (
            f"{self.compiling_seconds:.0f} s to compile {self.shapes} shapes + {self.padding_seconds:.0f} s of padding"
        )


@dataclass(frozen=True, kw_only=True)
class Widths:
    """The widths that were chosen, and why so many."""

    widths: list[int]
    reason: str | None = None
    """None where their number was given, or nothing is compiled."""


def choose_widths(
    passes: Sequence[Pass],
    *,
    asked: int | Literal["auto"],
    max_length: int,
    row: InstanceType | None,
    ranks: int,
    parameters: Callable[[], int],
) -> Widths:
    """Return the widths that sequences are padded to: `asked` of them, or as many as cost the least time on the cards.

    `row`: the instance type of these `ranks`; None where it is not known, and then the number is the usual one.
    `parameters` counts those of the model, and is asked only where they matter.
    """
    lengths = np.concatenate([one.lengths for one in passes])
    if asked != AUTO or row is None or not row.compile_seconds[0] or row.training_teraflops is None:
        number = USUAL if asked == AUTO else asked
        return Widths(widths=[min(width, max_length) for width in bucket_widths(lengths, at_most=number)])
    of_model = parameters()
    costs = [
        cost(passes, number, max_length=max_length, row=row, ranks=ranks, parameters=of_model)
        for number in range(1, MOST + 1)
    ]
    best = min(costs, key=lambda one: one.seconds)
    others = [one for one in costs if len(one.widths) != len(best.widths)]
    reason = f"{len(best.widths)} widths: {best} is the least"
    if others:
        second = min(others, key=lambda one: one.seconds)
        reason += f"; {len(second.widths)} would take {second}"
    return Widths(widths=best.widths, reason=reason)


def cost(
    passes: Sequence[Pass], number: int, *, max_length: int, row: InstanceType, ranks: int, parameters: int
) -> Cost:
    """Return what `number` widths cost: shapes x seconds of compilation + steps x seconds of padding."""
    assert row.training_teraflops is not None  # noqa: S101 - or there is nothing to reckon with
    together = np.concatenate([one.lengths for one in passes])
    widths = [min(width, max_length) for width in bucket_widths(together, at_most=number)]
    shapes, operations = 0, 0.0
    for one in passes:
        places = in_batches(np.searchsorted(np.asarray(widths), one.lengths), one.batch)
        buckets = places // len(one.lengths)
        shapes += len(np.unique(buckets))
        padding = int(np.asarray(widths)[buckets].sum() - one.lengths.sum())  # an example's second time is padding, too
        operations += one.times * padding * one.operations * parameters
    return Cost(
        widths=widths,
        shapes=shapes,
        compiling_seconds=shapes * row.compile_seconds[ranks > 1],
        padding_seconds=operations / (row.training_teraflops * 1e12 * ranks),
    )


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
