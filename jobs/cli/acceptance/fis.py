"""AWS's Fault Injection Service, which has EC2 take a Spot instance back, with the notice that a real reclaim has.

Action, target and the role's permissions are those of AWS's own example (awslabs/ec2-spot-workshops,
workshops/fis/fisspotinterruption.yaml; EC2 user guide, "Initiate a Spot Instance interruption").
"""

import json
import uuid
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any

from jobs.aws.connection import Aws
from jobs.aws.errors import error_code
from jobs.contract.errors import TrainyardError

ROLE_TRIES = 12
"""A new role is known everywhere only after some seconds: experiments that may not assume it yet fail at once."""

_TRUST = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"Service": "fis.amazonaws.com"}, "Action": "sts:AssumeRole"}],
}
_POLICY = "interrupt"
_NOT_THERE = ("NoSuchEntity", "ResourceNotFoundException")


def interrupt(
    aws: Aws, instance_arn: str, *, stage: str, ids: MutableMapping[str, str], wait: Callable[[], None]
) -> str:
    """Have one Spot instance taken back, and return the experiment's id once FIS says that it was sent.

    `ids` gets what was made, before it is used: `undo` takes it away. Raises TrainyardError where FIS refuses.
    """
    tags = {"trainyard:project": "trainyard", "trainyard:stage": stage}
    role_arn = _role(aws, instance_arn, stage=stage, tags=tags, ids=ids)
    if "template" not in ids:
        template = aws.client("fis").create_experiment_template(
            clientToken=str(uuid.uuid4()),
            description=f"trainyard acceptance of stage {stage}: take one Spot instance back",
            roleArn=role_arn,
            stopConditions=[{"source": "none"}],
            targets={
                "instance": {
                    "resourceType": "aws:ec2:spot-instance",
                    "resourceArns": [instance_arn],
                    "selectionMode": "ALL",
                }
            },
            actions={
                "interrupt": {
                    "actionId": "aws:ec2:send-spot-instance-interruptions",
                    "parameters": {"durationBeforeInterruption": "PT2M"},
                    "targets": {"SpotInstances": "instance"},
                }
            },
            tags=tags,
        )
        ids["template"] = template["experimentTemplate"]["id"]
    reason = ""
    for _ in range(ROLE_TRIES):
        experiment = _run(aws, ids["template"], tags=tags, wait=wait)
        ids["experiment"] = experiment["id"]
        if experiment["state"]["status"] == "completed":
            return str(experiment["id"])
        reason = experiment["state"].get("reason", experiment["state"]["status"])
        if "role" not in reason.lower():
            break
        wait()
    raise TrainyardError(
        f"FIS did not interrupt {instance_arn}: {reason}", next_step=f"aws fis get-experiment --id {ids['experiment']}"
    )


def _role(aws: Aws, instance_arn: str, *, stage: str, tags: dict[str, str], ids: MutableMapping[str, str]) -> str:
    """Make the role by which FIS may interrupt this one instance, and return its ARN."""
    iam = aws.client("iam")
    if "role" not in ids:
        ids["role"] = f"trainyard-{stage}-acceptance-{uuid.uuid4().hex[:8]}"
        iam.create_role(
            RoleName=ids["role"],
            AssumeRolePolicyDocument=json.dumps(_TRUST),
            Description="Lets FIS take one Spot instance back; trainyard acceptance deletes it",
            Tags=[{"Key": key, "Value": value} for key, value in tags.items()],
        )
    allowed = [
        {"Effect": "Allow", "Action": "ec2:DescribeInstances", "Resource": "*"},
        {"Effect": "Allow", "Action": "ec2:SendSpotInstanceInterruptions", "Resource": instance_arn},
    ]
    document = json.dumps({"Version": "2012-10-17", "Statement": allowed})
    iam.put_role_policy(RoleName=ids["role"], PolicyName=_POLICY, PolicyDocument=document)
    arn: str = iam.get_role(RoleName=ids["role"])["Role"]["Arn"]
    return arn


def _run(aws: Aws, template: str, *, tags: dict[str, str], wait: Callable[[], None]) -> dict[str, Any]:
    fis = aws.client("fis")
    started = fis.start_experiment(clientToken=str(uuid.uuid4()), experimentTemplateId=template, tags=tags)
    experiment: dict[str, Any] = started["experiment"]
    while experiment["state"]["status"] not in ("completed", "stopped", "failed", "cancelled"):
        wait()
        experiment = fis.get_experiment(id=experiment["id"])["experiment"]
    return experiment


def undo(aws: Aws, ids: MutableMapping[str, str]) -> None:
    """Delete template and role, as far as they are there. What FIS has begun takes two minutes and ends by itself."""
    if "template" in ids:
        with _already_gone():
            aws.client("fis").delete_experiment_template(id=ids["template"])
        del ids["template"]
    if "role" in ids:
        iam = aws.client("iam")
        with _already_gone():
            iam.delete_role_policy(RoleName=ids["role"], PolicyName=_POLICY)
        with _already_gone():
            iam.delete_role(RoleName=ids["role"])
        del ids["role"]


class _already_gone(suppress):  # noqa: N801 - reads as a statement
    """Suppress what AWS says of a thing that is not there."""

    def __init__(self) -> None:
        super().__init__(Exception)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        return error is not None and error_code(error) in _NOT_THERE
