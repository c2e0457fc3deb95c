"""Fine-tuning an encoder on pairs of sentences: this project's job beside the plain Trainer, on one accelerator.

python -m tests.benchmarks.finetuning_speed --device cuda    BERT-large, 3,668 pairs as long as MRPC's, 3 epochs, bf16
python -m tests.benchmarks.finetuning_speed --layers 2 --hidden 128 --heads 2 --examples 640    small, on this CPU

All sides train the same new weights on the same made-up pairs for as many epochs, 32 pairs a step, AdamW at the same
rate of learning:

    padded to 128   the plain Trainer, every pair padded to 128, as optimum-habana's published example does
    plain Trainer   the plain Trainer, each batch padded to its longest pair, as transformers' collator does
    entrypoint      jobs.train.launch finetune-classification, with metrics and the model on S3 as in any run

In bf16 autocast on a card, in fp32 on a CPU: what the entrypoint does there. Steps between the first and the last line
of the log count, in samples a second. The mean lengths and their spread are those of MRPC under BERT's tokenizer
(tests/jobs/train/data/test_labelled_buckets.py). New weights learn little in so short a time: the accuracy on held-out
pairs is printed so that one sees whether all sides learned alike.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from jobs.contract.locations import S3Location
from tests.support.benchmarks.launched import finished, launcher
from tests.support.train.launching import NewRun
from tests.support.train.reviews import save_new_bert, write_jsonl
from tests.support.train.s3_server import put

MAX_LENGTH = 128
MEAN_LENGTH, DEVIATION, LONGEST = 53, 18, 103
"""Tokens of a pair with its three special ones."""
BATCH = 32
LEARNING_RATE = 3e-5
WORDS = 20_000
HELD_OUT = 408
"""Pairs, as MRPC's validation split has them."""

PLAIN = {"padded to 128": "max_length", "plain Trainer": "longest"}
OURS = "entrypoint"

Result = dict[str, Any]
"""`samples_per_second`, `loss` of the last line of the log, `accuracy`."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.finetuning_speed", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--examples", type=int, default=3668)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2, help="in turns; the fastest of each side counts")
    parser.add_argument("--plain", choices=tuple(PLAIN), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        _train_plainly(options.folder, options)
        return
    results: dict[str, list[Result]] = {side: [] for side in (*PLAIN, OURS)}
    with tempfile.TemporaryDirectory() as name, launcher(Path(name), is_fresh=True) as new_run:
        folder = Path(name)
        _save(folder, options)
        flags = _flags(new_run, folder, options)
        for _ in range(options.rounds):
            for side, rounds in reversed(results.items()):
                is_ours = side == OURS
                rounds.append(_entrypoint(new_run, flags, options.device) if is_ours else _plain(folder, side))
                print(f"{side:<14} {rounds[-1]}", file=sys.stderr, flush=True)
    best = {side: max(rounds, key=lambda result: result["samples_per_second"]) for side, rounds in results.items()}
    print(f"{options.device}: {options.layers} layers of {options.hidden}, {options.examples} pairs, {BATCH} a step")
    print(f"{'':<14} {'samples/s':>9} {'of padded':>9} {'of plain':>9} {'last loss':>9} {'accuracy':>9}")
    padded, plain = (best[side]["samples_per_second"] for side in PLAIN)
    for side, result in best.items():
        rate = result["samples_per_second"]
        print(
            f"{side:<14} {rate:9.1f} {f'x{rate / padded:.2f}':>9} {f'x{rate / plain:.2f}':>9} "
            f"{result['loss']:9.4f} {result['accuracy']:9.4f}"
        )


def _save(folder: Path, options: argparse.Namespace) -> None:
    """New weights with a tokenizer whose words are whole, and pairs that agree where they begin with the same word."""
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
    (folder / "options.json").write_text(
        json.dumps({name: value for name, value in vars(options).items() if name not in ("plain", "folder")})
    )


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


def _entrypoint(new_run: NewRun, flags: tuple[str, ...], device: str) -> Result:
    run = new_run()
    finished(run.start(*flags, TRAINYARD_ACCELERATOR=device))
    first, *_, last = (line for line in run.metrics() if "loss" in line)
    seconds = (datetime.fromisoformat(last["time"]) - datetime.fromisoformat(first["time"])).total_seconds()
    result = run.receipt().result
    rate = (last["step"] - first["step"]) * BATCH / seconds
    return {"samples_per_second": rate, "loss": last["loss"], "accuracy": result["eval_accuracy"]}


def _plain(folder: Path, side: str) -> Result:
    command = [sys.executable, "-m", "tests.benchmarks.finetuning_speed", "--plain", side, "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answer: Result = json.loads(done.stdout.splitlines()[-1])
    return answer


def _train_plainly(folder: Path, given: argparse.Namespace) -> None:
    """In a process of its own. Prints a `Result` as JSON."""
    import transformers
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments

    options = argparse.Namespace(**json.loads((folder / "options.json").read_text()))
    transformers.set_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def table(name: str) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        texts, pairs = ([row[column] for row in rows] for column in ("text", "pair"))
        padding = "max_length" if PLAIN[given.plain] == "max_length" else False
        ids = tokenizer(texts, pairs, truncation=True, max_length=MAX_LENGTH, padding=padding)
        return [
            {**{column: ids[column][number] for column in ids}, "label": row["label"]}
            for number, row in enumerate(rows)
        ]

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]  # transformers has no types
        def __init__(self) -> None:
            self.logged: list[tuple[float, int, float]] = []

        def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs:
                self.logged.append((time.time(), state.global_step, logs["loss"]))

    watch = Watch()
    trainer = Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=2),
        args=TrainingArguments(
            output_dir=str(folder / "output"),
            num_train_epochs=options.epochs,
            learning_rate=LEARNING_RATE,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=64,
            logging_steps=10,
            bf16=options.device == "cuda",
            use_cpu=options.device == "cpu",
            save_strategy="no",
            disable_tqdm=True,
            report_to=[],
        ),
        train_dataset=table("train"),
        eval_dataset=table("eval"),
        processing_class=tokenizer,
        compute_metrics=lambda given: {"accuracy": float((given[0].argmax(-1) == given[1]).mean())},
        callbacks=[watch],
    )
    trainer.train()
    first, *_, last = watch.logged
    rate = (last[1] - first[1]) * BATCH / (last[0] - first[0])
    accuracy = trainer.evaluate()["eval_accuracy"]
    print(json.dumps({"samples_per_second": rate, "loss": last[2], "accuracy": accuracy}))


if __name__ == "__main__":
    main()
