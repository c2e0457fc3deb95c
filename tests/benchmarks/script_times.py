"""What a script of one's own pays for the platform: the wait for its first line, and the callback's share of a step.

python -m tests.benchmarks.script_times                    both; five submissions, five rounds of 300 steps
python -m tests.benchmarks.script_times --only callback    one of them, or: first-line
python -m tests.benchmarks.script_times --rounds 3 --steps 100      fewer

First line: `trainyard submit --follow` of a folder with a script that prints one line, on an embedded AWS of its own
whose jobs are processes. The first submission uploads the folder; those after it are warm. The seconds run from the
start of the command to the line on its output, and are told apart.

Callback: a BERT of 2 layers of 256 on sequences of 128 tokens, 4 a step, by the plain Trainer of transformers under
the launcher, on one rank with one thread; in turn as it is, with `trainyard.Callback(checkpoint_every_steps=None)`, and
with `trainyard.Callback()`, which saves as often as it is worth; with a line of metrics every ten steps. Counted are
the median seconds of a step, and the CPU seconds that the process spends on one, all its threads together: where other
work runs on the machine they say more. Told are the median of the rounds, and the least and the most of them.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.benchmarks.launched import finished, launcher
from tests.support.train.scripts import script_flags, write_files

WARM_UP = 10
FIRST = "the script is here"

PARTS = (
    "until the launcher's process is there",
    "until the rank's is",
    "until it says its line",
    "until that is shown",
)

SAYS = f"""
import os, time

def started(process):
    ticks = int(open(f"/proc/{{process}}/stat").read().rpartition(")")[2].split()[19])
    up = float(open("/proc/uptime").read().split()[0])
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")

print({FIRST!r}, started(os.getppid()), started(os.getpid()), time.time(), flush=True)
"""

SPEC = """
name: says-a-line
job: script
resources: {nproc_per_node: 1}
arguments: {code: code, command: say.py}
"""

TRAINS = f"""
import os, statistics, sys, time
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
import trainyard

class Clock(TrainerCallback):
    at, cpu, seconds, cpu_seconds = 0.0, 0.0, [], []

    def on_step_begin(self, args, state, control, **_):
        now, cpu = time.perf_counter(), time.process_time()
        if state.global_step > {WARM_UP}:
            self.seconds.append(now - self.at)
            self.cpu_seconds.append(cpu - self.cpu)
        self.at, self.cpu = now, cpu

torch.manual_seed(0)
data = [{{"input_ids": torch.randint(5, 1000, (128,)), "labels": torch.tensor(number % 2)}} for number in range(960)]
shape = dict(vocab_size=1000, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=1024)
clock = Clock()
saves = {{"none": None, "auto": "auto"}}
with_callback = [trainyard.Callback(checkpoint_every_steps=saves[sys.argv[1]])] if sys.argv[1] in saves else []
Trainer(
    BertForSequenceClassification(BertConfig(**shape)),
    TrainingArguments("out", max_steps=int(sys.argv[2]), per_device_train_batch_size=4, logging_steps=10, report_to=[],
                      use_cpu=True, disable_tqdm=True, save_strategy="no"),
    train_dataset=data,
    callbacks=[clock, *with_callback],
).train(resume_from_checkpoint=trainyard.checkpoint() if with_callback else None)
print("seconds", statistics.median(clock.seconds), statistics.fmean(clock.cpu_seconds), flush=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.script_times", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", choices=("first-line", "callback"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.only != "callback":
            _first_lines(Path(name), options.rounds)
        if options.only != "first-line":
            _callback(Path(name), options.rounds, options.steps)
    return 0


def _first_lines(folder: Path, submissions: int) -> None:
    write_files(folder / "submits", {"spec.yaml": SPEC, "code/say.py": SAYS})
    here = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    program = [sys.executable, "-c", "from jobs.cli import main; main()"]

    def trainyard(*arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [*program, *arguments],
            cwd=folder / "submits",
            env={**here, **environment, "PYTHONPATH": str(Path.cwd())},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stdout

    exports = trainyard("local", "up")
    try:
        environment = dict(re.findall(r"^export (\w+)='?([^'\n]*)'?$", exports, re.MULTILINE))
        for number in range(submissions):
            started = time.time()
            followed = subprocess.Popen(
                [*program, "submit", "spec.yaml", "--follow", "--yes"],
                cwd=folder / "submits",
                env={**here, **environment, "PYTHONPATH": str(Path.cwd())},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            assert followed.stdout is not None
            lines = iter(followed.stdout.readline, "")
            first = next((line for line in lines if FIRST in line), "")
            shown = time.time()
            rest = "".join(lines)
            if followed.wait() or not first:
                sys.exit(f"the run did not say its line:\n{rest}")
            moments = [started, *map(float, first.removeprefix(FIRST).split()), shown]
            parts = zip(PARTS, moments[1:], moments[:-1], strict=True)
            print(
                f"first line after {shown - started:.1f} s ({'warm' if number else 'the folder is uploaded'}): "
                + ", ".join(f"{name} {after - before:.2f}" for name, after, before in parts),
                flush=True,
            )
    finally:
        trainyard("local", "down", "--yes")


def _callback(folder: Path, rounds: int, steps: int) -> None:
    found: dict[str, list[tuple[float, float]]] = {"bare": [], "none": [], "auto": []}
    with launcher(folder) as new_run:
        code = write_files(folder / "trains", {"train.py": TRAINS})
        for _ in range(rounds):
            for which, figures in found.items():
                run = new_run()
                flags = script_flags(run.s3, code, f"train.py {which} {steps}")
                launched = run.start(*flags, kind="script")
                finished(launched)
                [line] = [line for line in launched.lines if line.startswith("seconds ")]
                wall, cpu = map(float, line.split()[1:])
                figures.append((wall, cpu))
                print(json.dumps({"side": which, "seconds": round(wall, 4), "cpu_seconds": round(cpu, 4)}), flush=True)
    for number, what in enumerate(("seconds of a step", "CPU seconds of a step")):
        sides = {which: [figure[number] for figure in figures] for which, figures in found.items()}
        bare = statistics.median(sides["bare"])
        for which, rounds_of in sides.items():
            middle = statistics.median(rounds_of)
            spread = f"{min(rounds_of):.4f} to {max(rounds_of):.4f}"
            print(f"{what}, {which}: {middle:.4f} ({spread}), {middle / bare - 1:+.1%}")


if __name__ == "__main__":
    sys.exit(main())
