"""AWS's Fault Injection Service, which has EC2 take a Spot instance back, with the notice that a real reclaim has.

Action, target and the role's permissions are those of AWS's own example (awslabs/ec2-spot-workshops,
workshops/fis/fisspotinterruption.yaml; EC2 user guide, "Initiate a Spot Instance interruption").
"""

import json
import uuid
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from jobs.aws.connection import Aws
from jobs.aws.errors import error_code
from jobs.core.errors import TrainyardError

_ROLE_TRIES = 12
"""A new role is known everywhere only after some seconds: experiments that may not assume it yet fail at once."""

_POLICY = "interrupt"


def interrupt(
    aws: Aws, instance_arn: str, *, stage: str, ids: MutableMapping[str, str], wait: Callable[[], None]
) -> None:
    """Have one Spot instance taken back. Returns once FIS reports that the notice was sent.

    `ids` gets what was made before it is used, so that `undo` can delete it. Raises TrainyardError if FIS refuses.
    """
    fis, tags = aws.client("fis"), {"trainyard:project": "trainyard", "trainyard:stage": stage}
    role_arn = _role(aws, instance_arn, stage=stage, tags=tags, ids=ids)
    if "template" not in ids:
        instances = {"resourceType": "aws:ec2:spot-instance", "resourceArns": [instance_arn], "selectionMode": "ALL"}
        action = {
            "actionId": "aws:ec2:send-spot-instance-interruptions",
            "parameters": {"durationBeforeInterruption": "PT2M"},
            "targets": {"SpotInstances": "instance"},
        }
        template = fis.create_experiment_template(
            clientToken=str(uuid.uuid4()),
            description=f"trainyard acceptance of stage {stage}: take one Spot instance back",
            roleArn=role_arn,
            stopConditions=[{"source": "none"}],
            targets={"instance": instances},
            actions={"interrupt": action},
            tags=tags,
        )
        ids["template"] = template["experimentTemplate"]["id"]
    for _ in range(_ROLE_TRIES):
        started = fis.start_experiment(clientToken=str(uuid.uuid4()), experimentTemplateId=ids["template"], tags=tags)
        experiment: dict[str, Any] = started["experiment"]
        ids["experiment"] = experiment["id"]
        while experiment["state"]["status"] not in ("completed", "stopped", "failed", "cancelled"):
            wait()
            experiment = fis.get_experiment(id=experiment["id"])["experiment"]
        if experiment["state"]["status"] == "completed":
            return
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
    trusted = {"Effect": "Allow", "Principal": {"Service": "fis.amazonaws.com"}, "Action": "sts:AssumeRole"}
    if "role" not in ids:
        ids["role"] = f"trainyard-{stage}-acceptance-{uuid.uuid4().hex[:8]}"
        iam.create_role(
            RoleName=ids["role"],
            AssumeRolePolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [trusted]}),
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


def undo(aws: Aws, ids: MutableMapping[str, str]) -> None:
    """Delete template and role if they are there. What FIS has begun takes two minutes and ends by itself."""
    if "template" in ids:
        with _unless_gone():
            aws.client("fis").delete_experiment_template(id=ids["template"])
        del ids["template"]
    if "role" in ids:
        iam = aws.client("iam")
        with _unless_gone():
            iam.delete_role_policy(RoleName=ids["role"], PolicyName=_POLICY)
        with _unless_gone():
            iam.delete_role(RoleName=ids["role"])
        del ids["role"]


@contextmanager
def _unless_gone() -> Iterator[None]:
    """Ignore AWS's error for a thing that is not there."""
    try:
        yield
    except Exception as error:
        if error_code(error) not in ("NoSuchEntity", "ResourceNotFoundException"):
            raise
