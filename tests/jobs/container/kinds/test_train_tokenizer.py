"""A WordPiece vocabulary from a sample of a corpus: `AutoTokenizer` loads it, and it is reproducible."""

from collections.abc import Iterator
from typing import Any

import pytest

from jobs.container.data.artifacts import OpenArtifact
from jobs.container.data.tokenizer import train_wordpiece
from jobs.container.kinds import train_tokenizer
from jobs.core.errors import UsageError
from jobs.spec.kinds.train_tokenizer import TrainTokenizer
from tests.support.container.corpora import Workshop, contents

CASED = "Crème brûlée in Paris"


@pytest.fixture
def corpus(real_corpus: OpenArtifact) -> OpenArtifact:
    return real_corpus


def loaded(artifact: OpenArtifact) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(artifact.download())


def test_the_tokenizer_loads_as_berts_and_is_measured(workshop: Workshop, corpus: OpenArtifact) -> None:
    made = workshop.tokenizer(corpus, vocabulary_size=1500, sample_fraction=0.5)
    tokenizer = loaded(made)
    assert type(tokenizer).__name__ in ("BertTokenizer", "BertTokenizerFast")  # transformers 5, and Gaudi's
    assert (len(tokenizer), tokenizer.model_max_length, tokenizer.is_fast) == (1500, 512, True)
    assert tokenizer.convert_tokens_to_ids(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]) == [0, 1, 2, 3, 4]
    assert tokenizer.tokenize("the Package") == ["the", "package"]
    assert tokenizer.tokenize(CASED) == tokenizer.tokenize("creme brulee in paris")
    assert tokenizer("the package", "the test")["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
    assert tokenizer.decode(tokenizer("the package")["input_ids"]) == "[CLS] the package [SEP]"

    result = workshop.result()
    assert result["vocabulary_size"] == 1500
    assert 0.1 < result["held_out_tokens_per_byte"] < 0.6
    assert result["held_out_bytes"] == corpus.manifest.files["held-out-00000.txt"].counts["text_bytes"] + sum(
        file.counts["text_bytes"]
        for name, file in corpus.manifest.files.items()
        if name.startswith("held-out") and name != "held-out-00000.txt"
    )
    assert 0.3 < result["sample_bytes"] / corpus.manifest.count("text_bytes") < 0.7
    assert workshop.metrics()[-1]["training_seconds"] > 0
    # The same sample gives the same vocabulary once, and another fraction gives another
    written = workshop.modified(made)
    workshop.tokenizer(corpus, vocabulary_size=1500, sample_fraction=0.5)
    assert workshop.modified(made) == written
    workshop.delete(made)
    again = workshop.tokenizer(corpus, vocabulary_size=1500, sample_fraction=0.5)
    assert contents(again.manifest) == contents(made.manifest)
    assert contents(workshop.tokenizer(corpus, vocabulary_size=1500, seed=1).manifest) != contents(made.manifest)


@pytest.mark.parametrize(
    ("given", "text_bytes", "expected"),
    [
        ("auto", 1_000_000, 1.0),
        ("auto", 32_000_000, 0.5),
        ("auto", 160_000_000, 0.1),
        ("auto", 10**12, 0.1),
        (0.02, 1_000_000, 0.02),
    ],
)
def test_a_larger_fraction_of_a_small_corpus_is_sampled(given: Any, text_bytes: int, expected: float) -> None:
    arguments = TrainTokenizer(corpus="run://clean", sample_fraction=given)
    assert train_tokenizer.sample_fraction(arguments, text_bytes) == pytest.approx(expected)


def test_ties_are_broken_the_same_way_in_every_run() -> None:
    """Words of equal frequency and many characters, which the library orders differently in each run."""
    words = [f"{first}{second}{third}" for first in "abcdefgh" for second in "ijklmnop" for third in "qrstuvwx"]

    def texts() -> Iterator[list[str]]:
        yield words * 2

    vocabularies = {train_wordpiece(texts, size=200, lowercase=True, max_characters=1000).to_str() for _ in range(6)}
    assert len(vocabularies) == 1


def test_rare_characters_are_unknown_tokens() -> None:
    def texts() -> Iterator[list[str]]:
        yield ["common words and common letters"] * 5 + ["漢字 rare"]

    tokenizer = train_wordpiece(texts, size=100, lowercase=True, max_characters=12)
    assert tokenizer.encode("漢字").tokens == ["[CLS]", "[UNK]", "[UNK]", "[SEP]"]
    assert "[UNK]" not in tokenizer.encode("common").tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocabulary_size": 100, "sample_fraction": 1}, "vocabulary_size 100 is less than the .* tokens that"),
        ({"sample_fraction": 0.0001}, r"none of the corpus's .* documents was sampled"),
    ],
)
def test_impossible_arguments_are_reported(
    workshop: Workshop, corpus: OpenArtifact, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        workshop.tokenizer(corpus, **arguments)
