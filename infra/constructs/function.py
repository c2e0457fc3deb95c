"""A Lambda function with its log group, its role and, for event-driven functions, its dead-letter queue."""

from collections.abc import Mapping

import aws_cdk as cdk
from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from infra.constructs.inline_role import InlineRole
from infra.constructs.stage_stack import RetainedLogGroup, acknowledge

TIMEOUT = Duration.seconds(60)


class Function(lambda_.Function):
    """A function that may write its own log and send to its dead-letter queue. Callers add other permissions."""

    def __init__(
        self,
        scope: Construct,
        name: str,
        *,
        handler: str,
        code: lambda_.Code,
        description: str,
        environment: Mapping[str, str],
        log_retention_days: int,
        dead_letters: sqs.IQueue | None = None,
        timeout: Duration = TIMEOUT,
    ) -> None:
        """Create the function. `dead_letters` receives events that failed three times."""
        log_group = RetainedLogGroup(scope, f"{name}Log", retention_days=log_retention_days)
        # The log is useless without the function, and runs have their own logs.
        log_group.apply_removal_policy(RemovalPolicy.DESTROY)
        # Not the L2's role: its AWSLambdaBasicExecutionRole may write to every log group of the account.
        role = InlineRole(
            scope, f"{name}Role", description=description, assumed_by=iam.ServicePrincipal("lambda.amazonaws.com")
        )
        log_group.grant_write(role)
        super().__init__(
            scope,
            name,
            description=description,
            runtime=lambda_.Runtime.PYTHON_3_14,
            architecture=lambda_.Architecture.ARM_64,  # a fifth cheaper for the same work
            handler=handler,
            code=code,
            environment=dict(environment),
            timeout=timeout,
            memory_size=256,
            role=role,
            log_group=log_group,
            # Lambda retries twice, after one minute and after two more.
            retry_attempts=2 if dead_letters else None,
            dead_letter_queue=dead_letters,
        )
        self.execution_role = role
        self._depend_on_policy_only()
        acknowledge(
            self,
            "Reserved concurrency is taken from the account's quota, which is ten in a new account and may not fall "
            "below that, so the deployment would fail. Few events call the functions, and parallel calls are safe.",
            "NIST.800.53.R5-LambdaConcurrency",
        )
        acknowledge(
            self,
            "It calls AWS's public API and nothing in the network; inside the VPC it would need NAT "
            "or endpoints, which cost money even while nothing runs.",
            "NIST.800.53.R5-LambdaInsideVPC",
        )

    def _depend_on_policy_only(self) -> None:
        """Drop the L2's dependency on the role, which cfn-lint reports because the function references the role."""
        policy = self.execution_role.node.find_child("DefaultPolicy").node.default_child
        resource = self.node.default_child
        assert isinstance(policy, cdk.CfnResource)  # noqa: S101 - narrows the type; the L2s are built on them
        assert isinstance(resource, cdk.CfnResource)  # noqa: S101 - as above
        resource.add_override("DependsOn", [policy.logical_id])

    def may_publish(self, topic: sns.ITopic, key: kms.IKey | None) -> None:
        """Let the function publish to `topic`, which is encrypted with `key`."""
        self.execution_role.allow("Publish", ["sns:Publish"], topic.topic_arn)
        if key:
            self.may_use(key)

    def may_use(self, key: kms.IKey) -> None:
        """Let the function encrypt and decrypt with `key`."""
        self.execution_role.allow("UseKey", ["kms:Decrypt", "kms:GenerateDataKey"], key.key_arn)
