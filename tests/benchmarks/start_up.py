"""What it costs to start an attempt again, by its parts: CPU of all its processes, and time to the first resumed steps.

python -m tests.benchmarks.start_up              one rank and two, three rounds of both sides
python -m tests.benchmarks.start_up --rounds 5   more

A BERT of two layers that is fine-tuned on 188 sentences is interrupted after its first steps, goes on in a second
attempt and is interrupted again after that one's first steps: the second one is measured. Two sides take turns:

    fresh     each rank is a process of its own, which imports PyTorch and transformers for itself
    forked    the ranks are forked from one that has imported them (jobs/train/launcher/fork_server.py)

The parts end with lines of the log:

    launcher      Python, the arguments' checks and PyTorch, up to `accelerator:`
    data          all that is imported for the Trainer; model and data fetched and tokenized; up to the last `data:`
    checkpoint    the newest one found and fetched, up to `start:`
    first steps   model, optimizer and process group made, the checkpoint loaded, three steps

The median of the rounds is printed. Where the machine does other work, only the CPU seconds say much.
"""

import argparse
import itertools
import resource
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from jobs.contract.errors import INTERRUPTED_EXIT_CODE
from tests.support.benchmarks.launched import launcher
from tests.support.train.launching import Run
from tests.support.train.recipes import Flags, finetuning
from tests.support.train.reviews import save_tiny_bert

FORKED = "import sys; from jobs.train import launch; sys.exit(launch.main())"
FRESH = f"from jobs.train.kinds import finetune_classification; del finetune_classification.preload; {FORKED}"
PARTS = {"launcher": "accelerator:", "data": "data: sequences", "checkpoint": "start:", "first steps": " samples/s"}
"""What the line contains with which a part ends."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.start_up", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as made, launcher(Path(made)) as new_run:
        folder = Path(made)
        flags = (
            *finetuning(new_run().s3, save_tiny_bert(folder / "model"), folder),
            *("--epochs=1000", "--checkpoint-every-steps=100000", "--log-every-steps=3"),
        )
        titles = [f"{part} s" for part in PARTS]
        print(f"{'':<16}{'CPU s':>12}{''.join(f'{title:>16}' for title in titles)}{'in all s':>12}")
        for ranks in (1, 2):
            found: dict[str, list[list[float]]] = {"fresh": [], "forked": []}
            for _ in range(rounds):
                for side, program in (("fresh", FRESH), ("forked", FORKED)):
                    run = new_run()
                    attempted(run, flags, program, ranks=ranks, attempt=1)
                    found[side].append(attempted(run, flags, program, ranks=ranks, attempt=2))
            for side, rows in found.items():
                cpu, *parts = (statistics.median(column) for column in zip(*rows, strict=True))
                shown = "".join(f"{seconds:16.1f}" for seconds in parts)
                print(f"{f'{ranks} rank(s) {side}':<16}{cpu:12.2f}{shown}{sum(parts):12.1f}", flush=True)
    return 0


def attempted(run: Run, flags: Flags, program: str, *, ranks: int, attempt: int) -> list[float]:
    """Interrupts an attempt after its first steps. Returns its CPU seconds, and the seconds of each part."""
    cpu, times = _cpu_seconds(), [time.monotonic()]
    fresh = replace(run, is_fresh=True)
    launched = fresh.start(*flags, nproc=ranks, attempt=attempt, program=("-c", program), TRAINYARD_ACCELERATOR="cpu")
    for line in PARTS.values():
        launched.wait_for_line(line)
        times.append(time.monotonic())
    if launched.kill(signal.SIGTERM) != INTERRUPTED_EXIT_CODE:
        sys.exit(launched.output)
    return [_cpu_seconds() - cpu, *(after - before for before, after in itertools.pairwise(times))]


def _cpu_seconds() -> float:
    """CPU seconds of all processes that this one has waited for; the S3 is one that still runs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
