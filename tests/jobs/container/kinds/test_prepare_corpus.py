"""A corpus from tables and text files: all documents, in order, once."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.core.errors import UsageError
from jobs.spec.kinds.prepare_corpus import PrepareCorpus
from tests.support.container.corpora import Workshop, contents, paragraphs, put_jsonl, texts_of
from tests.support.container.hub import save_data_set


def all_texts(artifact: Any) -> Counter[str]:
    return Counter(texts_of(artifact) + texts_of(artifact, "held-out"))


def save_in_every_format(folder: Path, texts: list[str]) -> dict[str, str]:
    """The name and column of each table, with the same documents."""
    import csv

    put_jsonl(folder / "a.jsonl", texts, column="body")
    for name, delimiter in (("b.csv", ","), ("c.tsv", "\t")):
        with (folder / name).open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream, delimiter=delimiter).writerows([["id", "prose"], *enumerate(texts)])
    table = pa.table({"id": range(len(texts)), "words": texts})
    pq.write_table(table, folder / "d.parquet", row_group_size=70)
    (folder / "e.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return {"a.jsonl": "body", "b.csv": "prose", "c.tsv": "prose", "d.parquet": "words", "e.txt": "none"}


@pytest.fixture(scope="module")
def without_empty_lines() -> list[str]:
    return [text for text in paragraphs(200) if "\n\n" not in text and "\r" not in text and "\n \n" not in text]


@pytest.mark.parametrize("name", ["a.jsonl", "b.csv", "c.tsv", "d.parquet", "e.txt"])
def test_every_format_gives_the_same_documents_shard_by_shard(
    workshop: Workshop,
    put: Callable[[Path, str], str],
    tmp_path: Path,
    without_empty_lines: list[str],
    name: str,
) -> None:
    column = save_in_every_format(tmp_path, without_empty_lines)[name]
    location = put(tmp_path / name, f"{tmp_path.name}/{name}")
    corpus = workshop.corpus(
        data=[location],
        text_columns=[column],
        text_documents="paragraphs",
        shard_bytes=13_000,
        held_out_fraction=0.1,
    )
    shards = [file.bytes for name, file in corpus.manifest.files.items()]
    assert len(shards) >= 6
    assert all_texts(corpus) == Counter(without_empty_lines)

    # AND an interrupted job continues where its shards end, in the middle of the file
    workshop.delete(corpus, "train-00001.txt", "train-00002.txt", "held-out-00002.txt")
    again = workshop.corpus(
        data=[location],
        text_columns=[column],
        text_documents="paragraphs",
        shard_bytes=13_000,
        held_out_fraction=0.1,
    )
    assert contents(again.manifest) == contents(corpus.manifest)


def test_a_hub_data_set_is_streamed(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = paragraphs(120)
    rows = [{"text": text, "title": str(number)} for number, text in enumerate(texts)]
    save_data_set(tmp_path / "org" / "articles", {"en": {"train": rows}}, class_names=())
    monkeypatch.chdir(tmp_path)
    arguments: dict[str, Any] = {
        "data": ["hf://org/articles?config=en&split=train"],
        "shard_bytes": 8_000,
        "held_out_fraction": 0.1,
    }
    corpus = workshop.corpus(**arguments)
    assert all_texts(corpus) == Counter(texts)
    workshop.delete(corpus, "train-00001.txt")
    assert contents(workshop.corpus(**arguments).manifest) == contents(corpus.manifest)
    with pytest.raises(UsageError, match=r"org/articles.*: no column 'body'"):
        workshop.corpus(**arguments, text_columns=["body"])


def test_a_corpus_is_produced_once(workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = [str(put_jsonl(tmp_path / "a.jsonl", paragraphs(100)))]
    first = workshop.corpus(data=data, held_out_fraction=0.1)
    written = workshop.modified(first)
    with caplog.at_level("INFO", logger="trainyard"):
        second = workshop.corpus(data=data, held_out_fraction=0.1)
    assert "corpus exists" in caplog.text
    assert second.location == first.location
    assert workshop.modified(first) == written
    # AND different content gives a different corpus
    put_jsonl(tmp_path / "a.jsonl", paragraphs(101))
    assert workshop.corpus(data=data, held_out_fraction=0.1).location != first.location


def test_empty_documents_and_nuls_are_dropped(workshop: Workshop, tmp_path: Path) -> None:
    texts = [*paragraphs(60), "", "  \n\t ", "\u00a0\u2003", None, "with\0nul \0", "\0"]
    corpus = workshop.corpus(data=[str(put_jsonl(tmp_path / "a.jsonl", texts))], held_out_fraction=0.1)
    assert all_texts(corpus) == Counter([*paragraphs(60), "withnul"])
    assert workshop.result()["dropped_empty"] == 5


@pytest.mark.parametrize("drop", [True, False])
def test_duplicate_documents_are_dropped_on_request(workshop: Workshop, tmp_path: Path, drop: bool) -> None:
    texts = [*paragraphs(100), *paragraphs(50)]
    arguments: dict[str, Any] = {
        "data": [str(put_jsonl(tmp_path / "a.jsonl", texts))],
        "held_out_fraction": 0.1,
        "shard_bytes": 8_000,
        "drop_duplicates": drop,
    }
    corpus = workshop.corpus(**arguments)
    assert all_texts(corpus) == Counter(paragraphs(100) if drop else texts)
    assert workshop.result()["dropped_duplicates"] == (50 if drop else 0)
    # AND a resumed job knows the documents of its earlier shards
    last = max(name for name in corpus.manifest.files if name.startswith("train"))
    workshop.delete(corpus, last)
    assert contents(workshop.corpus(**arguments).manifest) == contents(corpus.manifest)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_too_long_document_is_split_at_whitespace(workshop: Workshop, tmp_path: Path, name: str) -> None:
    long = " ".join(f"wörd{number}" for number in range(1000))
    texts = [*(text.replace("\n", " ").replace("\r", " ") for text in paragraphs(60)), long, "漢" * 2000]
    if name == "a.txt":
        (tmp_path / name).write_text("\n".join(texts), encoding="utf-8")
    else:
        put_jsonl(tmp_path / name, texts)
    corpus = workshop.corpus(data=[str(tmp_path / name)], held_out_fraction=0.1, max_document_bytes=4096)
    kept = all_texts(corpus)
    assert max(len(text.encode()) for text in kept) <= 4096
    words = Counter(word for text in kept for word in text.split() if "漢" not in word)
    assert words == Counter(word for text in texts for word in text.split() if "漢" not in word)
    assert sum(text.count("漢") * count for text, count in kept.items()) == 2000 + sum(
        t.count("漢") for t in texts[:60]
    )
    assert workshop.result()["cuts"] >= 3


@pytest.mark.parametrize(("kind", "place"), [("jsonl", "line 4"), ("csv", "line 5"), ("parquet", "row 4")])
def test_a_row_too_large_for_memory_is_reported(workshop: Workshop, tmp_path: Path, kind: str, place: str) -> None:
    """In CSV the row has many short lines. The limit is in bytes, of which it has more than characters."""
    texts = ["one", "two", "three", "é\n" * 1500]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        put_jsonl(path, texts)
    elif kind == "parquet":
        pq.write_table(pa.table({"text": texts}), path)
    else:
        path.write_text("text\none\ntwo\nthree\n" + f'"{texts[3]}"\nfour\n')
    with pytest.raises(UsageError, match=rf", {place}: longer than 4096 bytes.*\n.*max_document_bytes higher"):
        workshop.corpus(data=[str(path)], max_document_bytes=1024)


BROKEN = b"caf\xe9 au lait"


def put_broken(folder: Path, kind: str) -> Path:
    """A file with 60 documents, of which the 41st is not UTF-8."""
    texts = [text.replace("\n", " ").replace("\r", " ").replace('"', "") for text in paragraphs(60)]
    lines = [text.encode() for text in texts]
    lines[40] = BROKEN
    path = folder / f"a.{kind}"
    if kind == "txt":
        path.write_bytes(b"\n".join(lines) + b"\n")
    elif kind == "jsonl":
        path.write_bytes(
            b"".join(b'{"text": "' + line.replace(b"\\", b"/").replace(b"\t", b" ") + b'"}\n' for line in lines)
        )
    elif kind == "csv":
        path.write_bytes(b"text\n" + b"".join(b'"' + line + b'"\n' for line in lines))
    else:
        binary = pa.array(lines, type=pa.binary())
        pq.write_table(pa.table({"text": binary.view(pa.string())}), path)
    return path


@pytest.mark.parametrize(
    ("kind", "place", "position"),
    [("txt", "line 41", 4), ("jsonl", "line 41", 14), ("csv", "line 42", 4), ("parquet", "row 41", 4)],
)
def test_broken_text_is_reported_or_skipped_and_counted(
    workshop: Workshop, tmp_path: Path, kind: str, place: str, position: int
) -> None:
    path = put_broken(tmp_path, kind)
    with pytest.raises(UsageError, match=rf"a\.{kind}, {place}: no.* UTF-8.*position {position}"):
        workshop.corpus(data=[str(path)], held_out_fraction=0.1)
    corpus = workshop.corpus(data=[str(path)], held_out_fraction=0.1, on_broken_text="skip")
    assert corpus.manifest.count("documents") == 59
    assert workshop.result()["dropped_broken"] == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "no text"),
        ("a.jsonl", b'{"text": ""}\n{"text": " "}\n', r"no text \(2 documents are empty"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 5}\n', "line 2: 'text' is not text but 5"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "\\ud800 alone"}\n', r"line 2: not UTF-8 \(half of a surrogate pair"),
        ("a.csv", b"", "header: no column 'text'"),
        ("a.jsonl", b'{"text": "only one"}\n', "none of 1 documents is in the split"),
    ],
)
def test_bad_input_is_reported(workshop: Workshop, tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        workshop.corpus(data=[str(tmp_path / name)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": []}, "at least 1 item"),
        ({"data": ["a.jsonl", "b.jsonl", "c.jsonl"], "text_columns": ["x", "y"]}, "2 columns for 3 inputs"),
        ({"data": ["a.docx"]}, "is not a table"),
        ({"data": ["a.jsonl"], "held_out_fraction": 0}, "greater than 0"),
    ],
)
def test_invalid_arguments_are_refused_before_the_start(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrepareCorpus(**arguments)
