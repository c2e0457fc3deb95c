"""Whether a job of several nodes survives a lost one on a real network: each node in a network namespace of its own.

python -m tests.benchmarks.nodes_in_namespaces               jobs of 2 and of 4 nodes
python -m tests.benchmarks.nodes_in_namespaces --nodes 8     of another number, which divides 16
python -m tests.benchmarks.nodes_in_namespaces --logs logs   keeps the output of all launchers

Needs Linux, root and iproute2; exit status 3 where they lack. The namespaces hang on a bridge, with S3 (that of the
tests) beside them, and each runs a launcher with Batch's variables and one rank. Fine-tuning of a two-layer BERT is
left alone first, then interrupted in its midst: all processes of a child are killed, a child is cut off the network,
the main node's launcher gets SIGTERM. All launchers have to end, the main node's with 75 and the lost node's name (or,
after SIGTERM, all with the same saved step), and a second attempt of all nodes has to end with the weights and metrics
of the training that was left alone. Exit status 1 where one of this is not so.
"""

import argparse
import math
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jobs.errors import INTERRUPTED_EXIT_CODE
from jobs.train.outcome import RESUMES
from tests.benchmarks.launched import differences, finished, launcher
from tests.benchmarks.network import OUTSIDE, TEMPORARY, Network, in_own_namespaces, lacking
from tests.jobs.train.launching import Launched, Run
from tests.jobs.train.recipes import Flags, finetuning
from tests.jobs.train.reviews import save_tiny_bert

LACKING_EXIT_CODE = 3
HANG_TIMEOUT_SECONDS = 20
FLAGS = ("--epochs=20", "--checkpoint-every-steps=20")
"""240 steps."""
SAVED, INTERRUPTED_AT = "checkpoint: step 40,", "[progress] 60/"
PATIENCE_SECONDS = 120.0
"""For all launchers to end, from when something happened to one."""
INSIDE = "import sys; from tests.benchmarks import nodes_in_namespaces; sys.exit(nodes_in_namespaces.inside())"

LEFT_ALONE, KILLED, CUT_OFF, SIGTERM = "left alone", "kill -9 of a child", "a child cut off", "SIGTERM to the main node"
WAYS = (KILLED, CUT_OFF, SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one training."""

    nnodes: int
    what: str
    main_seconds: float
    """From the interruption (or the start) until the main node's launcher ended."""
    all_seconds: float
    reason: str = "-"
    resumed_from: str = "-"
    wrong: str = ""
    """Empty: all is as it should be."""


class Job:
    """One run on the first nodes of a network."""

    def __init__(self, network: Network, nnodes: int, run: Run, flags: Flags, logs: Path | None) -> None:
        self.nnodes = nnodes
        self.run = run
        self.nodes: list[Launched] = []
        self._network = network
        self._flags = flags
        self._logs = logs

    def start(self, attempt: int) -> None:
        self.nodes = [
            self.run.start(
                *self._flags,
                attempt=attempt,
                options=[f"--hang-timeout-seconds={HANG_TIMEOUT_SECONDS}"],
                within=self._network.on_node(index),
                **self._batch(index),
            )
            for index in range(self.nnodes)
        ]

    def ended(self) -> dict[int, float]:
        """When each launcher ended, of those that did in time; the others are killed."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        times: dict[int, float] = {}
        while len(times) < self.nnodes and time.monotonic() < deadline:
            for index, node in enumerate(self.nodes):
                if index not in times and node.process.poll() is not None:
                    times[index] = time.monotonic()
            time.sleep(0.05)
        for node in self.nodes:
            node.process.kill()
            node.wait()
        return times

    def keep_output(self, name: str) -> None:
        if self._logs is not None:
            self._logs.mkdir(exist_ok=True)
            for index, node in enumerate(self.nodes):
                text = f"{node.output}exit code {node.process.returncode}\n"
                (self._logs / f"{name.replace(' ', '-')}-node-{index}.log").write_text(text)

    def _batch(self, index: int) -> dict[str, Any]:
        """What AWS Batch tells a node; the main one is not told its own address."""
        variables = {
            "AWS_BATCH_JOB_ID": f"{self.run.location.key.strip('/')[-4:]}#{index}",
            "AWS_BATCH_JOB_NUM_NODES": str(self.nnodes),
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
            "AWS_BATCH_JOB_NODE_INDEX": str(index),
        }
        if index:
            variables["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = self._network.address(0)
        return variables


def main() -> int:
    _options()
    if missing := lacking():
        print(f"{missing}. Next: run it as root on Linux, with iproute2 installed", file=sys.stderr)
        return LACKING_EXIT_CODE
    return in_own_namespaces([sys.executable, "-c", INSIDE, *sys.argv[1:]])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.nodes_in_namespaces",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4], choices=(2, 4, 8, 16))
    parser.add_argument("--logs", type=Path, help="a folder for the output of all launchers")
    return parser.parse_args()


def inside() -> int:
    """The benchmark, where nothing it does to a network is seen outside."""
    options = _options()
    network = Network(max(options.nodes))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(dir=TEMPORARY) as name,
        launcher(Path(name), OUTSIDE) as new_run,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        flags = (*finetuning(new_run().s3, save_tiny_bert(Path(name) / "tiny-bert"), Path(name)), *FLAGS)
        bar = progress.add_task("", total=len(options.nodes) * (1 + len(WAYS)))
        for nnodes in options.nodes:
            progress.update(bar, description=f"{nnodes} nodes, {LEFT_ALONE}")
            whole = Job(network, nnodes, new_run(), flags, options.logs)
            rows.append(_left_alone(whole))
            progress.advance(bar)
            for way in WAYS:
                progress.update(bar, description=f"{nnodes} nodes, {way}")
                rows.append(_interrupted(Job(network, nnodes, new_run(), flags, options.logs), way, network, whole.run))
                progress.advance(bar)
    _print(rows)
    return 1 if any(row.wrong for row in rows) else 0


def _left_alone(job: Job) -> Row:
    started = time.monotonic()
    job.start(1)
    for node in job.nodes:
        finished(node)
    seconds = time.monotonic() - started
    job.keep_output(f"{job.nnodes} {LEFT_ALONE}")
    return Row(nnodes=job.nnodes, what=LEFT_ALONE, main_seconds=seconds, all_seconds=seconds)


def _interrupted(job: Job, way: str, network: Network, whole: Run) -> Row:
    """Two attempts of a run, the first interrupted."""
    job.start(1)
    main, lost = job.nodes[0], job.nnodes - 1
    main.wait_for_line(SAVED)
    main.wait_for_line(INTERRUPTED_AT)
    at = time.monotonic()
    if way == KILLED:
        network.kill(lost)
    elif way == CUT_OFF:
        network.cut_off(lost)
    else:
        main.process.send_signal(signal.SIGTERM)
    times = job.ended()
    job.keep_output(f"{job.nnodes} {way} 1")
    network.mend(lost)
    job.run.wait_until_gone()
    reasons = [node.lines[-1].removeprefix("interrupted: ").strip() for node in job.nodes]
    wrong = [f"node {index} did not end" for index in range(job.nnodes) if index not in times]
    if (code := main.process.returncode) != INTERRUPTED_EXIT_CODE:  # which Batch takes for the job's
        wrong.append(f"exit code {code}")
    if way == SIGTERM:
        saved = max(job.run.complete_checkpoints(), default=0)
        if any(reason != f"SIGTERM; saved step {saved}" for reason in reasons):
            wrong.append(f"newest checkpoint: step {saved}; of the nodes: {reasons}")
    elif not reasons[0].startswith(f"node {lost} lost: "):
        wrong.append(f"node {lost} is not named")

    job.start(2)
    for node in job.nodes:
        node.process.wait()  # for as long as it takes
    job.keep_output(f"{job.nnodes} {way} 2")
    resumed = re.search(r"start: resumed from checkpoint step-(\d+)", job.nodes[0].output)
    codes = [node.wait() for node in job.nodes]
    if any(codes):
        wrong.append(f"attempt 2 ended with {codes}: {job.nodes[0].lines[-1].strip()}")
    elif resumed is None:
        wrong.append("attempt 2 began anew")
    elif difference := differences(job.run, whole):
        wrong.append(difference)
    return Row(
        nnodes=job.nnodes,
        what=way,
        main_seconds=times.get(0, math.inf) - at,
        all_seconds=(max(times.values()) if len(times) == job.nnodes else math.inf) - at,
        reason=reasons[0].removesuffix(f"; {RESUMES}"),
        resumed_from=f"step {resumed[1]}" if resumed else "-",
        wrong="; ".join(wrong),
    )


def _print(rows: Sequence[Row]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("nodes", "what", "main node ended after s", "all after s", "its reason", "resumed from"):
        table.add_column(title, no_wrap=title != "its reason")
    table.add_column("equal")
    for row in rows:
        equal = "reference" if row.what == LEFT_ALONE else f"no: {row.wrong}" if row.wrong else "yes"
        seconds = (f"{row.main_seconds:.1f}", f"{row.all_seconds:.1f}")
        table.add_row(str(row.nnodes), row.what, *seconds, row.reason, row.resumed_from, equal)
    Console(width=None if sys.stdout.isatty() else 180).print(table)


if __name__ == "__main__":
    sys.exit(main())
