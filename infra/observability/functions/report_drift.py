"""Report what was changed by hand: resources of the stage that differ from their templates.

A schedule calls this once a week. CloudFormation compares each stack with what exists, which takes minutes, so the
function starts all comparisons and waits. An alert lists what differs, and what could not be compared.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from infra.observability.functions.stop_at_budget import STOP_TAG

_POLL_SECONDS = 10
_RESERVE_MS = 60_000
"""Time to read the results and to publish before Lambda ends the function."""


def is_intended(drift: Mapping[str, Any], difference: Mapping[str, str], written: tuple[str, ...]) -> bool:
    """Return whether the stage itself makes this difference. These are all cases.

    `written`: beginnings of the names of parameters whose values pushes of images and builds of AMIs write.
    """
    path, actual, name = difference["PropertyPath"], difference["ActualValue"], str(drift["PhysicalResourceId"])
    added = difference["DifferenceType"] == "ADD"
    match drift["ResourceType"]:
        case "AWS::Batch::ComputeEnvironment":
            # Budgets, hourly limits and instances that never join disable environments, with alerts of their own.
            return path == "/State"
        case "AWS::SSM::Parameter":
            return path == "/Value" and name.startswith(written)
        case "AWS::IAM::Role":
            # A used-up budget tags the roles of a team's members.
            return added and path.startswith("/Tags") and STOP_TAG in actual
        case "AWS::EC2::SecurityGroup":
            # CloudFormation does not know the rules that other stacks add. Ours name a group, never an address.
            return added and path.startswith("/SecurityGroup") and 'SecurityGroupId"' in actual
    return False


def lines_of(stack: str, drifts: Iterable[Mapping[str, Any]], written: tuple[str, ...]) -> Iterator[str]:
    """Yield a line for each resource that was changed by hand, without values, which may be confidential."""
    for drift in drifts:
        resource = f"{stack}: {drift['LogicalResourceId']} ({drift['ResourceType']})"
        differences = [each for each in drift["PropertyDifferences"] if not is_intended(drift, each, written)]
        if drift["StackResourceDriftStatus"] == "DELETED":
            yield f"{resource} was deleted"
        elif differences:
            yield f"{resource} differs: {', '.join(each['PropertyPath'] for each in differences)}"


def wait(client: Any, detection: str, context: Any) -> str:
    """Wait for the end of a comparison. Return why it is incomplete, or an empty text."""
    while True:
        status = client.describe_stack_drift_detection_status(StackDriftDetectionId=detection)
        if status["DetectionStatus"] == "DETECTION_FAILED":
            return str(status.get("DetectionStatusReason", "CloudFormation gives no reason"))
        if status["DetectionStatus"] != "DETECTION_IN_PROGRESS":
            return ""
        if context.get_remaining_time_in_millis() < _RESERVE_MS:
            return "CloudFormation has not finished in time"
        time.sleep(_POLL_SECONDS)


def handler(_event: dict[str, Any], context: Any) -> None:
    import boto3  # noqa: PLC0415 - the functions above are used and tested without it

    client: Any = boto3.client("cloudformation")
    stage, written = os.environ["STAGE"], tuple(json.loads(os.environ["WRITTEN"]))
    detections, lines = {}, []
    for stack in json.loads(os.environ["STACKS"]):
        try:
            detections[stack] = client.detect_stack_drift(StackName=stack)["StackDriftDetectionId"]
        except client.exceptions.ClientError as error:  # noqa: PERF203 - perhaps a deployment is updating this stack
            lines.append(f"{stack} could not be compared: {error}")
    for stack, detection in detections.items():
        if problem := wait(client, detection, context):
            lines.append(f"{stack} was not compared completely: {problem}")
        request = {"StackName": stack, "StackResourceDriftStatusFilters": ["MODIFIED", "DELETED"]}
        while request:  # the operation has no paginator
            page = client.describe_stack_resource_drifts(**request)
            lines += lines_of(stack, page["StackResourceDrifts"], written)
            request = {**request, "NextToken": page["NextToken"]} if page.get("NextToken") else {}
    print("\n".join(lines or ["no resource differs from its template"]))
    if lines:
        title = f"Stage {stage}, compared with its templates:"
        after = f"Next: cdk drift '{stage}/*' -c stage={stage}, which shows values. Undo what was changed by hand."
        boto3.client("sns").publish(TopicArn=os.environ["TOPIC_ARN"], Message="\n".join([title, *lines, after]))
