"""Requests about stacks, short enough for a test to show what it is about."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from botocore.exceptions import ClientError

Clients = Callable[[str], Any]
"""Makes a boto3 client by the name of its service."""


LAMBDA_ROLE: dict[str, Any] = {
    "Type": "AWS::IAM::Role",
    "Properties": {
        "AssumeRolePolicyDocument": {
            "Version": "2012-10-17",
            "Statement": [
                {"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}
            ],
        }
    },
}


def parameter(value: Any, **more: Any) -> dict[str, Any]:
    return {"Type": "AWS::SSM::Parameter", "Properties": {"Type": "String", "Value": value, **more}}


def template(resources: dict[str, Any], **sections: Any) -> str:
    return json.dumps({"Resources": resources, **sections})


def stack_of(clients: Clients, name: str) -> dict[str, Any]:
    stack: dict[str, Any] = clients("cloudformation").describe_stacks(StackName=name)["Stacks"][0]
    return stack


def outputs_of(clients: Clients, name: str) -> dict[str, str]:
    return {item["OutputKey"]: item["OutputValue"] for item in stack_of(clients, name).get("Outputs", [])}


def resources_of(clients: Clients, name: str) -> dict[str, dict[str, Any]]:
    answer = clients("cloudformation").describe_stack_resources(StackName=name)
    return {item["LogicalResourceId"]: item for item in answer["StackResources"]}


def change_set(clients: Clients, stack: str, kind: str, body: str) -> None:
    """Make and execute a change set as the CDK CLI does: under the same name for every stack."""
    cloudformation = clients("cloudformation")
    cloudformation.create_change_set(
        StackName=stack, ChangeSetName="cdk-deploy-change-set", ChangeSetType=kind, TemplateBody=body
    )
    cloudformation.execute_change_set(StackName=stack, ChangeSetName="cdk-deploy-change-set")


def attribute(name: str, logical_id: str = "It") -> Any:
    return {"Fn::GetAtt": [logical_id, name]}


@contextmanager
def stack(clients: Clients, name: str, resources: dict[str, Any], **outputs: Any) -> Iterator[dict[str, str]]:
    """Make a stack and yield its outputs; it must go without a trace of an error."""
    cloudformation = clients("cloudformation")
    body = template(resources, Outputs={key: {"Value": value} for key, value in outputs.items()})
    cloudformation.create_stack(StackName=name, TemplateBody=body)
    status = cloudformation.describe_stacks(StackName=name)["Stacks"][0]["StackStatus"]
    assert status == "CREATE_COMPLETE"
    yield outputs_of(clients, name)
    cloudformation.delete_stack(StackName=name)
    with pytest.raises(ClientError, match="does not exist"):
        cloudformation.describe_stacks(StackName=name)


def update(clients: Clients, name: str, resources: dict[str, Any], **outputs: Any) -> dict[str, str]:
    body = template(resources, Outputs={key: {"Value": value} for key, value in outputs.items()})
    clients("cloudformation").update_stack(StackName=name, TemplateBody=body)
    status = clients("cloudformation").describe_stacks(StackName=name)["Stacks"][0]["StackStatus"]
    assert status == "UPDATE_COMPLETE"
    return outputs_of(clients, name)
