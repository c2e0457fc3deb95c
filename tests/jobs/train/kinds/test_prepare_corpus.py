"""A corpus from tables and text files: all that should be in it, in its order, once."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.aws import s3 as object_store
from jobs.contract.errors import UsageError
from jobs.kinds.prepare_corpus import PrepareCorpus
from jobs.train.data import sources
from jobs.train.kinds import prepare_corpus
from tests.support.train.corpora import Workshop, contents, paragraphs, put_jsonl, texts_of
from tests.support.train.hub import save_data_set


def all_texts(artifact: Any) -> Counter[str]:
    return Counter(texts_of(artifact) + texts_of(artifact, "held-out"))


def test_what_is_held_out_depends_on_the_document_alone(workshop: Workshop, tmp_path: Path) -> None:
    texts = list(paragraphs(300))
    first = workshop.corpus(data=[str(put_jsonl(tmp_path / "a.jsonl", texts))], held_out_fraction=0.1)
    more = workshop.corpus(
        data=[str(put_jsonl(tmp_path / "b.jsonl", [*texts[::-1], "something new", "and more"]))], held_out_fraction=0.1
    )
    before, after = set(texts_of(first, "held-out")), set(texts_of(more, "held-out"))
    assert before == after - {"something new", "and more"}


def save_in_every_format(folder: Path, texts: list[str]) -> dict[str, str]:
    """Name and column of each, with the same documents."""
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

    # AND a job that was interrupted goes on where its shards end, in the middle of the file
    workshop.delete(corpus, "train-00001.txt", "train-00002.txt", "held-out-00002.txt")
    again = workshop.corpus(
        data=[location],
        text_columns=[column],
        text_documents="paragraphs",
        shard_bytes=13_000,
        held_out_fraction=0.1,
    )
    assert contents(again.manifest) == contents(corpus.manifest)


def test_several_inputs_follow_one_another_each_with_its_own_column(
    workshop: Workshop, tmp_path: Path, without_empty_lines: list[str]
) -> None:
    columns = save_in_every_format(tmp_path, without_empty_lines)
    corpus = workshop.corpus(
        data=[str(tmp_path / name) for name in columns],
        text_columns=list(columns.values()),
        text_documents="paragraphs",
        shard_bytes=50_000,
        held_out_fraction=0.1,
    )
    train = texts_of(corpus)
    assert train == [text for text in without_empty_lines if text in set(train)] * 5


def test_a_data_set_of_the_hub_is_streamed(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_corpus_is_made_once(workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = [str(put_jsonl(tmp_path / "a.jsonl", paragraphs(100)))]
    first = workshop.corpus(data=data, held_out_fraction=0.1)
    written = workshop.modified(first)
    with caplog.at_level("INFO", logger="trainyard"):
        second = workshop.corpus(data=data, held_out_fraction=0.1)
    assert "corpus exists" in caplog.text
    assert second.location == first.location
    assert workshop.modified(first) == written
    # AND other content is another corpus
    put_jsonl(tmp_path / "a.jsonl", paragraphs(101))
    assert workshop.corpus(data=data, held_out_fraction=0.1).location != first.location


def test_a_damaged_line_of_metrics_ends_no_job_that_is_resumed(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments: dict[str, Any] = {"data": [str(put_jsonl(tmp_path / "a.jsonl", paragraphs(300)))], "shard_bytes": 20_000}
    corpus = workshop.corpus(**arguments)
    place = workshop.runs[-1] / "metrics.jsonl"
    rows = workshop.metrics()
    last = f"train-{len(rows) - 2:05d}.txt"
    workshop.delete(corpus, last)
    damaged = [b"[]", b'{"step": 1, "docu', b"\xff", b'{"step": null}']
    object_store.write(workshop.s3, place, b"\n".join([json.dumps(rows[0]).encode(), *damaged]))
    workshop.again(prepare_corpus.prepare, PrepareCorpus(**arguments))
    assert workshop.made("corpus").location == corpus.location
    assert workshop.metrics()[0] == rows[0]
    assert caplog.messages == [f"warning: {place}: left out 4 lines that cannot be read, the first at line 2"]


def test_empty_documents_and_nuls_are_dropped(workshop: Workshop, tmp_path: Path) -> None:
    texts = [*paragraphs(60), "", "  \n\t ", "\u00a0\u2003", None, "with\0nul \0", "\0"]
    corpus = workshop.corpus(data=[str(put_jsonl(tmp_path / "a.jsonl", texts))], held_out_fraction=0.1)
    assert all_texts(corpus) == Counter([*paragraphs(60), "withnul"])
    assert workshop.result()["dropped_empty"] == 5


@pytest.mark.parametrize("drop", [True, False])
def test_equal_documents_are_dropped_where_that_is_asked_for(workshop: Workshop, tmp_path: Path, drop: bool) -> None:
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
    # AND a job that goes on knows what its earlier shards hold
    last = max(name for name in corpus.manifest.files if name.startswith("train"))
    workshop.delete(corpus, last)
    assert contents(workshop.corpus(**arguments).manifest) == contents(corpus.manifest)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_document_that_is_too_long_is_split_at_whitespace(workshop: Workshop, tmp_path: Path, name: str) -> None:
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


def test_a_large_object_is_read_in_blocks(
    workshop: Workshop, put: Callable[[Path, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 1000)
    texts = paragraphs(100)
    location = put(put_jsonl(tmp_path / "a.jsonl", texts), f"{tmp_path.name}/a.jsonl")
    assert all_texts(workshop.corpus(data=[location], held_out_fraction=0.1)) == Counter(texts)
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])["text"] == texts[0]
