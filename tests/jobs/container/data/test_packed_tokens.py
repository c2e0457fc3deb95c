"""Packed tokens: read back in whole batches; damaged folders are refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from jobs.container.data.packed_tokens import INDEX, Index, PackedFile, PackedTokens, pack, token_type
from jobs.core.errors import UsageError

SPECIAL = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}


def save(
    folder: Path, *shards: "np.ndarray[tuple[int], np.dtype[np.uint32]]", vocabulary: int = 1000
) -> list[PackedFile]:
    """Write each shard as a file of sequences of 8 tokens, and an index that names them as training split."""
    folder.mkdir(exist_ok=True)
    files = [
        pack([ids], folder / f"train-{number:05}.npy", sequence_length=8, vocabulary_size=vocabulary, pad_id=0)
        for number, ids in enumerate(shards)
    ]
    index = Index(
        sequence_length=8, vocabulary_size=vocabulary, special_ids=SPECIAL, files={"train": files, "held-out": []}
    )
    (folder / INDEX).write_text(index.model_dump_json())
    return files


def ids(count: int, *, start: int = 5) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    return np.arange(start, start + count, dtype=np.uint32)


def test_packed_tokens_are_read_back_in_order(tmp_path: Path) -> None:
    files = save(tmp_path, ids(16), ids(21, start=100), ids(3, start=500))
    packed = PackedTokens(tmp_path, "train")
    assert [file.sequences for file in files] == [2, 3, 1]
    assert len(packed) == 6
    read = packed.__getitems__(range(6))
    assert read.dtype == torch.int64
    assert (read == 0).sum(dim=1).tolist() == [0, 0, 0, 0, 3, 5], "only the last of a file is padded"
    assert read[read != 0].tolist() == [*range(5, 21), *range(100, 121), *range(500, 503)]
    assert packed.index.tokens("train") == 16 + 21 + 3
    batch = packed.__getitems__([3, 0, 2, 0])
    assert batch[:, 0].tolist() == [108, 5, 100, 5]
    assert torch.equal(packed[-1], packed[5])
    with pytest.raises(IndexError):
        packed[6]


@pytest.mark.parametrize("lengths", [[16], [3, 0, 20, 1], [5_000, 7_001]])
def test_file_written_in_parts_equals_numpys(tmp_path: Path, lengths: list[int]) -> None:
    parts = [ids(length) for length in lengths]
    file = pack(iter(parts), tmp_path / "parts.npy", sequence_length=8, vocabulary_size=10_000, pad_id=0)
    together = np.concatenate(parts).astype("<u2")
    assert (file.sequences, file.tokens) == (-(-len(together) // 8), len(together))
    np.save(tmp_path / "whole.npy", np.pad(together, (0, -len(together) % 8)).reshape(-1, 8))
    assert (tmp_path / "parts.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()


@pytest.mark.parametrize(("vocabulary", "itemsize"), [(65_536, 2), (65_537, 4)])
def test_ids_take_two_bytes_if_the_vocabulary_allows(tmp_path: Path, vocabulary: int, itemsize: int) -> None:
    save(tmp_path, np.array([vocabulary - 1], dtype=np.uint32), vocabulary=vocabulary)
    assert token_type(vocabulary).itemsize == itemsize
    assert np.load(tmp_path / "train-00000.npy").dtype.itemsize == itemsize
    assert PackedTokens(tmp_path, "train")[0][0] == vocabulary - 1


def test_damaged_packed_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="outside a vocabulary of 10"):
        save(tmp_path, np.array([10], dtype=np.uint32), vocabulary=10)
    with pytest.raises(UsageError, match="has no packed tokens"):
        PackedTokens(tmp_path, "train")
    save(tmp_path, ids(16))
    index = json.loads((tmp_path / INDEX).read_text())
    index["files"]["train"][0]["sequences"] = 3
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"according to its index\.json"):
        PackedTokens(tmp_path, "train")[0]
    (tmp_path / "train-00000.npy").unlink()
    with pytest.raises(UsageError, match=r"train-00000\.npy is missing"):
        PackedTokens(tmp_path, "train")
