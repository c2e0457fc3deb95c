"""How much of a day on Spot instances is useful work, here and where less is done about reclaims.

python -m tests.benchmarks.goodput                              measures, then simulates 1,000 days a figure
python -m tests.benchmarks.goodput --picture jobs/docs/goodput.svg   draws them too
python -m tests.benchmarks.goodput --restart-seconds 300        another machine's figure in place of the measured one

Goodput is the time of steps that are not lost over the time in which an instance is held; a day of that time is
simulated, with reclaims at random (a Poisson process). Three ways to train:

    trainyard             saves by Young's formula (checkpoint_every_steps: auto, which assumes a reclaim every 6 h),
                          and at once at the notice of two minutes, in which the instance is still held
    periodic saves        saves every 500 steps, the default of transformers, and resumes from the last complete one
    published tutorial    saves every 5,000 steps and never resumes: what counts is what the day's end still has

How long a step, a save, its upload, an ending and a start take is measured first, with the real launcher: BERT of two
layers of 256 on this machine's CPU, with the tests' S3. EC2's own start of an instance, the download of its image, and
waiting for capacity are in no figure; --restart-seconds and --waiting-seconds put them there.
"""

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

from rich.console import Console
from rich.table import Table

from jobs.contract.recipe import Recipe
from jobs.train.trainer.checkpoint_interval import interval
from tests.benchmarks.trainer_overhead import packed_tokens
from tests.support.benchmarks.launched import launcher
from tests.support.benchmarks.simulated_day import Costs, Policy, goodput
from tests.support.train.packing import publish

MEAN_HOURS = (1.0, 6.0, 24.0)
STOPPED_AT = 60
FLAGS = (
    "--max-steps=100000",
    "--global-batch-size=16",
    "--log-every-steps=5",
    "--checkpoint-every-steps=auto",
)
MEANINGS = {
    "step": "a step",
    "stall": "the training stands still for a save",
    "upload": "from there until the checkpoint is complete",
    "ending": "from SIGTERM to the end of the attempt, its work saved",
    "restart": "from the start of the launcher to the first step of a resumed attempt",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.goodput", description=__doc__)
    for name, meaning in MEANINGS.items():
        parser.add_argument(f"--{name}-seconds", type=float, help=f"{meaning}; measured where it is not given")
    parser.add_argument("--waiting-seconds", type=float, default=0.0, help="for the next instance, after each reclaim")
    parser.add_argument("--days", type=int, default=1000, help="simulated for each figure")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path, help="an SVG file to draw")
    options = parser.parse_args()
    given = {name: value for name in MEANINGS if (value := getattr(options, f"{name}_seconds")) is not None}
    costs = Costs(**given) if given.keys() == MEANINGS.keys() else replace(measured(), **given)
    for name, value in asdict(costs).items():
        print(f"{value:8.2f} s  {MEANINGS[name]}{' (given)' if name in given else ''}")
    print(f"{options.waiting_seconds:8.2f} s  waiting for the next instance")
    policies = policies_of(costs)
    for policy in policies:
        print(f"{policy.save_every_seconds:8.0f} s  between two saves of {policy.name}")
    table = Table(box=None, pad_edge=False)
    table.add_column("a reclaim every")
    figures: dict[str, list[float]] = {}
    for policy in policies:
        table.add_column(policy.name, justify="right")
        figures[policy.name] = [
            goodput(
                policy,
                costs,
                mean_hours=hours,
                days=options.days,
                seed=options.seed,
                waiting_seconds=options.waiting_seconds,
            )
            for hours in MEAN_HOURS
        ]
    for number, hours in enumerate(MEAN_HOURS):
        table.add_row(f"{hours:g} h", *(f"{100 * found[number]:.1f} %" for found in figures.values()))
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    if options.picture:
        options.picture.write_text(drawn(figures))


def policies_of(costs: Costs) -> Sequence[Policy]:
    hours = float(Recipe.model_fields["mean_hours_between_reclaims"].default)
    young = interval(stall_seconds=costs.stall, mean_seconds_between_reclaims=hours * 3600).seconds
    return (
        Policy(name="trainyard", save_every_seconds=young, resumes=True, heeds_notice=True),
        Policy(name="periodic saves", save_every_seconds=500 * costs.step, resumes=True, heeds_notice=False),
        Policy(name="published tutorial", save_every_seconds=5000 * costs.step, resumes=False, heeds_notice=False),
    )


def measured() -> Costs:
    """Measure two attempts of one run, the first of which is stopped."""
    with tempfile.TemporaryDirectory() as name, launcher(Path(name)) as new_run:
        run = new_run()
        folder = packed_tokens(Path(name) / "data")
        flags = (f"--data={publish(folder, run.s3, new_run().location).location}", f"--config={folder}", *FLAGS)
        first = run.start(*flags, kind="pretrain-mlm")
        stall = _figure(r"a save stops the training for ([\d.]+) s", first.wait_for_line("checkpoints: every"))
        upload = _figure(r"uploaded in ([\d.]+) s", first.wait_for_line("checkpoint: step "))
        first.wait_for_line(f"[progress] {STOPPED_AT}/")
        stopped = time.monotonic()
        first.process.terminate()
        first.process.wait()
        ending = time.monotonic() - stopped
        started = time.monotonic()
        second = run.start(*flags, kind="pretrain-mlm", attempt=2)
        second.wait_for_line("[progress] ")
        restart = time.monotonic() - started
        second.kill()
        run.wait_until_gone()
        lines = [line for line in run.metrics() if "loss" in line and 20 <= line["step"] <= STOPPED_AT]
    times = [datetime.fromisoformat(line["time"]).timestamp() for line in lines]
    step = statistics.median(later - earlier for earlier, later in pairwise(times)) / 5
    return Costs(step=step, stall=stall, upload=upload, ending=ending, restart=restart)


def _figure(pattern: str, line: str) -> float:
    found = re.search(pattern, line)
    assert found, line
    return float(found[1])


_COLOURS = ("#2f81b7", "#818b98", "#c2651a")
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
_FULL, _BAR, _LEFT, _NAMES = 420, 18, 24, 150


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
            parts.append(f'<text class="figure" x="{x + _FULL + 56}" y="{line}">{100 * share:.1f} %</text>')
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
