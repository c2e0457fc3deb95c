"""Stacks over the real HTTP API: what goes wrong, what must stay, what one stack owes another."""

import json
from typing import Any

import pytest
from botocore.exceptions import ClientError


def parameter(name: str, value: Any = "1", **more: Any) -> dict[str, Any]:
    return {"Type": "AWS::SSM::Parameter", "Properties": {"Type": "String", "Name": name, "Value": value}, **more}


def bucket(name: str, **more: Any) -> dict[str, Any]:
    return {"Type": "AWS::S3::Bucket", "Properties": {"BucketName": name}, **more}


def body(resources: dict[str, Any], **sections: Any) -> str:
    return json.dumps({"Resources": resources, **sections})


@pytest.fixture
def cloudformation(embedded_aws: Any) -> Any:
    return embedded_aws.client("cloudformation")


def status(cloudformation: Any, name: str) -> str:
    return str(cloudformation.describe_stacks(StackName=name)["Stacks"][0]["StackStatus"])


def reason(cloudformation: Any, name: str) -> str:
    return str(cloudformation.describe_stacks(StackName=name)["Stacks"][0]["StackStatusReason"])


def value_of(embedded_aws: Any, name: str) -> str | None:
    found = embedded_aws.client("ssm").get_parameters(Names=[name])["Parameters"]
    return found[0]["Value"] if found else None


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            body(
                {"A": {"Type": "AWS::S3::Bucket", "DependsOn": "B"}, "B": {"Type": "AWS::S3::Bucket", "DependsOn": "A"}}
            ),
            "Circular",
        ),
        (body({"A": parameter("/refused", {"Ref": "Nobody"})}), "Unresolved resource dependencies"),
        (body({"A": bucket("refused")}, Parameters={"P": {"Type": "String"}}), "must have values"),
        ("not a template", "Template format error"),
    ],
)
def test_a_wrong_template_makes_no_stack(cloudformation: Any, template: str, message: str) -> None:
    with pytest.raises(ClientError, match=message) as failure:
        cloudformation.create_stack(StackName="refused", TemplateBody=template)

    assert failure.value.response["Error"]["Code"] == "ValidationError"
    with pytest.raises(ClientError, match="Stack with id refused does not exist"):
        cloudformation.describe_stacks(StackName="refused")


def test_a_failed_stack_stays_as_it_is_where_no_rollback_is_asked_for(cloudformation: Any, embedded_aws: Any) -> None:
    resources = {"A": parameter("/kept"), "B": parameter("/kept", DependsOn="A")}
    cloudformation.create_stack(StackName="kept", TemplateBody=body(resources), DisableRollback=True)

    assert status(cloudformation, "kept") == "CREATE_FAILED"
    assert value_of(embedded_aws, "/kept") == "1"
    with pytest.raises(ClientError, match="CREATE_FAILED state and can not be updated"):
        cloudformation.update_stack(StackName="kept", TemplateBody=body({"A": parameter("/kept", "2")}))


def test_a_missing_attribute_fails_with_the_resource_and_the_attribute(cloudformation: Any) -> None:
    resources = {"Bucket": bucket("no-such-attribute"), "A": parameter("/a", {"Fn::GetAtt": ["Bucket", "Colour"]})}
    cloudformation.create_stack(StackName="attribute", TemplateBody=body(resources))

    assert status(cloudformation, "attribute") == "ROLLBACK_COMPLETE"
    assert "resource Bucket (AWS::S3::Bucket) does not support attribute type Colour" in reason(
        cloudformation, "attribute"
    )


def test_a_bucket_with_objects_holds_its_stack(cloudformation: Any, embedded_aws: Any) -> None:
    s3 = embedded_aws.client("s3")
    cloudformation.create_stack(
        StackName="full",
        TemplateBody=body({"Bucket": bucket("full-bucket"), "A": parameter("/full", {"Ref": "Bucket"})}),
    )
    s3.put_object(Bucket="full-bucket", Key="run", Body=b"weights")
    cloudformation.delete_stack(StackName="full")

    assert status(cloudformation, "full") == "DELETE_FAILED"
    assert reason(cloudformation, "full") == (
        "The following resource(s) failed to delete: [Bucket]. The bucket you tried to delete is not empty"
    )
    assert s3.get_object(Bucket="full-bucket", Key="run")["Body"].read() == b"weights"

    s3.delete_object(Bucket="full-bucket", Key="run")
    cloudformation.delete_stack(StackName="full")
    with pytest.raises(ClientError, match="does not exist"):
        cloudformation.describe_stacks(StackName="full")


def test_what_is_to_be_retained_outlives_stack_and_template(cloudformation: Any, embedded_aws: Any) -> None:
    retained = {"DeletionPolicy": "Retain"}
    resources = {"First": bucket("retained-first", **retained), "Second": bucket("retained-second", **retained)}
    cloudformation.create_stack(StackName="retained", TemplateBody=body({**resources, "A": parameter("/retained")}))
    cloudformation.update_stack(StackName="retained", TemplateBody=body({"Second": resources["Second"]}))
    assert value_of(embedded_aws, "/retained") is None
    cloudformation.delete_stack(StackName="retained")

    for name in ("retained-first", "retained-second"):
        embedded_aws.client("s3").head_bucket(Bucket=name)


def test_a_protected_stack_is_not_deleted(cloudformation: Any) -> None:
    cloudformation.create_stack(
        StackName="protected", TemplateBody=body({"A": parameter("/protected")}), EnableTerminationProtection=True
    )

    with pytest.raises(ClientError, match="TerminationProtection is enabled"):
        cloudformation.delete_stack(StackName="protected")
    cloudformation.update_termination_protection(StackName="protected", EnableTerminationProtection=False)
    cloudformation.delete_stack(StackName="protected")
    with pytest.raises(ClientError, match="does not exist"):
        cloudformation.describe_stacks(StackName="protected")


def test_an_export_in_use_neither_changes_nor_goes(cloudformation: Any) -> None:
    def exporting(value: str) -> str:
        return body({"A": parameter("/exporting")}, Outputs={"X": {"Value": value, "Export": {"Name": "in-use"}}})

    cloudformation.create_stack(StackName="exporting", TemplateBody=exporting("1"))
    importing = body({"A": parameter("/importing", {"Fn::ImportValue": "in-use"})})
    cloudformation.create_stack(StackName="importing", TemplateBody=importing)
    cloudformation.update_stack(StackName="exporting", TemplateBody=exporting("2"))
    assert status(cloudformation, "exporting") == "UPDATE_ROLLBACK_COMPLETE"
    assert reason(cloudformation, "exporting") == "Export in-use cannot be updated as it is in use by importing"
    cloudformation.delete_stack(StackName="exporting")
    assert status(cloudformation, "exporting") == "DELETE_FAILED"

    cloudformation.delete_stack(StackName="importing")
    cloudformation.delete_stack(StackName="exporting")
    with pytest.raises(ClientError, match="does not exist"):
        cloudformation.describe_stacks(StackName="exporting")


def test_what_it_does_not_know_is_refused(cloudformation: Any) -> None:
    with pytest.raises(ClientError, match="does not implement ListExports"):
        cloudformation.list_exports()
    with pytest.raises(ClientError, match="does not implement OnFailure DELETE"):
        cloudformation.create_stack(StackName="goes", TemplateBody=body({"A": parameter("/a")}), OnFailure="DELETE")
    cloudformation.create_stack(StackName="unknown", TemplateBody=body({"A": {"Type": "AWS::EC2::Instance"}}))
    assert "the embedded AWS has no AWS::EC2::Instance" in reason(cloudformation, "unknown")
    taken = {**bucket("unknown-bucket"), "Properties": {"BucketName": "unknown-bucket", "WebsiteConfiguration": {}}}
    cloudformation.create_stack(StackName="unknown-property", TemplateBody=body({"A": taken}))
    assert "has no WebsiteConfiguration of buckets" in reason(cloudformation, "unknown-property")


def test_a_custom_name_stands_in_the_way_of_a_replacement(cloudformation: Any) -> None:
    def group(description: str) -> str:
        properties = {"GroupName": "custom", "GroupDescription": description}
        return body({"A": {"Type": "AWS::EC2::SecurityGroup", "Properties": properties}})

    cloudformation.create_stack(StackName="custom", TemplateBody=group("one"))
    cloudformation.update_stack(StackName="custom", TemplateBody=group("two"))
    assert "when a custom-named resource requires replacing" in reason(cloudformation, "custom")


def test_what_moto_cannot_change_in_place_is_refused_not_replaced(cloudformation: Any) -> None:
    def log(interval: str) -> str:
        table = {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.9.0.0/16"}}
        gateway = {"VpcId": {"Ref": "Vpc"}, "InternetGatewayId": interval}
        return body({"Vpc": table, "A": {"Type": "AWS::EC2::VPCGatewayAttachment", "Properties": gateway}})

    first, second = (cloudformation_gateway(cloudformation, name) for name in ("first", "second"))
    cloudformation.create_stack(StackName="in-place", TemplateBody=log(first))
    cloudformation.update_stack(StackName="in-place", TemplateBody=log(second))
    assert "cannot change InternetGatewayId in place, as AWS would" in reason(cloudformation, "in-place")


def cloudformation_gateway(cloudformation: Any, name: str) -> str:
    template = body({"A": {"Type": "AWS::EC2::InternetGateway"}})
    cloudformation.create_stack(StackName=f"gateway-{name}", TemplateBody=template)
    (found,) = cloudformation.describe_stack_resources(StackName=f"gateway-{name}")["StackResources"]
    return str(found["PhysicalResourceId"])


def test_two_stacks_cannot_export_one_name(cloudformation: Any) -> None:
    for number in ("1", "2"):
        outputs = {"X": {"Value": number, "Export": {"Name": "exported-once"}}}
        template = body({"A": parameter(f"/exported-{number}")}, Outputs=outputs)
        cloudformation.create_stack(StackName=f"exports-{number}", TemplateBody=template)

    assert status(cloudformation, "exports-1") == "CREATE_COMPLETE"
    assert (
        reason(cloudformation, "exports-2") == "Export with name exported-once is already exported by stack exports-1"
    )


def test_a_failed_update_brings_back_what_it_had_replaced(cloudformation: Any, embedded_aws: Any) -> None:
    def template(cidr: str, **more: Any) -> str:
        vpc = {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": cidr}}
        return body({"Vpc": vpc, "A": parameter("/replaced", {"Ref": "Vpc"}), **more})

    cloudformation.create_stack(StackName="replaced", TemplateBody=template("10.1.0.0/16"))
    before = value_of(embedded_aws, "/replaced")
    taken = parameter("/replaced", DependsOn="A")
    cloudformation.update_stack(StackName="replaced", TemplateBody=template("10.2.0.0/16", Taken=taken))

    assert status(cloudformation, "replaced") == "UPDATE_ROLLBACK_COMPLETE"
    assert value_of(embedded_aws, "/replaced") == before
    vpcs = embedded_aws.client("ec2").describe_vpcs()["Vpcs"]
    assert {vpc["CidrBlock"] for vpc in vpcs if vpc["VpcId"] == before} == {"10.1.0.0/16"}
    assert "10.2.0.0/16" not in {vpc["CidrBlock"] for vpc in vpcs}


def test_an_empty_change_set_says_so(cloudformation: Any) -> None:
    template = body({"A": parameter("/empty")})
    cloudformation.create_stack(StackName="empty", TemplateBody=template)
    cloudformation.create_change_set(StackName="empty", ChangeSetName="none", TemplateBody=template)

    found = cloudformation.describe_change_set(StackName="empty", ChangeSetName="none")
    assert (found["Status"], found["ExecutionStatus"]) == ("FAILED", "UNAVAILABLE")
    assert "didn't contain changes" in found["StatusReason"]


def test_events_tell_the_story_in_order(cloudformation: Any) -> None:
    cloudformation.create_stack(StackName="told", TemplateBody=body({"A": parameter("/told")}))

    events = cloudformation.describe_stack_events(StackName="told")["StackEvents"]
    story = [(event["LogicalResourceId"], event["ResourceStatus"]) for event in reversed(events)]
    assert story == [
        ("told", "CREATE_IN_PROGRESS"),
        ("A", "CREATE_IN_PROGRESS"),
        ("A", "CREATE_COMPLETE"),
        ("told", "CREATE_COMPLETE"),
    ]
    times = [event["Timestamp"] for event in reversed(events)]
    assert sorted(set(times)) == times


def test_secret_parameters_are_not_shown(cloudformation: Any) -> None:
    declared = {"Secret": {"Type": "String", "NoEcho": True}, "Plain": {"Type": "String", "Default": "seen"}}
    cloudformation.create_stack(
        StackName="secret",
        TemplateBody=body({"A": parameter("/secret")}, Parameters=declared),
        Parameters=[{"ParameterKey": "Secret", "ParameterValue": "hidden"}],
    )

    (stack,) = cloudformation.describe_stacks(StackName="secret")["Stacks"]
    shown = {item["ParameterKey"]: item["ParameterValue"] for item in stack["Parameters"]}
    assert shown == {"Secret": "****", "Plain": "seen"}


def test_an_unproven_type_is_listed_as_long_as_it_is_there(fresh_aws: Any) -> None:
    cloudformation = fresh_aws.client("cloudformation")
    resources = {
        "Pipeline": {"Type": "AWS::ImageBuilder::ImagePipeline", "Properties": {"Name": "named"}},
        "Metadata": {"Type": "AWS::CDK::Metadata", "Properties": {}},
        "A": parameter("/unproven", {"Fn::Join": [" ", [{"Ref": "Pipeline"}, {"Fn::GetAtt": ["Pipeline", "Arn"]}]]}),
    }
    cloudformation.create_stack(StackName="unproven", TemplateBody=body(resources))

    assert fresh_aws.health()["unproven"] == ["AWS::ImageBuilder::ImagePipeline"]
    arn = "arn:aws:imagebuilder:us-east-1:123456789012:imagepipeline/named"
    assert value_of(fresh_aws, "/unproven") == f"named {arn}"
    cloudformation.delete_stack(StackName="unproven")
    assert fresh_aws.health()["unproven"] == []


def test_a_parameter_that_is_updated_has_the_templates_value_again(cloudformation: Any, embedded_aws: Any) -> None:
    # Trap: CloudFormation does so for a changed tag too, and whatever somebody wrote meanwhile is lost.
    ssm = embedded_aws.client("ssm")

    def resources(*, cost_centre: str | None, other: str = "1") -> str:
        tags = {"stage": "dev", **({"cost-centre": cost_centre} if cost_centre else {})}
        written = parameter("/reset/written", "first")
        return body(
            {
                "Written": {**written, "Properties": {**written["Properties"], "Tags": tags}},
                "Other": parameter("/reset/other", other),
            }
        )

    cloudformation.create_stack(StackName="reset", TemplateBody=resources(cost_centre=None))
    # WHEN another resource changes, THEN what was written stays
    ssm.put_parameter(Name="/reset/written", Value="pushed", Overwrite=True)
    cloudformation.update_stack(StackName="reset", TemplateBody=resources(cost_centre=None, other="2"))
    assert value_of(embedded_aws, "/reset/other") == "2"
    assert value_of(embedded_aws, "/reset/written") == "pushed"
    # WHEN a tag comes, THEN it does not
    cloudformation.update_stack(StackName="reset", TemplateBody=resources(cost_centre="4711", other="2"))
    assert value_of(embedded_aws, "/reset/written") == "first"
    assert tags_of(ssm, "/reset/written") == {"stage": "dev", "cost-centre": "4711"}
    # AND as little when it goes
    ssm.put_parameter(Name="/reset/written", Value="pushed", Overwrite=True)
    cloudformation.update_stack(StackName="reset", TemplateBody=resources(cost_centre=None, other="2"))
    assert value_of(embedded_aws, "/reset/written") == "first"
    assert tags_of(ssm, "/reset/written") == {"stage": "dev"}


def tags_of(ssm: Any, name: str) -> dict[str, str]:
    listed = ssm.list_tags_for_resource(ResourceType="Parameter", ResourceId=name)["TagList"]
    return {tag["Key"]: tag["Value"] for tag in listed if not tag["Key"].startswith("aws:")}
