"""Files of a corpus into files of packed tokens, by the fastest encoder whose ids are those of `tokenizers`.

`nanotoken` is tens of times as fast as `tokenizers`, but it is young. So it is held against `tokenizers` on odd texts,
on a sample of the job's own data, and on the first and the last documents of every file. `tokenizers` encodes these
while `nanotoken` encodes the file, and what comes of it is given out when they agree. Where one id differs, or it is
not installed, `tokenizers` makes the file, and all that follow.

A file is read, encoded and written in blocks, so that memory grows neither with a file nor with the corpus.
"""

import logging
import os
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.train.data import corpus_files
from jobs.train.data.encoders import ODD_TEXTS, Encoder, HuggingFace, Nanotoken, difference
from jobs.train.data.packed_tokens import PackedFile, pack

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger("trainyard")

SAMPLE_BYTES = 1 << 19
"""Text of the corpus on which a fast encoder is held against `tokenizers` before anything that it made is used."""

CHECKED_BYTES = 1 << 16
"""Text at the beginning and at the end of each file on which its ids are held against those of `tokenizers`."""

BLOCK_BYTES = 1 << 20
"""Text of a file that one thread encodes at once."""


@dataclass(frozen=True)
class Choice:
    """The encoder that a job uses, and why."""

    encoder: Encoder
    reason: str

    def __str__(self) -> str:
        return f"{self.encoder.name} ({self.reason})"


@dataclass(frozen=True)
class Ends:
    """Ids with which those of a file have to begin and to end."""

    first: "NDArray[np.uint32]"
    last: "NDArray[np.uint32]"

    @classmethod
    def of(cls, path: Path, reference: Encoder, *, each_bytes: int) -> "Ends":
        """Encode the first and the last documents of a file."""
        return cls(
            first=reference.encode(corpus_files.first_documents(path, each_bytes)),
            last=reference.encode(corpus_files.last_documents(path, each_bytes)),
        )

    def agree(self, ids: "NDArray[Any]") -> bool:
        return np.array_equal(ids[: len(self.first)], self.first) and np.array_equal(ids[-len(self.last) :], self.last)


class CorpusPacking:
    """Packs the files of one corpus, one after the other, on all cores."""

    def __init__(self, tokenizer: Any, *, sequence_length: int, pad_id: int, only_tokenizers: bool = False) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._sequence_length = sequence_length
        self._pad_id = pad_id
        self._reference = HuggingFace(tokenizer)
        self.choice: Choice | None = Choice(self._reference, "asked for") if only_tokenizers else None
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

    def pack(self, path: Path, target: Path) -> PackedFile:
        """Write the ids of a corpus file that has documents; `choice` tells whose they are."""
        before = self.choice
        choice = before or self._fastest()
        if choice.encoder is self._reference:
            self.choice = choice
            file = self._written(self._reference, path, target)
        else:
            file = self._checked(choice, path, target)
        if before is None:
            log.info("encoder: %s", self.choice)
        elif self.choice is not before:
            log.warning("warning: encoder from here on: %s", self.choice)
        return file

    def _fastest(self) -> Choice:
        """Choose the fastest encoder there is, before its ids were held against any others."""
        try:
            return Choice(Nanotoken(self._tokenizer.to_str()), "")
        except ImportError as error:
            return Choice(self._reference, f"nanotoken is not installed: {error}")
        except Exception as error:  # noqa: BLE001 - a young library may raise anything; the work is done all the same
            return Choice(self._reference, f"nanotoken cannot be used: {type(error).__name__}: {error}")

    def _compare(self, encoder: Encoder, path: Path) -> str:
        """Hold it against `tokenizers` on a sample of a file. Raises _OtherIdsError."""
        fraction = min(1.0, SAMPLE_BYTES / path.stat().st_size)
        sample = list(corpus_files.sample(path, fraction, seed=[0], at_most_bytes=SAMPLE_BYTES))
        differing = difference(encoder, self._reference, [*(text.encode() for text in ODD_TEXTS), *sample])
        if differing is not None:
            raise _OtherIdsError(f"{encoder.name} gives other ids for {differing[:40]!r}")
        return (
            f"its ids equal those of tokenizers on {len(sample)} documents of {sum(map(len, sample))} bytes of this "
            f"corpus and on {len(ODD_TEXTS)} odd texts"
        )

    def _checked(self, choice: Choice, path: Path, target: Path) -> PackedFile:
        """Pack by the encoder of `choice`; where its ids are not right, by `tokenizers`, which `choice` becomes."""
        encoder = choice.encoder
        sample = None if self.choice else self._checking.submit(self._compare, encoder, path)
        ends = self._checking.submit(Ends.of, path, self._reference, each_bytes=CHECKED_BYTES)
        try:
            file = self._written(encoder, path, target)
            if sample is not None:
                self.choice = Choice(encoder, sample.result())
            if ends.result().agree(np.load(target, mmap_mode="r").reshape(-1)[: file.tokens]):
                return file
            reason = f"{encoder.name} gave other ids for documents of {path.name}"
        except OSError:
            raise
        except _OtherIdsError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - as above
            reason = f"{encoder.name} cannot be used: {type(error).__name__}: {error}"
        self.choice = Choice(self._reference, reason)
        return self._written(self._reference, path, target)

    def _written(self, encoder: Encoder, path: Path, target: Path) -> PackedFile:
        return pack(
            self._encoded(encoder, path),
            target,
            sequence_length=self._sequence_length,
            vocabulary_size=self._vocabulary_size,
            pad_id=self._pad_id,
        )

    def _encoded(self, encoder: Encoder, path: Path) -> "Iterator[NDArray[np.uint32]]":
        """Give the ids of a file's documents, block by block; while one is written the following are encoded."""
        coming: deque[Future[NDArray[np.uint32]]] = deque()
        for block in corpus_files.blocks(path, BLOCK_BYTES):
            coming.append(self._encoding.submit(_encode, encoder, block))
            if len(coming) > 2 * self._cores:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


class _OtherIdsError(Exception):
    """An encoder gave other ids than `tokenizers`. Its message says for what."""


def _encode(encoder: Encoder, block: bytes) -> "NDArray[np.uint32]":
    return encoder.encode(block.split(corpus_files.END))
