"""Plans that run a test's command instead of a training, and are otherwise unchanged."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from jobs.aws.connection import Aws
from jobs.core.stage import DeployedStage
from jobs.runs import batch
from jobs.runs.job import Job
from jobs.runs.planning import plan_run
from jobs.spec.plan import Plan
from jobs.spec.spec import parse_spec
from tests.support.waiting import PATIENCE_SECONDS, pause

MODEL_KEY = "tests/model"
DATA_KEY = "tests/train.jsonl"
NO_WEIGHTS = b"\2" + bytes(7) + b"{}"
"""A safetensors file without tensors."""
MODEL_FILES = {
    "config.json": b'{"model_type": "bert", "max_position_embeddings": 512}',
    "tokenizer.json": b"{}",
    "model.safetensors": NO_WEIGHTS,
}
"""Files that are accepted as a model before a job is submitted."""
DATA = (
    b"".join(b'{"text": "%s", "label": %d}\n' % (b"good " * 2000, row % 2) for row in range(600))
    + b'{"text": "late"}\n'
)
"""A table whose only error is after the rows that are checked before submission, so that its job fails soon."""
SPEC = {
    "name": "probe",
    "job": "finetune-classification",
    "team": "research",
    "arguments": {"model": f"data://{MODEL_KEY}", "train_data": f"data://{DATA_KEY}"},
}


@dataclass(frozen=True)
class Run:
    """An ended run."""

    plan: Plan
    ended: Job


Begin = Callable[..., Job]
"""`begin(plan, state="RUNNING")` submits the plan and waits for the state; the job ends with the test."""

RunCommand = Callable[..., Run]
"""`run_command(["sh", "-c", …], name="probe")` submits a job with the command and waits for its end."""


def planned_to_run(
    aws: Aws, stage: DeployedStage, command: Sequence[str], *, name: str = "probe", **keys: object
) -> Plan:
    """Return the plan of `SPEC` with `command` in the container, and with other keys of the spec."""
    plan = plan_run(aws, stage, parse_spec({**SPEC, "name": name, **keys}, origin="the test"))
    request = copy.deepcopy(plan.request)
    request["ecsPropertiesOverride"]["taskProperties"][0]["containers"][0]["command"] = list(command)
    return replace(plan, request=request)


@contextmanager
def no_instances(aws: Aws, stage: DeployedStage, queue: str) -> Iterator[None]:
    """Disable the compute environments of a queue, so that new jobs wait until the end of the block."""
    [found] = aws.batch.describe_job_queues(jobQueues=[stage.queue(queue)])["jobQueues"]
    names = [item["computeEnvironment"] for item in found["computeEnvironmentOrder"]]
    for name in names:
        aws.batch.update_compute_environment(computeEnvironment=name, state="DISABLED")
    try:
        yield
    finally:
        for name in names:
            aws.batch.update_compute_environment(computeEnvironment=name, state="ENABLED")


def wait_for(aws: Aws, stage: DeployedStage, job_id: str, *, state: str | None = None) -> Job:
    """Return the job once it is in `state` or has ended."""
    since = time.monotonic()
    while time.monotonic() < since + PATIENCE_SECONDS:
        [job] = batch.describe(aws, stage, [job_id])
        if job.state == state or (job.ended and state is None):
            return job
        if job.ended:
            raise AssertionError(f"ended as {job.state} ({job.reason}) before it was {state}")
        pause(since)
    raise AssertionError(f"still {job.state} after {PATIENCE_SECONDS} s")
