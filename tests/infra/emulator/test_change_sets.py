"""What a change set shows of a stack's next state: `cdk diff` says from it what is replaced."""

from typing import Any

import pytest

from tests.support.embedded_aws import EmbeddedAws
from tests.support.emulator.stack_requests import parameter, resources_of, stack_of, template


class Stack:
    """A stack that is deployed once, and looked at with other templates from then on."""

    def __init__(self, aws: EmbeddedAws, name: str) -> None:
        self.aws = aws
        self.name = name
        self.client = aws.client("cloudformation")

    def deploy(self, resources: dict[str, Any]) -> None:
        self.client.create_stack(StackName=self.name, TemplateBody=template(resources))
        assert stack_of(self.aws.client, self.name)["StackStatus"] == "CREATE_COMPLETE"

    def changes(self, resources: dict[str, Any], **sections: Any) -> dict[str, Any]:
        """Return the changes by logical id."""
        named = {"StackName": self.name, "ChangeSetName": "look"}
        self.client.create_change_set(**named, ChangeSetType="UPDATE", TemplateBody=template(resources, **sections))
        found = self.client.describe_change_set(**named)
        self.client.delete_change_set(**named)
        assert found["Status"] == "CREATE_COMPLETE", found
        return {item["ResourceChange"]["LogicalResourceId"]: item["ResourceChange"] for item in found["Changes"]}


@pytest.fixture
def stack(embedded_aws: EmbeddedAws, request: pytest.FixtureRequest) -> Stack:
    return Stack(embedded_aws, request.node.name.replace("_", "-")[:60])


def targets(change: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (detail["Target"]["Name"], detail["Target"]["RequiresRecreation"], detail["Evaluation"])
        for detail in change["Details"]
    ]


def test_a_change_names_the_property_and_no_other(stack: Stack) -> None:
    def resources(value: str) -> dict[str, Any]:
        return {
            "First": parameter(value, Name=f"/{stack.name}", Description="it"),
            "Other": parameter({"Ref": "First"}),
        }

    stack.deploy(resources("1"))
    (change,) = stack.changes(resources("2")).values()
    assert (change["Action"], change["ResourceType"]) == ("Modify", "AWS::SSM::Parameter")
    assert (change["Replacement"], change["Scope"]) == ("False", ["Properties"])
    assert targets(change) == [("Value", "Never", "Static")]


def test_what_follows_from_another_name_is_uncertain(stack: Stack) -> None:
    follower = parameter({"Fn::Join": ["", ["of ", {"Ref": "First"}]]})

    def resources(end: str) -> dict[str, Any]:
        return {"First": parameter("1", Name=f"/{stack.name}/{end}"), "Follower": follower}

    stack.deploy(resources("old"))
    changes = stack.changes(resources("new"))
    assert changes["First"]["Replacement"] == "True"
    assert targets(changes["First"]) == [("Name", "Always", "Static")]
    assert targets(changes["Follower"]) == [("Value", "Never", "Dynamic")]
    assert changes["Follower"]["Replacement"] == "False"


def test_a_new_version_of_a_launch_template_is_seen_where_it_is_used(stack: Stack) -> None:
    def launched(instance_type: str) -> dict[str, Any]:
        data = {"InstanceType": instance_type}
        return {
            "Launch": {"Type": "AWS::EC2::LaunchTemplate", "Properties": {"LaunchTemplateData": data}},
            "Version": parameter({"Fn::GetAtt": ["Launch", "LatestVersionNumber"]}),
        }

    stack.deploy(launched("m5.large"))
    changes = stack.changes(launched("m5.xlarge"))
    assert targets(changes["Launch"]) == [("LaunchTemplateData", "Never", "Static")]
    assert targets(changes["Version"]) == [("Value", "Never", "Dynamic")]


def test_what_comes_and_goes_is_shown_and_nothing_done(stack: Stack) -> None:
    resources = {"Goes": parameter("2"), "Stays": parameter("3")}
    stack.deploy(resources)
    never = {"Never": {"Fn::Equals": ["a", "b"]}}
    coming = {"Comes": parameter({"Ref": "Stays"}), "Third": {**parameter("3"), "Condition": "Never"}}
    changes = stack.changes({"Stays": parameter("3"), **coming}, Conditions=never)
    assert {name: change["Action"] for name, change in changes.items()} == {"Goes": "Remove", "Comes": "Add"}
    assert resources.keys() == resources_of(stack.aws.client, stack.name).keys()
