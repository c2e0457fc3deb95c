"""Documents of a corpus: grouped into batches, and read in pieces without losing anything."""

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.container.data.corpus_files import Input, batches
from jobs.data_checks.table_rows import BEGINNING
from jobs.spec.arguments import TextFormat


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.txt", b"f\xfcnf\r\xe9\r"),
        ("t.txt.gz", gzip.compress(b"f\xfcnf\n\xe9\n", mtime=0)),
        ("t.csv", b"text;more\nf\xfcnf;1\n\xe9;2\n"),
    ],
)
def test_documents_in_another_format_are_read_from_anywhere(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    source = Input(
        location=str(tmp_path / name),
        column="text",
        paragraphs=False,
        max_document_bytes=1024,
        s3=lambda: pytest.fail("local"),
        text_format=TextFormat(delimiter=";", encoding="cp1252"),
    )
    documents = list(source.read(BEGINNING))
    assert [str(document.content).strip() for document in documents] == ["f\u00fcnf", "\u00e9"]
    assert list(source.read(documents[0].after)) == documents[1:]


def test_batches_are_filled_up_to_the_limit() -> None:
    documents = [b"ab", b"c", b"d", b"longer", b"e"]
    assert list(batches(documents, at_most_bytes=3)) == [["ab", "c"], ["d"], ["longer"], ["e"]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("input") / "t.txt"


@given(lines=st.lists(st.text(st.sampled_from("aé "), max_size=40), max_size=4), paragraphs=st.booleans())
def test_pieces_of_long_documents_lose_nothing(path: Path, lines: list[str], *, paragraphs: bool) -> None:
    text = "".join(f"{line}\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    source = Input(
        location=str(path), column="", paragraphs=paragraphs, max_document_bytes=16, s3=lambda: pytest.fail("local")
    )
    documents = list(source.read(BEGINNING))
    pieces = [document.content for document in documents]
    assert "".join("".join(map(str, pieces)).split()) == "".join(text.split())
    assert all(len(str(piece).encode()) <= 17 for piece in pieces)
    if documents:  # reading can start anywhere
        assert list(source.read(documents[0].after)) == documents[1:]
