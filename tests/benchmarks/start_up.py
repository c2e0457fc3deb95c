"""What it costs to start an attempt again, by its parts, up to the end of the first resumed step.

python -m tests.benchmarks.start_up                      a small BERT on one rank and on two; the medians of three runs
python -m tests.benchmarks.start_up --examples 1000000   BERT-base, random weights, on that many made-up texts
python -m tests.benchmarks.start_up --requirements FILE  packages of a script's own: installed, and taken from S3 later

A fine-tuning is killed after its first checkpoint, and continues in a second attempt, which is measured. The parts are
those of the line `start-up:` in its log (jobs/train/start_up.py). CPU is that of the launcher and its ranks, without
the S3, which is a process of this machine too: if others work on it, only the CPU seconds are comparable.

The small one is a BERT of two layers on 188 sentences. BERT-base has one rank, which takes all cores, and its first
attempt is shown too. The total of the last column is what `goodput --restart-seconds` takes. Packages come on top of a
restart.
"""

import argparse
import csv
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil

from jobs.train.packages import Environment
from tests.support.benchmarks.launched import launcher
from tests.support.benchmarks.speed import in_turns
from tests.support.train.launching import NewRun, Run
from tests.support.train.recipes import Flags, finetuning
from tests.support.train.reviews import save_tiny_bert
from tests.support.train.s3_server import put

TOTAL = "in all"
STEPS = ("--epochs=1000", "--log-every-steps=3")
HELD_OUT = 10_000
PATIENCE_SECONDS = 1800.0

Parts = dict[str, tuple[float, float]]
"""Seconds of each part, and CPU seconds of the rank; in all, of the launcher and all ranks."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.start_up", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--examples", type=int, help="fine-tune BERT-base on so many instead")
    parser.add_argument("--requirements", type=Path, help="measure an environment of these packages instead")
    options = parser.parse_args()
    cores = str(os.cpu_count())
    with tempfile.TemporaryDirectory() as made:
        if options.examples:
            os.environ["OMP_NUM_THREADS"] = cores
        with launcher(Path(made)) as new_run:
            if options.requirements:
                environment(new_run(), options.requirements, Path(made))
                return
            show(
                base(new_run, Path(made), options.examples)
                if options.examples
                else small(new_run, Path(made), options.rounds)
            )


def small(new_run: NewRun, folder: Path, rounds: int) -> dict[str, Parts]:
    flags = (*finetuning(new_run().s3, save_tiny_bert(folder / "model"), folder), *STEPS)

    def resumed(ranks: int) -> Parts:
        run = new_run()
        attempted(run, flags, ranks=ranks, attempt=1)
        return attempted(run, flags, ranks=ranks, attempt=2)

    found = in_turns({"1 rank": lambda: resumed(1), "2 ranks": lambda: resumed(2)}, rounds)
    return {
        side: {part: tuple(map(statistics.median, zip(*(row[part] for row in rows), strict=True))) for part in rows[0]}
        for side, rows in found.items()
    }


def base(new_run: NewRun, folder: Path, examples: int) -> dict[str, Parts]:
    s3 = new_run().s3
    words = save_base_bert(folder / "base")
    flags = (
        f"--model={put(s3, folder / 'base', 'models/base')}",
        f"--train-data={put(s3, write_texts(folder / 'train.csv', words, examples, seed=1), 'made-up/train.csv')}",
        f"--eval-data={put(s3, write_texts(folder / 'eval.csv', words, HELD_OUT, seed=2), 'made-up/eval.csv')}",
        "--global-batch-size=16",
        *STEPS,
    )
    run = new_run()
    return {
        name: attempted(run, flags, ranks=1, attempt=attempt)
        for attempt, name in enumerate(("first attempt", "resumed"), start=1)
    }


def environment(run: Run, requirements: Path, folder: Path) -> None:
    """Make an environment as two attempts do, and import in each all that it has."""
    code = folder / "code"
    code.mkdir()
    (code / "requirements.txt").write_bytes(requirements.read_bytes())
    for attempt in ("first attempt", "goes on"):
        place = folder / attempt.partition(" ")[0]
        began = time.monotonic()
        packages = Environment(run.s3, run.location, place, code=code, requirements="requirements.txt")
        variables = packages.make(wheels=None, installs=True)
        made = time.monotonic()
        modules = sorted(
            {
                file.parent.name
                for path in variables["PYTHONPATH"].split(":")
                for file in Path(path).glob("*/__init__.py")
            }
        )
        program = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)"
        subprocess.run([sys.executable, "-c", program, *modules], env={**os.environ, **variables}, check=True)
        imported = time.monotonic()
        print(
            f"{attempt:<14} packages {made - began:5.1f} s   import {', '.join(modules)} {imported - made:.1f} s",
            flush=True,
        )


def attempted(run: Run, flags: Flags, *, ranks: int, attempt: int) -> Parts:
    """Ends an attempt after its first steps, the first one once it has saved. Returns what its parts took."""
    every = f"--checkpoint-every-steps={2 if attempt == 1 else 100_000}"
    launched = replace(run, is_fresh=True).start(
        *flags, every, nproc=ranks, attempt=attempt, TRAINYARD_ACCELERATOR="cpu"
    )
    line = launched.wait_for_line("start-up:", PATIENCE_SECONDS)
    cpu = cpu_seconds(launched.process.pid)
    if attempt == 1:
        launched.wait_for_line("checkpoint: step", PATIENCE_SECONDS)
    launched.kill()
    run.wait_until_gone()
    if attempt > 1 and "start: resumed" not in launched.output:
        sys.exit(launched.output)
    named = re.findall(r"([a-z][a-z ]*) ([\d.]+) \(([\d.]+)\)", line.rpartition(": ")[2])
    parts = {name: (float(seconds), float(of_rank)) for name, seconds, of_rank in named}
    return {**parts, TOTAL: (sum(seconds for seconds, _ in parts.values()), cpu)}


def cpu_seconds(pid: int) -> float:
    """What a process and all that it has started took until now, those that have ended included."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return float(sum(sum(process.cpu_times()[:4]) for process in family))


def show(found: dict[str, Parts]) -> None:
    parts = dict.fromkeys(part for side in found.values() for part in side if part != TOTAL)
    print(f"{'seconds':<22}" + "".join(f"{side:>16}{'CPU':>8}" for side in found))
    for part in (*parts, TOTAL):
        figures = (side.get(part, (0.0, 0.0)) for side in found.values())
        print(f"{part:<22}" + "".join(f"{seconds:16.1f}{cpu:8.1f}" for seconds, cpu in figures), flush=True)


def save_base_bert(folder: Path) -> Sequence[str]:
    """A BERT of the usual size, with random weights and a vocabulary of made-up words, which are returned."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    syllables = [one + vowel for one in "bdfghklmnprstvz" for vowel in "aeiou"]
    chance = np.random.default_rng(0)
    words = sorted({"".join(chance.choice(syllables, 2 + number % 3)) for number in range(40_000)})
    letters = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{one}" for one in "abcdefghijklmnopqrstuvwxyz")]
    pieces = [f"##{one}" for one in syllables]
    config = BertConfig()
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *pieces, *words][: config.vocab_size]
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(known))
    BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
    return words


def write_texts(path: Path, words: Sequence[str], count: int, *, seed: int) -> Path:
    """Texts of 5 to 40 words, some of which are much more frequent than others, of two classes."""
    chance = np.random.default_rng(seed)
    lengths = chance.integers(5, 41, count)
    ends = np.cumsum(lengths)
    of_all = np.asarray(words, dtype=object)[(len(words) * chance.random(int(ends[-1])) ** 3).astype(np.int64)].tolist()
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for number, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
            rows.writerow([" ".join(of_all[end - length : end]), ("bad", "good")[number % 2]])
    return path


if __name__ == "__main__":
    main()
