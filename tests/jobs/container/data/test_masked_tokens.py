"""Masked sequences: which tokens are masked, with what, and in which order sequences come."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from jobs.container.data.masked_tokens import IGNORED, MaskedSequences, Masking, Spread, TrainingOrder

PAD, UNK, CLS, SEP, MASK = range(5)
VOCABULARY = 1000
LENGTH = 128


class Rows:
    """Sequences of ordinary tokens between [CLS] and [SEP]. The last one is half full."""

    def __init__(self, count: int, *, length: int = LENGTH) -> None:
        self.ids = np.random.default_rng(0).integers(5, VOCABULARY, (count, length))
        self.ids[:, 0], self.ids[:, -1] = CLS, SEP
        self.ids[-1, length // 2 :] = PAD

    def __len__(self) -> int:
        return len(self.ids)

    def __getitems__(self, rows: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(self.ids[list(rows)])


def masking(*, fraction: float = 0.15, seed: int = 1) -> Masking:
    return Masking(
        fraction=fraction,
        vocabulary_size=VOCABULARY,
        mask_id=MASK,
        pad_id=PAD,
        special_ids=range(5),
        seed=seed,
    )


def masked(batch: dict[str, torch.Tensor], row: int) -> dict[int, int]:
    """Return the position and token of each label in one sequence."""
    pairs = zip(batch["masked_positions"][row].tolist(), batch["labels"][row].tolist(), strict=True)
    return {place: token for place, token in pairs if token != IGNORED}


def test_every_sequence_has_equally_many_masks() -> None:
    rows = Rows(400)
    batch = MaskedSequences(rows, masking()).__getitems__(range(400))

    assert batch["masked_positions"].shape == batch["labels"].shape == (400, 19)
    counts = [len(masked(batch, row)) for row in range(400)]
    assert set(counts[:-1]) == {19}, "of 126 ordinary tokens"
    assert counts[-1] == 9, "15 % of what the padding leaves"
    assert batch["attention_mask"][0].all()
    assert batch["attention_mask"][-1].tolist() == [1] * 64 + [0] * 64
    for row in range(400):
        tokens = masked(batch, row)
        assert {place: rows.ids[row, place] for place in tokens} == tokens, "labels are the sequence's own tokens"
        assert min(tokens.values()) >= 5
        untouched = np.delete(np.arange(LENGTH), list(tokens))
        assert (batch["input_ids"][row].numpy()[untouched] == rows.ids[row, untouched]).all()
    places = Counter(place for row in range(399) for place in masked(batch, row))
    assert set(places) == set(range(1, LENGTH - 1)), "every position is masked sometimes"


def test_masked_positions_split_80_10_10() -> None:
    batch = MaskedSequences(Rows(4001), masking()).__getitems__(range(4000))
    there = batch["input_ids"].gather(1, batch["masked_positions"])
    assert (there == MASK).double().mean().item() == pytest.approx(0.8, abs=0.01)
    assert (there == batch["labels"]).double().mean().item() == pytest.approx(0.1, abs=0.01)
    others = there[(there != MASK) & (there != batch["labels"])]
    assert len(others) / there.numel() == pytest.approx(0.1, abs=0.01)
    assert others.min() >= 5, "no special token is a replacement"
    assert len(set(others.tolist())) > 900, "from the whole vocabulary"


def test_masks_follow_from_seed_and_number_alone() -> None:
    data = MaskedSequences(Rows(32), masking())
    whole = data.__getitems__(range(32))
    again = MaskedSequences(Rows(32), masking()).__getitems__([7, 3])
    for name, values in whole.items():
        assert torch.equal(values[[7, 3]], again[name])
        assert torch.equal(values[7], data[7][name])
    other = MaskedSequences(Rows(32), masking(seed=2)).__getitems__(range(32))
    same = [masked(whole, row).keys() == masked(other, row).keys() for row in range(32)]
    assert not any(same)
    assert MaskedSequences(Rows(32), masking(seed=-1))[0]["labels"].shape == (19,)


def test_each_pass_has_all_sequences_in_a_new_order() -> None:
    rows = Rows(50)
    order = TrainingOrder(rows, masking(), length=120)
    assert len(order) == 120
    batches = [order.__getitems__(range(start, start + 8)) for start in range(0, 120, 8)]  # 50 is within a batch
    seen = [token for batch in batches for token in restored(batch)]
    first, second, third = seen[:50], seen[50:100], seen[100:]
    assert sorted(first) == sorted(second) == sorted(map(tuple, rows.ids.tolist()))
    assert first != second
    assert set(third) <= set(first)
    row = first[0]
    places = [masked(batches[number // 8], number % 8).keys() for number in (0, 50 + second.index(row))]
    assert places[0] != places[1]


def restored(batch: dict[str, torch.Tensor]) -> list[tuple[int, ...]]:
    """Return the sequences before masking."""
    ids = batch["input_ids"].clone()
    for row in range(len(ids)):
        for place, token in masked(batch, row).items():
            ids[row, place] = token
    return [tuple(row) for row in ids.tolist()]


def test_order_can_be_entered_anywhere() -> None:
    """As a resumed attempt does."""
    whole = TrainingOrder(Rows(10), masking(), length=40)
    expected = [whole.__getitems__(range(start, start + 4)) for start in range(0, 40, 4)]
    later = TrainingOrder(Rows(10), masking(), length=40)
    for number in (9, 2, 7):
        found = later.__getitems__(range(4 * number, 4 * number + 4))
        assert all(torch.equal(found[name], expected[number][name]) for name in found)


@pytest.mark.parametrize(("count", "expected"), [(1, [0]), (3, [0, 4, 9]), (99, list(range(10)))])
def test_evaluation_is_spread_over_held_out_sequences(count: int, expected: list[int]) -> None:
    rows = Rows(10)
    spread = Spread(rows, count)
    assert len(spread) == len(expected)
    assert torch.equal(spread.__getitems__(range(len(spread))), rows.__getitems__(expected))
