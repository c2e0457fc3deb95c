"""Short helpers for tests of stacks: templates, and what DescribeStacks returns."""

import json
from collections.abc import Callable
from typing import Any

Clients = Callable[[str], Any]
"""Returns a boto3 client by the name of its service."""


def parameter(value: Any, **more: Any) -> dict[str, Any]:
    return {"Type": "AWS::SSM::Parameter", "Properties": {"Type": "String", "Value": value, **more}}


def template(resources: dict[str, Any], **sections: Any) -> str:
    return json.dumps({"Resources": resources, **sections})


def stack_of(clients: Clients, name: str) -> dict[str, Any]:
    stack: dict[str, Any] = clients("cloudformation").describe_stacks(StackName=name)["Stacks"][0]
    return stack


def resources_of(clients: Clients, name: str) -> dict[str, dict[str, Any]]:
    answer = clients("cloudformation").describe_stack_resources(StackName=name)
    return {item["LogicalResourceId"]: item for item in answer["StackResources"]}
