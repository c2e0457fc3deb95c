"""The rights of the drift report are those that CloudFormation's schemas list, as far as ReadOnlyAccess has them."""

from fnmatch import fnmatchcase
from typing import Any

from infra.emulator.cloudformation.resources import schema
from infra.observability.drift import READS
from tests.support.infra.deployed_roles import DeployedStage, aws_managed_policies, statements
from tests.support.infra.policy_evaluation import as_list
from tests.support.infra.synthesis import Templates, stacks_of
from tests.support.infra.variants import CUDA

READ_ONLY = [
    pattern.lower()
    for statement in as_list(aws_managed_policies()["arn:aws:iam::aws:policy/ReadOnlyAccess"]["Statement"])
    for pattern in as_list(statement["Action"])
]


def reads_of(template: dict[str, Any]) -> set[str]:
    """Return the actions that CloudFormation's schemas list for reading a template's resources."""
    types = {resource["Type"] for resource in template["Resources"].values()}
    handlers = [schema(name).get("handlers", {}).get("read", {}) for name in types]
    return {action.lower() for handler in handlers for action in handler.get("permissions", [])}


def test_reads_are_those_of_the_schemas_without_values_of_secrets(variants: Templates) -> None:
    wanted = {action for template in variants.values() for action in reads_of(template)}
    left_out = {action for action in wanted if not any(fnmatchcase(action, pattern) for pattern in READ_ONLY)}
    assert left_out == {
        "billing:getbillingviewdata",
        "iam:passrole",
        "kms:decrypt",
        "secretsmanager:getsecretvalue",
        "vpc-lattice:describeservicenetworkvpcendpointassociation",
    }
    listed = {f"{service}:{name}".lower() for service, _, names in READS for name in names.split()}
    assert {action for action in listed if not action.startswith("cloudformation:")} == wanted - left_out


def test_only_the_services_of_the_stage_are_read(everything: DeployedStage) -> None:
    def services(stage: DeployedStage) -> set[str]:
        found = statements(stage.role("observability", "ReportDrift"))
        return {action.split(":")[0] for one in found for action in as_list(one["Action"]) if "*" not in action}

    optional = {"fsx", "imagebuilder", "kms", "secretsmanager"}
    assert optional <= services(everything)
    assert not optional & services(DeployedStage(CUDA[1].name, stacks_of(CUDA[1])))
