"""A WordPiece vocabulary learnt from text, the same one whenever it is learnt from the same text.

Hugging Face's trainer numbers the characters that go on a word (`##x`) in the order in which a hash table gives its
words, and breaks ties by these numbers, so that two runs learn two vocabularies. Here it is told all characters
beforehand, in a fixed order.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jobs.core.errors import UsageError

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Their ids are 0 to 4."""

PREFIX = "##"

MIN_FREQUENCY = 2
"""How often a pair of tokens has to occur in the texts to become one."""

Texts = Callable[[], Iterator[list[str]]]
"""Gives all texts, in lists of some megabytes, each time it is called: they need not fit into memory."""


def learn(texts: Texts, *, size: int, lowercase: bool, max_characters: int) -> Any:
    """Learn a tokenizer as BERT's with `size` tokens, or fewer where the texts do not give as many.

    Raises UsageError where not even the characters fit.
    """
    from tokenizers import models, processors, trainers

    tokenizer = _untrained(lowercase=lowercase)
    characters = _characters(texts(), tokenizer, at_most=max_characters)
    inner = [PREFIX + character for character in characters if _goes_on(character, tokenizer)]
    fixed = len(SPECIAL) + len(characters) + len(inner)
    if size < fixed:
        raise UsageError(
            f"vocabulary_size {size} is less than the {fixed} tokens that {len(characters)} different characters need",
            next_step=f"set it to {fixed} at least, or max_characters lower",
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
    learnt = sorted((number, token) for token, number in tokenizer.get_vocab().items() if token not in known)
    tokens = [*SPECIAL, *characters, *inner, *(token for _, token in learnt)]
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
    """Return BERT's pipeline without a vocabulary; uncased, it drops accents too, as the published one does."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=PREFIX)
    return tokenizer


def _characters(texts: Iterator[list[str]], tokenizer: Any, *, at_most: int) -> list[str]:
    """List the most frequent characters of the normalized texts, in the order of Unicode."""
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


def _goes_on(character: str, tokenizer: Any) -> bool:
    """Return whether a character can stand inside a word: punctuation and Chinese characters are words of their own."""
    normalized = tokenizer.normalizer.normalize_str(f"a{character}a")
    return len(tokenizer.pre_tokenizer.pre_tokenize_str(normalized)) == 1
