"""Compare the speed of fine-tuning on pairs of sentences: our job and the plain Trainer, on one accelerator.

python -m tests.benchmarks.finetuning_speed --device cuda    BERT-large, 3,668 pairs as long as MRPC's, 3 epochs, bf16
python -m tests.benchmarks.finetuning_speed --layers 2 --hidden 128 --heads 2 --examples 640    small, on this CPU

All sides train the same new weights on the same synthetic pairs for the same epochs, with 32 pairs per step, and AdamW
at the same learning rate:

    padded to 128   the plain Trainer, every pair padded to 128, like optimum-habana's published example
    plain Trainer   the plain Trainer, each batch padded to its longest pair, like transformers' collator
    entrypoint      jobs.container.launch finetune-classification, with metrics and the model on S3 as in any run

All sides use bf16 autocast on a card and fp32 on a CPU, like the entrypoint. Steps between the first and the last log
line count. Mean and spread of the lengths are those of MRPC under BERT's tokenizer. New weights learn little in
such a short time, but the accuracy on held-out pairs shows whether all sides learned the same.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jobs.core.locations import S3Location
from tests.support.benchmarks.launched import launcher
from tests.support.benchmarks.speed import (
    Result,
    by_entrypoint,
    by_plain_trainer,
    in_turns,
    plainly,
    show,
    training_options,
)
from tests.support.container.launching import NewRun
from tests.support.container.reviews import save_new_bert, write_jsonl
from tests.support.container.s3_server import put

MAX_LENGTH = 128
MEAN_LENGTH, DEVIATION, LONGEST = 53, 18, 103
"""Tokens of a pair, including three special tokens."""
BATCH = 32
LEARNING_RATE = 3e-5
WORDS = 20_000
HELD_OUT = 408
"""Number of held-out pairs, as in MRPC's validation split."""
PADDED, PLAIN = "padded to 128", "plain Trainer"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.finetuning_speed", description=__doc__)
    training_options(parser, layers=24, hidden=1024, heads=16)
    parser.add_argument("--examples", type=int, default=3668)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    if options.plain:
        print(json.dumps(_train_plainly(options.plain[0], Path(options.plain[1]), options)))
        return
    with tempfile.TemporaryDirectory() as name, launcher(Path(name), is_fresh=True) as new_run:
        folder, module = Path(name), "tests.benchmarks.finetuning_speed"
        _save(folder, options)
        flags = _flags(new_run, folder, options)

        def entrypoint() -> Result:
            found = by_entrypoint(new_run(), *flags, kind="finetune-classification", device=options.device)
            return {**found, "accuracy": found["eval_accuracy"]}

        sides = {
            "entrypoint": entrypoint,
            PLAIN: lambda: plainly(module, PLAIN, folder, options),
            PADDED: lambda: plainly(module, PADDED, folder, options),
        }
        results = in_turns(sides, options.rounds)
    print(f"{options.device}: {options.layers} layers of {options.hidden}, {options.examples} pairs, {BATCH} a step")
    columns = {"loss": "last loss", "accuracy": "accuracy"}
    show(results, PLAIN, columns, unit=BATCH, name="samples/s")


def _save(folder: Path, options: argparse.Namespace) -> None:
    """Save new weights, a tokenizer of whole words, and pairs whose label is 1 if both begin with the same word."""
    sizes = {"hidden_size": options.hidden, "num_hidden_layers": options.layers, "num_attention_heads": options.heads}
    words_known = [f"w{number}" for number in range(WORDS)]
    save_new_bert(folder / "model", words_known, **sizes, intermediate_size=4 * options.hidden)
    chance = np.random.default_rng(7)
    for name, count in (("train", options.examples), ("eval", HELD_OUT)):
        rows = []
        for drawn in chance.normal(MEAN_LENGTH, DEVIATION, count):
            words = chance.zipf(1.3, int(min(max(drawn, 11), LONGEST)) - 3) % WORDS
            first, second = (list(half) for half in np.array_split(words, 2))
            label = int(chance.integers(2))
            first[0] = second[0] if label else (second[0] + 1 + chance.integers(WORDS - 1)) % WORDS
            pair = (" ".join(f"w{number}" for number in half) for half in (first, second))
            rows.append({**dict(zip(("text", "pair"), pair, strict=True)), "label": label})
        write_jsonl(folder / f"{name}.jsonl", rows)


def _flags(new_run: NewRun, folder: Path, options: argparse.Namespace) -> tuple[str, ...]:
    s3 = new_run().s3
    uploaded: dict[str, S3Location | str] = {
        name: put(s3, folder / path, f"speed/{path}")
        for name, path in (("model", "model"), ("train-data", "train.jsonl"), ("eval-data", "eval.jsonl"))
    }
    return (
        *(f"--{name}={location}" for name, location in uploaded.items()),
        "--text-pair-column=pair",
        f"--max-length={MAX_LENGTH}",
        f"--epochs={options.epochs}",
        f"--learning-rate={LEARNING_RATE}",
        "--warmup-ratio=0",
        f"--global-batch-size={BATCH}",
        "--checkpoint-every-steps=1000000",
    )


def _train_plainly(side: str, folder: Path, options: argparse.Namespace) -> Result:
    """Train in this process, which is separate from the benchmark."""
    import transformers
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    transformers.set_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def table(name: str) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        texts, pairs = ([row[column] for row in rows] for column in ("text", "pair"))
        padding = "max_length" if side == PADDED else False
        ids = tokenizer(texts, pairs, truncation=True, max_length=MAX_LENGTH, padding=padding)
        return [
            {**{column: ids[column][number] for column in ids}, "label": row["label"]}
            for number, row in enumerate(rows)
        ]

    found, trainer = by_plain_trainer(
        options.device,
        folder / "output",
        arguments={
            "num_train_epochs": options.epochs,
            "learning_rate": LEARNING_RATE,
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": 64,
            "logging_steps": 10,
        },
        model=AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=2),
        train_dataset=table("train"),
        eval_dataset=table("eval"),
        processing_class=tokenizer,
        compute_metrics=lambda given: {"accuracy": float((given[0].argmax(-1) == given[1]).mean())},
    )
    return {**found, "accuracy": trainer.evaluate()["eval_accuracy"]}


if __name__ == "__main__":
    main()
