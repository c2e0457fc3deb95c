"""Compare the sides of a benchmark in turns, and measure the speed of the entrypoint or the plain Trainer."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from tests.support.benchmarks.launched import finished
from tests.support.container.launching import Run

T = TypeVar("T")

Result = dict[str, Any]
"""Figures of one training: `steps_per_second`, `loss` of the last log line, and others."""


def in_turns(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Measure each side once per round, so that other load affects all sides, and print each result immediately."""
    found: dict[str, list[T]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, measure in sides.items():
            found[side].append(measure())
            print(f"{side:<14} {found[side][-1]}", file=sys.stderr, flush=True)
    return found


def start_side(module: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """Start one side in a separate process. Its last output line is JSON."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)


def side_result(process: "subprocess.Popen[str]") -> Result:
    """Wait for a side and return its result. If it failed, end the benchmark."""
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"{process.args!r} failed with {process.returncode}")
    found: Result = json.loads(output.splitlines()[-1])
    return found


def training_options(parser: argparse.ArgumentParser, *, layers: int, hidden: int, heads: int) -> None:
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--hidden", type=int, default=hidden)
    parser.add_argument("--heads", type=int, default=heads)
    parser.add_argument("--rounds", type=int, default=2, help="rounds of all sides; the fastest of each side counts")
    parser.add_argument("--plain", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)


def plainly(module: str, side: str, folder: Path, options: argparse.Namespace) -> Result:
    """Train with the plain Trainer in a separate process, which runs `module` with `--plain` and the same options."""
    given = {name: value for name, value in vars(options).items() if name != "plain"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if not isinstance(value, bool)]
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return side_result(start_side(module, "--plain", side, str(folder), *words, OMP_NUM_THREADS=threads))


def by_entrypoint(run: Run, *flags: str, kind: str, device: str) -> Result:
    """Train with the launcher. Return the result, and the speed between the first and the last line of metrics."""
    finished(run.start(*flags, kind=kind, TRAINYARD_ACCELERATOR=device))
    first, *_, last = (line for line in run.metrics() if "loss" in line)
    seconds = (datetime.fromisoformat(last["time"]) - datetime.fromisoformat(first["time"])).total_seconds()
    rate = (last["step"] - first["step"]) / seconds
    return {"steps_per_second": rate, "loss": last["loss"], **run.receipt().result}


def by_plain_trainer(device: str, output: Path, *, arguments: Mapping[str, Any], **parts: Any) -> tuple[Result, Any]:
    """Train with the Trainer of transformers, without saving. Return its speed, and the Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    logged: list[tuple[float, int, float]] = []

    class Watch(TrainerCallback):  # type: ignore[misc]  # transformers has no types
        def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs:
                logged.append((time.time(), state.global_step, logs["loss"]))

    fixed = {"save_strategy": "no", "disable_tqdm": True, "report_to": []}
    on = {"bf16": device == "cuda", "use_cpu": device == "cpu"}
    trainer = Trainer(
        args=TrainingArguments(output_dir=str(output), **fixed, **on, **arguments), callbacks=[Watch()], **parts
    )
    trainer.train()
    first, *_, last = logged
    return {"steps_per_second": (last[1] - first[1]) / (last[0] - first[0]), "loss": last[2]}, trainer


def show(results: Mapping[str, list[Result]], of: str, columns: Mapping[str, str], *, unit: float, name: str) -> None:
    """Print the fastest round of each side: its speed, the ratio to side `of`, and the figures of `columns`."""
    best = {side: max(rounds, key=lambda each: float(each["steps_per_second"])) for side, rounds in results.items()}
    print(f"{'':<14} {name:>12} {'ratio':>7}" + "".join(f"{title:>14}" for title in columns.values()))
    for side, result in best.items():
        rate = float(result["steps_per_second"])
        figures = "".join(f"{result[key]:14.4f}" for key in columns)
        print(f"{side:<14} {rate * unit:12,.1f} x{rate / float(best[of]['steps_per_second']):6.2f}{figures}")
