"""What stock moto gets wrong about stacks, each a function that raises where the service behind `clients` has it."""

from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.emulator.stack_requests import (
    Clients,
    change_set,
    outputs_of,
    parameter,
    resources_of,
    stack_of,
    template,
)


def outputs_of_a_change_set(clients: Clients) -> None:
    body = template(
        {"Bucket": {"Type": "AWS::S3::Bucket"}},
        Outputs={"Name": {"Value": {"Ref": "Bucket"}, "Export": {"Name": "gap-bucket"}}},
    )
    change_set(clients, "gap-exporter", "CREATE", body)
    importer = {"Copy": parameter({"Fn::ImportValue": "gap-bucket"}, Name="/gap/imported")}
    clients("cloudformation").create_stack(StackName="gap-importer", TemplateBody=template(importer))

    bucket = outputs_of(clients, "gap-exporter")["Name"]
    assert clients("ssm").get_parameter(Name="/gap/imported")["Parameter"]["Value"] == bucket
    clients("s3").head_bucket(Bucket=bucket)


def unsupported_type_is_on_record(clients: Clients) -> None:
    resources: dict[str, Any] = {
        "Budget": {"Type": "AWS::Budgets::BudgetsAction", "Properties": {"BudgetName": "gap"}},
        "Custom": {"Type": "Custom::Thing", "Properties": {"ServiceToken": "arn:aws:lambda:::function:none"}},
        "Names": parameter({"Fn::Sub": "${Budget} ${Custom.Token}"}, Name="/gap/unproven"),
    }
    clients("cloudformation").create_stack(StackName="gap-unproven", TemplateBody=template(resources))

    found = resources_of(clients, "gap-unproven")
    assert found.keys() == resources.keys()
    assert found["Budget"]["ResourceType"] == "AWS::Budgets::BudgetsAction"
    assert found["Budget"]["PhysicalResourceId"].startswith("gap-unproven-Budget-")
    value = clients("ssm").get_parameter(Name="/gap/unproven")["Parameter"]["Value"]
    assert value.split()[0] == found["Budget"]["PhysicalResourceId"]
    assert "Fn::GetAtt" not in value
    assert len(value.split()) == 2


def failed_create_rolls_back(clients: Clients) -> None:
    cloudformation, ssm = clients("cloudformation"), clients("ssm")
    ssm.put_parameter(Name="/gap/taken", Value="by another", Type="String")
    resources = {"First": parameter("1", Name="/gap/first"), "Taken": parameter("2", Name="/gap/taken")}
    resources["Taken"]["DependsOn"] = "First"
    cloudformation.create_stack(StackName="gap-create", TemplateBody=template(resources))

    assert stack_of(clients, "gap-create")["StackStatus"] == "ROLLBACK_COMPLETE"
    assert cloudformation.describe_stacks()["Stacks"]  # usable still
    with pytest.raises(ssm.exceptions.ParameterNotFound):
        ssm.get_parameter(Name="/gap/first")
    assert ssm.get_parameter(Name="/gap/taken")["Parameter"]["Value"] == "by another"
    events = cloudformation.describe_stack_events(StackName="gap-create")["StackEvents"]
    (reason,) = {event["ResourceStatusReason"] for event in events if event["ResourceStatus"] == "CREATE_FAILED"}
    assert "already exists" in reason

    cloudformation.delete_stack(StackName="gap-create")
    ssm.delete_parameter(Name="/gap/taken")
    cloudformation.create_stack(StackName="gap-create", TemplateBody=template(resources))
    assert stack_of(clients, "gap-create")["StackStatus"] == "CREATE_COMPLETE"


def failed_update_fails(clients: Clients) -> None:
    cloudformation, ssm = clients("cloudformation"), clients("ssm")
    good = {"First": parameter("1", Name="/gap/update/first"), "Goes": parameter("stays", Name="/gap/update/goes")}
    bad = {
        "First": parameter("2", Name="/gap/update/first"),
        "Added": parameter("3", Name="/gap/update/added"),
        "Queue": {
            "Type": "AWS::Batch::JobQueue",
            "DependsOn": ["Added", "First"],
            "Properties": {
                "Priority": 1,
                "ComputeEnvironmentOrder": [{"Order": 1, "ComputeEnvironment": "arn:aws:batch:none"}],
            },
        },
    }
    cloudformation.create_stack(StackName="gap-update", TemplateBody=template(good))
    for _ in range(2):  # the CLI tries again, and must not be told that there is nothing to do
        cloudformation.update_stack(StackName="gap-update", TemplateBody=template(bad))
        stack = stack_of(clients, "gap-update")
        assert stack["StackStatus"] == "UPDATE_ROLLBACK_COMPLETE"
        assert "Queue" in stack["StackStatusReason"]
    assert ssm.get_parameter(Name="/gap/update/first")["Parameter"]["Value"] == "1"
    assert ssm.get_parameter(Name="/gap/update/goes")["Parameter"]["Value"] == "stays"
    with pytest.raises(ssm.exceptions.ParameterNotFound):
        ssm.get_parameter(Name="/gap/update/added")

    with pytest.raises(ClientError, match="No updates are to be performed"):
        cloudformation.update_stack(StackName="gap-update", TemplateBody=template(good))
    good["First"] = parameter("4", Name="/gap/update/first")
    cloudformation.update_stack(StackName="gap-update", TemplateBody=template(good))
    assert stack_of(clients, "gap-update")["StackStatus"] == "UPDATE_COMPLETE"
    assert ssm.get_parameter(Name="/gap/update/first")["Parameter"]["Value"] == "4"


def previous_value_of_a_default(clients: Clients) -> None:
    cloudformation = clients("cloudformation")
    declared = {"BootstrapVersion": {"Type": "AWS::SSM::Parameter::Value<String>", "Default": "/gap/version"}}
    clients("ssm").put_parameter(Name="/gap/version", Value="30", Type="String")
    first = template({"One": parameter("1", Name="/gap/previous")}, Parameters=declared)
    second = template({"One": parameter({"Ref": "BootstrapVersion"}, Name="/gap/previous")}, Parameters=declared)
    cloudformation.create_stack(StackName="gap-previous", TemplateBody=first)
    cloudformation.update_stack(
        StackName="gap-previous",
        TemplateBody=second,
        Parameters=[{"ParameterKey": "BootstrapVersion", "UsePreviousValue": True}],
    )

    assert clients("ssm").get_parameter(Name="/gap/previous")["Parameter"]["Value"] == "30"


def change_set_of_a_second_stack(clients: Clients) -> None:
    cloudformation = clients("cloudformation")
    for stack in ("gap-one", "gap-two"):
        change_set(clients, stack, "CREATE", template({"One": parameter("1", Name=f"/{stack}")}))
    # The CLI deletes the last change set and waits until there is none of that name; the other stack still has its own.
    cloudformation.delete_change_set(StackName="gap-one", ChangeSetName="cdk-deploy-change-set")
    with pytest.raises(ClientError, match="ChangeSetNotFound"):
        cloudformation.describe_change_set(StackName="gap-one", ChangeSetName="cdk-deploy-change-set")
    change_set(clients, "gap-one", "UPDATE", template({"One": parameter("2", Name="/gap-one")}))

    assert stack_of(clients, "gap-one")["StackStatus"] == "UPDATE_COMPLETE"
    parameters = clients("ssm").get_parameters(Names=["/gap-one", "/gap-two"])["Parameters"]
    assert {item["Name"]: item["Value"] for item in parameters} == {"/gap-one": "2", "/gap-two": "1"}


def change_follows_what_was_replaced(clients: Clients) -> None:
    def body(cidr: str) -> str:
        return template(
            {
                "Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": cidr}},
                "Id": parameter({"Ref": "Vpc"}, Name="/gap/vpc"),
            }
        )

    cloudformation = clients("cloudformation")
    cloudformation.create_stack(StackName="gap-replace", TemplateBody=body("10.7.0.0/16"))
    cloudformation.update_stack(StackName="gap-replace", TemplateBody=body("10.6.0.0/16"))

    vpc = clients("ssm").get_parameter(Name="/gap/vpc")["Parameter"]["Value"]
    (found,) = clients("ec2").describe_vpcs(VpcIds=[vpc])["Vpcs"]
    assert found["CidrBlock"] == "10.6.0.0/16"
    assert "10.7.0.0/16" not in {
        vpc["CidrBlock"] for vpc in clients("ec2").describe_vpcs()["Vpcs"]
    }  # the old one is gone


GAPS = (
    outputs_of_a_change_set,
    unsupported_type_is_on_record,
    failed_create_rolls_back,
    failed_update_fails,
    previous_value_of_a_default,
    change_set_of_a_second_stack,
    change_follows_what_was_replaced,
)
