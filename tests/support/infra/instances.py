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


def all_environments(compute: Template) -> dict[str, Properties]:
    """Return compute environments as their instances' Name tag calls them: `<pool id>-of-research-spot`, …"""
    found = resources(compute, "AWS::Batch::ComputeEnvironment").values()
    return {item["ComputeResources"]["Tags"]["Name"].split("-compute-")[1]: item for item in found}


def environments(compute: Template) -> dict[str, Properties]:
    """Return those of team `research` by pool and capacity: `<pool id>-spot`, …"""
    own = "-of-research-"
    return {name.replace(own, "-"): item for name, item in all_environments(compute).items() if own in name}


def capacity(compute: Template, name: str) -> Properties:
    """Return the compute resources of one environment, by any of these names."""
    found: Properties = {**environments(compute), **all_environments(compute)}[name]["ComputeResources"]
    return found


def launch_data(compute: Template, name: str) -> Properties:
    """Return the launch template's data of one environment."""
    reference = capacity(compute, name)["LaunchTemplate"]["LaunchTemplateId"]["Ref"]
    found: Properties = resources(compute, "AWS::EC2::LaunchTemplate")[reference]["LaunchTemplateData"]
    return found


def queues(compute: Template, team: str | None = "research") -> dict[str, Properties]:
    """Return the job queues of a team (None: that teams share), by the names under which they are published."""
    by_id = resources(compute, "AWS::Batch::JobQueue")
    found = {}
    for item in resources(compute, "AWS::SSM::Parameter").values():
        _, kind, name = item["Name"].partition("/team-queue/" if "/team-queue/" in item["Name"] else "/queue/")
        if kind:
            logical_id, attribute = item["Value"]["Fn::GetAtt"]
            assert attribute == "JobQueueArn"
            owner, name = name.split("/", 1) if kind == "/team-queue/" else (None, name)
            queue = by_id.pop(logical_id)
            if owner == team:
                found[name] = queue
    assert not by_id, f"queues that nobody finds: {list(by_id)}"
    return found


def queue_environments(compute: Template, name: str, team: str | None = "research") -> list[str]:
    """Return the environments that a team's queue draws on, in Batch's order, by pool and capacity."""
    by_id = {
        logical_id: item["ComputeResources"]["Tags"]["Name"].split("-compute-")[1]
        for logical_id, item in resources(compute, "AWS::Batch::ComputeEnvironment").items()
    }
    order = sorted(queues(compute, team)[name]["ComputeEnvironmentOrder"], key=lambda item: int(item["Order"]))
    return [by_id[item["ComputeEnvironment"]["Fn::GetAtt"][0]].replace("-of-research-", "-") for item in order]


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
