"""Change sets, from which `cdk diff` reports replacements."""

from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.emulator.stack_requests import parameter, resources_of, stack_of, template
from tests.support.running_emulator import Emulator


class Stack:
    """A stack that is deployed once and then compared with other templates."""

    def __init__(self, aws: Emulator, name: str) -> None:
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
def stack(emulator: Emulator, request: pytest.FixtureRequest) -> Stack:
    return Stack(emulator, request.node.name.replace("_", "-")[:60])


def targets(change: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (detail["Target"]["Name"], detail["Target"]["RequiresRecreation"], detail["Evaluation"])
        for detail in change["Details"]
    ]


def test_change_names_its_properties_and_dependents_are_dynamic(stack: Stack) -> None:
    def resources(value: str, instance_type: str) -> dict[str, Any]:
        data = {"InstanceType": instance_type}
        return {
            "Changed": parameter(value, Name=f"/{stack.name}", Description="it"),
            "Other": parameter({"Ref": "Changed"}),
            "Renamed": parameter("1", Name=f"/{stack.name}/{value}"),
            "Follower": parameter({"Fn::Join": ["", ["of ", {"Ref": "Renamed"}]]}),
            "Launch": {"Type": "AWS::EC2::LaunchTemplate", "Properties": {"LaunchTemplateData": data}},
            "Version": parameter({"Fn::GetAtt": ["Launch", "LatestVersionNumber"]}),
        }

    stack.deploy(resources("1", "m5.large"))
    changes = stack.changes(resources("2", "m5.xlarge"))
    assert {name: targets(change) for name, change in changes.items()} == {
        "Changed": [("Value", "Never", "Static")],
        "Renamed": [("Name", "Always", "Static")],
        "Follower": [("Value", "Never", "Dynamic")],
        "Launch": [("LaunchTemplateData", "Never", "Static")],
        "Version": [("Value", "Never", "Dynamic")],
    }
    assert [name for name, change in changes.items() if change["Replacement"] != "False"] == ["Renamed"]
    changed = changes["Changed"]
    assert (changed["Action"], changed["ResourceType"]) == ("Modify", "AWS::SSM::Parameter")


def test_additions_and_removals_are_shown_but_not_applied(stack: Stack) -> None:
    resources = {"Goes": parameter("2"), "Stays": parameter("3")}
    stack.deploy(resources)
    never = {"Never": {"Fn::Equals": ["a", "b"]}}
    coming = {"Comes": parameter({"Ref": "Stays"}), "Third": {**parameter("3"), "Condition": "Never"}}
    changes = stack.changes({"Stays": parameter("3"), **coming}, Conditions=never)
    assert {name: change["Action"] for name, change in changes.items()} == {"Goes": "Remove", "Comes": "Add"}
    assert resources.keys() == resources_of(stack.aws.client, stack.name).keys()
    # An empty change set fails with AWS's message.
    named = {"StackName": stack.name, "ChangeSetName": "none"}
    stack.client.create_change_set(**named, TemplateBody=template(resources))
    found = stack.client.describe_change_set(**named)
    assert (found["Status"], found["ExecutionStatus"]) == ("FAILED", "UNAVAILABLE")
    assert "didn't contain changes" in found["StatusReason"]
    with pytest.raises(ClientError, match="cannot be executed"):
        stack.client.execute_change_set(**named)
