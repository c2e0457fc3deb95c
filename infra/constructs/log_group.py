"""A log group that outlives its stack and empties itself."""

from aws_cdk import RemovalPolicy
from aws_cdk import aws_logs as logs
from constructs import Construct

from infra.constructs.stage_stack import acknowledge


class RetainedLogGroup(logs.LogGroup):
    """A log group that is kept when its stack is deleted; its events expire after `retention_days`."""

    def __init__(self, scope: Construct, name: str, *, retention_days: int) -> None:
        super().__init__(scope, name, removal_policy=RemovalPolicy.RETAIN)
        # The L2's own enumeration of the days has names only ("THREE_MONTHS"); settings say a number.
        resource = self.node.default_child
        assert isinstance(resource, logs.CfnLogGroup)  # noqa: S101 - narrows the type; the L2 is built on it
        resource.retention_in_days = retention_days
        acknowledge(
            self,
            "CloudWatch Logs encrypts every log group at rest with a key of AWS's, at no charge; no secret is logged",
            "NIST.800.53.R5-CloudWatchLogGroupEncrypted",
        )
