"""Train a vocabulary, load a tokenizer, and encode texts to token ids.

Hugging Face's `tokenizers` is the reference. `nanotoken` gives the same ids much faster. CorpusPacking in
jobs.container.data.packed_tokens chooses between them.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jobs.aws import s3 as object_store
from jobs.container.data import corpus_files
from jobs.container.data.artifacts import TOKENIZER_KIND, identity_of, open_artifact
from jobs.container.data.sources import hub_folder, is_on_hub
from jobs.core.artifact import POINTER
from jobs.core.errors import NotFoundError, UsageError
from jobs.core.locations import S3, S3Location, refuse_unresolved
from jobs.core.run import MANIFEST
from jobs.data_checks.model_files import CONFIGURATION, TOKENIZER, TOKENIZER_FILES

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from numpy.typing import NDArray


# ruff: noqa: RUF001 - odd texts have characters that look like others


_BATCH_BYTES = 1 << 18
"""Bytes of text to pass to `tokenizers` at once. Its results take thirty times as much memory."""

_CACHED_WORDS = 1 << 18
"""Words whose ids `nanotoken` caches in each thread. Its default, four times as many, is a fifth faster on half a
gigabyte of text, but memory then grows by about 200 MB per core, as long as a corpus has new words."""

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
"""Texts that different tokenizers are most likely to encode differently."""


class Encoder(Protocol):
    """Encodes texts to token ids. Several threads may call it at once."""

    name: str

    def encode(self, documents: list[bytes]) -> "NDArray[np.uint32]":
        """Return the ids of each document with its special tokens (`[CLS] … [SEP]`), concatenated."""


class HuggingFace:
    """The encoder of Hugging Face's `tokenizers`, on all cores."""

    name = "tokenizers"

    def __init__(self, tokenizer: Any) -> None:
        # The launcher disables this for ranks (jobs.container.launch), but this job is alone on its node.
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        # The fast method does not record where each token came from.
        self._encode_batch = tokenizer.encode_batch_fast

    def encode(self, documents: list[bytes]) -> "NDArray[np.uint32]":
        ids = [np.empty(0, dtype=np.uint32)]
        for batch in corpus_files.batches(documents, at_most_bytes=_BATCH_BYTES):
            ids += [np.array(encoding.ids, dtype=np.uint32) for encoding in self._encode_batch(batch)]
        return np.concatenate(ids)


class Nanotoken:
    """The encoder of `nanotoken`, on one core. Its constructor passes on any error of the library."""

    name = "nanotoken"

    def __init__(self, tokenizer_json: str) -> None:
        import nanotoken

        nanotoken.set_cache_entries(_CACHED_WORDS)
        self._tokenizer = nanotoken.Tokenizer.from_json(tokenizer_json)

    def encode(self, documents: list[bytes]) -> "NDArray[np.uint32]":
        ids: NDArray[np.uint32] = self._tokenizer.encode_batch(documents, parallel=False).ids
        return ids


def load_tokenizer(path: Path) -> Any:
    """Load a tokenizer.json, without truncation and padding. Raises UsageError if it is not a tokenizer."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise UsageError(f"{path.name} of the tokenizer cannot be loaded: {reason}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def first_difference(encoder: Encoder, reference: Encoder, documents: list[bytes]) -> str | None:
    """Return the first document that two encoders encode differently, or None."""
    if np.array_equal(encoder.encode(documents), reference.encode(documents)):
        return None
    differing = (one for one in documents if not np.array_equal(encoder.encode([one]), reference.encode([one])))
    return next(differing, b"").decode()


SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Special tokens, with the ids 0 to 4."""

PREFIX = "##"

MIN_FREQUENCY = 2
"""How often a pair of tokens must occur in the texts to become one token."""

Texts = Callable[[], Iterator[list[str]]]
"""Each call returns all texts again, in lists of a few megabytes, so that they need not fit into memory."""


def train_wordpiece(texts: Texts, *, size: int, lowercase: bool, max_characters: int) -> Any:
    """Train a tokenizer like BERT's with `size` tokens, or fewer if the texts do not yield as many.

    The same texts always give the same vocabulary. Hugging Face's trainer numbers the characters within words (`##x`)
    in the order of a hash table, and breaks ties by these numbers, so two runs would learn different vocabularies. To
    prevent this, we pass all characters to it in a fixed order.

    Raises UsageError if `size` is too small for the characters.
    """
    from tokenizers import models, processors, trainers

    tokenizer = _untrained(lowercase=lowercase)
    characters = _characters(texts(), tokenizer, at_most=max_characters)
    inner = [PREFIX + character for character in characters if _continues_word(character, tokenizer)]
    fixed = len(SPECIAL) + len(characters) + len(inner)
    if size < fixed:
        raise UsageError(
            f"vocabulary_size {size} is less than the {fixed} tokens that {len(characters)} different characters need",
            next_step=f"set it to at least {fixed}, or set a lower max_characters",
        )
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=[*SPECIAL, *inner],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        continuing_subword_prefix=PREFIX,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    known = {*SPECIAL, *characters, *inner}
    learned = sorted((number, token) for token, number in tokenizer.get_vocab().items() if token not in known)
    tokens = [*SPECIAL, *characters, *inner, *(token for _, token in learned)]
    vocabulary = {token: number for number, token in enumerate(tokens)}

    result = _untrained(lowercase=lowercase)
    result.model = models.WordPiece(vocabulary, unk_token="[UNK]", continuing_subword_prefix=PREFIX)  # noqa: S106 - no secret
    result.add_special_tokens(list(SPECIAL))
    result.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return result


def _untrained(*, lowercase: bool) -> Any:
    """Return BERT's pipeline without a vocabulary. `lowercase` also removes accents, as in BERT-uncased."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=PREFIX)
    return tokenizer


def _characters(texts: Iterator[list[str]], tokenizer: Any, *, at_most: int) -> list[str]:
    """Return the most frequent characters of the normalized texts, in Unicode order."""
    counts = np.zeros(0x110000, dtype=np.int64)
    for batch in texts:
        found = np.bincount(np.frombuffer("".join(batch).encode("utf-32-le"), dtype="<u4"))
        counts[: len(found)] += found
    normalized: Counter[str] = Counter()
    for code in np.flatnonzero(counts).tolist():
        for character in tokenizer.normalizer.normalize_str(chr(code)):
            normalized[character] += int(counts[code])
    words = [character for character in normalized if not character.isspace()]
    return sorted(sorted(words, key=lambda character: (-normalized[character], character))[:at_most])


def _continues_word(character: str, tokenizer: Any) -> bool:
    """Return whether a character can occur inside a word. Punctuation and Chinese characters are separate words."""
    normalized = tokenizer.normalizer.normalize_str(f"a{character}a")
    return len(tokenizer.pre_tokenizer.pre_tokenize_str(normalized)) == 1


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer's files on this machine."""

    folder: Path
    names: list[str]
    identity: Any
    """The artifact's fingerprint, or the hashes of the files."""


def tokenizer_files(location: str, *, s3: Callable[[], "S3Client"], scratch: Path) -> TokenizerFiles:
    """Download the tokenizer at `location`: an artifact or a model's folder, on S3, on the hub or local.

    Raises NotFoundError if there is no tokenizer, and UsageError if `location` is an artifact of another kind.
    """
    refuse_unresolved(location)
    source: Path | None = None
    if is_on_hub(location):
        source = hub_folder(location, "model", [*TOKENIZER_FILES, CONFIGURATION, MANIFEST])
        present = object_store.files_below(source)
    elif location.startswith(S3):
        present = [*object_store.sizes(s3(), S3Location.parse(location))]
    else:
        source = Path(location)
        present = object_store.files_below(source) if source.is_dir() else []
    if {MANIFEST, POINTER} & {*present}:
        artifact = open_artifact(location, kind=TOKENIZER_KIND, s3=s3, scratch=scratch)
        return TokenizerFiles(
            folder=artifact.download(), names=[*artifact.manifest.files], identity=artifact.manifest.fingerprint
        )
    names = [name for name in TOKENIZER_FILES if name in present]
    if TOKENIZER not in names:
        raise NotFoundError(
            f"{location} is not a tokenizer: it has neither {TOKENIZER} nor {MANIFEST} nor {POINTER}",
            next_step="name a run of train-tokenizer, or a model that save_pretrained wrote with its fast tokenizer",
        )
    folder = scratch / "tokenizer"
    folder.mkdir()

    def copy(name: str) -> None:
        if source is None:
            object_store.download_below(s3(), S3Location.parse(location), name, folder)
        else:
            shutil.copyfile(source / name, folder / name)

    for name in names:
        copy(name)
    identity = identity_of(str(folder), s3=s3)
    if CONFIGURATION in present:  # has the model's type, which decides a tokenizer's class and special tokens
        copy(CONFIGURATION)
        names.append(CONFIGURATION)
    return TokenizerFiles(folder=folder, names=names, identity=identity)
