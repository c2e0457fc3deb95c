"""Image Builder's AMIs, as other parts of a stack use them."""

from typing import Any

from tests.support.emulator.stack_requests import parameter, stack_of, template


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


def test_new_version_of_a_recipe_makes_a_new_ami(emulator: Any) -> None:
    # GIVEN a stack with an AMI that EC2 knows
    cloudformation = emulator.client("cloudformation")
    policy = {"UpdateReplacePolicy": "Retain", "DeletionPolicy": "Delete"}
    cloudformation.create_stack(StackName="ami", TemplateBody=body("1.0.1", "/ami", **policy))
    old = published(emulator, "/ami")
    (found,) = emulator.client("ec2").describe_images(ImageIds=[old])["Images"]
    assert {"Key": "trainyard:pool", "Value": "dl1"} in found["Tags"]
    # WHEN its recipe is edited without a new version, THEN that is refused as on AWS, and the stack does not change
    edited = body("1.0.1", "/ami", **policy).replace("ami-1", "ami-2")
    cloudformation.update_stack(StackName="ami", TemplateBody=edited)
    stack = stack_of(emulator.client, "ami")
    assert stack["StackStatus"] == "UPDATE_ROLLBACK_COMPLETE"
    assert "already exists" in stack["StackStatusReason"]
    assert published(emulator, "/ami") == old
    # WHEN its recipe gets a new version, THEN there is a new AMI, and the old one is kept as the template says
    cloudformation.update_stack(StackName="ami", TemplateBody=body("1.0.2", "/ami", **policy))
    new = published(emulator, "/ami")
    assert stack_of(emulator.client, "ami")["StackStatus"] == "UPDATE_COMPLETE"
    assert new != old
    # AND the new AMI is deleted with the stack
    cloudformation.delete_stack(StackName="ami")
    assert [known(emulator, ami) for ami in (old, new)] == [True, False]
