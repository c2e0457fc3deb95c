"""An epoch: every example, alike lengths together, one shape on all ranks, in an order from seed and epoch alone."""

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from jobs.container.data.labelled_buckets import bucket_widths, in_batches
from jobs.container.trainer.determinism import BatchOrder

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80).map(np.asarray)


def order(buckets: Any, batch: int, *, epoch: float, seed: int = 7) -> BatchOrder:
    state, arguments = SimpleNamespace(epoch=epoch), SimpleNamespace(seed=seed)
    length = -(-len(buckets) // batch) * batch
    shuffled = functools.partial(in_batches, buckets, batch)
    sampler = BatchOrder(shuffled, length, SimpleNamespace(state=state, args=arguments))
    assert len(sampler) % batch == 0
    return sampler


@settings(deadline=None)
@given(sequences=LENGTHS, number=st.integers(1, 4))
def test_no_other_widths_pad_less_and_there_are_no_more_than_lengths_need(sequences: Any, number: int) -> None:
    def padded(widths: Any) -> int:
        return int(np.asarray(widths)[np.searchsorted(widths, sequences)].sum())

    found = bucket_widths(sequences, at_most=number)
    ends = range(8, int(sequences.max()) + 8, 8)
    choices = [[*inner, ends[-1]] for count in range(number) for inner in itertools.combinations(ends[:-1], count)]
    assert found[-1] == ends[-1]
    assert padded(found) == min(map(padded, choices))
    assert len(found) <= min(number, len(set(-(-sequences // 8))))


@settings(deadline=None)
@given(sequences=LENGTHS, batch=st.sampled_from([1, 4, 16]), number=st.sampled_from([1, 4]))
def test_an_epoch_has_every_example_in_whole_batches_that_hold_it(sequences: Any, batch: int, number: int) -> None:
    count = len(sequences)
    widths = np.asarray(bucket_widths(sequences, at_most=number))
    places = list(order(np.searchsorted(widths, sequences), batch, epoch=3))

    padded_for, rows = np.divmod(np.asarray(places).reshape(-1, batch), count)
    assert (padded_for == padded_for[:, :1]).all(), "a batch of two widths"
    assert (sequences[rows] <= widths[padded_for]).all(), "a sequence longer than its batch"
    assert len(places) == -(-count // batch) * batch
    assert set(rows.ravel().tolist()) == set(range(count)), "an example is missing"
    assert max(np.bincount(rows.ravel())) <= max(2, -(-batch // count))
    narrowest = np.searchsorted(widths, sequences[rows])
    assert (narrowest < padded_for).sum() < len(widths) * batch, "more moved up than did not fill a batch"


@pytest.mark.parametrize(("ranks", "accumulated"), [(2, 4), (8, 1)])
def test_all_ranks_have_the_same_width_at_the_same_time_and_together_the_global_batch(
    ranks: int, accumulated: int
) -> None:
    """As accelerate deals a DataLoader's batches out."""
    sequences = np.clip(np.random.default_rng(1000).gamma(2.0, 9.0, 1000), 3, 90).astype(np.int64)
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
    # What is not shuffled is filled with what is there
    assert in_batches(np.asarray([1, 0, 1]), 4).tolist() == [1 + 3, 0 + 3, 2 + 3, 1 + 3]
