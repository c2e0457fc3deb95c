"""Masked sequences: what a masked language model trains on, made batch by batch from packed tokens.

Each sequence has the same number of masked places, so that a batch has one shape for ever: Gaudi compiles a graph for
each new one. Which places, and what stands there instead, follows from the seed and the number of the sequence in the
run, and from nothing else; an attempt that resumes, on however many ranks, masks as the one before would have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

IGNORED = -100
"""The label of a place that is not masked: PyTorch's cross-entropy leaves it out."""

MASK_SHARE, RANDOM_SHARE = 0.8, 0.1
"""Shares of the masked places that hold [MASK], and that hold another token. The rest keep their own, as in BERT."""

EVALUATION_SEED = 0
"""Held-out sequences are masked alike in every run, so that runs of any seed can be compared."""

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 1 << 64


class Sequences(Protocol):
    """Token ids in sequences of one length: jobs.container.data.packed_tokens.PackedTokens."""

    def __len__(self) -> int: ...

    def __getitems__(self, rows: Sequence[int], /) -> "torch.Tensor": ...


@dataclass(frozen=True, kw_only=True)
class Masking:
    """The rule by which tokens are masked."""

    fraction: float
    vocabulary_size: int
    mask_id: int
    pad_id: int
    special_ids: Sequence[int]
    """Never masked, nor put in another token's place."""
    seed: int

    def places(self, sequence_length: int) -> int:
        """Return how many places of a sequence are masked."""
        return max(1, round(self.fraction * sequence_length))

    def __call__(self, ids: "NDArray[np.int64]", numbers: "NDArray[np.int64]") -> "dict[str, NDArray[np.int64]]":
        """Make a batch of the sequences `ids`, of which each is masked after its own number.

        `input_ids` and `attention_mask` have the shape of `ids`; `masked_positions` and `labels` have `places` columns.
        Where a sequence has fewer tokens to mask than that, for it ends in padding, labels are IGNORED.
        """
        length = ids.shape[1]
        ordinary = np.ones(self.vocabulary_size, dtype=bool)
        ordinary[list(self.special_ids)] = False
        maskable = ordinary[ids]
        # The places with the smallest random keys, in the order of the keys, special tokens last.
        keys = _random((numbers[:, None] * length + np.arange(length)).astype(np.uint64), self.seed, stream=0)
        keys[~maskable] = _WORD - 1
        count = min(self.places(length), length)
        chosen = np.argpartition(keys, count - 1, axis=1)[:, :count]
        chosen = np.take_along_axis(chosen, np.take_along_axis(keys, chosen, axis=1).argsort(axis=1), axis=1)
        tokens = maskable.sum(axis=1)
        wanted = np.minimum(np.maximum(np.rint(self.fraction * tokens), 1), tokens)
        masked = np.arange(count) < wanted[:, None]

        counters = (numbers[:, None] * length + chosen).astype(np.uint64)
        labels = np.take_along_axis(ids, chosen, axis=1)
        draw = _random(counters, self.seed, stream=1)
        others = np.flatnonzero(ordinary)
        other = others[_random(counters, self.seed, stream=2) % np.uint64(len(others))]
        replaced = np.where(draw < np.uint64(int(MASK_SHARE * _WORD)), self.mask_id, labels)
        in_others_place = (draw >= np.uint64(int(MASK_SHARE * _WORD))) & (
            draw < np.uint64(int((MASK_SHARE + RANDOM_SHARE) * _WORD))
        )
        replaced = np.where(in_others_place, other, replaced)
        inputs = ids.copy()
        np.put_along_axis(inputs, chosen, np.where(masked, replaced, labels), axis=1)
        return {
            "input_ids": inputs,
            "attention_mask": (ids != self.pad_id).astype(np.int64),
            "masked_positions": chosen.astype(np.int64),
            "labels": np.where(masked, labels, IGNORED),
        }


class MaskedSequences:
    """A data set of masked sequences, as DataLoader reads it: whole batches at a time."""

    def __init__(self, sequences: Sequences, masking: Masking) -> None:
        self._sequences = sequences
        self._masking = masking

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, number: int) -> "dict[str, torch.Tensor]":
        return {name: values[0] for name, values in self.__getitems__([number]).items()}

    def __getitems__(self, numbers: Sequence[int]) -> "dict[str, torch.Tensor]":
        import torch

        drawn = np.asarray(numbers, dtype=np.int64)
        ids = self._sequences.__getitems__(self._rows(drawn).tolist()).numpy()
        return {name: torch.from_numpy(array) for name, array in self._masking(ids, drawn).items()}

    @staticmethod
    def collate(batch: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        """`__getitems__` has made the batch already."""
        return batch

    @staticmethod
    def collate_unpadded(batch: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        """Return the batch without `attention_mask` where nothing in it is padded: the device need not be asked."""
        return {name: values for name, values in batch.items() if name != "attention_mask" or not values.all()}

    def _rows(self, numbers: "NDArray[np.int64]") -> "NDArray[np.int64]":
        return numbers


class TrainingOrder(MaskedSequences):
    """The sequences that a run trains on, in their order: `length` of them, pass after pass over those there are.

    A pass has each sequence once, in an order of its own and with masks of its own. The order does not depend on the
    number of ranks, which take turns at its batches.
    """

    def __init__(self, sequences: Sequences, masking: Masking, *, length: int) -> None:
        super().__init__(sequences, masking)
        self._length = length
        self._orders: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return self._length

    def _rows(self, numbers: "NDArray[np.int64]") -> "NDArray[np.int64]":
        passes, places = np.divmod(numbers, len(self._sequences))
        rows = np.empty_like(numbers)
        for number in np.unique(passes).tolist():
            rows[passes == number] = self._order(number)[places[passes == number]]
        return rows

    def _order(self, number: int) -> "NDArray[np.int64]":
        if number not in self._orders:
            # A batch may lie across two passes; earlier ones are over.
            self._orders = {kept: order for kept, order in self._orders.items() if kept == number - 1}
            seed = (self._masking.seed % _WORD, number)
            self._orders[number] = np.random.default_rng(seed).permutation(len(self._sequences))
        return self._orders[number]


class Spread:
    """At most `count` of some sequences, evenly spread over them."""

    def __init__(self, sequences: Sequences, count: int) -> None:
        self._sequences = sequences
        self._rows = np.linspace(0, len(sequences) - 1, min(count, len(sequences))).round().astype(np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, rows: Sequence[int]) -> "torch.Tensor":
        return self._sequences.__getitems__(self._rows[list(rows)].tolist())


def _random(counters: "NDArray[np.uint64]", seed: int, *, stream: int) -> "NDArray[Any]":
    """Draw 64 random bits for each counter by SplitMix64, whose state after n steps needs no steps between."""
    start = _finalised(np.array([(seed % _WORD) ^ (stream * _GOLDEN) % _WORD], dtype=np.uint64))
    return _finalised(start + counters * np.uint64(_GOLDEN))


def _finalised(values: "NDArray[np.uint64]") -> "NDArray[np.uint64]":
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    finalised: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return finalised
