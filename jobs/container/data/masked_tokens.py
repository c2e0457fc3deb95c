"""Mask packed tokens, batch by batch, to train a masked language model.

Each sequence has the same number of masked positions, so that all batches have one shape: Gaudi compiles a graph for
each new shape. Masks depend only on the seed and the sequence's number in the run, so a resumed attempt makes the same
masks on any number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

IGNORED = -100
"""Label of a position that is not masked. PyTorch's cross-entropy ignores it."""

MASK_SHARE, RANDOM_SHARE = 0.8, 0.1
"""Shares of the masked positions that get [MASK] and a random token. The rest keep their token, as in BERT."""

EVALUATION_SEED = 0
"""Every run masks held-out sequences in the same way, so that runs with different seeds can be compared."""

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 1 << 64


class Sequences(Protocol):
    """Token ids in sequences of one length, such as PackedTokens."""

    def __len__(self) -> int: ...

    def __getitems__(self, rows: Sequence[int], /) -> "torch.Tensor": ...


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Masks sequences of token ids."""

    fraction: float
    vocabulary_size: int
    mask_id: int
    pad_id: int
    special_ids: Sequence[int]
    """Never masked, and never a replacement for another token."""
    seed: int

    def places(self, sequence_length: int) -> int:
        """Return the number of masked positions in a sequence."""
        return max(1, round(self.fraction * sequence_length))

    def __call__(self, ids: "NDArray[np.int64]", numbers: "NDArray[np.int64]") -> "dict[str, NDArray[np.int64]]":
        """Mask the sequences `ids`, each according to its number, and return them as a batch.

        `input_ids` and `attention_mask` have the shape of `ids`; `masked_positions` and `labels` have `places` columns.
        If a sequence that ends in padding has fewer tokens to mask, the remaining labels are IGNORED.
        """
        length = ids.shape[1]
        ordinary = np.ones(self.vocabulary_size, dtype=bool)
        ordinary[list(self.special_ids)] = False
        maskable = ordinary[ids]
        # Choose the positions with the smallest random keys, in the order of the keys. Special tokens come last.
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
    """A data set of masked sequences, from which a DataLoader reads whole batches."""

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
        """Return the batch as `__getitems__` made it."""
        return batch

    @staticmethod
    def collate_unpadded(batch: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        """Drop `attention_mask` if nothing is padded, which saves a query of the device."""
        return {name: values for name, values in batch.items() if name != "attention_mask" or not values.all()}

    def _rows(self, numbers: "NDArray[np.int64]") -> "NDArray[np.int64]":
        return numbers


class TrainingOrder(MaskedSequences):
    """The `length` training sequences of a run in order, from repeated passes over `sequences`.

    Each pass has every sequence once, with a new order and new masks. The order does not depend on the number of ranks,
    which take batches in turn.
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
            # A batch may span two passes. Earlier passes are complete.
            self._orders = {kept: order for kept, order in self._orders.items() if kept == number - 1}
            seed = (self._masking.seed % _WORD, number)
            self._orders[number] = np.random.default_rng(seed).permutation(len(self._sequences))
        return self._orders[number]


class Spread:
    """At most `count` sequences, evenly spaced among all."""

    def __init__(self, sequences: Sequences, count: int) -> None:
        self._sequences = sequences
        self._rows = np.linspace(0, len(sequences) - 1, min(count, len(sequences))).round().astype(np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, rows: Sequence[int]) -> "torch.Tensor":
        return self._sequences.__getitems__(self._rows[list(rows)].tolist())


def _random(counters: "NDArray[np.uint64]", seed: int, *, stream: int) -> "NDArray[Any]":
    """Draw 64 random bits for each counter by SplitMix64, whose state after n steps can be computed directly."""
    start = _finalised(np.array([(seed % _WORD) ^ (stream * _GOLDEN) % _WORD], dtype=np.uint64))
    return _finalised(start + counters * np.uint64(_GOLDEN))


def _finalised(values: "NDArray[np.uint64]") -> "NDArray[np.uint64]":
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    finalised: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return finalised
