"""An epoch: every example, alike lengths together, one shape on all ranks, in an order from seed and epoch alone."""

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from jobs.train.data.labelled_buckets import bucket_widths, in_batches
from jobs.train.trainer.determinism import BatchOrder


def lengths(count: int, *, longest: int = 90) -> Any:
    """Many short, few long."""
    return np.clip(np.random.default_rng(count).gamma(2.0, 9.0, count), 3, longest).astype(np.int64)


def padded(sequences: Any, widths: Any) -> int:
    return int(np.asarray(widths)[np.searchsorted(widths, sequences)].sum())


@pytest.mark.parametrize("buckets", [1, 2, 3, 4])
def test_no_other_widths_pad_less(buckets: int) -> None:
    sequences = lengths(500)
    ends = range(8, int(sequences.max()) + 8, 8)
    choices = [[*inner, ends[-1]] for inner in itertools.combinations(ends[:-1], buckets - 1)]
    found = bucket_widths(sequences, at_most=buckets)
    assert found[-1] == ends[-1]
    assert padded(sequences, found) == min(padded(sequences, widths) for widths in choices)


@pytest.mark.parametrize(
    ("sequences", "widths"),
    [([5, 5], [8]), ([8, 9], [8, 16]), ([3, 500, 3], [8, 504]), (range(1, 33), [8, 16, 24, 32])],
)
def test_there_are_no_more_widths_than_lengths_need(sequences: Any, widths: list[int]) -> None:
    assert bucket_widths(np.asarray(sequences), at_most=9) == widths


@pytest.mark.parametrize(("count", "batch"), [(16, 16), (17, 16), (500, 32), (37, 4), (1000, 128)])
@pytest.mark.parametrize("buckets", [1, 4])
def test_an_epoch_has_every_example_in_whole_batches_that_hold_it(count: int, batch: int, buckets: int) -> None:
    sequences = lengths(count)
    widths = np.asarray(bucket_widths(sequences, at_most=buckets))
    places = list(order(np.searchsorted(widths, sequences), batch, epoch=3))

    padded_for, rows = np.divmod(np.asarray(places).reshape(-1, batch), count)
    assert (padded_for == padded_for[:, :1]).all(), "a batch of two widths"
    assert (sequences[rows] <= widths[padded_for]).all(), "a sequence longer than its batch"
    assert len(places) == -(-count // batch) * batch
    assert set(rows.ravel().tolist()) == set(range(count)), "an example is missing"
    assert max(np.bincount(rows.ravel())) <= 2
    narrowest = np.searchsorted(widths, sequences[rows])
    assert (narrowest < padded_for).sum() < len(widths) * batch, "more moved up than did not fill a batch"


@pytest.mark.parametrize(("ranks", "accumulated"), [(1, 1), (2, 1), (2, 4), (8, 1), (8, 2)])
def test_all_ranks_have_the_same_width_at_the_same_time_and_together_the_global_batch(
    ranks: int, accumulated: int
) -> None:
    """As accelerate deals a DataLoader's batches out."""
    sequences = lengths(1000)
    widths = np.asarray(bucket_widths(sequences, at_most=4))
    sampler = order(np.searchsorted(widths, sequences), 64, epoch=0)
    batches = BatchSampler(sampler, 64 // ranks // accumulated, drop_last=False)
    dealt = [np.asarray(list(BatchSamplerShard(batches, ranks, rank))) for rank in range(ranks)]

    shapes = [(share // 1000).max(axis=1).reshape(-1, accumulated) for share in dealt]
    for share in shapes:
        assert np.array_equal(share, shapes[0]), "ranks differ"
        assert (share == share[:, :1]).all(), "a step of two shapes"
    assert len(np.unique(shapes[0])) == 4
    of_one_rank = np.asarray(list(sampler)).reshape(-1, 64)
    of_all = np.concatenate([share.reshape(len(of_one_rank), -1) for share in dealt], axis=1)
    assert np.array_equal(np.sort(of_all), np.sort(of_one_rank)), "the steps depend on the number of ranks"


def test_the_order_follows_from_the_seed_and_the_epoch() -> None:
    buckets = np.arange(100) % 3
    orders = {(seed, epoch): list(order(buckets, 8, seed=seed, epoch=epoch)) for seed in (1, 2) for epoch in (0, 1)}
    assert len({tuple(places) for places in orders.values()}) == 4
    # In the middle of an epoch too, where an attempt resumes.
    assert list(order(buckets, 8, seed=1, epoch=1.6)) == orders[1, 1]


def test_what_is_not_shuffled_is_filled_with_what_is_there() -> None:
    assert in_batches(np.asarray([1, 0, 1]), 4).tolist() == [1 + 3, 0 + 3, 2 + 3, 1 + 3]


def order(buckets: Any, batch: int, *, epoch: float, seed: int = 7) -> BatchOrder:
    state, arguments = SimpleNamespace(epoch=epoch), SimpleNamespace(seed=seed)
    length = -(-len(buckets) // batch) * batch
    shuffled = functools.partial(in_batches, buckets, batch)
    sampler = BatchOrder(shuffled, length, SimpleNamespace(state=state, args=arguments))
    assert len(sampler) % batch == 0
    return sampler
