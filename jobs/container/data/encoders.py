"""From text to token ids: Hugging Face's `tokenizers`, and `nanotoken`, which gives the same ids much faster.

Which of them a job uses is decided in jobs.container.data.corpus_packing.
"""

# ruff: noqa: RUF001 - odd texts have characters that look like others

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jobs.container.data import corpus_files
from jobs.core.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BATCH_BYTES = 1 << 18
"""Text that `tokenizers` gets at once; its results take thirty times as much memory."""

_CACHED_WORDS = 1 << 18
"""Words whose ids `nanotoken` keeps in each thread. Its own choice is four times as many: a fifth faster on half a
gigabyte of text, but its memory then grows as long as a corpus has new words, by about 200 MB for each core."""

ODD_TEXTS = (
    "",
    " ",
    "\t\r\n\x0b\x0c\x1c\x85\u00a0\u2028\u3000 a\u200bb\ufeffc",
    "control \x01\x02\x7f\x80\x9f characters\x00 and \ufffd replacement",
    "[CLS] special [SEP] tokens [MASK][PAD]in[UNK]text [mask] [ SEP ]",
    "café cafe\u0301 Ångström ÅNGSTRÖM naïve Straße ẞ ŒUVRE fi ﬁ ＦＵＬＬ",
    "İstanbul ıI ΟΔΥΣΣΕΥΣ Σ ς ǅ K Å µ",
    "漢字かな交じり文、日本語。한국어 텍스트 中文繁體 𠀀𪚥",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈🇩🇪👍🏽 ☎️ \U0010ffff\ue000",
    "हिन्दी ประเทศไทย العربيّة עִבְרִית тест Ёлка",
    "e\u0301\u0302\u0303\u0304\u0305" * 10,
    "x" * 99 + " " + "y" * 100 + " " + "z" * 101 + " " + "ab-" * 200,
    "w" * 5000 + "." * 500 + "\u0301" * 300,
    "a_b__c d.e,f;g:h!i?j'k\"l(m)n[o]p{q}r|s\\t/u<v>w=x+y*z&#@$%^~`–—…“”‘’«»¿¡§¶€£¥©®™°±²³¼½×÷",
    "http://example.org/a?b=c&d=e#f 1,234.56 3.14e-10 0xDEADBEEF foo@bar.com C++ .NET",
    "##ing ##ed # # ## [unused1] <s></s> <pad>",
)
"""Texts that tokenizers most often read differently."""


class Encoder(Protocol):
    """Makes ids. Several threads may call it at once."""

    name: str

    def encode(self, documents: list[bytes]) -> "NDArray[np.uint32]":
        """`[CLS] … [SEP]` of each document, one after the other."""


class HuggingFace:
    """`tokenizers`, on all cores."""

    name = "tokenizers"

    def __init__(self, tokenizer: Any) -> None:
        # Ranks have it off (jobs.container.launch); this job is alone on its node.
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        # The fast one leaves out where each token came from.
        self._encode_batch = tokenizer.encode_batch_fast

    def encode(self, documents: list[bytes]) -> "NDArray[np.uint32]":
        ids = [np.empty(0, dtype=np.uint32)]
        for batch in corpus_files.batches(documents, at_most_bytes=_BATCH_BYTES):
            ids += [np.array(encoding.ids, dtype=np.uint32) for encoding in self._encode_batch(batch)]
        return np.concatenate(ids)


class Nanotoken:
    """`nanotoken`, on one core. Its constructor raises whatever the library raises where it cannot do the work."""

    name = "nanotoken"

    def __init__(self, tokenizer_json: str) -> None:
        import nanotoken

        nanotoken.set_cache_entries(_CACHED_WORDS)
        self._tokenizer = nanotoken.Tokenizer.from_json(tokenizer_json)

    def encode(self, documents: list[bytes]) -> "NDArray[np.uint32]":
        ids: NDArray[np.uint32] = self._tokenizer.encode_batch(documents, parallel=False).ids
        return ids


def load(path: Path) -> Any:
    """Load the tokenizer of a tokenizer.json, which cuts and pads nothing. Raises UsageError where it is none."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise UsageError(f"{path.name} of the tokenizer cannot be loaded: {reason}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def difference(encoder: Encoder, reference: Encoder, documents: list[bytes]) -> str | None:
    """Return the first document for which two encoders give different ids."""
    if np.array_equal(encoder.encode(documents), reference.encode(documents)):
        return None
    differing = (one for one in documents if not np.array_equal(encoder.encode([one]), reference.encode([one])))
    return next(differing, b"").decode()
