"""Asks EC2 for CloudFormation whether it offers an instance type here: where it does not, what waits for this fails.

CloudFormation's own `cfnresponse` is there for code that a template holds, as it does this.
"""

from typing import Any

import boto3
import cfnresponse  # type: ignore[import-not-found]


def handler(event: dict[str, Any], context: Any) -> None:
    wanted = event["ResourceProperties"]
    name, before = wanted["InstanceType"], event.get("PhysicalResourceId", "")
    asked = name + "/" + wanted["Build"]
    status, reason = cfnresponse.SUCCESS, None
    # What was there before stays allowed: a deployment that fails here has to find its way back to it.
    if event["RequestType"] != "Delete" and asked != before:
        try:
            offers = boto3.client("ec2").describe_instance_type_offerings(
                Filters=[{"Name": "instance-type", "Values": [name]}]
            )["InstanceTypeOfferings"]
        except Exception as error:  # noqa: BLE001 - CloudFormation would wait for an answer for an hour
            status, reason = cfnresponse.FAILED, "EC2 does not say whether it offers " + name + ": " + str(error)
        else:
            if not offers:
                status, reason = cfnresponse.FAILED, wanted["Otherwise"]
    physical_id = asked if status == cfnresponse.SUCCESS else before or asked
    cfnresponse.send(event, context, status, {}, physical_id, reason=reason)
