"""The base of every stack: name and tags, published parameters, and reasons for acknowledged findings."""

from typing import Any

import aws_cdk as cdk
from aws_cdk import RemovalPolicy
from aws_cdk import aws_logs as logs
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from infra.stages import Stage
from jobs.core.stage import parameter_path


class StageStack(cdk.Stack):
    """A stack of a stage. Tags all of its resources with `trainyard:project` and `trainyard:stage`."""

    def __init__(self, scope: Construct, name: str, *, stage: Stage, description: str) -> None:
        super().__init__(
            scope,
            name,
            stack_name=f"trainyard-{stage.name}-{name}",
            description=f"trainyard {stage.name}: {description}",
            # On every stack, because `cdk destroy` starts with those that hold no data, and would end running jobs.
            termination_protection=stage.termination_protection,
            synthesizer=cdk.DefaultStackSynthesizer(qualifier=stage.bootstrap_qualifier),
        )
        self.stage_row = stage
        self.instance_tags = {"trainyard:project": "trainyard", "trainyard:stage": stage.name}
        """The stack's tags, for resources that Batch and EC2 create, because CloudFormation does not tag those."""
        for key, value in self.instance_tags.items():
            cdk.Tags.of(self).add(key, value)

    def publish(self, name: str, value: str) -> None:
        """Write `value` to the SSM parameter that `jobs.core.stage.DeployedStage` reads for `name`."""
        ssm.StringParameter(
            self,
            f"Parameter-{name.replace('/', '-')}",
            parameter_name=parameter_path(self.stage_row.name) + name,
            string_value=value,
        )

    def published(self, name: str, *, reader: Construct) -> str:
        """Return the value that this stack publishes under `name`, as of the deployment of the reader's stack.

        Use this instead of an export for values that a change of settings may replace or remove: CloudFormation refuses
        both for an export in use.
        """
        stack = cdk.Stack.of(reader)
        stack.add_stack_dependency(self, f"the parameter {name}")
        return ssm.StringParameter.value_for_string_parameter(stack, parameter_path(self.stage_row.name) + name)


def acknowledge(construct: Construct, reason: str, *rules: str) -> None:
    """Record why cdk-nag's `rules` do not apply to `construct`. The reason goes into the template's metadata."""
    cdk.Validations.of(construct).acknowledge(*(cdk.Acknowledgment(id=rule, reason=reason) for rule in rules))


def finding(construct: Construct, value: str) -> str:
    """Return `value` as cdk-nag writes it in a finding, with unresolved references in angle brackets."""
    return _flat(cdk.Stack.of(construct).resolve(value))


def _flat(value: Any) -> str:
    match value:
        case {"Fn::Join": [separator, parts]}:
            return str(separator).join(_flat(part) for part in parts)
        case {"Ref": name}:
            return f"<{name}>"
        case {"Fn::GetAtt": [name, attribute]}:
            return f"<{name}.{attribute}>"
        case {"Fn::ImportValue": name}:
            return str(name)
    return str(value)


class RetainedLogGroup(logs.LogGroup):
    """A log group that is kept when its stack is deleted. Its events expire after `retention_days`."""

    def __init__(self, scope: Construct, name: str, *, retention_days: int) -> None:
        super().__init__(scope, name, removal_policy=RemovalPolicy.RETAIN)
        # The L2's enumeration has names only ("THREE_MONTHS"), while settings give a number.
        resource = self.node.default_child
        assert isinstance(resource, logs.CfnLogGroup)  # noqa: S101 - narrows the type; the L2 is built on it
        resource.retention_in_days = retention_days
        acknowledge(
            self,
            "CloudWatch Logs encrypts every log group at rest with an AWS key, at no charge; no secret is logged",
            "NIST.800.53.R5-CloudWatchLogGroupEncrypted",
        )
