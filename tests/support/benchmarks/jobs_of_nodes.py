"""Run a job of several nodes, each in a separate network namespace: a multi-node job of Batch, or a gang."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from tests.support.benchmarks.network import Network
from tests.support.container.launching import Launched, Run
from tests.support.container.recipes import Flags

Kind = Literal["multi-node", "gang"]
"""A multi-node job of AWS Batch, or an array of one-node jobs that find each other through S3."""

HANG_TIMEOUT_SECONDS = 20
PATIENCE_SECONDS = 120.0
"""Time limit for all launchers to exit after one is interrupted."""


class Job:
    """One run on the first nodes of a network."""

    def __init__(self, network: Network, kind: Kind, nnodes: int, run: Run, *, flags: Flags, logs: Path | None) -> None:
        self.kind = kind
        self.nnodes = nnodes
        self.run = run
        self.nodes: list[Launched] = []
        self.least = nnodes
        """Fewest nodes on which a gang may train."""
        self._network = network
        self._flags = flags
        self._logs = logs

    def start(self, attempt: int) -> None:
        self.nodes = self.started(range(self.nnodes), attempt)

    def started(self, indices: Iterable[int], attempt: int, *options: str) -> list[Launched]:
        """Start and return the launchers of these nodes."""
        return [
            self.run.start(
                *self._flags,
                attempt=attempt,
                options=[f"--hang-timeout-seconds={HANG_TIMEOUT_SECONDS}", *self._options(), *options],
                within=self._network.on_node(index),
                **self._batch(index),
            )
            for index in indices
        ]

    def ended(self) -> dict[int, float]:
        """Return when each launcher exited, and kill those that did not exit in time."""
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
                (self._logs / f"{self.kind}-{self.nnodes}-{name.replace(' ', '-')}-node-{index}.log").write_text(text)

    def _options(self) -> list[str]:
        return [f"--gang-min-nnodes={self.least}"] if self.kind == "gang" else []

    def _batch(self, index: int) -> dict[str, Any]:
        """Return Batch's variables of a node or of an array's child. The main node does not get its own address."""
        job_id = self.run.location.key.strip("/")[-4:]
        if self.kind == "gang":
            return {
                "AWS_BATCH_JOB_ID": f"{job_id}:{index}",
                "AWS_BATCH_JOB_ARRAY_INDEX": str(index),
                "AWS_BATCH_JOB_ARRAY_SIZE": str(self.nnodes),
            }
        variables = {
            "AWS_BATCH_JOB_ID": f"{job_id}#{index}",
            "AWS_BATCH_JOB_NUM_NODES": str(self.nnodes),
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
            "AWS_BATCH_JOB_NODE_INDEX": str(index),
        }
        if index:
            variables["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = self._network.address(0)
        return variables
