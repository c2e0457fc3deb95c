"""Tables from S3 and local paths; every kind of damage is reported with its place."""

import bz2
import csv
import gzip
import io
import json
import re
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.container.data.labelled_text import read_table
from jobs.container.data.tables import _rows_at_once
from jobs.core.errors import NotFoundError, UsageError
from jobs.data_checks.table_rows import BadRows
from jobs.spec.arguments import TextFormat
from tests.support.container.places import Place

ROWS = [
    {"text": 'a "quoted", tab\tand comma', "label": "good", "more": "1"},
    {"text": "two\nlines", "label": "bad", "more": "2"},
    {"text": "f\u00fcnf \U0001f600", "label": "good", "more": "3"},
]


def delimited(delimiter: str, **options: Any) -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(ROWS[0]), delimiter=delimiter, **options)
    writer.writeheader()
    writer.writerows(ROWS)
    return stream.getvalue().encode()


def json_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def parquet(columns: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "unit", "lines"),
    [
        ("table.jsonl", json_lines(ROWS), "line", [1, 2, 3]),
        ("table.ndjson", b"\xef\xbb\xbf" + json_lines(ROWS[:1]) + b"\n \r\n" + json_lines(ROWS[1:]), "line", [1, 4, 5]),
        # The second row ends on the line after the one it starts on.
        ("table.csv", delimited(","), "line", [2, 4, 5]),
        ("table.csv", b"\xef\xbb\xbf" + delimited(",", lineterminator="\n"), "line", [2, 4, 5]),
        ("TABLE.TSV", delimited("\t"), "line", [2, 4, 5]),
        ("table.parquet", parquet({key: [row[key] for row in ROWS] for key in ROWS[0]}), "row", [1, 2, 3]),
    ],
    ids=["jsonl", "with a mark and empty lines", "csv", "csv with a mark", "tsv", "parquet"],
)
def test_table_is_read_with_the_place_of_each_row(
    place: Place, name: str, content: bytes, unit: str, lines: list[int]
) -> None:
    table = place.read(place.put(name, content))
    assert table.columns == {key: [row[key] for row in ROWS] for key in ("text", "label")}
    assert list(table.lines) == lines
    assert table.place(1) == f"{place.at(name)}, {unit} {lines[1]}"


TEXTS = {"text": ["f\u00fcnf; \u201egut\u201c", "caf\u00e9"], "label": ["gut", "schlecht"]}


def rows_of(delimiter: str, end: str, before: str = "") -> str:
    rows = zip(TEXTS["text"], TEXTS["label"], strict=True)
    return before + "".join(
        f"{delimiter.join(row)}{end}" for row in [("text", "label"), *((f'"{text}"', label) for text, label in rows)]
    )


ARRAY = json.dumps([{"label": label, "text": text} for text, label in zip(*TEXTS.values(), strict=True)], indent=1)


@pytest.mark.parametrize(
    ("name", "content", "text_format"),
    [
        ("cp1252.csv", rows_of(";", "\r\n").encode("cp1252"), TextFormat(delimiter=";", encoding="cp1252")),
        ("excel.csv", rows_of(";", "\r\n", "sep=;\r\n").encode("utf-8-sig"), TextFormat()),
        ("old-mac.csv", rows_of(",", "\r").encode("mac-roman"), TextFormat(encoding="mac-roman")),
        ("unicode-text.tsv", rows_of("\t", "\r\n").encode("utf-16"), TextFormat()),
        ("t.csv.gz", gzip.compress(rows_of(",", "\n", "\n\n").encode(), mtime=0), TextFormat()),
        ("T.TSV.ZST", pa.compress(rows_of("\t", "\n").encode(), "zstd", asbytes=True), TextFormat()),
        ("t.csv.bz2", bz2.compress(rows_of(",", "\n").encode("cp1252")), TextFormat(encoding="cp1252")),
        ("no-suffix.csv", gzip.compress(rows_of(",", "\n").encode(), mtime=0), TextFormat()),
        ("array.json", ARRAY.encode(), TextFormat()),
        ("array.jsonl", json.dumps(json.loads(ARRAY), ensure_ascii=False).encode("utf-8-sig"), TextFormat()),
        (
            "blanks.csv",
            b" text,label \n" + rows_of(" ,", " \n").partition("\n")[2].replace('"', "").encode(),
            TextFormat(strip=True, quotes_are_text=True),
        ),
        (
            "bytes.parquet",
            parquet({key: [value.encode() for value in values] for key, values in TEXTS.items()}),
            TextFormat(),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_table_of_another_program_is_read(place: Place, name: str, content: bytes, text_format: TextFormat) -> None:
    table = read_table(place.put(name, content), list(TEXTS), s3=place._client, text_format=text_format)
    assert table.columns == TEXTS


@pytest.mark.parametrize(
    "content",
    [
        b",text,label\n0,a,x\n1,b,y\n",
        b'"text" "label"\n"1" "a" "x"\n"2" "b" "y"\n'.replace(b" ", b","),
        b"Unnamed: 0,text,label\n0,a,x\n1,b,y\n",
    ],
    ids=["pandas", "R", "pandas again"],
)
def test_index_column_is_ignored(local: Place, content: bytes) -> None:
    assert local.read(local.put("t.csv", content)).columns == {"text": ["a", "b"], "label": ["x", "y"]}


def test_encodings_that_the_bytes_contradict_are_refused(local: Place) -> None:
    table = local.put("t.csv", rows_of(",", "\n").encode())
    with pytest.raises(UsageError, match=r"t\.csv is UTF-8, not cp1252"):
        read_table(table, list(TEXTS), s3=local._client, text_format=TextFormat(encoding="cp1252"))
    table = local.put("t.csv", b"text,label\n\xfc \x81,a\nb,b\n")
    with pytest.raises(UsageError, match=r"t\.csv, line 2: not cp1252 \(byte 0x81 at position 3\)"):
        read_table(table, list(TEXTS), s3=local._client, text_format=TextFormat(encoding="cp1252"))


def test_missing_table_error_says_where_to_look(local: Place, remote: Place) -> None:
    with pytest.raises(NotFoundError, match=re.escape(f"{local.at('t.csv')} does not exist\nNext: check the path")):
        local.read(local.at("t.csv"))
    missing = remote.at("no/t.csv")
    listing = f"aws s3 ls {missing.removesuffix('t.csv')}"
    with pytest.raises(NotFoundError, match=re.escape(f"{missing} does not exist\nNext: {listing}")):
        remote.read(missing)
    with pytest.raises(UsageError, match="which only `trainyard submit` can resolve"):
        local.read("data://team/t.csv")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.jsonl", b"\n \n"),
        ("t.csv", b""),
        ("t.parquet", parquet({"text": pa.array([], pa.string()), "label": pa.array([], pa.int64())})),
    ],
)
def test_table_without_examples_is_refused(local: Place, name: str, content: bytes) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{local.at(name)} has no examples")):
        local.read(local.put(name, content))


GOOD_LINE = b'{"text": "a", "label": 1}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", GOOD_LINE + b'{"text": "a", "lab', ", line 2: not JSON: Unterminated string starting at"),
        ("t.jsonl", GOOD_LINE + b'{"label": ' + b"1" * 5000 + b"}\n", ", line 2: JSON that Python cannot read"),
        (
            "t.csv",
            b'text,label\n"two\nlines",1\ncaf\xe9,1\n',
            ", line 4: not UTF-8 (byte 0xe9 at position 4: 'caf\u00e9' in cp1252",
        ),
        ("t.csv", b"text,label\na,1\nb,2,3\n", ", line 3: 3 fields, but the header has 2"),
        ("t.csv", b'text,label\na,1\n"b,2\n', ", line 3: unexpected end of data"),
        ("t.parquet", parquet({"text": ["a"], "label": [1]})[:-20], " cannot be read as Parquet: "),
        (
            "t.parquet",
            parquet({"text": pa.array([b"a", b"\xfcber"]).view(pa.string()), "label": [1, 2]}),
            " cannot be read as Parquet: Column 0: In chunk 0: Invalid: Invalid UTF8 sequence at string index 1",
        ),
    ],
)
def test_damaged_table_is_refused_with_the_place(local: Place, name: str, content: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(local.at(name) + message)}"):
        local.read(local.put(name, content))


@pytest.mark.parametrize(
    ("name", "content", "at"),
    [
        ("t.jsonl", GOOD_LINE + b'{"txt": "b", "label": 1}\n', ", line 2"),
        ("t.csv", b"txt,label\na,1\n", ", header"),
        ("t.parquet", parquet({"txt": ["a"], "label": [1]}), ", schema"),
    ],
    ids=["jsonl", "csv", "parquet"],
)
def test_missing_column_error_suggests_the_closest(place: Place, name: str, content: bytes, at: str) -> None:
    message = f"{place.at(name)}{at}: no column 'text'; did you mean 'txt'?\nNext: name the columns with text_column"
    with pytest.raises(UsageError, match=re.escape(message)):
        place.read(place.put(name, content))


def test_bad_rows_are_recorded_and_others_read(place: Place) -> None:
    rows = b'text,label\n\xc3\xa4,1\nb\n\xffc,1\n"d,1\ne"f,1\ng,2\n'
    location = place.put("bad.csv", rows)
    bad = BadRows(skip=True, at_most=9)
    table = read_table(location, ("text", "label"), s3=place._client, bad=bad)
    assert table.columns == {"text": ["\u00e4", "g"], "label": ["1", "2"]}
    assert list(table.lines) == [2, 7]
    assert bad.counts[location] == 4, "the half-quoted field takes two lines"
    assert bad.named(location)[0] == f"{location}, line 3: 1 fields, but the header has 2"
    with pytest.raises(UsageError, match=r"(?s)^4 bad rows:\n.*the row begins in line 5.*line 4: not UTF-8"):
        place.read(location)


def test_streamed_rows_read_at_once_fit_the_longest_row() -> None:
    column = SimpleNamespace(total_uncompressed_size=100_000, path_in_schema="text")
    group = SimpleNamespace(num_rows=1000, num_columns=1, column=lambda _: column)
    for most, rows in ((1000, 10), (10, 1), (10**9, 256), (None, 10_000)):
        table: Any = SimpleNamespace(max_row_bytes=most, columns=["text"])
        assert _rows_at_once(group, table) == rows
