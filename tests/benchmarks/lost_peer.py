"""Test a training on two nodes when one node is killed, with the accelerator's own collectives.

python -m tests.benchmarks.lost_peer --device cuda    two nodes with one rank each, on one card, over NCCL
python -m tests.benchmarks.lost_peer                  the same over gloo

NCCL refuses two ranks on one card of one host. So each node gets its own host id (NCCL_HOSTID), and they communicate
over loopback like two hosts. First, a fine-tuning of a two-layer BERT runs without interruption. In a second run, the
launcher of the second node gets kill -9, which also ends its rank. The first node's launcher must exit with 75 and name
the lost node, however its own rank ended: PyTorch's watchdog ends a rank that waits in NCCL with SIGABRT. A second
attempt of both nodes must end with the weights and metrics of the uninterrupted run. Otherwise, the exit code is 1.
"""

import argparse
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jobs.core.errors import INTERRUPTED_EXIT_CODE
from tests.support.benchmarks.launched import differences, finished, launcher
from tests.support.container.launching import Launched, Run
from tests.support.container.recipes import finetuning
from tests.support.container.reviews import save_tiny_bert

LONGER = ("--epochs=20", "--checkpoint-every-steps=20")
"""240 steps."""
SAVED, KILLED_AT = "checkpoint: step 40,", "[progress] 60/"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.lost_peer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    device = parser.parse_args().device
    with tempfile.TemporaryDirectory() as name, launcher(Path(name), is_fresh=True) as new_run:
        folder = Path(name)
        flags = (*finetuning(new_run().s3, save_tiny_bert(folder / "tiny-bert"), folder), *LONGER)
        whole, run = new_run(), new_run()
        for node in _start_nodes(whole, flags, device, attempt=1):
            finished(node)
        main_node, other = _start_nodes(run, flags, device, attempt=1)
        main_node.wait_for_line(SAVED)
        main_node.wait_for_line(KILLED_AT)
        other.process.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        code = main_node.wait()
        seconds = time.monotonic() - killed_at
        ranks_end = [line.strip() for line in main_node.lines if re.search(r"SIG[A-Z]+|terminate called", line)]
        reason = main_node.lines[-1].strip()
        run.wait_until_gone()
        second = _start_nodes(run, flags, device, attempt=2)
        for node in second:
            finished(node)
        resumed = re.search(r"start: resumed from checkpoint step-(\d+)", second[0].output)
        difference = differences(run, whole)
    wrong = []
    if code != INTERRUPTED_EXIT_CODE or "node 1" not in reason:
        wrong.append(f"exit code {code}; the reason{'' if 'node 1' in reason else ' does not'} name the lost node")
    if resumed is None:
        wrong.append("the second attempt started over")
    if difference:
        wrong.append(difference)
    print(f"{device}: the first node ended {seconds:.1f} s after the kill with {code}")
    print(f"its reason: {reason}")
    for line in ranks_end[-3:]:
        print(f"its log: {line}")
    print(f"the second attempt resumed from {f'step {resumed[1]}' if resumed else 'nothing'}")
    print(f"failed: {'; '.join(wrong)}" if wrong else "equal to the uninterrupted training")
    return 1 if wrong else 0


def _start_nodes(run: Run, flags: tuple[str, ...], device: str, *, attempt: int) -> list[Launched]:
    """Start the launchers of both nodes, with the variables of a multi-node job of AWS Batch."""
    variables: dict[str, Any] = {
        "AWS_BATCH_JOB_NUM_NODES": "2",
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
        "TRAINYARD_ACCELERATOR": device,
    }
    main_address: dict[str, Any] = {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "127.0.0.1"}
    return [
        run.start(
            *flags,
            attempt=attempt,
            AWS_BATCH_JOB_ID=f"8d2f#{index}",
            AWS_BATCH_JOB_NODE_INDEX=str(index),
            NCCL_HOSTID=f"node-{index}",
            **variables,
            **(main_address if index else {}),
        )
        for index in range(2)
    ]


if __name__ == "__main__":
    sys.exit(main())
