"""CloudFormation's events: each change of a stack's status, to whoever has a rule for them."""

from typing import Any

from infra.emulator import ACCOUNT_ID, REGION
from tests.support.embedded_aws import EmbeddedAws
from tests.support.emulator.event_calls import messages, queue_of, rule
from tests.support.emulator.stack_requests import parameter, template

DONE = ("CREATE", "UPDATE", "DELETE", "ROLLBACK", "UPDATE_ROLLBACK")


def watch(aws: EmbeddedAws, stack: str) -> str:
    """Return the URL of a queue that gets the events of a stack, by a rule like the budget stop's."""
    url, arn = queue_of(aws)
    prefix = f"arn:aws:cloudformation:{REGION}:{ACCOUNT_ID}:stack/{stack}/"
    pattern = {
        "source": ["aws.cloudformation"],
        "detail-type": ["CloudFormation Stack Status Change"],
        "detail": {
            "stack-id": [{"prefix": prefix}],
            "status-details": {"status": [f"{what}_COMPLETE" for what in DONE] + ["CREATE_FAILED", "DELETE_FAILED"]},
        },
    }
    rule(aws, pattern, {"Arn": arn})
    return url


def test_changes_failures_and_ends_are_told_in_order(embedded_aws: EmbeddedAws) -> None:
    cloudformation, s3 = embedded_aws.client("cloudformation"), embedded_aws.client("s3")
    url = watch(embedded_aws, "told-all")
    taken = parameter("1", Name="/told-all/taken")
    embedded_aws.client("ssm").put_parameter(Name="/told-all/taken", Value="mine", Type="String")
    holder = {"Bucket": {"Type": "AWS::S3::Bucket", "Properties": {"BucketName": "told-all"}}}

    def names(body: dict[str, Any]) -> dict[str, str]:
        return {"StackName": "told-all", "TemplateBody": template(body)}

    cloudformation.create_stack(**names({"Taken": taken}))
    cloudformation.delete_stack(StackName="told-all")
    cloudformation.create_stack(**names({"Taken": taken}), DisableRollback=True)
    cloudformation.delete_stack(StackName="told-all")
    cloudformation.create_stack(**names(holder))
    cloudformation.update_stack(**names({**holder, "One": parameter("1")}))
    cloudformation.update_stack(**names({**holder, "One": parameter("1"), "Taken": taken}))
    s3.put_object(Bucket="told-all", Key="held", Body=b"")
    cloudformation.delete_stack(StackName="told-all")
    s3.delete_object(Bucket="told-all", Key="held")
    cloudformation.delete_stack(StackName="told-all")

    told = messages(embedded_aws, url, 9)
    assert told[0]["resources"] == [told[0]["detail"]["stack-id"]]
    assert [event["detail"]["status-details"]["status"] for event in told] == [
        *("ROLLBACK_COMPLETE", "DELETE_COMPLETE"),
        *("CREATE_FAILED", "DELETE_COMPLETE"),
        "CREATE_COMPLETE",
        "UPDATE_COMPLETE",
        "UPDATE_ROLLBACK_COMPLETE",
        *("DELETE_FAILED", "DELETE_COMPLETE"),
    ]
