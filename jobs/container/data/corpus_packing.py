"""Files of a corpus into files of packed tokens, by the fastest encoder whose ids are those of `tokenizers`.

`nanotoken` is tens of times as fast as `tokenizers`, but it is young. So its ids are compared with those of
`tokenizers` on odd texts, and on a sample of every file while it encodes that file. If one id differs, or the library
raises or is not installed, `tokenizers` makes the file, and all that follow.

A file is read, encoded and written in blocks, so that memory grows neither with a file nor with the corpus.
"""

import logging
import os
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.container.data import corpus_files
from jobs.container.data.encoders import ODD_TEXTS, Encoder, HuggingFace, Nanotoken, difference
from jobs.container.data.packed_tokens import PackedFile, pack

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger("trainyard")

SAMPLE_BYTES = 1 << 18
"""Text of each file on which the ids of a fast encoder are compared with those of `tokenizers`."""

BLOCK_BYTES = 1 << 20
"""Text of a file that one thread encodes at once."""


class CorpusPacking:
    """Packs the files of one corpus, one after the other, on all cores."""

    def __init__(self, tokenizer: Any, *, sequence_length: int, pad_id: int, only_tokenizers: bool = False) -> None:
        self._vocabulary_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._sequence_length = sequence_length
        self._pad_id = pad_id
        self._reference = HuggingFace(tokenizer)
        self._encoder: Encoder = self._reference
        self.reason = "asked for"
        """Why this encoder is used."""
        if not only_tokenizers:
            try:
                self._encoder = Nanotoken(tokenizer.to_str())
                self.reason = "its ids equal those of tokenizers on odd texts and on a sample of each file"
            except Exception as error:  # noqa: BLE001 - a young library may raise anything; the work is done all the same
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
        """Write the ids of a corpus file that has documents."""
        if self._encoder is not self._reference:
            checking = self._checking.submit(self._fault, path)
            try:
                file = self._written(path, target)
                fault = checking.result()
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - as above
                fault = _unusable(error)
            if fault is None:
                return file
            self._encoder, self.reason = self._reference, fault
            log.warning("warning: encoder from here on: %s (%s)", self.encoder_name, self.reason)
        return self._written(path, target)

    def _fault(self, path: Path) -> str | None:
        """Return what is wrong with the ids of odd texts and of a sample of a file, if anything is."""
        fraction = min(1.0, SAMPLE_BYTES / path.stat().st_size)
        sample = corpus_files.sample(path, fraction, seed=[0], at_most_bytes=SAMPLE_BYTES)
        differing = difference(self._encoder, self._reference, [*(text.encode() for text in ODD_TEXTS), *sample])
        return None if differing is None else f"nanotoken gives other ids for {differing[:40]!r}"

    def _written(self, path: Path, target: Path) -> PackedFile:
        return pack(
            self._encoded(path),
            target,
            sequence_length=self._sequence_length,
            vocabulary_size=self._vocabulary_size,
            pad_id=self._pad_id,
        )

    def _encoded(self, path: Path) -> "Iterator[NDArray[np.uint32]]":
        """Give the ids of a file's documents, block by block; while one is written the following are encoded."""
        coming: deque[Future[NDArray[np.uint32]]] = deque()
        for block in corpus_files.blocks(path, BLOCK_BYTES):
            coming.append(self._encoding.submit(self._encoder.encode, block.split(corpus_files.END)))
            if len(coming) > 2 * self._cores:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def _unusable(error: Exception) -> str:
    return f"nanotoken cannot be used: {type(error).__name__}: {error}"
