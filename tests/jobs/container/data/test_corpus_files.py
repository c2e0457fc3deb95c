"""Documents of a corpus: grouped into batches, and read in pieces without losing anything."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.container.data.corpus_files import Input, batches
from jobs.data_checks.table_rows import BEGINNING


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
