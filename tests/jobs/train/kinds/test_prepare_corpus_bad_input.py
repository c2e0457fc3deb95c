"""Bad input of a corpus: told with its place, or counted and skipped."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.contract.errors import NotFoundError, UsageError
from jobs.kinds.prepare_corpus import PrepareCorpus
from tests.support.train.corpora import Workshop, paragraphs, put_jsonl
from tests.support.train.hub import save_data_set

TOO_LONG = ["one", "two", "three", "é\n" * 1500]


def put_too_long(folder: Path, kind: str) -> str:
    if kind == "hub":
        save_data_set(folder / "org" / "long", {"en": {"train": [{"text": text} for text in TOO_LONG]}}, class_names=())
        return "hf://org/long?config=en&split=train"
    path = folder / f"a.{kind}"
    if kind == "jsonl":
        put_jsonl(path, TOO_LONG)
    elif kind == "parquet":
        pq.write_table(pa.table({"text": TOO_LONG}), path)
    else:
        path.write_text("text\none\ntwo\nthree\n" + f'"{TOO_LONG[3]}"\nfour\n')
    return str(path)


@pytest.mark.parametrize(
    ("kind", "place"),
    [("jsonl", "line 4"), ("csv", "line 5"), ("tsv", "line 5"), ("parquet", "row 4"), ("hub", "row 4")],
)
def test_a_row_that_no_memory_may_hold_is_told_with_its_place(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, place: str
) -> None:
    """In CSV it has many lines, none of which is long; counted are bytes, of which it has more than characters."""
    monkeypatch.chdir(tmp_path)
    location = put_too_long(tmp_path, kind)
    with pytest.raises(UsageError, match=rf", {place}: longer than 4096 bytes.*\n.*max_document_bytes higher"):
        workshop.corpus(data=[location], max_document_bytes=1024)


BROKEN = b"caf\xe9 au lait"


def put_broken(folder: Path, kind: str) -> Path:
    """A file with 60 documents, of which the 41st is no UTF-8."""
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
def test_broken_text_is_told_with_its_place_or_counted_and_skipped(
    workshop: Workshop, tmp_path: Path, kind: str, place: str, position: int
) -> None:
    path = put_broken(tmp_path, kind)
    with pytest.raises(UsageError, match=rf"a\.{kind}, {place}: no.* UTF-8.*position {position}"):
        workshop.corpus(data=[str(path)], held_out_fraction=0.1)
    corpus = workshop.corpus(data=[str(path)], held_out_fraction=0.1, on_broken_text="skip")
    assert corpus.manifest.count("documents") == 59
    assert workshop.result()["dropped_broken"] == 1


def test_half_of_a_surrogate_pair_is_broken_text(workshop: Workshop, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "\\ud800 alone"}\n')
    with pytest.raises(UsageError, match=r"line 2: no UTF-8 \(half of a surrogate pair"):
        workshop.corpus(data=[str(path)])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "no text"),
        ("a.jsonl", b'{"text": ""}\n{"text": " "}\n', r"no text \(2 documents are empty"),
        ("a.txt", b"\n\n \n", "no text"),
        ("a.jsonl", b'{"text": "a"}\n{"txet": "b"}\n', r"line 2: no column 'text'; did you mean 'txet'\?"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', "line 2: not a JSON object"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: not JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 5}\n', "line 2: 'text' is not text but 5"),
        ("a.csv", b"text,b\na\n", "line 2: 1 fields, but the header has 2"),
        ("a.csv", b"body,b\na,b\n", "line 1: no column 'text'"),
        ("a.csv", b"", "line 1: no column 'text'"),
        ("a.parquet", b"PAR1 nonsense", "cannot be read as Parquet"),
        ("a.jsonl", b'{"text": "only one"}\n', "none of 1 documents is in the part"),
    ],
)
def test_bad_input_is_told(workshop: Workshop, tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        workshop.corpus(data=[str(tmp_path / name)])


@pytest.mark.parametrize("location", ["/nowhere/a.jsonl", "s3://data/nowhere/a.jsonl"])
def test_what_is_not_there_is_told(workshop: Workshop, location: str) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        workshop.corpus(data=[location])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": []}, "at least 1 item"),
        ({"data": ["a.jsonl", "b.jsonl", "c.jsonl"], "text_columns": ["x", "y"]}, "2 columns for 3 inputs"),
        ({"data": ["a.jsonl", "a.jsonl"]}, "names a.jsonl twice"),
        ({"data": ["a.docx"]}, "is no table"),
        ({"data": ["a.jsonl"], "held_out_fraction": 0}, "greater than 0"),
    ],
)
def test_nonsense_is_refused_before_anything_runs(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrepareCorpus(**arguments)
