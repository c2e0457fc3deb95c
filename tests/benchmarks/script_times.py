"""Measure the platform's overhead for a custom script: the time to its first line, and the callback's share of a step.

python -m tests.benchmarks.script_times                    both, with five submissions and 2,000 steps
python -m tests.benchmarks.script_times --only callback    one of both (or: first-line)
python -m tests.benchmarks.script_times --submissions 3 --steps 500     fewer

First line: `trainyard submit` of a folder with a script that prints one line, on a separate emulator whose jobs are
processes. The first submission uploads the folder; later ones are warm. The time runs from the start of the command
until the line appears in its output.

Callback: a BERT with 2 layers of 256 on sequences of 128 tokens, 4 per step, with the plain Trainer of transformers
under the launcher, on one rank with one thread, and a line of metrics every ten steps. Two processes would differ by
more than the effect, so one process alternates: every ten steps, `trainyard.Callback(checkpoint_every_steps=None)` is
removed or added. Each ten steps with it are compared with the next ten without it, in wall-clock seconds and in CPU
seconds of all threads. The benchmark `saving` measures the cost of a save.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.benchmarks.launched import finished, launcher
from tests.support.container.scripts import script_flags, write_files

BLOCK = 10
"""Steps per turn, and between two lines of metrics."""
FIRST = "the script runs"

SPEC = """
name: says-a-line
job: script
resources: {nproc_per_node: 1}
arguments: {code: code, command: say.py}
"""

TRAINS = f"""
import statistics, sys, time
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
import trainyard

class InTurns(TrainerCallback):
    blocks = {{True: [], False: []}}

    def on_step_begin(self, args, state, control, **_):
        if state.global_step % {BLOCK}:
            return
        now = time.perf_counter(), time.process_time()
        callbacks = trainer.callback_handler.callbacks
        here = callback in callbacks
        if state.global_step > {BLOCK}:
            self.blocks[here].append([(end - start) / {BLOCK} for start, end in zip(self.at, now)])
        (callbacks.remove if here else callbacks.append)(callback)
        self.at = time.perf_counter(), time.process_time()

torch.manual_seed(0)
data = [{{"input_ids": torch.randint(5, 1000, (128,)), "labels": torch.tensor(number % 2)}} for number in range(960)]
shape = dict(vocab_size=1000, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=1024)
callback = trainyard.Callback(checkpoint_every_steps=None)
trainer = Trainer(
    BertForSequenceClassification(BertConfig(**shape)),
    TrainingArguments("out", max_steps=int(sys.argv[1]), per_device_train_batch_size=4, logging_steps={BLOCK},
                      report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"),
    train_dataset=data,
    callbacks=[InTurns(), callback],
)
trainer.train(resume_from_checkpoint=trainyard.checkpoint())
for number, what in enumerate(("seconds", "CPU seconds")):
    there, absent = ([block[number] for block in InTurns.blocks[here]] for here in (True, False))
    apart = [(one - other) / other for one, other in zip(there, absent)]
    low, middle, high = statistics.quantiles(apart, n=4)
    error = 1.253 * statistics.stdev(apart) / len(apart) ** 0.5
    spread = f"half of {{len(apart)}} pairs between {{low:+.2%}} and {{high:+.2%}}; standard error {{error:.2%}}"
    middle = f"{{statistics.median(absent):.4f}} without it; with it {{middle:+.2%}}"
    print(f"{{what}} of a step: {{middle}} ({{spread}})", flush=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.script_times", description=__doc__)
    parser.add_argument("--submissions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", choices=("first-line", "callback"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.only != "callback":
            _first_lines(Path(name), options.submissions)
        if options.only != "first-line":
            _callback(Path(name), options.steps)
    return 0


def _first_lines(folder: Path, submissions: int) -> None:
    write_files(folder / "submits", {"spec.yaml": SPEC, "code/say.py": f"print({FIRST!r}, flush=True)"})
    here = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}

    def trainyard(*arguments: str, **more: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", "from jobs.cli import main; main()", *arguments],
            cwd=folder / "submits",
            env={**here, **more, "PYTHONPATH": str(Path.cwd())},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    exports, _ = trainyard("local", "up").communicate()
    environment = dict(re.findall(r"^export (\w+)='?([^'\n]*)'?$", exports, re.MULTILINE))
    try:
        for number in range(submissions):
            started = time.monotonic()
            with trainyard("submit", "spec.yaml", "--yes", **environment) as followed:
                assert followed.stdout is not None
                lines = iter(followed.stdout.readline, "")
                before = "".join(itertools.takewhile(lambda line: FIRST not in line, lines))
                seconds = time.monotonic() - started
                rest = "".join(lines)
            if followed.returncode or not rest:
                sys.exit(f"the run did not print {FIRST!r}:\n{before}{rest}")
            print(f"first line after {seconds:.1f} s ({'warm' if number else 'the folder is uploaded'})", flush=True)
    finally:
        trainyard("local", "down", "--yes").communicate()


def _callback(folder: Path, steps: int) -> None:
    with launcher(folder) as new_run:
        run = new_run()
        code = write_files(folder / "trains", {"train.py": TRAINS})
        launched = run.start(*script_flags(run.s3, code, f"train.py {steps}"), kind="script")
        finished(launched)
        print("".join(line for line in launched.lines if "seconds of a step" in line), end="")


if __name__ == "__main__":
    sys.exit(main())
