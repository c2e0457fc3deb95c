"""Read compute environments, launch templates and user data from a compute stack's template."""

import base64
import email
from email.message import Message
from typing import Any

from tests.support.infra.synthesis import resources

Properties = dict[str, Any]

GAUDI, CUDA, CPU = "dl1-24xlarge-1-21-0-spot", "p4d-24xlarge-cuda-2026-11-spot", "cpu-m6i-4xlarge-spot"
"""Compute environments of ALL (tests/support/infra/variants.py); every script of boot/ runs on one of them."""


def environments(compute: Properties) -> dict[str, Properties]:
    """Return compute resources by the end of their instances' Name tags: `<pool id>-of-<team>-spot`, …"""
    found = resources(compute, "AWS::Batch::ComputeEnvironment").values()
    return {item["Tags"]["Name"].split("-compute-")[1]: item for item in (one["ComputeResources"] for one in found)}


def launch_data(compute: Properties, name: str) -> Properties:
    """Return the launch template data of a compute environment."""
    reference = environments(compute)[name]["LaunchTemplate"]["LaunchTemplateId"]["Ref"]
    found: Properties = resources(compute, "AWS::EC2::LaunchTemplate")[reference]["LaunchTemplateData"]
    return found


def user_data(data: Properties) -> str:
    """Return user data as an instance gets it, with references in angle brackets."""
    return base64.b64decode(_evaluated(data["UserData"])).decode()


def boot_parts(data: Properties) -> list[tuple[str, str]]:
    """Return (content type, script) of each part of the user data, in order."""
    message = email.message_from_string(user_data(data))
    return [(part.get_content_type(), _payload(part)) for part in message.walk() if not part.is_multipart()]


def script_with(data: Properties, text: str) -> str:
    """Return the only script of the user data that contains the text."""
    (script,) = (script for _, script in boot_parts(data) if text in script)
    return script


def _payload(part: Message) -> str:
    payload = part.get_payload(decode=True)
    assert isinstance(payload, bytes)
    return payload.decode()


def _evaluated(value: Any) -> str:
    match value:
        case {"Fn::Base64": argument}:
            return base64.b64encode(_evaluated(argument).encode()).decode()
        case {"Fn::Join": [separator, parts]}:
            return str(separator).join(map(_evaluated, parts))
        case {"Ref": name}:
            return f"<{name}>"
    return str(value)
