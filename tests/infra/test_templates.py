"""Properties of every template of every stage."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.settings import STAGES
from tests.support.infra.synthesis import Templates, flatten
from tests.support.infra.variants import VARIANTS

UNTAGGED_RESOURCES = {
    # The CDK creates these as bare resources without tags; CloudFormation adds the stack's.
    "CustomVpcRestrictDefaultSGCustomResourceProviderRole26592FE0",
    "CustomVpcRestrictDefaultSGCustomResourceProviderHandlerDC833E5E",
}

KEPT_TYPES = {"AWS::S3::Bucket", "AWS::S3::BucketPolicy", "AWS::KMS::Key"}
"""Data, and the keys to read it."""
KEPT_LOGS = {"network", "jobs"}
"""Stacks whose logs are kept too: network traffic, and logs of jobs."""

ROWS = {row.name: row for row in (*STAGES.values(), *VARIANTS)}

Resource = tuple[str, str, dict[str, Any]]


@pytest.fixture(scope="module")
def all_resources(templates: Templates, variants: Templates) -> list[Resource]:
    """Path, logical id and resource of all templates, from the shipped settings and the variants."""
    return [
        (path, name, resource)
        for path, template in {**templates, **variants}.items()
        for name, resource in template["Resources"].items()
    ]


def test_cfn_lint_finds_nothing(variant_assemblies: tuple[Path, Path]) -> None:
    # Every stack of the stage with every feature, and those that differ with an existing VPC or a proxy.
    everything, others = variant_assemblies
    files = [str(path) for path in everything.glob("assembly-all/*.template.json")]
    for stack in ("network", "compute"):
        files += [str(path) for path in others.glob(f"assembly-existing/*{stack}*.template.json")]
    for stack in ("compute", "jobs"):
        files += [str(path) for path in others.glob(f"assembly-closed/*{stack}*.template.json")]
    assert len(files) == 8 + 2 + 2
    # W3005: the CDK's functions depend on their role both explicitly and by reference, which is harmless.
    command = [str(Path(sys.executable).parent / "cfn-lint"), "--ignore-checks", "W3005", "--", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
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
        # Suppress single findings: suppressing a whole rule would hide later ones.
        if rule["id"].startswith("AwsSolutions-IAM"):
            assert "[" in rule["id"], f"{path} {name}: {rule['id']}"


def test_roles_only_trust_services_and_configured_principals(all_resources: list[Resource]) -> None:
    for path, name, resource in all_resources:
        if resource["Type"] != "AWS::IAM::Role":
            continue
        row = ROWS[path.split("/")[0]]
        members = {principal for team in row.teams for principal in team.member_principals}
        for statement in _list(resource["Properties"]["AssumeRolePolicyDocument"]["Statement"]):
            for kind, principals in statement["Principal"].items():
                trusted = {flatten(principal) for principal in _list(principals)}
                match kind:
                    case "Service":
                        assert all(re.fullmatch(r"[a-z0-9-]+\.amazonaws\.com", one) for one in trusted), (
                            f"{path} {name}"
                        )
                    case "AWS":
                        assert trusted <= members, f"{path} {name}: {trusted}"
                    case "Federated":
                        # By the repository in the token, never by the provider alone.
                        assert row.deploy_from is not None, f"{path} {name}"
                        subjects = (row.deploy_from.subject, row.deploy_from.pull_request_subject)
                        condition = statement["Condition"]["StringEquals"]
                        assert condition["token.actions.githubusercontent.com:sub"] in subjects, f"{path} {name}"
                    case _:
                        pytest.fail(f"{path} {name} trusts {kind} {trusted}")


def test_every_taggable_resource_has_project_and_stage_tags(all_resources: list[Resource]) -> None:
    for path, name, resource in all_resources:
        if name in UNTAGGED_RESOURCES or not _takes_tags(resource["Type"]):
            continue
        tags = _tags(resource)
        assert tags.get("trainyard:project") == "trainyard", f"{path} {name}"
        assert tags.get("trainyard:stage") == path.split("/")[0], f"{path} {name}"


def test_every_log_expires(all_resources: list[Resource]) -> None:
    groups = [(path, item["Properties"]) for path, _, item in all_resources if item["Type"] == "AWS::Logs::LogGroup"]
    assert {path.split("/")[0] for path, _ in groups} == set(ROWS)
    for path, group in groups:
        assert group["RetentionInDays"] == ROWS[path.split("/")[0]].log_retention_days, path
    # Without a configured group, a function creates one that never expires.
    for path, name, resource in all_resources:
        if resource["Type"] == "AWS::Lambda::Function":
            assert "LogGroup" in resource["Properties"].get("LoggingConfig", {}), f"{path} {name}"


def test_data_and_logs_are_kept(all_resources: list[Resource]) -> None:
    kept = [
        (path, name, item)
        for path, name, item in all_resources
        if item["Type"] in KEPT_TYPES or (item["Type"] == "AWS::Logs::LogGroup" and path.split("/")[1] in KEPT_LOGS)
    ]
    assert {item["Type"] for _, _, item in kept} == KEPT_TYPES | {"AWS::Logs::LogGroup"}
    for path, name, resource in kept:
        policies = (resource.get("DeletionPolicy"), resource.get("UpdateReplacePolicy"))
        assert policies == ("Retain", "Retain"), f"{path} {name}"


def _schema(resource_type: str) -> dict[str, Any]:
    """Return CloudFormation's schema of a type from cfn-lint; empty for custom resources."""
    if not resource_type.startswith("AWS::"):
        return {}
    from cfnlint.schema.manager import PROVIDER_SCHEMA_MANAGER  # slow, and needed by few tests

    schema: dict[str, Any] = PROVIDER_SCHEMA_MANAGER.get_resource_schema("us-east-1", resource_type).schema
    return schema


def _takes_tags(resource_type: str) -> bool:
    schema = _schema(resource_type)
    # The schema does not count launch templates, whose tags have another name.
    return (
        resource_type == "AWS::EC2::LaunchTemplate"
        or schema.get("tagging", {}).get("taggable", False)
        or "Tags" in schema.get("properties", {})
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _tags(resource: dict[str, Any]) -> dict[str, str]:
    properties = resource.get("Properties", {})
    tags = properties.get("Tags", properties.get("ResourceTags", {}))
    if resource["Type"] == "AWS::EC2::LaunchTemplate":
        tags = next(
            item["Tags"] for item in properties["TagSpecifications"] if item["ResourceType"] == "launch-template"
        )
    return tags if isinstance(tags, dict) else {tag["Key"]: tag["Value"] for tag in tags}
