"""Packed tokens: a corpus as token ids, in sequences of one length, that are read without copying a file into memory.

An artifact of kind `packed-tokens` holds, all below one folder:

    index.json             one `Index`: what the ids mean, and which files hold how many sequences
    train-00000.npy, …     NumPy arrays of `sequences x sequence_length` ids, little-endian: uint16, or uint32 where the
    held-out-00000.npy, …  vocabulary has more than 65,536 tokens; one pair of files for each shard of the corpus
    tokenizer/             what `AutoTokenizer.from_pretrained` loads, the tokenizer that made the ids

Within a shard the documents follow one another as `[CLS] … [SEP] [CLS] … [SEP]`, however long each is: nothing is cut
off. A sequence ends where it is full, so a document may go on in the next one. The last sequence of a file is filled
with `[PAD]`; no other has any, unless a document spells it. A shard without documents of a part has no file of it.
"""

from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.core.errors import UsageError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

KIND = "packed-tokens"
VERSION = 1
INDEX = "index.json"
TOKENIZER = "tokenizer/"

Split = Literal["train", "held-out"]
SPLITS: tuple[Split, ...] = ("train", "held-out")

UINT16_VOCABULARY = 1 << 16
"""The largest vocabulary whose ids fit into two bytes."""


class PackedFile(BaseModel):
    """A file of packed tokens, as the index describes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    sequences: int
    tokens: int
    """Without the padding of its last sequence."""


class Index(BaseModel):
    """The content of index.json: what the ids mean, and where they lie."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sequence_length: int
    vocabulary_size: int
    """Size of the tokenizer's vocabulary, added tokens included: each id is below it."""
    special_ids: dict[str, int]
    """`pad`, `unk`, `cls`, `sep`, `mask`."""
    files: dict[Split, list[PackedFile]]

    @property
    def pad_id(self) -> int:
        return self.special_ids["pad"]

    def names(self, *splits: Split) -> list[str]:
        """List the names of the parts' files, for a download."""
        return [file.name for split in splits for file in self.files[split]]

    def tokens(self, split: Split) -> int:
        return sum(file.tokens for file in self.files[split])

    def sequences(self, split: Split) -> int:
        return sum(file.sequences for file in self.files[split])

    @classmethod
    def read(cls, folder: Path) -> "Index":
        """Read the index of a folder. Raises UsageError where there is none, or one that cannot be read."""
        try:
            return cls.model_validate_json((folder / INDEX).read_bytes())
        except (OSError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(
                f"{folder} holds no packed tokens: its {INDEX} cannot be read: {reason}",
                next_step="run the job `tokenize` again, or name what it made",
            ) from None


class PackedTokens:
    """One part of packed tokens: a data set whose items are sequences, given out as whole batches.

    Files are mapped when they are first read, in each process that reads: a DataLoader's workers and all ranks of a
    node share the pages.
    """

    def __init__(self, folder: Path, split: Split) -> None:
        """Raises UsageError where the folder holds no packed tokens, or not the files that its index names."""
        self.index = Index.read(folder)
        self.split = split
        self._folder = folder
        self._files = self.index.files[split]
        self._first_rows = np.cumsum([0, *(file.sequences for file in self._files)])
        self._arrays: dict[int, NDArray[Any]] = {}
        for file in self._files:
            if not (folder / file.name).is_file():
                raise UsageError(f"{folder}: {file.name} is missing, which its {INDEX} names")

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def __getitem__(self, row: int) -> "torch.Tensor":
        """Return the ids of one sequence, int64. Raises IndexError as a list does."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"sequence {row} of {len(self)}")
        return self.__getitems__([row % len(self)])[0]

    def __getitems__(self, rows: Sequence[int]) -> "torch.Tensor":
        """Return the ids of those sequences as one tensor, `len(rows) x sequence_length`, int64."""
        import torch

        batch = np.empty((len(rows), self.index.sequence_length), dtype=np.int64)
        wanted = np.asarray(rows, dtype=np.int64)
        numbers = np.searchsorted(self._first_rows, wanted, side="right") - 1
        positions = wanted - self._first_rows[numbers]
        for place, (number, position) in enumerate(zip(numbers.tolist(), positions.tolist(), strict=True)):
            batch[place] = self._array(number)[position]
        return torch.from_numpy(batch)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the mapped files, whose content would travel to each worker."""
        return {**self.__dict__, "_arrays": {}}

    def _array(self, number: int) -> "NDArray[Any]":
        array = self._arrays.get(number)
        if array is None:
            file = self._files[number]
            mapped = np.load(self._folder / file.name, mmap_mode="r")
            shape = (file.sequences, self.index.sequence_length)
            if mapped.shape != shape:
                raise UsageError(f"{self._folder}: {file.name} has {mapped.shape} ids, but its {INDEX} says {shape}")
            # A plain array over the same pages: memmap's own indexing takes several times as long.
            array = self._arrays[number] = np.asarray(mapped)
        return array


def pack(
    parts: "Iterable[NDArray[np.uint32]]", path: Path, *, sequence_length: int, vocabulary_size: int, pad_id: int
) -> PackedFile:
    """Write the ids of documents, one after the other, as a file of packed tokens, of which a part is in memory.

    Raises ValueError where an id is outside the vocabulary, or there are none.
    """
    of_type = token_type(vocabulary_size)
    tokens = 0
    with path.open("wb") as stream:
        # How many sequences there are is known at the end; the headers of all numbers are of one length.
        stream.write(_header((0, sequence_length), of_type))
        for part in parts:
            largest = int(part.max(initial=0))
            if largest >= vocabulary_size:
                raise ValueError(f"token id {largest} is outside a vocabulary of {vocabulary_size}")
            stream.write(part.astype(of_type).data)
            tokens += len(part)
        if not tokens:
            raise ValueError("there are no tokens to pack")
        sequences = -(-tokens // sequence_length)
        stream.write(np.full(sequences * sequence_length - tokens, pad_id, dtype=of_type).data)
        stream.seek(0)
        stream.write(_header((sequences, sequence_length), of_type))
    return PackedFile(name=path.name, sequences=sequences, tokens=tokens)


def _header(shape: tuple[int, int], of_type: "np.dtype[Any]") -> bytes:
    """Return what `numpy.save` writes before the values."""
    stream = BytesIO()
    described = {"descr": of_type.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, described)
    return stream.getvalue()


def token_type(vocabulary_size: int) -> "np.dtype[Any]":
    """Return the smallest type that holds a vocabulary's ids."""
    return np.dtype("<u2" if vocabulary_size <= UINT16_VOCABULARY else "<u4")
