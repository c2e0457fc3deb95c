"""Packed tokens of a corpus: the ids of Hugging Face's tokenizer, complete, with either library."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.container.data import packed_tokens, token_table
from jobs.container.data.artifacts import OpenArtifact
from jobs.container.data.corpus_files import END
from jobs.container.data.packed_tokens import SPLITS, CorpusPacking, Index, PackedTokens, Split
from jobs.container.data.tokenizer import Nanotoken, load_tokenizer
from jobs.container.kinds.tokenize import tokenize
from jobs.core.errors import NotFoundError, UsageError
from jobs.spec.kinds.tokenize import Tokenize
from tests.support.container.corpora import Workshop, contents, paragraphs, texts_of

VOCABULARY = 1500


@pytest.fixture
def corpus(real_corpus: OpenArtifact) -> OpenArtifact:
    return real_corpus


@pytest.fixture
def tokenizer(real_tokenizer: OpenArtifact) -> OpenArtifact:
    return real_tokenizer


def expected_ids(corpus: OpenArtifact, tokenizer: OpenArtifact, split: Split) -> list[int]:
    """The ids of `transformers`, document by document."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer.download())
    return [number for text in texts_of(corpus, split) for number in loaded(text)["input_ids"]]


def packed_ids(packed: OpenArtifact, split: Split) -> list[int]:
    """Without the padding that ends each file."""
    index = Index.read(packed.download())
    rows = PackedTokens(packed.download(), split)
    ids, start = [], 0
    for file in index.files[split]:
        batch = rows.__getitems__(range(start, start + file.sequences)).flatten().tolist()
        assert set(batch[file.tokens :]) <= {index.pad_id}
        ids += batch[: file.tokens]
        start += file.sequences
    return ids


@pytest.mark.parametrize("encoder", ["auto", "tokenizers"])
def test_the_ids_match_hugging_face_and_none_is_lost(
    *,
    workshop: Workshop,
    corpus: OpenArtifact,
    tokenizer: OpenArtifact,
    encoder: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    packed = workshop.packed(corpus, tokenizer, sequence_length=64, encoder=encoder)
    for split in ("train", "held-out"):
        expected = expected_ids(corpus, tokenizer, split)
        assert packed_ids(packed, split) == expected
        assert len(expected) > 1000
    index = Index.read(packed.download())
    assert (index.sequence_length, index.vocabulary_size) == (64, VOCABULARY)
    assert index.special_ids == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    assert len(index.files["train"]) > 2
    result = workshop.result()
    assert result["tokens"] == index.tokens("train")
    assert result["held_out_tokens"] == index.tokens("held-out")
    assert result["bytes"] == 128 * (result["sequences"] + result["held_out_sequences"] + len(index.files["train"]) * 2)
    assert result["tokens_per_second"] > 0
    assert result["encoder"] == ("nanotoken" if encoder == "auto" else "tokenizers")
    assert result["encoder_reason"]
    assert result["special_tokens_in_text"] == 4
    made_of = {"corpus": corpus.manifest.fingerprint, "tokenizer": tokenizer.manifest.fingerprint}
    assert packed.manifest.inputs == made_of
    held = packed.path("tokenizer/tokenizer.json").read_bytes()
    assert held == tokenizer.path("tokenizer.json").read_bytes()
    assert "contains special tokens, which are encoded as such: 1 [PAD], 1 [CLS], 1 [SEP], 1 [MASK]" in caplog.text
    assert workshop.metrics()[-1]["tokens"] == result["tokens"]


def test_only_missing_files_are_produced_again(
    workshop: Workshop, corpus: OpenArtifact, tokenizer: OpenArtifact, caplog: pytest.LogCaptureFixture
) -> None:
    packed = workshop.packed(corpus, tokenizer, sequence_length=64)
    before = workshop.modified(packed)
    workshop.delete(packed, "train-00001.npy", "index.json")
    with caplog.at_level("INFO", logger="trainyard"):
        again = workshop.packed(corpus, tokenizer, sequence_length=64)
    after = workshop.modified(packed)
    assert {name for name in after if name.endswith(".npy") and after[name] != before[name]} <= {"train-00001.npy"}
    assert contents(again.manifest) == contents(packed.manifest)
    assert "5 of 6 files exist already" in caplog.text
    # AND complete files are not produced again
    assert workshop.packed(corpus, tokenizer, sequence_length=64).location == packed.location
    assert workshop.modified(packed) == after
    assert workshop.packed(corpus, tokenizer, sequence_length=128).location != packed.location


def test_tokens_of_a_hub_data_set_are_packed(
    workshop: Workshop, tokenizer: OpenArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(token_table, "ROWS", 40)
    # GIVEN a data set of the hub, in the form that run_mlm.py trains on, and another with padding
    encode = load_tokenizer(tokenizer.download() / "tokenizer.json").encode
    rows = [encode(text).ids for text in paragraphs(100)]
    for name, padding in (("plain", 0), ("padded", 3)):
        folder = tmp_path / "acme" / name / "data"
        folder.mkdir(parents=True)
        columns = {"input_ids": [row + [0] * padding for row in rows], "attention_mask": [[1]] * len(rows)}
        pq.write_table(pa.table(columns), folder / "train-00000-of-00001.parquet")
    arguments = {"token_table": "hf://acme/plain", "held_out_fraction": 0.1, "sequence_length": 64}
    wanted = Tokenize(tokenizer=tokenizer.location, **arguments)
    # WHEN it is packed
    workshop.run(tokenize, wanted)
    packed = workshop.made("packed-tokens")
    # THEN no token is lost, and each row is in one split
    splits = {split: packed_ids(packed, split) for split in SPLITS}
    assert sorted(splits["train"] + splits["held-out"]) == sorted(number for row in rows for number in row)
    assert len(splits["held-out"]) > 100
    assert len(Index.read(packed.download()).files["train"]) == 3
    assert workshop.result()["tokens"] == len(splits["train"])
    # AND missing shards are made again, in place
    workshop.delete(packed, "train-00001.npy", "index.json")
    workshop.again(tokenize, wanted)
    assert contents(workshop.made("packed-tokens").manifest) == contents(packed.manifest)
    # AND padding makes no difference to the tokens
    workshop.run(tokenize, wanted.model_copy(update={"token_table": "hf://acme/padded"}))
    assert packed_ids(workshop.made("packed-tokens"), "train") == splits["train"]
    monkeypatch.setattr(token_table, "ROWS", 1000)
    pq.write_table(pa.table({"input_ids": [[5, VOCABULARY]]}), tmp_path / "t.parquet")
    other = Tokenize(tokenizer=tokenizer.location, token_table=str(tmp_path / "t.parquet"))
    with pytest.raises(UsageError, match="row 1: 'input_ids' has other values than the ids of a token"):
        workshop.run(tokenize, other)


def mistaken(how: Callable[[list[bytes], Any], Any]) -> type[Nanotoken]:
    """The library with an error: `how` gets documents and their ids, and returns other ids."""

    class Mistaken(Nanotoken):
        def encode(self, documents: list[bytes]) -> Any:
            return how(documents, super().encode(documents))

    return Mistaken


def _broken(documents: list[bytes], _ids: Any) -> Any:
    raise RuntimeError("a mistake")


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (None, "nanotoken cannot be used: ModuleNotFoundError: import of nanotoken halted"),
        (mistaken(_broken), "nanotoken cannot be used: RuntimeError: a mistake"),
        (
            mistaken(lambda documents, ids: ids[::-1] if b"\xc4\xb0" in b"".join(documents) else ids),
            "gives different ids for 'İst",
        ),
        (
            mistaken(lambda documents, ids: ids[1:] if b"second file" in documents else ids),
            "different ids for 'second file'",
        ),
    ],
)
def test_a_missing_or_wrong_encoder_library_is_not_used(
    tmp_path: Path, tokenizer: OpenArtifact, monkeypatch: pytest.MonkeyPatch, library: Any, reason: str
) -> None:
    if library is None:
        monkeypatch.setitem(sys.modules, "nanotoken", None)
    else:
        monkeypatch.setattr(packed_tokens, "Nanotoken", library)
    loaded = load_tokenizer(tokenizer.download() / "tokenizer.json")
    with CorpusPacking(loaded, sequence_length=8, pad_id=0) as packing:
        for text in ("the text", "second file", "the third"):
            path = tmp_path / "train-00000.txt"
            path.write_bytes(text.encode() + END)
            file = packing.pack(path, tmp_path / "train-00000.npy")
            assert np.load(tmp_path / file.name).flatten()[: file.tokens].tolist() == loaded.encode(text).ids
    assert packing.encoder_name == "tokenizers"
    assert reason in packing.reason


def test_a_vocabulary_larger_than_two_bytes_is_packed(tmp_path: Path) -> None:
    """Pack a file as `tokenize` does, with a vocabulary larger than any test corpus could give."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = [f"word{number}" for number in range(70_000)]
    vocabulary = {token: number for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    path = tmp_path / "train-00000.txt"
    path.write_bytes(" ".join(words).encode() + END)
    with CorpusPacking(tokenizer, sequence_length=512, pad_id=0) as packing:
        file = packing.pack(path, tmp_path / "train-00000.npy")
    array = np.load(tmp_path / file.name)
    assert array.dtype == np.uint32
    assert array.flatten()[: file.tokens].tolist() == [2, *range(5, 70_005), 3]


@pytest.mark.parametrize("only_tokenizers", [False, True])
def test_the_ids_of_a_file_do_not_depend_on_its_blocks(
    tmp_path: Path, tokenizer: OpenArtifact, monkeypatch: pytest.MonkeyPatch, only_tokenizers: bool
) -> None:
    path = tmp_path / "train-00000.txt"
    texts = ["", *paragraphs(60), "", "a long document " * 200, ""]
    path.write_bytes(b"".join(text.encode() + END for text in texts))
    loaded = load_tokenizer(tokenizer.download() / "tokenizer.json")
    expected = [number for text in texts for number in loaded.encode(text).ids]
    for block_bytes in (100, 1 << 20):
        monkeypatch.setattr(packed_tokens, "BLOCK_BYTES", block_bytes)
        with CorpusPacking(loaded, sequence_length=32, pad_id=0, only_tokenizers=only_tokenizers) as packing:
            file = packing.pack(path, tmp_path / "train-00000.npy")
            assert packing.encoder_name == ("tokenizers" if only_tokenizers else "nanotoken")
        assert np.load(tmp_path / file.name).flatten()[: file.tokens].tolist() == expected


def test_a_models_tokenizer_is_read_from_its_folder(
    workshop: Workshop, corpus: OpenArtifact, tiny_bert: Path, put: Callable[[Path, str], str], tmp_path: Path
) -> None:
    local = workshop.packed(corpus, SimpleNamespace(location=str(tiny_bert)), sequence_length=32)
    on_s3 = workshop.packed(corpus, SimpleNamespace(location=put(tiny_bert, "models/to-go-on")), sequence_length=32)
    assert local.manifest.fingerprint == on_s3.manifest.fingerprint, "wherever its files lie"
    held = local.path("tokenizer/tokenizer.json").read_bytes()
    assert held == (tiny_bert / "tokenizer.json").read_bytes()
    assert "tokenizer/model.safetensors" not in local.manifest.files
    with pytest.raises(
        NotFoundError, match=r"has neither tokenizer\.json nor manifest\.json nor artifact\.json\nNext: "
    ):
        workshop.packed(corpus, SimpleNamespace(location=str(tmp_path)))
    with pytest.raises(UsageError, match="is a 'corpus', not a 'tokenizer'"):
        workshop.packed(corpus, corpus)
