"""Detect drift: resources that differ from their template.

Like CloudFormation, this compares only properties that the template sets and the service returns, and knows the rules
that a stack adds to its own security groups, but not those that other stacks add. Types other than those in `_SERVICES`
are not checked, like types that CloudFormation does not support.

Source: CloudFormation user guide, "Detect unmanaged configuration changes to stacks and resources with drift
detection", with its section on considerations; API reference, "StackResourceDrift" and "PropertyDifference".
"""

import json
from collections.abc import Container, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from botocore.exceptions import ClientError

from infra.emulator.cloudformation.api import Api
from infra.emulator.cloudformation.stack import Stack, StackResource

_SERVICES = {
    "AWS::Batch::ComputeEnvironment": "batch",
    "AWS::Batch::JobQueue": "batch",
    "AWS::EC2::SecurityGroup": "ec2",
    "AWS::SSM::Parameter": "ssm",
}
"""The types that are checked, and their services."""


def drifts_of(stack: Stack) -> list[dict[str, Any]]:
    """Return the drift of each resource that can be checked, as DescribeStackResourceDrifts does."""
    return [_drift(stack, resource) for resource in stack.resources.values() if resource.resource_type in _SERVICES]


def _drift(stack: Stack, resource: StackResource) -> dict[str, Any]:
    try:
        actual = _actual(stack, resource)
    except ClientError as error:
        if "NotFound" not in error.response["Error"]["Code"]:
            raise
        actual = []
    # Groups of our templates have separate rules, which count as if they were set here; others must not be added.
    expected = {"SecurityGroupIngress": [], **resource.properties}
    differences = [each for one in actual for each in _differences(expected, one, "")]
    return {
        "StackId": stack.stack_id,
        "LogicalResourceId": resource.logical_id,
        "PhysicalResourceId": resource.physical_id,
        "ResourceType": resource.resource_type,
        "PropertyDifferences": differences,
        "StackResourceDriftStatus": "DELETED" if not actual else "MODIFIED" if differences else "IN_SYNC",
        "Timestamp": datetime.now(timezone.utc),
    }


def _actual(stack: Stack, resource: StackResource) -> list[Any]:
    """Return what the service says of a resource, or an empty list if it does not exist."""
    api, which = Api(_SERVICES[resource.resource_type], stack.account), resource.physical_id
    match resource.resource_type:
        case "AWS::Batch::ComputeEnvironment":
            return list(api("DescribeComputeEnvironments", ComputeEnvironments=[which])["computeEnvironments"])
        case "AWS::Batch::JobQueue":
            return list(api("DescribeJobQueues", JobQueues=[which])["jobQueues"])
        case "AWS::SSM::Parameter":
            return [api("GetParameter", Name=which)["Parameter"]]
    return [_rules(api, which, {other.physical_id for other in stack.resources.values()})]


def _rules(api: Api, group_id: str, own: Container[str]) -> Mapping[str, Any]:
    """Return a security group's rules as templates have them, without the stack's `own`, which are resources too."""
    api("DescribeSecurityGroups", GroupIds=[group_id])  # fails if it does not exist
    rules: dict[str, list[Any]] = {"SecurityGroupIngress": [], "SecurityGroupEgress": []}
    filters = [{"Name": "group-id", "Values": [group_id]}]
    for rule in api("DescribeSecurityGroupRules", Filters=filters)["SecurityGroupRules"]:
        direction, end = ("Egress", "Destination") if rule["IsEgress"] else ("Ingress", "Source")
        found = {key: rule.get(key) for key in ("IpProtocol", "FromPort", "ToPort", "Description")}
        found["CidrIp"] = rule.get("CidrIpv4")
        found[f"{end}SecurityGroupId"] = rule.get("ReferencedGroupInfo", {}).get("GroupId")
        if rule["SecurityGroupRuleId"] not in own:
            rules[f"SecurityGroup{direction}"].append({key: item for key, item in found.items() if item is not None})
    return rules


def _differences(expected: Any, actual: Any, path: str) -> Iterator[dict[str, Any]]:
    """Compare values whose names may be capitalised differently. The order of lists does not matter."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        returned = {name.lower(): item for name, item in actual.items()}
        for name, item in expected.items():
            if name.lower() in returned:
                yield from _differences(item, returned[name.lower()], f"{path}/{name}")
    elif isinstance(expected, list) and isinstance(actual, list):
        extra = list(actual)
        for index, item in enumerate(expected):
            same = [other for other in extra if not list(_differences(item, other, ""))]
            if same:
                extra.remove(same[0])
            else:
                yield _difference(f"{path}/{index}", "REMOVE", item, None)
        for index, item in enumerate(extra, start=len(expected)):
            yield _difference(f"{path}/{index}", "ADD", None, item)
    elif _text(expected) != _text(actual):
        yield _difference(path, "NOT_EQUAL", expected, actual)


def _difference(path: str, kind: str, expected: Any, actual: Any) -> dict[str, Any]:
    values = {"ExpectedValue": _text(expected), "ActualValue": _text(actual)}
    return {"PropertyPath": path, "DifferenceType": kind, **values}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
