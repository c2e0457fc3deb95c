"""Measure each part of a restart, until the end of the first resumed step.

python -m tests.benchmarks.start_up                      a small BERT on one and on two ranks; medians of three runs
python -m tests.benchmarks.start_up --requirements FILE  a script's packages: installed first, later taken from S3

A fine-tuning is killed after its first checkpoint, and the benchmark measures its second attempt. The parts are those
of the log line `start-up:` (jobs/container/rank.py). CPU seconds include the launcher and its ranks, but not the S3
server, which also runs on this machine. On a busy machine, only the CPU seconds are comparable.

The model is a BERT with two layers, on 188 sentences. Pass the total of the last column to `goodput --restart-seconds`.
The time for packages is added to a restart.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil

from jobs.container.packages import Environment
from tests.support.benchmarks.launched import launcher
from tests.support.benchmarks.speed import in_turns
from tests.support.container.launching import NewRun, Run
from tests.support.container.recipes import Flags, finetuning
from tests.support.container.reviews import save_tiny_bert

TOTAL = "total"
STEPS = ("--epochs=1000", "--log-every-steps=3")
PATIENCE_SECONDS = 1800.0

Parts = dict[str, tuple[float, float]]
"""Seconds of each part, and CPU seconds: of the rank for a part, of the launcher and all ranks for the total."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.start_up", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requirements", type=Path, help="measure an environment with these packages instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, launcher(Path(made)) as new_run:
        if options.requirements:
            environment(new_run(), options.requirements, Path(made))
        else:
            show(small(new_run, Path(made), options.rounds))


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


def environment(run: Run, requirements: Path, folder: Path) -> None:
    """Make the environment of two attempts, and import all its packages in each."""
    code = folder / "code"
    code.mkdir()
    (code / "requirements.txt").write_bytes(requirements.read_bytes())
    for attempt in ("first attempt", "second attempt"):
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
    """Run an attempt for a few steps (the first until it has saved), kill it, and return the times of its parts."""
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
    """Return the CPU seconds of a process and its descendants, including those that have ended."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return float(sum(sum(process.cpu_times()[:4]) for process in family))


def show(found: dict[str, Parts]) -> None:
    parts = dict.fromkeys(part for side in found.values() for part in side if part != TOTAL)
    print(f"{'seconds':<22}" + "".join(f"{side:>16}{'CPU':>8}" for side in found))
    for part in (*parts, TOTAL):
        figures = (side.get(part, (0.0, 0.0)) for side in found.values())
        print(f"{part:<22}" + "".join(f"{seconds:16.1f}{cpu:8.1f}" for seconds, cpu in figures), flush=True)


if __name__ == "__main__":
    main()
