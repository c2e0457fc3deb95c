import json
from typing import Any

import pytest

from infra.emulator.cloudformation.template import Scope, TemplateError, parse_template

RESOURCES = {"Bucket": {"Type": "AWS::S3::Bucket"}, "Role": {"Type": "AWS::IAM::Role"}}
PHYSICAL = {"Bucket": "bucket-1", "Role": "role-1"}
ATTRIBUTES = {("Bucket", "Arn"): "arn:aws:s3:::bucket-1", ("Role", "Outputs.Nested.Name"): "nested"}


def scope(parameters: dict[str, str] | None = None, **sections: Any) -> Scope:
    def import_value(name: str) -> str:
        if name != "exported":
            raise TemplateError(f"No export named {name} found.")
        return "imported"

    return Scope(
        template={"Resources": RESOURCES, **sections},
        account_id="123456789012",
        region="us-east-1",
        stack_id="arn:aws:cloudformation:us-east-1:123456789012:stack/one/1",
        stack_name="one",
        given_parameters=parameters or {},
        ref=PHYSICAL.__getitem__,
        attribute=lambda name, attribute: ATTRIBUTES[name, attribute],
        import_value=import_value,
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"Ref": "AWS::Region"}, "us-east-1"),
        ({"Fn::GetAtt": ["Bucket", "Arn"]}, "arn:aws:s3:::bucket-1"),
        ({"Fn::GetAtt": ["Role", "Outputs", "Nested", "Name"]}, "nested"),
        ({"Fn::Join": ["-", ["a", {"Ref": "Bucket"}, 3, True]]}, "a-bucket-1-3-true"),
        ({"Fn::Sub": "${Bucket}/${Bucket.Arn}/${!kept}/$plain"}, "bucket-1/arn:aws:s3:::bucket-1/${kept}/$plain"),
        ({"Fn::Sub": ["${Own}-${AWS::AccountId}", {"Own": {"Ref": "Role"}}]}, "role-1-123456789012"),
        ({"Fn::Select": ["1", {"Fn::Split": [":", "a:b:c"]}]}, "b"),
        ({"Fn::ImportValue": {"Fn::Sub": "exported"}}, "imported"),
        ({"Fn::Select": [1, {"Fn::GetAZs": ""}]}, "us-east-1b"),
        ({"Fn::Base64": {"Fn::Sub": "${Bucket}"}}, "YnVja2V0LTE="),
        ({"Fn::If": ["Large", "yes", {"Ref": "AWS::NoValue"}]}, "yes"),
        ([{"Fn::If": ["Small", "yes", {"Ref": "AWS::NoValue"}]}, "kept"], ["kept"]),
        ({"Kept": 1, "Gone": {"Ref": "AWS::NoValue"}}, {"Kept": 1}),
        (
            {"Condition": {"Bool": {"aws:SecureTransport": "false"}}},
            {"Condition": {"Bool": {"aws:SecureTransport": "false"}}},
        ),
    ],
)
def test_functions_are_resolved(value: Any, expected: Any) -> None:
    sections: dict[str, Any] = {
        "Conditions": {
            "Small": {"Fn::Not": [{"Condition": "Large"}]},
            "Large": {"Fn::Equals": [{"Ref": "AWS::Region"}, "us-east-1"]},
        },
    }

    assert scope(**sections).resolve(value) == expected


@pytest.mark.parametrize(("function", "holds"), [("Fn::And", False), ("Fn::Or", True)])
def test_conditions_are_combined(function: str, holds: bool) -> None:
    large = {"Fn::Equals": [{"Ref": "AWS::Region"}, "us-east-1"]}
    conditions = {"Large": large, "Both": {function: [{"Condition": "Large"}, {"Fn::Not": [large]}]}}

    assert scope(Conditions=conditions).condition("Both") is holds


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"Fn::GetAtt": ["Missing", "Arn"]}, "references undefined resource Missing"),
        ({"Fn::ImportValue": "nobody"}, "No export named nobody found"),
        ({"Fn::Select": [5, ["a"]]}, "nonexistent value at index 5"),
        ({"Fn::Cidr": ["10.0.0.0/16", 2]}, "does not implement Fn::Cidr"),
        ("{{resolve:secretsmanager:name}}", "does not implement dynamic references"),
    ],
)
def test_unresolvable_values_are_reported(value: Any, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        scope().resolve(value)


def test_parameters_take_the_given_value_or_the_default() -> None:
    declared = {
        "Given": {"Type": "String", "Default": "unused"},
        "Default": {"Type": "Number", "Default": 5},
        "Many": {"Type": "CommaDelimitedList", "Default": "a,b"},
    }

    found = scope({"Given": "given"}, Parameters=declared)

    assert found.parameters == {"Given": "given", "Default": "5", "Many": ["a", "b"]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"Parameters: \[Size\] must have values"),
        ({"Size": "huge"}, "Parameter Size failed to satisfy constraint"),
        ({"Size": "small", "Other": "1"}, r"Parameters: \[Other\] do not exist in the template"),
    ],
)
def test_wrong_parameters_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        scope(given, Parameters={"Size": {"Type": "String", "AllowedValues": ["small", "large"]}})
    with pytest.raises(TemplateError, match="NoEcho"):
        scope({"Secret": "hidden"}, Parameters={"Secret": {"Type": "String", "NoEcho": True}})


def test_rule_of_the_template_stops_the_deployment() -> None:
    # The CDK writes this rule to detect an old bootstrap stack.
    contains = {"Fn::Contains": [["1", "2", "3"], {"Ref": "Version"}]}
    rules = {"Check": {"Assertions": [{"Assert": {"Fn::Not": [contains]}, "AssertDescription": "run cdk bootstrap"}]}}
    declared = {"Version": {"Type": "String"}}

    assert scope({"Version": "30"}, Parameters=declared, Rules=rules).parameters == {"Version": "30"}
    with pytest.raises(TemplateError, match="run cdk bootstrap"):
        scope({"Version": "3"}, Parameters=declared, Rules=rules)


def test_resources_come_after_their_dependencies() -> None:
    resources = {
        "Last": {"Type": "T", "Properties": {"A": {"Fn::Sub": "${Middle.Arn}"}, "B": {"Fn::GetAtt": ["First", "Arn"]}}},
        "Absent": {"Type": "T", "Condition": "Never"},
        "Middle": {"Type": "T", "DependsOn": ["First", "Absent"]},
        "First": {"Type": "T", "Properties": {"A": {"Fn::If": ["Never", {"Ref": "Absent"}, "x"]}}},
    }
    found = scope(Resources=resources, Conditions={"Never": {"Fn::Equals": ["a", "b"]}})

    assert list(found.active_resources()) == ["First", "Middle", "Last"]
    circle = {"A": {"Type": "T", "DependsOn": "B"}, "B": {"Type": "T", "DependsOn": "A"}}
    with pytest.raises(TemplateError, match=r"Circular dependency .* \[A, B\]"):
        scope(Resources=circle).active_resources()


def test_json_and_yaml_with_short_forms_are_parsed() -> None:
    yaml = """
AWSTemplateFormatVersion: 2010-09-09
Resources:
  Role:
    Type: AWS::IAM::Role
    Properties:
      Version: 2012-10-17
      Arn: !GetAtt Other.Arn
      Name: !Sub "${AWS::StackName}-x"
      Both: !Join ["-", [!Ref Other, y]]
"""
    expected = {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Resources": {
            "Role": {
                "Type": "AWS::IAM::Role",
                "Properties": {
                    "Version": "2012-10-17",
                    "Arn": {"Fn::GetAtt": ["Other", "Arn"]},
                    "Name": {"Fn::Sub": "${AWS::StackName}-x"},
                    "Both": {"Fn::Join": ["-", [{"Ref": "Other"}, "y"]]},
                },
            }
        },
    }

    assert parse_template(yaml) == expected
    assert parse_template(json.dumps(expected)) == expected
