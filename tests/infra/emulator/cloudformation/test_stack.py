"""Stacks over the real HTTP API: failures, retained resources, exports, events."""

from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from infra.emulator import ACCOUNT_ID, REGION
from tests.support.emulator.event_calls import messages, queue_of, rule
from tests.support.emulator.stack_requests import stack_of, template
from tests.support.running_emulator import Emulator, run_emulator


def parameter(name: str, value: Any = "1", **more: Any) -> dict[str, Any]:
    return {"Type": "AWS::SSM::Parameter", "Properties": {"Type": "String", "Name": name, "Value": value}, **more}


def bucket(name: str, **more: Any) -> dict[str, Any]:
    return {"Type": "AWS::S3::Bucket", "Properties": {"BucketName": name}, **more}


class Stack:
    """A stack, named after its test."""

    def __init__(self, aws: Emulator, name: str) -> None:
        self.aws = aws
        self.name = name
        self.client = aws.client("cloudformation")

    def create(self, resources: dict[str, Any], *, sections: Any = None, **more: Any) -> None:
        self.client.create_stack(StackName=self.name, TemplateBody=template(resources, **(sections or {})), **more)

    def update(self, resources: dict[str, Any], *, sections: Any = None) -> None:
        self.client.update_stack(StackName=self.name, TemplateBody=template(resources, **(sections or {})))

    def delete(self) -> None:
        self.client.delete_stack(StackName=self.name)

    @property
    def status(self) -> str:
        return str(stack_of(self.aws.client, self.name)["StackStatus"])

    @property
    def reason(self) -> str:
        return str(stack_of(self.aws.client, self.name)["StackStatusReason"])

    def value_of(self, name: str) -> str | None:
        found = self.aws.client("ssm").get_parameters(Names=[name])["Parameters"]
        return found[0]["Value"] if found else None


@pytest.fixture
def stack(emulator: Emulator, request: pytest.FixtureRequest) -> Stack:
    return Stack(emulator, request.node.originalname.replace("_", "-")[:60])


@pytest.fixture(scope="module")
def own_aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """A server for the tests that check its health."""
    with run_emulator(tmp_path_factory.mktemp("stacks")) as aws:
        yield aws


def beside(stack: Stack, name: str) -> Stack:
    return Stack(stack.aws, f"{stack.name}-{name}")


def test_wrong_template_creates_no_stack(stack: Stack) -> None:
    for body in (template({"A": parameter("/refused", {"Ref": "Nobody"})}), "not a template"):
        with pytest.raises(ClientError, match="Template format error") as failure:
            stack.client.create_stack(StackName=stack.name, TemplateBody=body)
        assert failure.value.response["Error"]["Code"] == "ValidationError"
    with pytest.raises(ClientError, match=f"Stack with id {stack.name} does not exist"):
        assert stack.status


def test_failed_stack_is_kept_without_rollback(stack: Stack) -> None:
    stack.create({"A": parameter("/kept"), "B": parameter("/kept", DependsOn="A")}, DisableRollback=True)
    assert stack.status == "CREATE_FAILED"
    assert stack.value_of("/kept") == "1"
    with pytest.raises(ClientError, match="CREATE_FAILED state and can not be updated"):
        stack.update({"A": parameter("/kept", "2")})


@pytest.mark.parametrize(
    ("resource", "reason"),
    [
        ({"Type": "AWS::EC2::Instance"}, "the emulator does not support AWS::EC2::Instance"),
        (
            parameter("/a", {"Fn::GetAtt": ["A", "Colour"]}),
            "A (AWS::S3::Bucket) does not support attribute type Colour",
        ),
        (
            {"Type": "AWS::S3::Bucket", "Properties": {"WebsiteConfiguration": {}}},
            "does not support WebsiteConfiguration of buckets",
        ),
        ({"Type": "AWS::KMS::Key", "Properties": {"Colour": "red"}}, r"extraneous key [Colour] is not permitted"),
        ({"Type": "AWS::SQS::QueuePolicy", "Properties": {}}, "an error of the emulator"),
    ],
)
def test_unknown_resources_and_properties_fail_the_stack(
    own_aws: Emulator, resource: dict[str, Any], reason: str
) -> None:
    stack = Stack(own_aws, "unknown")
    stack.create({"A": bucket("unknown"), "B": resource})
    assert stack.status == "ROLLBACK_COMPLETE"
    assert reason in stack.reason
    stack.delete()
    # A failure of the emulator is also recorded as a server error.
    errors = [error["operation"] for error in own_aws.health()["server_errors"]]
    assert ("creating B (AWS::SQS::QueuePolicy)" in errors) == (resource["Type"] == "AWS::SQS::QueuePolicy")


def test_unknown_operations_are_refused(stack: Stack) -> None:
    with pytest.raises(ClientError, match="does not implement ListExports"):
        stack.client.list_exports()
    with pytest.raises(ClientError, match="does not implement OnFailure DELETE"):
        stack.create({"A": parameter("/a")}, OnFailure="DELETE")


def test_bucket_with_objects_prevents_deletion(stack: Stack) -> None:
    s3 = stack.aws.client("s3")
    stack.create({"Bucket": bucket("full-bucket"), "A": parameter("/full", {"Ref": "Bucket"})})
    s3.put_object(Bucket="full-bucket", Key="run", Body=b"weights")
    stack.delete()
    assert stack.status == "DELETE_FAILED"
    assert stack.reason.endswith("failed to delete: [Bucket]. The bucket you tried to delete is not empty")
    assert s3.get_object(Bucket="full-bucket", Key="run")["Body"].read() == b"weights"
    s3.delete_object(Bucket="full-bucket", Key="run")
    stack.delete()
    with pytest.raises(ClientError, match="does not exist"):
        assert stack.status


def test_retained_resources_outlive_stack_and_template(stack: Stack) -> None:
    first, second = (bucket(f"retained-{name}", DeletionPolicy="Retain") for name in ("first", "second"))
    stack.create({"First": first, "Second": second, "A": parameter("/retained")}, EnableTerminationProtection=True)
    stack.update({"Second": second})
    assert stack.value_of("/retained") is None
    with pytest.raises(ClientError, match="TerminationProtection is enabled"):
        stack.delete()
    stack.client.update_termination_protection(StackName=stack.name, EnableTerminationProtection=False)
    stack.delete()
    for name in ("retained-first", "retained-second"):
        stack.aws.client("s3").head_bucket(Bucket=name)


def test_export_in_use_cannot_change_or_be_deleted(stack: Stack) -> None:
    importing, second = beside(stack, "importing"), beside(stack, "second")

    def exported(value: str) -> dict[str, Any]:
        return {"Outputs": {"X": {"Value": value, "Export": {"Name": "in-use"}}}}

    stack.create({"A": parameter("/exporting")}, sections=exported("1"))
    importing.create({"A": parameter("/importing", {"Fn::ImportValue": "in-use"})})
    stack.update({"A": parameter("/exporting")}, sections=exported("2"))
    assert stack.status == "UPDATE_ROLLBACK_COMPLETE"
    assert stack.reason == f"Export in-use cannot be updated as it is in use by {importing.name}"
    second.create({"A": parameter("/exporting-too")}, sections=exported("2"))
    assert second.reason == f"Export with name in-use is already exported by stack {stack.name}"
    stack.delete()
    assert stack.status == "DELETE_FAILED"
    importing.delete()
    stack.delete()
    with pytest.raises(ClientError, match="does not exist"):
        assert stack.status


def test_custom_name_prevents_a_replacement(stack: Stack) -> None:
    def group(description: str) -> dict[str, Any]:
        properties = {"GroupName": "custom", "GroupDescription": description}
        return {"A": {"Type": "AWS::EC2::SecurityGroup", "Properties": properties}}

    stack.create(group("one"))
    stack.update(group("two"))
    assert "when a custom-named resource requires replacing" in stack.reason


def test_change_that_moto_cannot_make_in_place_is_refused(stack: Stack) -> None:
    def attached(gateway: str) -> dict[str, Any]:
        gateways = {name: {"Type": "AWS::EC2::InternetGateway"} for name in ("First", "Second")}
        ids = {"VpcId": {"Ref": "Vpc"}, "InternetGatewayId": {"Ref": gateway}}
        return {
            **gateways,
            "Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.9.0.0/16"}},
            "A": {"Type": "AWS::EC2::VPCGatewayAttachment", "Properties": ids},
        }

    stack.create(attached("First"))
    stack.update(attached("Second"))
    assert "cannot change InternetGatewayId in place, as AWS would" in stack.reason


def test_failed_update_restores_replaced_resources(stack: Stack) -> None:
    def resources(cidr: str, **more: Any) -> dict[str, Any]:
        vpc = {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": cidr}}
        return {"Vpc": vpc, "A": parameter("/replaced", {"Ref": "Vpc"}), **more}

    stack.create(resources("10.1.0.0/16"))
    before = stack.value_of("/replaced")
    stack.update(resources("10.2.0.0/16", Taken=parameter("/replaced", DependsOn="A")))
    assert stack.status == "UPDATE_ROLLBACK_COMPLETE"
    assert stack.value_of("/replaced") == before
    vpcs = {vpc["VpcId"]: vpc["CidrBlock"] for vpc in stack.aws.client("ec2").describe_vpcs()["Vpcs"]}
    assert vpcs[str(before)] == "10.1.0.0/16"
    assert "10.2.0.0/16" not in vpcs.values()


def test_events_are_in_order(stack: Stack) -> None:
    stack.create({"A": parameter("/told")})
    events = stack.client.describe_stack_events(StackName=stack.name)["StackEvents"][::-1]
    assert [(event["LogicalResourceId"], event["ResourceStatus"]) for event in events] == [
        (stack.name, "CREATE_IN_PROGRESS"),
        ("A", "CREATE_IN_PROGRESS"),
        ("A", "CREATE_COMPLETE"),
        (stack.name, "CREATE_COMPLETE"),
    ]
    times = [event["Timestamp"] for event in events]
    assert sorted(set(times)) == times


def test_eventbridge_gets_the_end_of_each_operation(stack: Stack) -> None:
    # With a rule like that of the budget stop.
    url, arn = queue_of(stack.aws)
    prefix = f"arn:aws:cloudformation:{REGION}:{ACCOUNT_ID}:stack/{stack.name}/"
    ends = [f"{what}_COMPLETE" for what in ("CREATE", "UPDATE", "DELETE", "ROLLBACK", "UPDATE_ROLLBACK")]
    detail = {"stack-id": [{"prefix": prefix}], "status-details": {"status": ends}}
    rule(stack.aws, {"source": ["aws.cloudformation"], "detail": detail}, {"Arn": arn})

    taken = parameter("/hears/taken")
    stack.aws.client("ssm").put_parameter(Name="/hears/taken", Value="mine", Type="String")
    stack.create({"Taken": taken})
    stack.delete()
    stack.create({"A": parameter("/hears")})
    stack.update({"A": parameter("/hears", "2")})
    stack.update({"A": parameter("/hears", "2"), "Taken": taken})
    stack.delete()
    received = messages(stack.aws, url, 6)
    assert received[0]["resources"] == [received[0]["detail"]["stack-id"]]
    assert [event["detail"]["status-details"]["status"] for event in received] == [
        *("ROLLBACK_COMPLETE", "DELETE_COMPLETE"),
        *("CREATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE", "DELETE_COMPLETE"),
    ]


def test_recorded_type_is_listed_while_a_stack_has_it(own_aws: Emulator) -> None:
    stack = Stack(own_aws, "unproven")
    stack.create(
        {
            "Pipeline": {"Type": "AWS::ImageBuilder::ImagePipeline", "Properties": {"Name": "named"}},
            "Metadata": {"Type": "AWS::CDK::Metadata", "Properties": {}},
            "A": parameter("/unproven", {"Fn::GetAtt": ["Pipeline", "Arn"]}),
        }
    )
    assert own_aws.health()["unproven"] == ["AWS::ImageBuilder::ImagePipeline"]
    assert stack.value_of("/unproven") == f"arn:aws:imagebuilder:us-east-1:{ACCOUNT_ID}:imagepipeline/named"
    stack.delete()
    assert own_aws.health()["unproven"] == []


def test_update_of_a_parameter_restores_the_templates_value(stack: Stack) -> None:
    # Trap: CloudFormation does this for a changed tag too, and a value written meanwhile is lost.
    ssm = stack.aws.client("ssm")

    def resources(*, other: str, **tags: str) -> dict[str, Any]:
        written = parameter("/reset/written", "first")
        return {
            "Written": {**written, "Properties": {**written["Properties"], "Tags": {"stage": "dev", **tags}}},
            "Other": parameter("/reset/other", other),
        }

    def tags() -> dict[str, str]:
        listed = ssm.list_tags_for_resource(ResourceType="Parameter", ResourceId="/reset/written")["TagList"]
        return {tag["Key"]: tag["Value"] for tag in listed if not tag["Key"].startswith("aws:")}

    stack.create(resources(other="1"))
    # WHEN another resource changes, THEN the written value is kept
    ssm.put_parameter(Name="/reset/written", Value="pushed", Overwrite=True)
    stack.update(resources(other="2"))
    assert (stack.value_of("/reset/other"), stack.value_of("/reset/written")) == ("2", "pushed")
    # WHEN a tag is added or removed, THEN the written value is lost
    for more in ({"cost-centre": "4711"}, {}):
        ssm.put_parameter(Name="/reset/written", Value="pushed", Overwrite=True)
        stack.update(resources(other="2", **more))
        assert stack.value_of("/reset/written") == "first"
        assert tags() == {"stage": "dev", **more}


def test_changed_stack_tag_replaces_resources_whose_tags_cannot_change(stack: Stack) -> None:
    # Trap: `cdk deploy --tags` sets tags of the stack, which reach all resources. A new environment ends running jobs.
    tags = {"stage": "dev"}
    resources = {
        "Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.9.0.0/16"}},
        "Subnet": {
            "Type": "AWS::EC2::Subnet",
            "Properties": {"VpcId": {"Ref": "Vpc"}, "CidrBlock": "10.9.0.0/24"},
        },
        "Profile": {"Type": "AWS::IAM::InstanceProfile", "Properties": {"Roles": []}},
        "Environment": {
            "Type": "AWS::Batch::ComputeEnvironment",
            "Properties": {
                "Type": "MANAGED",
                "ReplaceComputeEnvironment": False,
                "Tags": tags,
                "ComputeResources": {
                    "Type": "SPOT",
                    "MaxvCpus": 8,
                    "InstanceTypes": ["m6i.4xlarge"],
                    "InstanceRole": {"Fn::GetAtt": ["Profile", "Arn"]},
                    "Subnets": [{"Ref": "Subnet"}],
                    "SecurityGroupIds": [{"Fn::GetAtt": ["Vpc", "DefaultSecurityGroup"]}],
                },
            },
        },
        "Topic": {"Type": "AWS::SNS::Topic", "Properties": {}},
    }
    named = {"StackName": stack.name, "TemplateBody": template(resources)}
    stack.create(resources)
    batch, sns = stack.aws.client("batch"), stack.aws.client("sns")

    def found() -> dict[str, str]:
        listed = stack.client.describe_stack_resources(StackName=stack.name)["StackResources"]
        return {item["LogicalResourceId"]: item["PhysicalResourceId"] for item in listed}

    before, cost = found(), [{"Key": "cost", "Value": "1"}]
    stack.client.create_change_set(**named, ChangeSetName="look", Tags=cost)
    changes = stack.client.describe_change_set(StackName=stack.name, ChangeSetName="look")["Changes"]
    replacement = {
        item["ResourceChange"]["LogicalResourceId"]: item["ResourceChange"]["Replacement"] for item in changes
    }
    assert (replacement["Environment"], replacement["Topic"]) == ("True", "False")
    stack.client.update_stack(**named, Tags=cost)
    after = found()
    assert (after["Topic"], after["Environment"] != before["Environment"]) == (before["Topic"], True)
    assert sns.list_tags_for_resource(ResourceArn=after["Topic"])["Tags"] == cost
    listed = batch.describe_compute_environments()["computeEnvironments"]
    assert {item["computeEnvironmentArn"]: item["tags"] for item in listed}[after["Environment"]] == {
        **tags,
        "cost": "1",
    }
    assert before["Environment"] not in {item["computeEnvironmentArn"] for item in listed}
