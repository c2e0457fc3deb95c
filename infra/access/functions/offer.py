"""A custom resource that fails its CloudFormation deployment if EC2 does not offer an instance type in the region.

`cfnresponse` is available because the template contains this code inline.
"""

from typing import Any

import boto3
import cfnresponse  # type: ignore[import-not-found]


def handler(event: dict[str, Any], context: Any) -> None:
    properties = event["ResourceProperties"]
    name, before = properties["InstanceType"], event.get("PhysicalResourceId", "")
    requested = name + "/" + properties["Release"]
    status, reason = cfnresponse.SUCCESS, None
    # The previous value stays allowed, so that a deployment that fails here can roll back to it.
    if event["RequestType"] != "Delete" and requested != before:
        try:
            offers = boto3.client("ec2").describe_instance_type_offerings(
                Filters=[{"Name": "instance-type", "Values": [name]}]
            )["InstanceTypeOfferings"]
        except Exception as error:  # noqa: BLE001 - without an answer, CloudFormation would wait for an hour
            status, reason = cfnresponse.FAILED, "EC2 did not report whether it offers " + name + ": " + str(error)
        else:
            if not offers:
                status, reason = cfnresponse.FAILED, properties["Otherwise"]
    physical_id = requested if status == cfnresponse.SUCCESS else before or requested
    cfnresponse.send(event, context, status, {}, physical_id, reason=reason)
