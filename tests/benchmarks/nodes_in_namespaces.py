"""Test whether a job survives a lost node on a real network, with each node in a separate network namespace.

python -m tests.benchmarks.nodes_in_namespaces               jobs of 2 and of 4 nodes
python -m tests.benchmarks.nodes_in_namespaces --nodes 8     another number of nodes, which divides 16
python -m tests.benchmarks.nodes_in_namespaces --job node-group nodes that are separate jobs, on Spot
python -m tests.benchmarks.nodes_in_namespaces --logs logs   keep the output of all launchers

Needs Linux, root and iproute2; exits with 3 without them. The namespaces are connected to a bridge, as is the tests' S3
server. Each runs a launcher with Batch's variables and one rank. A fine-tuning of a two-layer BERT runs first without
interruption. Further runs are interrupted: all processes of a node are killed, a node is disconnected, or a launcher
gets SIGTERM. All launchers must exit. The main node's must exit with 75 and name the lost node. After SIGTERM, all
must report the same saved step. In a node group, all survivors must exit with 75. A second attempt of all nodes
must end with the weights and metrics of the uninterrupted run.

In one more test, half of a node group starts because one node is late. When that node arrives, the others must save and
exit with 75, and all nodes must continue from there. The result must have the steps of the uninterrupted run, but not
its values: on fewer nodes a step draws other random numbers. If any of this fails, the exit code is 1.
"""

import argparse
import math
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from jobs.core.errors import INTERRUPTED_EXIT_CODE
from tests.support.benchmarks.launched import differences, finished, launcher
from tests.support.benchmarks.network import (
    OUTSIDE,
    PATIENCE_SECONDS,
    TEMPORARY,
    Job,
    Kind,
    Network,
    in_own_namespaces,
    missing_requirements,
)
from tests.support.container.launching import Launched, Run
from tests.support.container.recipes import finetuning
from tests.support.container.reviews import save_tiny_bert

LACKING_EXIT_CODE = 3
FLAGS = ("--epochs=20", "--checkpoint-every-steps=20")
"""240 steps."""
SAVED, INTERRUPTED_AT = "checkpoint: step 40,", "[progress] 60/"
INSIDE = "import sys; from tests.benchmarks import nodes_in_namespaces; sys.exit(nodes_in_namespaces.inside())"

UNINTERRUPTED, KILLED, CUT_OFF = "uninterrupted", "kill -9 of a child", "a child disconnected"
SIGTERM, SIGTERM_OF_CHILD, KILLED_MAIN = "SIGTERM to the main node", "SIGTERM to a child", "kill -9 of the main node"
LATE = "one node is late"
WAYS: dict[Kind, tuple[str, ...]] = {
    "multi-node": (KILLED, CUT_OFF, SIGTERM),  # without its main node a job has no exit code
    "node-group": (KILLED, CUT_OFF, SIGTERM_OF_CHILD, KILLED_MAIN, LATE),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one training."""

    job: Kind
    nnodes: int
    what: str
    main_seconds: float
    """Seconds from the interruption (or the start) until the main node's launcher exited."""
    all_seconds: float
    reason: str = "-"
    resumed_from: str = "-"
    wrong: str = ""
    """What failed; empty if nothing did."""

    def __str__(self) -> str:
        yes = {UNINTERRUPTED: "reference", LATE: "equal steps"}.get(self.what, "equal")
        return (
            f"{self.job}, {self.nnodes} nodes, {self.what}: main node ended after {self.main_seconds:.1f} s, all after "
            f"{self.all_seconds:.1f} s ({self.reason}), resumed from {self.resumed_from}: "
            f"{f'NOT EQUAL: {self.wrong}' if self.wrong else yes}"
        )


def main() -> int:
    _options()
    if missing := missing_requirements():
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
    parser.add_argument("--job", nargs="+", default=sorted(WAYS), choices=sorted(WAYS))
    parser.add_argument("--logs", type=Path, help="folder in which to keep the output of all launchers")
    return parser.parse_args()


def inside() -> int:
    """Run the benchmark inside its namespaces, which hide its network from the machine."""
    options = _options()
    network = Network(max(options.nodes))
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(dir=TEMPORARY) as name,
        launcher(Path(name), OUTSIDE) as new_run,
    ):
        flags = (*finetuning(new_run().s3, save_tiny_bert(Path(name) / "tiny-bert"), Path(name)), *FLAGS)
        for kind, nnodes in [(kind, nnodes) for kind in options.job for nnodes in options.nodes]:
            whole = Job(network, kind, nnodes, new_run(), flags=flags, logs=options.logs)
            rows.append(_uninterrupted(whole))
            print(rows[-1], flush=True)
            for way in WAYS[kind]:
                job = Job(network, kind, nnodes, new_run(), flags=flags, logs=options.logs)
                rows.append(_late(job, whole.run) if way == LATE else _interrupted(job, way, network, whole.run))
                print(rows[-1], flush=True)
    return 1 if any(row.wrong for row in rows) else 0


def _uninterrupted(job: Job) -> Row:
    started = time.monotonic()
    job.start(1)
    for node in job.nodes:
        finished(node)
    seconds = time.monotonic() - started
    job.keep_output(UNINTERRUPTED)
    return Row(job=job.kind, nnodes=job.nnodes, what=UNINTERRUPTED, main_seconds=seconds, all_seconds=seconds)


def _interrupted(job: Job, way: str, network: Network, whole: Run) -> Row:
    """Run two attempts and interrupt the first."""
    job.start(1)
    main, last = job.nodes[0], job.nnodes - 1
    hit = 0 if way in (SIGTERM, KILLED_MAIN) else last
    main.wait_for_line(SAVED)
    main.wait_for_line(INTERRUPTED_AT)
    at = time.monotonic()
    if way in (KILLED, KILLED_MAIN):
        network.kill(hit)
    elif way == CUT_OFF:
        network.disconnect(hit)
    else:
        job.nodes[hit].process.send_signal(signal.SIGTERM)
    times = job.ended()
    job.keep_output(f"{way} 1")
    network.reconnect(hit)
    job.run.wait_until_gone()
    wrong = [f"node {index} did not end" for index in range(job.nnodes) if index not in times]
    saved = max(job.run.complete_checkpoints(), default=0)
    for index in _counted(job, way):
        node = job.nodes[index]
        if (code := node.process.returncode) != INTERRUPTED_EXIT_CODE:
            wrong.append(f"node {index}: exit code {code}")
        elif "SIGTERM" in way and _reason(node) != f"SIGTERM; saved step {saved}":
            wrong.append(f"newest checkpoint: step {saved}; node {index}: {_reason(node)}")
    if way in (KILLED, CUT_OFF) and not _reason(main).startswith(f"node {last} lost: "):
        wrong.append(f"node {last} is not named")

    reason = _reason(job.nodes[1 if way == KILLED_MAIN else 0])
    job.start(2)
    for node in job.nodes:
        node.process.wait()  # without a limit
    job.keep_output(f"{way} 2")
    resumed = re.search(r"start: resumed from checkpoint step-(\d+)", job.nodes[0].output)
    codes = [node.wait() for node in job.nodes]
    if any(codes):
        wrong.append(f"attempt 2 ended with {codes}: {_reason(job.nodes[0])}")
    elif resumed is None:
        wrong.append("attempt 2 started over")
    elif difference := differences(job.run, whole):
        wrong.append(difference)
    return Row(
        job=job.kind,
        nnodes=job.nnodes,
        what=way,
        main_seconds=times.get(0, math.inf) - at,
        all_seconds=(max(times.values()) if len(times) == job.nnodes else math.inf) - at,
        reason=reason.partition("; if retried, ")[0],
        resumed_from=f"step {resumed[1]}" if resumed else "-",
        wrong="; ".join(wrong),
    )


def _late(job: Job, whole: Run) -> Row:
    """Start half of the nodes, and the last node while they train."""
    job.least, last = job.nnodes // 2, job.nnodes - 1
    others = job.started(range(1, last), 1)
    for node in others:
        node.wait_for_line("for the others")
    main = job.started([0], 1, "--rendezvous-wait-seconds=1", f"--hang-timeout-seconds={PATIENCE_SECONDS}")
    begun, waiting = [*main, *others][: job.least], [*main, *others][job.least :]
    begun[0].wait_for_line(INTERRUPTED_AT)
    ranks = [rank for node in begun for rank in node.ranks()]
    for rank in ranks:
        rank.suspend()  # otherwise the training ends before any node looks for the late one
    at = time.monotonic()
    waiting += job.started([last], 1)
    begun[0].wait_for_line(" arrived late")
    for rank in ranks:
        rank.resume()
    seconds = []
    for node in begun:
        node.process.wait()
        seconds.append(time.monotonic() - at)
    job.nodes = begun
    job.keep_output(f"{LATE} 1")
    reason = _reason(begun[0])
    wrong = [f"{node.wait()}: {_reason(node)}" for node in begun if node.wait() != INTERRUPTED_EXIT_CODE]

    job.nodes = [*job.started(range(job.least), 2), *waiting]
    codes = [node.process.wait() for node in job.nodes]
    job.keep_output(f"{LATE} 2")
    resumed = re.search(r"start: resumed from checkpoint step-(\d+)", job.nodes[0].output)
    if any(codes):
        wrong.append(f"attempt 2 ended with {codes}: {_reason(job.nodes[0])}")
    elif resumed is None or f"saved step {resumed[1]}" not in reason:
        wrong.append("attempt 2 did not resume from the saved step")
    elif [line["step"] for line in job.run.metrics()] != [line["step"] for line in whole.metrics()]:
        wrong.append("the metrics have other steps")
    return Row(
        job=job.kind,
        nnodes=job.nnodes,
        what=LATE,
        main_seconds=seconds[0],
        all_seconds=max(seconds),
        reason=reason,
        resumed_from=f"step {resumed[1]}" if resumed else "-",
        wrong="; ".join(wrong),
    )


def _counted(job: Job, way: str) -> list[int]:
    """Return the nodes whose exit codes matter to Batch: the main node, or every node of a node group."""
    if "SIGTERM" in way:
        return list(range(job.nnodes))
    if job.kind == "multi-node":
        return [0]
    killed = {KILLED: job.nnodes - 1, KILLED_MAIN: 0}.get(way)
    return [index for index in range(job.nnodes) if index != killed]


def _reason(node: Launched) -> str:
    return node.lines[-1].removeprefix("interrupted: ").strip() if node.lines else ""


if __name__ == "__main__":
    sys.exit(main())
