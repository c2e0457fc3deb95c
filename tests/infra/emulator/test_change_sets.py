"""What a change set shows of a stack's next state, property by property: `cdk diff` is made of it."""

import json
from typing import Any

import pytest

from tests.support.embedded_aws import EmbeddedAws
from tests.support.emulator.stack_requests import parameter, stack_of, template

TIER = {"Tier": {"Type": "String", "Default": "Standard"}, "Secret": {"Type": "String", "NoEcho": True}}


class Stack:
    """A stack that is deployed once, and looked at with other templates from then on."""

    def __init__(self, aws: EmbeddedAws, name: str) -> None:
        self.aws = aws
        self.name = name
        self.client = aws.client("cloudformation")

    def deploy(self, resources: dict[str, Any], *, parameters: dict[str, str] | None = None, **sections: Any) -> None:
        self.client.create_stack(
            StackName=self.name, TemplateBody=template(resources, **sections), Parameters=_given(parameters or {})
        )
        assert stack_of(self.aws.client, self.name)["StackStatus"] == "CREATE_COMPLETE"

    def changes(
        self,
        resources: dict[str, Any],
        *,
        parameters: dict[str, str] | None = None,
        kind: str = "UPDATE",
        values: bool = True,
        **sections: Any,
    ) -> dict[str, Any]:
        """Return the changes by logical id; with the values of properties unless told otherwise."""
        self.client.create_change_set(
            StackName=self.name,
            ChangeSetName="look",
            ChangeSetType=kind,
            TemplateBody=template(resources, **sections),
            Parameters=_given(parameters or {}),
        )
        found = self.client.describe_change_set(StackName=self.name, ChangeSetName="look", IncludePropertyValues=values)
        self.client.delete_change_set(StackName=self.name, ChangeSetName="look")
        assert found["Status"] == "CREATE_COMPLETE", found
        return {item["ResourceChange"]["LogicalResourceId"]: item["ResourceChange"] for item in found["Changes"]}


def _given(parameters: dict[str, str]) -> list[dict[str, str]]:
    return [{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()]


@pytest.fixture
def stack(embedded_aws: EmbeddedAws, request: pytest.FixtureRequest) -> Stack:
    return Stack(embedded_aws, request.node.name.replace("_", "-")[:60])


def targets(change: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [
        (detail["Target"]["Name"], detail["Target"]["RequiresRecreation"], detail["Evaluation"])
        for detail in change["Details"]
    ]


def test_a_change_names_the_property_with_its_values_and_no_other(stack: Stack) -> None:
    first = parameter("1", Name=f"/{stack.name}", Description="what it is")
    stack.deploy({"First": first, "Other": parameter({"Ref": "First"})})
    changes = stack.changes(
        {"First": parameter("2", Name=f"/{stack.name}", Description="what it is"), "Other": parameter({"Ref": "First"})}
    )

    (change,) = changes.values()
    assert (change["Action"], change["ResourceType"]) == ("Modify", "AWS::SSM::Parameter")
    assert (change["Replacement"], change["Scope"]) == ("False", ["Properties"])
    assert targets(change) == [("Value", "Never", "Static")]
    target = change["Details"][0]["Target"]
    assert (target["BeforeValue"], target["AfterValue"]) == ("1", "2")
    before, after = (json.loads(change[name])["Properties"] for name in ("BeforeContext", "AfterContext"))
    assert before == first["Properties"]
    assert after == {**before, "Value": "2"}


def test_values_are_shown_to_whom_asks_for_them(stack: Stack) -> None:
    stack.deploy({"First": parameter("before")})
    changes = stack.changes({"First": parameter("after")}, values=False)

    assert targets(changes["First"]) == [("Value", "Never", "Static")]
    assert not {"BeforeContext", "AfterContext"} & changes["First"].keys()
    assert changes["First"]["Details"][0]["Target"].keys() == {"Attribute", "Name", "RequiresRecreation"}


def test_what_follows_from_another_name_is_told_as_uncertain(stack: Stack) -> None:
    follower = parameter({"Fn::Join": ["", ["of ", {"Ref": "First"}]]})
    stack.deploy({"First": parameter("1", Name=f"/{stack.name}/old"), "Follower": follower})
    changes = stack.changes({"First": parameter("1", Name=f"/{stack.name}/new"), "Follower": follower})

    assert changes["First"]["Replacement"] == "True"
    assert targets(changes["First"]) == [("Name", "Always", "Static")]
    assert targets(changes["Follower"]) == [("Value", "Never", "Dynamic")]
    target = changes["Follower"]["Details"][0]["Target"]
    assert target["AfterValue"] == "of {{changeSet:KNOWN_AFTER_APPLY}}"


def test_a_new_version_of_a_launch_template_is_seen_where_it_is_used(stack: Stack) -> None:
    def launched(instance_type: str) -> dict[str, Any]:
        data = {"InstanceType": instance_type}
        return {
            "Launch": {"Type": "AWS::EC2::LaunchTemplate", "Properties": {"LaunchTemplateData": data}},
            "Version": parameter({"Fn::GetAtt": ["Launch", "LatestVersionNumber"]}),
        }

    stack.deploy(launched("m5.large"))
    changes = stack.changes(launched("m5.xlarge"))

    assert targets(changes["Launch"])[0][0] == "LaunchTemplateData"
    assert targets(changes["Version"]) == [("Value", "Never", "Dynamic")]


def test_a_parameter_changes_what_refers_to_it_and_a_secret_stays_one(stack: Stack) -> None:
    resources = {"Tiered": parameter("1", Tier={"Ref": "Tier"}), "Hidden": parameter({"Ref": "Secret"})}
    stack.deploy(resources, Parameters=TIER, parameters={"Secret": "hidden-before"})
    changes = stack.changes(resources, Parameters=TIER, parameters={"Secret": "hidden-after", "Tier": "Advanced"})

    assert [detail["Target"]["AfterValue"] for detail in changes["Tiered"]["Details"]] == ["Advanced"]
    assert targets(changes["Hidden"]) == [("Value", "Never", "Static")]
    assert "hidden-" not in json.dumps(changes)


def test_policies_and_removals_are_told(stack: Stack) -> None:
    stack.deploy(
        {"Kept": parameter("1"), "Goes": parameter("2"), "Stays": {**parameter("3"), "DeletionPolicy": "Retain"}}
    )
    changes = stack.changes({"Kept": {**parameter("1"), "DeletionPolicy": "Retain"}})

    assert (changes["Kept"]["Scope"], changes["Kept"]["Replacement"]) == (["DeletionPolicy"], "False")
    assert changes["Kept"]["Details"][0]["Target"]["Attribute"] == "DeletionPolicy"
    removed = {name: (changes[name]["Action"], changes[name]["PolicyAction"]) for name in ("Goes", "Stays")}
    assert removed == {"Goes": ("Remove", "Delete"), "Stays": ("Remove", "Retain")}


def test_a_new_stack_is_all_additions(stack: Stack) -> None:
    conditions = {"Never": {"Fn::Equals": ["a", "b"]}}
    resources = {
        "First": parameter("1"),
        "Second": parameter({"Ref": "First"}),
        "Third": {**parameter("3"), "Condition": "Never"},
    }
    changes = stack.changes(resources, kind="CREATE", Conditions=conditions)

    assert {name: change["Action"] for name, change in changes.items()} == {"First": "Add", "Second": "Add"}
    assert not stack.aws.client("ssm").describe_parameters(
        ParameterFilters=[{"Key": "Name", "Option": "Contains", "Values": [stack.name]}]
    )["Parameters"]
