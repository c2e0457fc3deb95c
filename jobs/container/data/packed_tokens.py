"""Pack a corpus into token ids in sequences of one length, and read them from memory-mapped files.

An artifact of kind `packed-tokens` has these files in one folder:

    index.json             one `Index`: the meaning of the ids, and the number of sequences in each file
    train-00000.npy, …     NumPy arrays of `sequences x sequence_length` ids, little-endian: uint16, or uint32 if the
    held-out-00000.npy, …  vocabulary has more than 65,536 tokens; one pair of files for each shard of the corpus
    tokenizer/             the tokenizer that made the ids, for `AutoTokenizer.from_pretrained`

The documents of a shard are concatenated as `[CLS] … [SEP] [CLS] … [SEP]`. Nothing is truncated: a document that does
not fit into a sequence continues in the next sequence. The last sequence of a file is padded with `[PAD]`. No other
sequence contains `[PAD]`, unless a document does. A shard has no file for an empty split.
"""

import logging
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.container.data import corpus_files
from jobs.container.data.tokenizer import ODD_TEXTS, Encoder, HuggingFace, Nanotoken, first_difference
from jobs.core.errors import UsageError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

log = logging.getLogger("trainyard")

KIND = "packed-tokens"
VERSION = 1
INDEX = "index.json"
TOKENIZER = "tokenizer/"

Split = Literal["train", "held-out"]
SPLITS: tuple[Split, ...] = ("train", "held-out")

UINT16_VOCABULARY = 1 << 16
"""The largest vocabulary whose ids fit into two bytes."""


class PackedFile(BaseModel):
    """The index's entry for one file of packed tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    sequences: int
    tokens: int
    """Number of tokens, without the padding of the last sequence."""


class Index(BaseModel):
    """The content of index.json: the meaning of the ids, and their files."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sequence_length: int
    vocabulary_size: int
    """Size of the tokenizer's vocabulary, including added tokens. Each id is below it."""
    special_ids: dict[str, int]
    """Ids of `pad`, `cls`, `sep`, `mask`, and `unk` if the tokenizer has an unknown token."""
    files: dict[Split, list[PackedFile]]

    @property
    def pad_id(self) -> int:
        return self.special_ids["pad"]

    def names(self, *splits: Split) -> list[str]:
        """List the files of the given splits, for a download."""
        return [file.name for split in splits for file in self.files[split]]

    def tokens(self, split: Split) -> int:
        return sum(file.tokens for file in self.files[split])

    def sequences(self, split: Split) -> int:
        return sum(file.sequences for file in self.files[split])

    @classmethod
    def read(cls, folder: Path) -> "Index":
        """Read the index of a folder. Raises UsageError if it is missing or damaged."""
        try:
            return cls.model_validate_json((folder / INDEX).read_bytes())
        except (OSError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(
                f"{folder} has no packed tokens: its {INDEX} cannot be read: {reason}",
                next_step="run the job `tokenize` again, or name the run that made them",
            ) from None


class PackedTokens:
    """A data set of the sequences of one split, which reads whole batches.

    Each process maps a file when it first reads it. A DataLoader's workers and all ranks of a node share the pages.
    """

    def __init__(self, folder: Path, split: Split) -> None:
        """Raises UsageError if the folder has no packed tokens, or lacks files that its index names."""
        self.index = Index.read(folder)
        self.split = split
        self._folder = folder
        self._files = self.index.files[split]
        self._first_rows = np.cumsum([0, *(file.sequences for file in self._files)])
        self._arrays: dict[int, NDArray[Any]] = {}
        for file in self._files:
            if not (folder / file.name).is_file():
                raise UsageError(f"{folder}: {file.name} is missing, although its {INDEX} names it")

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def __getitem__(self, row: int) -> "torch.Tensor":
        """Return the ids of one sequence, int64. Raises IndexError like a list."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"sequence {row} of {len(self)}")
        return self.__getitems__([row % len(self)])[0]

    def __getitems__(self, rows: Sequence[int]) -> "torch.Tensor":
        """Return the ids of the given sequences as one tensor, `len(rows) x sequence_length`, int64."""
        import torch

        batch = np.empty((len(rows), self.index.sequence_length), dtype=np.int64)
        wanted = np.asarray(rows, dtype=np.int64)
        numbers = np.searchsorted(self._first_rows, wanted, side="right") - 1
        positions = wanted - self._first_rows[numbers]
        for place, (number, position) in enumerate(zip(numbers.tolist(), positions.tolist(), strict=True)):
            batch[place] = self._array(number)[position]
        return torch.from_numpy(batch)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the mapped files, whose content would otherwise be pickled for each worker."""
        return {**self.__dict__, "_arrays": {}}

    def _array(self, number: int) -> "NDArray[Any]":
        array = self._arrays.get(number)
        if array is None:
            file = self._files[number]
            mapped = np.load(self._folder / file.name, mmap_mode="r")
            shape = (file.sequences, self.index.sequence_length)
            if mapped.shape != shape:
                raise UsageError(
                    f"{self._folder}: {file.name} has {mapped.shape} ids, but {shape} according to its {INDEX}"
                )
            # A plain array over the same pages: memmap's own indexing takes several times as long.
            array = self._arrays[number] = np.asarray(mapped)
        return array


def pack(
    parts: "Iterable[NDArray[np.uint32]]", path: Path, *, sequence_length: int, vocabulary_size: int, pad_id: int
) -> PackedFile:
    """Write the concatenated ids of documents as a file of packed tokens. Only one part is in memory at a time.

    Raises ValueError if an id is outside the vocabulary or if there are no ids.
    """
    dtype = token_type(vocabulary_size)
    tokens = 0
    with path.open("wb") as stream:
        # The number of sequences is known only at the end; headers have the same length for every number.
        stream.write(_header((0, sequence_length), dtype))
        for part in parts:
            largest = int(part.max(initial=0))
            if largest >= vocabulary_size:
                raise ValueError(f"token id {largest} is outside a vocabulary of {vocabulary_size}")
            stream.write(part.astype(dtype).data)
            tokens += len(part)
        if not tokens:
            raise ValueError("there are no tokens to pack")
        sequences = -(-tokens // sequence_length)
        stream.write(np.full(sequences * sequence_length - tokens, pad_id, dtype=dtype).data)
        stream.seek(0)
        stream.write(_header((sequences, sequence_length), dtype))
    return PackedFile(name=path.name, sequences=sequences, tokens=tokens)


def _header(shape: tuple[int, int], dtype: "np.dtype[Any]") -> bytes:
    """Return the header that `numpy.save` writes before the values."""
    stream = BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype.str, "fortran_order": False, "shape": shape})
    return stream.getvalue()


def token_type(vocabulary_size: int) -> "np.dtype[Any]":
    """Return the smallest integer type that holds a vocabulary's ids."""
    return np.dtype("<u2" if vocabulary_size <= UINT16_VOCABULARY else "<u4")


SAMPLE_BYTES = 1 << 18
"""Bytes of text of each file for which a fast encoder's ids are compared with those of `tokenizers`."""

BLOCK_BYTES = 1 << 20
"""Bytes of text that one thread encodes at once."""


class CorpusPacking:
    """Packs the files of a corpus one by one on all cores, with the fastest encoder whose ids are right.

    `nanotoken` is tens of times faster than `tokenizers`, but young. So its ids are compared with those of `tokenizers`
    on odd texts, and on a sample of each file while that file is encoded. If an id differs, or if `nanotoken` raises an
    error or is not installed, `tokenizers` encodes this file and all later files.

    Files are read, encoded and written in blocks, so memory use does not grow with a file or the corpus.
    """

    def __init__(self, tokenizer: Any, *, sequence_length: int, pad_id: int, only_tokenizers: bool = False) -> None:
        self._vocabulary_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._sequence_length = sequence_length
        self._pad_id = pad_id
        self._reference = HuggingFace(tokenizer)
        self._encoder: Encoder = self._reference
        self.reason = "requested"
        """Why this encoder is used."""
        if not only_tokenizers:
            try:
                self._encoder = Nanotoken(tokenizer.to_str())
                self.reason = "its ids equal those of tokenizers on odd texts and on a sample of each file"
            except Exception as error:  # noqa: BLE001 - a young library may raise anything; tokenizers replaces it then
                self.reason = _unusable(error)
        log.info("encoder: %s (%s)", self.encoder_name, self.reason)
        self._cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        self._encoding = ThreadPoolExecutor(self._cores, thread_name_prefix="encode")
        self._checking = ThreadPoolExecutor(1, thread_name_prefix="check")

    def __enter__(self) -> "CorpusPacking":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._encoding.shutdown(cancel_futures=True)
        self._checking.shutdown(cancel_futures=True)

    @property
    def encoder_name(self) -> str:
        return self._encoder.name

    def pack(self, path: Path, target: Path) -> PackedFile:
        """Write the ids of a corpus file, which must have documents."""
        if self._encoder is not self._reference:
            checking = self._checking.submit(self._mismatch, path)
            try:
                file = self._pack(path, target)
                problem = checking.result()
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - as above
                problem = _unusable(error)
            if problem is None:
                return file
            self._encoder, self.reason = self._reference, problem
            log.warning("warning: switching to the encoder %s (%s)", self.encoder_name, self.reason)
        return self._pack(path, target)

    def _mismatch(self, path: Path) -> str | None:
        """Return how the ids of odd texts and of a sample of a file differ, or None if they are equal."""
        fraction = min(1.0, SAMPLE_BYTES / path.stat().st_size)
        sample = corpus_files.sample(path, fraction, seed=[0], at_most_bytes=SAMPLE_BYTES)
        differing = first_difference(self._encoder, self._reference, [*(text.encode() for text in ODD_TEXTS), *sample])
        return None if differing is None else f"nanotoken gives different ids for {differing[:40]!r}"

    def _pack(self, path: Path, target: Path) -> PackedFile:
        return pack(
            self._encoded(path),
            target,
            sequence_length=self._sequence_length,
            vocabulary_size=self._vocabulary_size,
            pad_id=self._pad_id,
        )

    def _encoded(self, path: Path) -> "Iterator[NDArray[np.uint32]]":
        """Yield the ids of a file's documents, block by block. The next blocks are encoded while one is written."""
        pending: deque[Future[NDArray[np.uint32]]] = deque()
        for block in corpus_files.blocks(path, BLOCK_BYTES):
            pending.append(self._encoding.submit(self._encoder.encode, block.split(corpus_files.END)))
            if len(pending) > 2 * self._cores:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _unusable(error: Exception) -> str:
    return f"nanotoken cannot be used: {type(error).__name__}: {error}"
