import copy
from collections import defaultdict
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest
from aws_cdk import aws_s3 as s3

import infra.app
from infra.constructs.stage_stack import acknowledge
from infra.rules import RULES, instances, job_definitions
from infra.rules.templates import Rule, StageTemplates, rules_of
from infra.settings import STAGES
from tests.support.infra.synthesis import Templates, new_app
from tests.support.infra.variants import VARIANTS

ENVIRONMENT, TEMPLATE = "AWS::Batch::ComputeEnvironment", "AWS::EC2::LaunchTemplate"
GROUP, INGRESS, EGRESS = (f"AWS::EC2::SecurityGroup{kind}" for kind in ("", "Ingress", "Egress"))
DEFINITION = "AWS::Batch::JobDefinition"
INTERFACES = "LaunchTemplateData.NetworkInterfaces"
RETRIES = "RetryStrategy.EvaluateOnExit"
ONE, NODES = "EcsProperties.TaskProperties.0", "NodeProperties.NodeRangeProperties.0.EcsProperties.TaskProperties.0"
RECLAIM = {"Action": "RETRY", "OnStatusReason": "Host EC2*"}
ENDS = [{"Action": "EXIT", "OnStatusReason": "*"}, {"Action": "EXIT", "OnExitCode": "*"}]
EVERY_ADDRESS = [{"CidrIp": "0.0.0.0/0", "IpProtocol": "tcp", "FromPort": 22, "ToPort": 22}]


def variable(name: str, value: str) -> list[dict[str, str]]:
    return [{"Name": name, "Value": value}]


BREAKS: list[tuple[str, str, str, Any]] = [
    ("ComputeEnvironment-EfaPlacement", ENVIRONMENT, "ComputeResources.Type", "SPOT"),
    ("ComputeEnvironment-EfaPlacement", ENVIRONMENT, "ComputeResources.PlacementGroup", None),
    ("ComputeEnvironment-EfaPlacement", ENVIRONMENT, "ComputeResources.Subnets", ["subnet-1", "subnet-2"]),
    ("ComputeEnvironment-EfaPlacement", "AWS::EC2::PlacementGroup", "Strategy", "spread"),
    ("LaunchTemplate-EfaCards", TEMPLATE, f"{INTERFACES}.1.NetworkCardIndex", 0),
    ("LaunchTemplate-EfaCards", TEMPLATE, f"{INTERFACES}.1.DeviceIndex", 0),
    ("LaunchTemplate-Imdsv2", TEMPLATE, "LaunchTemplateData.MetadataOptions.HttpTokens", "optional"),
    ("LaunchTemplate-Imdsv2", TEMPLATE, "LaunchTemplateData.MetadataOptions", None),
    ("LaunchTemplate-NoPublicAddress", TEMPLATE, f"{INTERFACES}.0.AssociatePublicIpAddress", True),
    ("JobDefinition-RetryRules", DEFINITION, "RetryStrategy.Attempts", 11),
    ("JobDefinition-RetryRules", DEFINITION, "RetryStrategy", None),
    ("JobDefinition-RetryRules", DEFINITION, RETRIES, [RECLAIM]),
    ("JobDefinition-RetryRules", DEFINITION, RETRIES, [RECLAIM, ENDS[0]]),
    ("JobDefinition-RetryRules", DEFINITION, RETRIES, [RECLAIM, ENDS[1]]),
    ("JobDefinition-RetryRules", DEFINITION, RETRIES, ENDS),
    ("JobDefinition-RetryRules", DEFINITION, RETRIES, [*ENDS, RECLAIM]),
    ("JobDefinition-RetryRules", DEFINITION, RETRIES, [RECLAIM, *ENDS, RECLAIM]),
    ("JobDefinition-RetryRules", DEFINITION, RETRIES, [*[RECLAIM] * 4, *ENDS]),
    ("JobDefinition-RetryRules", DEFINITION, RETRIES, [RECLAIM, {"Action": "RETRY", "OnReason": "*Host"}, *ENDS]),
    ("JobDefinition-Memlock", DEFINITION, f"{ONE}.Containers.0.Ulimits", []),
    ("JobDefinition-Memlock", DEFINITION, f"{NODES}.Containers.0.Ulimits.0.SoftLimit", 65536),
    ("JobDefinition-EfaDevices", DEFINITION, f"{NODES}.Containers.0.LinuxParameters", {}),
    ("JobDefinition-EfaDevices", DEFINITION, f"{NODES}.Containers.0.LinuxParameters.Devices.0", {}),
    ("JobDefinition-EfaDevices", DEFINITION, f"{NODES}.Containers.0.LinuxParameters.Devices.1.Permissions", ["READ"]),
    ("JobDefinition-NoSecret", DEFINITION, f"{ONE}.Containers.0.Environment", variable("HF_TOKEN", "x")),
    ("JobDefinition-NoSecret", DEFINITION, f"{ONE}.Containers.0.Environment", variable("A", "hf_" + "aB3" * 11)),
    ("JobDefinition-NoSecret", DEFINITION, f"{NODES}.Containers.0.Environment", variable("A", "AKIA" + "A1B2" * 4)),
    ("JobDefinition-NoSecret", DEFINITION, f"{ONE}.Containers.0.Environment", variable("A", "https://me:word@host/x")),
    ("JobDefinition-RoleOfItsTeam", DEFINITION, f"{ONE}.TaskRoleArn", "arn:aws:iam::123456789012:role/everyones"),
    ("JobDefinition-RoleOfItsTeam", DEFINITION, f"{NODES}.TaskRoleArn", None),
    ("SecurityGroup-EfaAmongItself", INGRESS, "IpProtocol", "tcp"),
    ("SecurityGroup-EfaAmongItself", EGRESS, "IpProtocol", "tcp"),
    ("SecurityGroup-EfaAmongItself", EGRESS, "DestinationSecurityGroupId", None),
    ("SecurityGroup-NothingFromOutside", GROUP, "SecurityGroupIngress", EVERY_ADDRESS),
    ("SecurityGroup-NothingFromOutside", INGRESS, "CidrIpv6", "::/0"),
    ("Subnet-Private", "AWS::EC2::Subnet", "MapPublicIpOnLaunch", True),
    ("Subnet-Private", "AWS::EC2::Route", "GatewayId", {"Ref": "InternetGateway"}),
]  # fmt: skip
"""The rule, and a property whose new value in all resources of a type breaks it. None removes the property."""


@pytest.mark.parametrize("stage", [*STAGES, *(row.name for row in VARIANTS)])
def test_synthesised_templates_break_no_rule(stage: str, templates: Templates, variants: Templates) -> None:
    assert broken_rules(_of_stage({**templates, **variants}, stage)) == {}


def test_the_rules_of_every_module_are_used() -> None:
    assert [rule for module in (instances, job_definitions) for rule in rules_of(module)] == list(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_reports_violations(variants: Templates, rule: Rule) -> None:
    assert rule.reason
    assert rule.source
    assert rule.next_step
    breaks = [one[1:] for one in BREAKS if f"TY-{one[0]}" == rule.id]
    assert breaks
    for resource_type, path, value in breaks:
        # GIVEN the real templates WHEN one property is wrong
        templates = copy.deepcopy(_of_stage(variants, "all"))
        properties_of_type = [
            resource.setdefault("Properties", {})
            for template in templates.values()
            for resource in template["Resources"].values()
            if resource["Type"] == resource_type
        ]
        assert [put(properties, path, value) for properties in properties_of_type].count(True)
        # THEN the rule reports it, at a resource of these templates
        findings = broken_rules(templates).get(rule.id)
        assert findings, (path, value)
        assert all(found.split(" ")[1] in templates[found.split(" ")[0]]["Resources"] for found in findings)


def test_only_groups_of_efa_instances_need_rules_for_themselves(templates: Templates) -> None:
    # GIVEN a stage without EFA WHEN its groups admit only TCP from themselves
    of_stage = copy.deepcopy(_of_stage(templates, "dev"))
    for template in of_stage.values():
        for resource in template["Resources"].values():
            if resource["Type"] in (INGRESS, EGRESS):
                resource["Properties"]["IpProtocol"] = "tcp"
    # THEN no rule for EFA is broken
    assert "TY-SecurityGroup-EfaAmongItself" not in broken_rules(of_stage)


def test_synthesis_stops_at_broken_rules_unless_acknowledged(tmp_path: Path) -> None:
    # GIVEN a launch template without required session tokens, and a bucket without protection
    app = new_app(tmp_path / "refused")
    s3.Bucket(cdk.Stack.of(_open_template(app)), "Bucket")
    # WHEN the app is synthesised, THEN it fails with construct, reason and next step
    with pytest.raises(RuntimeError, match="test/careless/Open") as refused:
        app.synth()
    for text in (
        *("TY-LaunchTemplate-Imdsv2", "can read the instance's credentials"),
        *("set metadataOptions.httpTokens to 'required'", "S3 Bucket has server access logs disabled"),
    ):
        assert text in str(refused.value)
    # AND with an acknowledgement, synthesis succeeds
    app = new_app(tmp_path / "acknowledged")
    acknowledge(_open_template(app), "a demonstration without credentials", "trainyard::TY-LaunchTemplate-Imdsv2")
    app.synth()


def put(container: Any, path: str, value: object) -> bool:
    """Set or remove the property at a dotted path (numbers are list indices). Return whether its container exists."""
    *above, last = (int(key) if key.isdigit() else key for key in path.split("."))
    for key in above:
        if not (key < len(container) if isinstance(key, int) else key in container):
            return False
        container = container[key]
    if value is None:
        container.pop(last, None)
    else:
        container[last] = value
    return True


def broken_rules(templates: Templates) -> dict[str, list[str]]:
    """Return each rule's findings in a stage's templates, as `<stack> <logical id> <location>`."""
    stage = StageTemplates(templates)
    findings: dict[str, list[str]] = defaultdict(list)
    for rule in RULES:
        for finding in rule.find(stage):
            findings[rule.id].append(f"{finding.resource.stack} {finding.resource.logical_id} {finding.location}")
    return dict(findings)


def _of_stage(templates: Templates, stage: str) -> Templates:
    chosen = {path: template for path, template in templates.items() if path.split("/")[0] == stage}
    assert chosen
    return chosen


def _open_template(app: cdk.App) -> cdk.CfnResource:
    infra.app.build(app, [])
    stack = cdk.Stack(cdk.Stage(app, "test"), "careless")
    return cdk.CfnResource(stack, "Open", type=TEMPLATE, properties={"LaunchTemplateData": {}})
