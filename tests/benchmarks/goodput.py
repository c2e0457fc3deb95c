"""How much of a day on Spot instances is useful work, here and where less is done about reclaims.

python -m tests.benchmarks.goodput                                   simulates 1,000 days a figure, from PARTS below
python -m tests.benchmarks.goodput --picture jobs/docs/goodput.svg   draws them too
python -m tests.benchmarks.goodput --instance-seconds 240            another machine's figure in place of one of PARTS
python -m tests.benchmarks.goodput --measure                         measures what it can of PARTS here first

Goodput is the time of steps that are not lost over the time that passes while an instance is held; a day of that time
is simulated, with reclaims at random (a Poisson process). EC2 gives notice of each, two minutes before. Six ways to
train:

    trainyard              saves by Young's formula (checkpoint_every_steps: auto, which assumes a reclaim every 6 h);
                           saves at the notice, trains on, saves again shortly before the end, and leaves
    save and leave         the same, but leaves at once when it has saved at the notice; the instance is still held
    save once              the same, but trains on after the save at the notice until the instance is gone
    no heed of it          saves by Young's formula, told the true rate, and trains until the instance is gone
    every 500 steps        the default of transformers, until the instance is gone
    published tutorial     saves every 5,000 steps and never resumes: what counts is what the day's end still has

All resume from the last complete checkpoint, but for the tutorial, and all start as fast.

A second table is about how long a new instance takes.
"""

import argparse
import json
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from rich.console import Console
from rich.table import Table

from jobs.contract.recipe import Recipe
from jobs.train.data.packed_tokens import INDEX, TOKENIZER, Index, pack
from jobs.train.trainer.checkpoint_interval import interval
from tests.support.benchmarks.launched import launcher
from tests.support.benchmarks.simulated_day import Costs, Policy, goodput
from tests.support.train.packing import publish
from tests.support.train.reviews import save_tiny_bert

MEAN_HOURS = (1.0, 6.0, 24.0)
INSTANCE_SECONDS = (10.0, 60.0, 120.0, 240.0)
STOPPED_AT = 60
LENGTH, VOCABULARY = 128, 8192
CONFIG = {
    "model_type": "bert",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 512,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
FLAGS = (
    "--max-steps=100000",
    "--global-batch-size=16",
    "--log-every-steps=5",
    "--checkpoint-every-steps=auto",
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One duration that the simulation is about, and where it comes from."""

    meaning: str
    seconds: float
    source: str
    restarts: bool = False
    """True where it is a part of a restart, from an instance on which the job can start to the first step on it."""


_SAVING = "saving: BERT-base, on two quiet cores of which S3 takes a share"
_START_UP = "start_up --examples 1000000: BERT-base, on two quiet cores"

PARTS = {
    "step": Part(meaning="a step", seconds=0.78, source=_SAVING),
    "stall": Part(meaning="a save holds the training up for at most", seconds=0.10, source=_SAVING),
    "upload": Part(meaning="from there until the checkpoint is complete", seconds=13.9, source=_SAVING),
    "instance": Part(
        meaning="an instance starts, and has the image",
        seconds=0.0,
        source="not measured, for it takes an account",
    ),
    "launcher": Part(meaning="the launcher starts, and imports", seconds=2.8, source=_START_UP, restarts=True),
    "data": Part(meaning="tokenizer and examples are fetched", seconds=1.1, source=_START_UP, restarts=True),
    "checkpoint": Part(meaning="the checkpoint is fetched", seconds=3.4, source=_START_UP, restarts=True),
    "first-step": Part(
        meaning="the checkpoint is loaded; the first step", seconds=3.0, source=_START_UP, restarts=True
    ),
}
"""What the documents' figures are simulated from. A restart is the sum of its parts."""

_ENDS = {"launcher": "accelerator:", "data": "data: ", "checkpoint": "start: ", "first-step": "[progress] "}
"""How the line of the log begins with which a part of a restart ends."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.goodput", description=__doc__.partition("\n")[0])
    for name, part in PARTS.items():
        parser.add_argument(f"--{name}-seconds", type=float, help=f"{part.meaning} (default: {part.seconds:g})")
    parser.add_argument("--restart-seconds", type=float, help="in place of its parts")
    parser.add_argument("--measure", action="store_true", help="measure here what is not given, in about a minute")
    parser.add_argument("--days", type=int, default=1000, help="simulated for each figure")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path, help="an SVG file to draw")
    options = parser.parse_args()
    given = {name: getattr(options, f"{name.replace('-', '_')}_seconds") for name in PARTS}
    given = {name: seconds for name, seconds in given.items() if seconds is not None}
    found = measured() if options.measure else {}
    seconds = {name: part.seconds for name, part in PARTS.items()} | found | given
    for name, part in PARTS.items():
        source = "given" if name in given else "measured now" if name in found else part.source
        print(f"{seconds[name]:8.2f} s  {part.meaning} ({source})")
    costs = costs_of(seconds)
    if options.restart_seconds is not None:
        costs = replace(costs, restart=options.restart_seconds)
    print(f"{costs.instance + costs.restart:8.2f} s  a new instance and a restart in all")
    figures = simulated(costs, days=options.days, seed=options.seed)
    table = Table(box=None, pad_edge=False)
    table.add_column("a reclaim every")
    for name in figures:
        table.add_column(name, justify="right")
    for number, hours in enumerate(MEAN_HOURS):
        table.add_row(f"{hours:g} h", *(f"{100 * each[number]:.2f} %" for each in figures.values()))
    by_instance = Table(box=None, pad_edge=False)
    by_instance.add_column("an instance takes")
    by_instance.add_column("at a reclaim every 1 h", justify="right")
    for taken, share in zip(INSTANCE_SECONDS, with_instances(costs, days=options.days, seed=options.seed), strict=True):
        by_instance.add_row(f"{taken:g} s", f"{100 * share:.2f} %")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(by_instance)
    if options.picture:
        options.picture.write_text(drawn(figures))


def costs_of(seconds: Mapping[str, float]) -> Costs:
    restart = sum(seconds[name] for name, part in PARTS.items() if part.restarts)
    return Costs(restart=restart, **{name: seconds[name] for name, part in PARTS.items() if not part.restarts})


def with_instances(costs: Costs, *, days: int = 1000, seed: int = 1) -> list[float]:
    """Goodput of ours at a reclaim each hour, by INSTANCE_SECONDS."""
    ours = policies_of(costs, 1.0)[0]
    return [
        goodput(ours, replace(costs, instance=taken), mean_hours=1.0, days=days, seed=seed)
        for taken in INSTANCE_SECONDS
    ]


def simulated(costs: Costs, *, days: int = 1000, seed: int = 1) -> dict[str, list[float]]:
    """Goodput of each way to train, at each of MEAN_HOURS."""
    figures: dict[str, list[float]] = {}
    for hours in MEAN_HOURS:
        for policy in policies_of(costs, hours):
            share = goodput(policy, costs, mean_hours=hours, days=days, seed=seed)
            figures.setdefault(policy.name, []).append(share)
    return figures


def policies_of(costs: Costs, mean_hours: float) -> Sequence[Policy]:
    assumed = float(Recipe.model_fields["mean_hours_between_reclaims"].default)
    auto = interval(
        stall_seconds=costs.stall, mean_seconds_between_reclaims=assumed * 3600, complete_seconds=costs.save
    ).seconds
    young = max(math.sqrt(2 * costs.stall * mean_hours * 3600), costs.save)
    return (
        Policy(name="trainyard", save_every_seconds=auto, at_notice="saves twice"),
        Policy(name="save and leave", save_every_seconds=auto, at_notice="leaves"),
        Policy(name="save once", save_every_seconds=auto, at_notice="saves"),
        Policy(name="no heed of it", save_every_seconds=young),
        Policy(name="every 500 steps", save_every_seconds=500 * costs.step),
        Policy(name="published tutorial", save_every_seconds=5000 * costs.step, resumes=False),
    )


def measured() -> dict[str, float]:
    """Measure two attempts of one run, the first of which is stopped."""
    with tempfile.TemporaryDirectory() as name, launcher(Path(name)) as new_run:
        run = replace(new_run(), is_fresh=True)  # a launcher that imports for itself, as one in a container does
        folder = _packed_tokens(Path(name) / "data")
        flags = (f"--data={publish(folder, run.s3, new_run().location).location}", f"--config={folder}", *FLAGS)
        first = run.start(*flags, kind="pretrain-mlm")
        stall = _figure(r"holds the training up for at most ([\d.]+) s", first.wait_for_line("checkpoints: every"))
        upload = _figure(r"uploaded in ([\d.]+) s", first.wait_for_line("checkpoint: step "))
        first.wait_for_line(f"[progress] {STOPPED_AT}/")
        first.process.terminate()
        first.process.wait()
        times = [time.monotonic()]
        second = run.start(*flags, kind="pretrain-mlm", attempt=2)
        for line in _ENDS.values():
            second.wait_for_line(line)
            times.append(time.monotonic())
        second.kill()
        run.wait_until_gone()
        lines = [line for line in run.metrics() if "loss" in line and 20 <= line["step"] <= STOPPED_AT]
    logged = [datetime.fromisoformat(line["time"]).timestamp() for line in lines]
    step = statistics.median(later - earlier for earlier, later in pairwise(logged)) / 5
    parts = dict(zip(_ENDS, (later - earlier for earlier, later in pairwise(times)), strict=True))
    return {"step": step, "stall": stall, "upload": upload, **parts}


def _packed_tokens(folder: Path) -> Path:
    """Packed tokens of a made-up language, with a tokenizer that nobody uses, and the model's configuration."""
    save_tiny_bert(folder / TOKENIZER)
    ids = np.random.default_rng(0).zipf(1.3, 500_000).clip(5, VOCABULARY - 1).astype(np.uint32)
    files = {
        split: [
            pack([part], folder / f"{split}-00000.npy", sequence_length=LENGTH, vocabulary_size=VOCABULARY, pad_id=0)
        ]
        for split, part in (("train", ids[:-LENGTH]), ("held-out", ids[-LENGTH:]))
    }
    special = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    index = Index.model_validate(
        {"sequence_length": LENGTH, "vocabulary_size": VOCABULARY, "special_ids": special, "files": files}
    )
    (folder / INDEX).write_text(index.model_dump_json())
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def _figure(pattern: str, line: str) -> float:
    found = re.search(pattern, line)
    assert found, line
    return float(found[1])


_COLOURS = ("#2f81b7", *("#818b98",) * 4, "#c2651a")
_STYLE = """
text { font: 13px system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #1f2328; }
.title { font-size: 16px; font-weight: 600; }
.soft { fill: #59636e; }
.figure { text-anchor: end; }
.page { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .soft { fill: #9198a1; }
  .page { fill: #0d1117; }
}
"""
_FULL, _BAR, _LEFT, _NAMES = 420, 18, 24, 130


def drawn(figures: Mapping[str, Sequence[float]]) -> str:
    """Bars, one for each way and rate, as an SVG document."""
    parts, top = [], 62
    for number, hours in enumerate(MEAN_HOURS):
        parts.append(f'<text class="soft" x="{_LEFT}" y="{top}">a reclaim every {hours:g} h</text>')
        top += 8
        for colour, (name, found) in zip(_COLOURS, figures.items(), strict=True):
            share = found[number]
            x, line = _LEFT + _NAMES, top + 14
            parts.append(f'<text x="{_LEFT}" y="{line}">{escape(name)}</text>')
            parts.append(
                f'<rect x="{x}" y="{top}" width="{_FULL * share:.1f}" height="{_BAR}" rx="3" fill="{colour}"/>'
            )
            parts.append(f'<text class="figure" x="{x + _FULL + 56}" y="{line}">{100 * share:.2f} %</text>')
            top += _BAR + 6
        top += 26
    width, height = _LEFT + _NAMES + _FULL + 80, top - 10
    title = "Useful step time while an instance is held"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{title}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{width}" height="{height}"/>',
            f'<text class="title" x="{_LEFT}" y="34">{title}</text>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    main()
