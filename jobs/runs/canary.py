"""A temporary queue whose only instance boots another AMI, to run one job on it before the stage's other jobs.

Everything else is that of a queue of the stage: instance type, launch template, role, subnets. No instance runs before
the job, so nothing but the job costs money.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jobs.aws.connection import Aws
from jobs.core.errors import ConfigurationError, TrainyardError
from jobs.core.instance_types import InstanceType

_COPIED = (
    *("type", "allocationStrategy", "instanceTypes", "subnets", "securityGroupIds", "instanceRole", "tags"),
    *("placementGroup", "launchTemplate"),
)
_NAMES = {"job_queue": "jobQueue", "compute_environment": "computeEnvironment"}
_PATIENCE_SECONDS = 600.0


def first_environment(aws: Aws, queue: str) -> Mapping[str, Any]:
    """Return the compute environment that a queue tries first."""
    order = _described(aws, "job_queue", queue)["computeEnvironmentOrder"]
    name = min(order, key=lambda item: item["order"])["computeEnvironment"]
    return _described(aws, "compute_environment", name)


@contextmanager
def temporary_queue(aws: Aws, queue: str, row: InstanceType, ami_id: str, *, name: str) -> Iterator[str]:
    """Yield the ARN of a queue like `queue`, with one instance of `row`, and delete it at the end.

    Raises ConfigurationError if Batch cannot use the environment.
    """
    environment = first_environment(aws, queue)
    resources = environment["computeResources"]
    copied: Any = {key: resources[key] for key in _COPIED if resources.get(key)}
    images = [{"imageType": image["imageType"], "imageIdOverride": ami_id} for image in resources["ec2Configuration"]]
    copied |= {"minvCpus": 0, "maxvCpus": row.vcpus, "ec2Configuration": images}
    # Only AWS may set its own tags.
    tags = {key: value for key, value in environment.get("tags", {}).items() if not key.startswith("aws:")}
    try:
        aws.batch.create_compute_environment(
            computeEnvironmentName=name, type="MANAGED", computeResources=copied, tags=tags
        )
        _wait(aws, "compute_environment", name, until=lambda status: status == "VALID")
        created = aws.batch.create_job_queue(
            jobQueueName=name,
            priority=1,
            computeEnvironmentOrder=[{"order": 1, "computeEnvironment": name}],
            schedulingPolicyArn=_described(aws, "job_queue", queue)["schedulingPolicyArn"],
            tags=tags,
        )
        _wait(aws, "job_queue", name, until=lambda status: status == "VALID")
        yield created["jobQueueArn"]
    finally:
        for kind, parameter in _NAMES.items():  # the queue first: an environment in use cannot be deleted
            if _described(aws, kind, name):
                getattr(aws.batch, f"update_{kind}")(**{parameter: name, "state": "DISABLED"})
                _wait(aws, kind, name, until=lambda status: status != "UPDATING")
                getattr(aws.batch, f"delete_{kind}")(**{parameter: name})
                _wait(aws, kind, name, until=lambda status: not status)


def _wait(aws: Aws, kind: str, name: str, *, until: Callable[[str], bool]) -> None:
    """Wait until the status passes `until`. It is empty once the resource is deleted."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not until((found := _described(aws, kind, name)).get("status", "")):
        if found.get("status") == "INVALID":
            raise ConfigurationError(f"AWS Batch cannot use {name}: {found.get('statusReason', 'no reason given')}")
        if time.monotonic() > deadline:
            raise TrainyardError(
                f"the {kind.replace('_', ' ')} {name} is still {found.get('status', 'missing')}",
                next_step="if it remains, disable and delete it with aws batch",
            )
        time.sleep(0.2 if aws.emulated else 3)


def _described(aws: Aws, kind: str, name: str) -> Mapping[str, Any]:
    key = f"{_NAMES[kind]}s"
    found: list[Mapping[str, Any]] = getattr(aws.batch, f"describe_{kind}s")(**{key: [name]})[key]
    return next((each for each in found if each.get("status") != "DELETED"), {})
