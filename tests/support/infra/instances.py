"""What the tests of compute environments read a compute stack's template with."""

import base64
import email
from email.message import Message
from typing import Any

from tests.support.infra.synthesis import resources

Template = dict[str, Any]
Properties = dict[str, Any]

GAUDI = "dl1-24xlarge-1-21-0"
"""The pool of a stage that says nothing else."""
CPU = "cpu-m6i-4xlarge"


def environments(compute: Template) -> dict[str, Properties]:
    """Return compute environments by pool and capacity, as their instances' Name tag says it: `<pool id>-spot`, …"""
    found = resources(compute, "AWS::Batch::ComputeEnvironment").values()
    return {item["ComputeResources"]["Tags"]["Name"].split("-compute-")[1]: item for item in found}


def capacity(compute: Template, name: str) -> Properties:
    """Return the compute resources of one environment."""
    found: Properties = environments(compute)[name]["ComputeResources"]
    return found


def launch_data(compute: Template, name: str) -> Properties:
    """Return the launch template's data of one environment."""
    reference = capacity(compute, name)["LaunchTemplate"]["LaunchTemplateId"]["Ref"]
    found: Properties = resources(compute, "AWS::EC2::LaunchTemplate")[reference]["LaunchTemplateData"]
    return found


def queues(compute: Template) -> dict[str, Properties]:
    """Return job queues by the names under which they are published."""
    by_id = resources(compute, "AWS::Batch::JobQueue")
    found = {}
    for item in resources(compute, "AWS::SSM::Parameter").values():
        if "/queue/" in item["Name"]:
            logical_id, attribute = item["Value"]["Fn::GetAtt"]
            assert attribute == "JobQueueArn"
            found[item["Name"].split("/queue/")[1]] = by_id.pop(logical_id)
        if "/team-queue/" in item["Name"]:  # of an isolated team, see compute/test_isolated_team.py
            by_id.pop(item["Value"]["Fn::GetAtt"][0])
    assert not by_id, f"queues that nobody finds: {list(by_id)}"
    return found


def queue_environments(compute: Template, name: str) -> list[str]:
    """Return the environments that a queue draws on, in Batch's order, by the keys of `environments`."""
    by_id = {
        logical_id: item["ComputeResources"]["Tags"]["Name"].split("-compute-")[1]
        for logical_id, item in resources(compute, "AWS::Batch::ComputeEnvironment").items()
    }
    order = sorted(queues(compute)[name]["ComputeEnvironmentOrder"], key=lambda item: int(item["Order"]))
    return [by_id[item["ComputeEnvironment"]["Fn::GetAtt"][0]] for item in order]


def user_data(data: Properties) -> str:
    """Return user data as the instance gets it, after CloudFormation; references stand in angle brackets."""
    return base64.b64decode(_evaluated(data["UserData"])).decode()


def boot_parts(data: Properties) -> list[tuple[str, str]]:
    """Return (content type, script) of each part of the user data, in order."""
    message = email.message_from_string(user_data(data))
    return [(part.get_content_type(), _payload(part)) for part in message.walk() if not part.is_multipart()]


def _payload(part: Message) -> str:
    payload = part.get_payload(decode=True)
    assert isinstance(payload, bytes)
    return payload.decode()


def _evaluated(value: Any) -> str:
    if isinstance(value, str):
        return value
    ((function, argument),) = value.items()
    if function == "Ref":
        return f"<{argument}>"
    if function == "Fn::Base64":
        return base64.b64encode(_evaluated(argument).encode()).decode()
    assert function == "Fn::Join"
    separator, parts = argument
    return str(separator).join(_evaluated(part) for part in parts)
