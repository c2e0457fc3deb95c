"""What holds for every template of every stage."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.emulator import cdk_cli
from infra.settings import STAGES
from tests.infra.synthesis import ROOT, Templates, flatten, read_assembly

UNTAGGED_TYPES = {
    # CloudFormation takes no tags for them.
    "AWS::EC2::Route",
    "AWS::EC2::SecurityGroupEgress",
    "AWS::EC2::SecurityGroupIngress",
    "AWS::EC2::SubnetRouteTableAssociation",
    "AWS::EC2::VPCGatewayAttachment",
    "AWS::IAM::InstanceProfile",
    "AWS::IAM::Policy",
    "AWS::S3::BucketPolicy",
    "Custom::VpcRestrictDefaultSG",
}
UNTAGGED_RESOURCES = {
    # Made by CDK as bare resources, out of its tags' reach; CloudFormation passes it the stack's.
    "CustomVpcRestrictDefaultSGCustomResourceProviderRole26592FE0",
    "CustomVpcRestrictDefaultSGCustomResourceProviderHandlerDC833E5E",
}

STATEFUL_TYPES = {"AWS::S3::Bucket", "AWS::Logs::LogGroup"}

Resource = tuple[str, str, dict[str, Any]]


@pytest.fixture(scope="module")
def all_resources(templates: Templates) -> list[Resource]:
    """Stack, logical id and resource, of all templates."""
    return [
        (path, name, resource)
        for path, template in templates.items()
        for name, resource in template["Resources"].items()
    ]


def test_cfn_lint_finds_nothing_in_what_make_synth_makes(
    templates: Templates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN the very command of the Makefile, in the environment that runs the tests
    recipe = re.search(r"^synth:.*\n\t(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    program, *arguments = shlex.split(recipe[1])
    assert program == "cdk"
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    # WHEN it is run (at this endpoint nothing answers: synthesis asks nobody)
    out, said = tmp_path / "out", list[str]()
    arguments = [*arguments, "--output", str(out)]
    code = cdk_cli.run(arguments, endpoint="http://localhost:9", scratch=tmp_path, cwd=ROOT, on_line=said.append)
    assert code == 0, "\n".join(said)
    # THEN the templates of all stages are there, and cfn-lint has nothing to say about any
    assert set(read_assembly(out)) == set(templates)
    files = [str(path) for path in out.glob("assembly-*/*.template.json")]
    assert len(files) == 5 * len(STAGES)
    done = subprocess.run(
        [str(Path(sys.executable).parent / "cfn-lint"), *files], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout


def test_every_suppressed_rule_has_a_reason(all_resources: list[Resource]) -> None:
    suppressed = [
        (path, name, rule)
        for path, name, resource in all_resources
        for rule in resource.get("Metadata", {}).get("cdk_nag", {}).get("rules_to_suppress", [])
    ]
    assert suppressed
    for path, name, rule in suppressed:
        assert len(rule["reason"].split()) >= 8, f"{path} {name}: '{rule['reason']}' explains nothing"
        # One finding each: a rule that is suppressed whole hides what comes later.
        if rule["id"].startswith("AwsSolutions-IAM"):
            assert "[" in rule["id"], f"{path} {name}: {rule['id']}"


def test_every_wildcard_of_a_policy_has_a_written_reason(all_resources: list[Resource]) -> None:
    unexplained = [
        f"{path} {name}: {finding}"
        for path, name, resource in all_resources
        for finding in unexplained_wildcards(resource)
    ]
    assert unexplained == []


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ({"Action": "s3:GetObject", "Resource": "arn:aws:s3:::b/k"}, []),
        ({"Action": "s3:*", "Resource": "arn:aws:s3:::b/k"}, ["Action::s3:*"]),
        ({"Action": ["s3:GetObject"], "Resource": "*"}, ["Resource::*"]),
        (
            {"Action": "s3:Get*", "Resource": ["a", {"Fn::Join": ["", [{"Ref": "B"}, "/*"]]}]},
            ["Action::s3:Get*", "Resource::<B>/*"],
        ),
        ({"NotAction": "iam:PassRole", "Resource": "a"}, ["NotAction"]),
        ({"Action": "a:B", "NotResource": "a"}, ["NotResource"]),
    ],
)
@pytest.mark.parametrize("place", ["PolicyDocument", "Policies"])
def test_the_search_for_wildcards_finds_them(place: str, statement: dict[str, Any], found: list[str]) -> None:
    document = {"Statement": [{"Effect": "Allow", **statement}]}
    properties = {place: document} if place == "PolicyDocument" else {place: [{"PolicyDocument": document}]}
    assert unexplained_wildcards({"Type": "AWS::IAM::Role", "Properties": properties}) == found


def test_a_reason_explains_the_very_wildcard_it_names() -> None:
    document = {"Statement": {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}}
    reason = {"id": "AwsSolutions-IAM5[Resource::*]", "reason": "it is so"}
    resource = {
        "Type": "AWS::IAM::Policy",
        "Properties": {"PolicyDocument": document},
        "Metadata": {"cdk_nag": {"rules_to_suppress": [reason]}},
    }
    assert unexplained_wildcards(resource) == ["Action::s3:*"]


def test_no_one_is_trusted_but_services(all_resources: list[Resource]) -> None:
    trusted = {
        json.dumps(statement["Principal"])
        for _, _, resource in all_resources
        if resource["Type"] == "AWS::IAM::Role"
        for statement in _list(resource["Properties"]["AssumeRolePolicyDocument"]["Statement"])
    }
    assert trusted == {
        json.dumps({"Service": f"{service}.amazonaws.com"})
        for service in ("ec2", "ecs-tasks", "lambda", "vpc-flow-logs")
    }


def test_everything_that_takes_tags_says_whose_it_is(all_resources: list[Resource]) -> None:
    for path, name, resource in all_resources:
        if resource["Type"] in UNTAGGED_TYPES or name in UNTAGGED_RESOURCES:
            continue
        tags = _tags(resource)
        assert tags.get("trainyard:project") == "trainyard", f"{path} {name}"
        assert tags.get("trainyard:stage") == path.split("/")[0], f"{path} {name}"


def test_every_log_expires(all_resources: list[Resource]) -> None:
    groups = [resource["Properties"] for _, _, resource in all_resources if resource["Type"] == "AWS::Logs::LogGroup"]
    assert len(groups) == 3 * len(STAGES)
    assert {group["RetentionInDays"] for group in groups} == {90}
    # A function makes itself a group that never expires unless it is given one.
    functions = [item["Properties"] for _, _, item in all_resources if item["Type"] == "AWS::Lambda::Function"]
    assert all("LogGroup" in function["LoggingConfig"] for function in functions)


def test_what_holds_data_or_logs_is_kept(all_resources: list[Resource]) -> None:
    stateful = [item for _, _, item in all_resources if item["Type"] in STATEFUL_TYPES]
    assert len(stateful) == 6 * len(STAGES)
    for resource in stateful:
        assert (resource["DeletionPolicy"], resource["UpdateReplacePolicy"]) == ("Retain", "Retain")


def test_names_are_generated(all_resources: list[Resource]) -> None:
    named = {
        resource["Type"]
        for _, _, resource in all_resources
        for key in resource.get("Properties", {})
        if key in {"Name", "PolicyName"} or (key.endswith("Name") and key[:-4] in resource["Type"])
    }
    # Parameters are where generated names are found; an inline policy is part of its role.
    assert named == {"AWS::SSM::Parameter", "AWS::IAM::Policy"}


def test_templates_hold_no_key_pair_and_no_secret(templates: Templates) -> None:
    text = json.dumps(templates).lower()
    for word in ("keyname", "ec2keypair", "password", "secretstring", "privatekey", "hf_token"):
        assert f'"{word}"' not in text


def unexplained_wildcards(resource: dict[str, Any]) -> list[str]:
    """Wildcards in what the policies of a resource allow, but for those that its metadata gives a reason for."""
    explained = {
        rule["id"].removeprefix("AwsSolutions-IAM5[").removesuffix("]")
        for rule in resource.get("Metadata", {}).get("cdk_nag", {}).get("rules_to_suppress", [])
        if rule["reason"]
    }
    return [finding for finding in _wildcards(resource) if finding not in explained]


def _wildcards(resource: dict[str, Any]) -> Iterator[str]:
    properties = resource.get("Properties", {})
    documents = [properties[key] for key in ("PolicyDocument", "AssumeRolePolicyDocument") if key in properties]
    documents += [policy["PolicyDocument"] for policy in properties.get("Policies", [])]
    for document in documents:
        for statement in _list(document["Statement"]):
            if statement["Effect"] != "Allow":
                continue
            yield from (key for key in ("NotAction", "NotResource", "NotPrincipal") if key in statement)
            for key in ("Action", "Resource"):
                for value in _list(statement.get(key, [])):
                    text = flatten(value)
                    if "*" in text:
                        yield f"{key}::{text}"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _tags(resource: dict[str, Any]) -> dict[str, str]:
    properties = resource.get("Properties", {})
    tags = properties.get("Tags", {})
    if resource["Type"] == "AWS::EC2::LaunchTemplate":
        tags = next(
            item["Tags"] for item in properties["TagSpecifications"] if item["ResourceType"] == "launch-template"
        )
    return tags if isinstance(tags, dict) else {tag["Key"]: tag["Value"] for tag in tags}
