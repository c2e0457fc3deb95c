"""AMIs that Image Builder would make, as a stack's other parts see them."""

from typing import Any

import pytest

from tests.support.emulator.stack_requests import parameter, resources_of, stack_of, template


def recipe(version: str) -> dict[str, Any]:
    properties = {"Name": "gaudi", "Version": version, "ParentImage": "ami-1", "Components": []}
    return {"Type": "AWS::ImageBuilder::ImageRecipe", "Properties": properties}


def image(**more: Any) -> dict[str, Any]:
    properties = {
        "ImageRecipeArn": {"Fn::GetAtt": ["Recipe", "Arn"]},
        "InfrastructureConfigurationArn": "arn:aws:imagebuilder:us-east-1:123456789012:infrastructure-configuration/x",
        "Tags": {"trainyard:pool": "dl1"},
    }
    return {"Type": "AWS::ImageBuilder::Image", "Properties": properties, **more}


def body(version: str, name: str, **more: Any) -> str:
    ami = {"Fn::GetAtt": ["Image", "ImageId"]}
    return template(
        {"Recipe": recipe(version), "Image": image(**more), "Ami": parameter(ami, Name=name, DataType="aws:ec2:image")}
    )


def published(aws: Any, name: str) -> str:
    return str(aws.client("ssm").get_parameter(Name=name)["Parameter"]["Value"])


def known(aws: Any, ami: str) -> bool:
    return bool(aws.client("ec2").describe_images(Filters=[{"Name": "image-id", "Values": [ami]}])["Images"])


@pytest.mark.parametrize("kept", [True, False], ids=["retained", "replaced"])
def test_another_recipe_makes_another_ami(embedded_aws: Any, kept: bool) -> None:
    # GIVEN a stack with an AMI that EC2 knows
    cloudformation, name = embedded_aws.client("cloudformation"), f"ami-of-{kept}"
    policy = {"UpdateReplacePolicy": "Retain", "DeletionPolicy": "Delete"} if kept else {}
    cloudformation.create_stack(StackName=name, TemplateBody=body(f"1.{int(kept)}.1", f"/{name}", **policy))
    old = published(embedded_aws, f"/{name}")
    (found,) = embedded_aws.client("ec2").describe_images(ImageIds=[old])["Images"]
    assert {"Key": "trainyard:pool", "Value": "dl1"} in found["Tags"]
    # WHEN its recipe gets a new version
    cloudformation.update_stack(StackName=name, TemplateBody=body(f"1.{int(kept)}.2", f"/{name}", **policy))
    # THEN there is another AMI, and the old one is kept where the template says so
    new = published(embedded_aws, f"/{name}")
    assert stack_of(embedded_aws.client, name)["StackStatus"] == "UPDATE_COMPLETE"
    assert new != old
    assert known(embedded_aws, new)
    assert known(embedded_aws, old) is kept
    # AND what the stack has goes with it
    cloudformation.delete_stack(StackName=name)
    assert not known(embedded_aws, new)


def test_a_recipe_cannot_change_under_its_version(embedded_aws: Any) -> None:
    # GIVEN a recipe, and an edit of it that leaves its version
    cloudformation, name = embedded_aws.client("cloudformation"), "same-version"
    cloudformation.create_stack(StackName=name, TemplateBody=body("2.0.0", f"/{name}"))
    before = resources_of(embedded_aws.client, name)["Recipe"]["PhysicalResourceId"]
    assert before.endswith(":image-recipe/gaudi/2.0.0")
    edited = body("2.0.0", f"/{name}").replace("ami-1", "ami-2")
    # WHEN the stack is updated
    cloudformation.update_stack(StackName=name, TemplateBody=edited)
    # THEN it is refused as on AWS, and the stack is as before
    stack = stack_of(embedded_aws.client, name)
    assert stack["StackStatus"] == "UPDATE_ROLLBACK_COMPLETE"
    assert "already exists" in stack["StackStatusReason"]
    assert resources_of(embedded_aws.client, name)["Recipe"]["PhysicalResourceId"] == before
    cloudformation.delete_stack(StackName=name)
