"""From text to token ids, the fastest way that gives the very ids of Hugging Face's `tokenizers`.

`nanotoken` reads files of documents itself and is tens of times as fast, but it is young. So it is held against
`tokenizers` on odd texts, on a sample of the job's own data before it is used, and on some documents of every file that
it has encoded; where one id differs, or it is not installed, `tokenizers` does the work.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jobs.errors import UsageError
from jobs.train import corpus_files
from jobs.train.odd_texts import ODD_TEXTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BATCH_BYTES = 4 << 20
"""Text that `tokenizers` gets at once; its results take many times as much memory."""


class Encoder(Protocol):
    """Makes the ids of whole files."""

    name: str

    def encode_file(self, path: Path) -> "NDArray[np.uint32]":
        """`[CLS] … [SEP]` of each document of a corpus file, one after the other."""

    def encode(self, texts: list[str]) -> "NDArray[np.uint32]":
        """The same of texts in memory."""


class HuggingFace:
    """`tokenizers`, on all cores."""

    name = "tokenizers"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Ranks have it off (jobs.train.launch); this job is alone on its node.
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        # The fast one leaves out where each token came from; tokenizers has it since 0.20.
        self._encode_batch = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)

    def encode_file(self, path: Path) -> "NDArray[np.uint32]":
        batches = corpus_files.batches(path, at_most_bytes=_BATCH_BYTES)
        return _joined(self.encode(batch) for batch in batches)

    def encode(self, texts: list[str]) -> "NDArray[np.uint32]":
        return _joined(np.array(encoding.ids, dtype=np.uint32) for encoding in self._encode_batch(texts))


class Nanotoken:
    """`nanotoken`, on all cores. Its constructor raises whatever the library raises where it cannot do the work."""

    name = "nanotoken"

    def __init__(self, tokenizer_json: str) -> None:
        import nanotoken

        self._library = nanotoken
        self._tokenizer = nanotoken.Tokenizer.from_json(tokenizer_json)

    def encode_file(self, path: Path) -> "NDArray[np.uint32]":
        if not path.stat().st_size:
            return np.empty(0, dtype=np.uint32)
        source = self._library.TextFileSource(str(path), separator=corpus_files.END)
        ids: NDArray[np.uint32] = self._tokenizer.encode_files(source).ids
        return ids

    def encode(self, texts: list[str]) -> "NDArray[np.uint32]":
        ids: NDArray[np.uint32] = self._tokenizer.encode_batch(texts).ids
        return ids


@dataclass(frozen=True)
class Choice:
    """Which encoder a job uses, and why."""

    encoder: Encoder
    reason: str

    def __str__(self) -> str:
        return f"{self.encoder.name} ({self.reason})"


def load(path: Path) -> Any:
    """The tokenizer of a tokenizer.json, which cuts and pads nothing. Raises UsageError where it is none."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise UsageError(f"{path.name} of the tokenizer cannot be loaded: {reason}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def choose(tokenizer: Any, sample: list[str]) -> Choice:
    """The fastest encoder whose ids equal those of `tokenizers` on the sample and on odd texts."""
    reference = HuggingFace(tokenizer)
    try:
        fast = Nanotoken(tokenizer.to_str())
        texts = [*ODD_TEXTS, *sample]
        differing = difference(fast, reference, texts)
    except ImportError as error:
        return Choice(reference, f"nanotoken is not installed: {error}")
    except Exception as error:  # noqa: BLE001 - a young library may raise anything; the work is done all the same
        return Choice(reference, f"nanotoken cannot be used: {type(error).__name__}: {error}")
    if differing is not None:
        return Choice(reference, f"nanotoken gives other ids for {differing[:40]!r}")
    characters = sum(len(text) for text in sample)
    return Choice(
        fast,
        f"its ids equal those of tokenizers on {len(sample)} documents of {characters} characters of this corpus and "
        f"on {len(ODD_TEXTS)} odd texts",
    )


def difference(encoder: Encoder, reference: Encoder, texts: list[str]) -> str | None:
    """The first text for which they give different ids."""
    if np.array_equal(encoder.encode(texts), reference.encode(texts)):
        return None
    return next((text for text in texts if not np.array_equal(encoder.encode([text]), reference.encode([text]))), "")


def first_and_last_agree(ids: "NDArray[np.uint32]", path: Path, reference: Encoder, *, each_bytes: int) -> bool:
    """Whether the ids of a corpus file begin and end with those of its first and of its last documents."""
    first = reference.encode([document.decode() for document in corpus_files.first_documents(path, each_bytes)])
    last = reference.encode([document.decode() for document in corpus_files.last_documents(path, each_bytes)])
    return np.array_equal(ids[: len(first)], first) and np.array_equal(ids[-len(last) :], last)


def _joined(parts: Iterable["NDArray[np.uint32]"]) -> "NDArray[np.uint32]":
    return np.concatenate([np.empty(0, dtype=np.uint32), *parts])
