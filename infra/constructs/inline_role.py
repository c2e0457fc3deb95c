"""A role with one inline policy, built statement by statement, with a reason for every wildcard."""

from collections.abc import Mapping, Sequence

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.constructs.stage_stack import acknowledge, finding


class InlineRole(iam.Role):
    """A role whose policy is created and deleted with the role, and cannot be attached elsewhere."""

    def __init__(
        self,
        scope: Construct,
        name: str,
        *,
        description: str,
        assumed_by: iam.IPrincipal,
        team: str | None = None,
        max_session_duration: cdk.Duration | None = None,
    ) -> None:
        super().__init__(
            scope, name, description=description, assumed_by=assumed_by, max_session_duration=max_session_duration
        )
        if team is not None:
            cdk.Tags.of(self).add("trainyard:team", team)
        acknowledge(
            self,
            "The permissions of this role change with the code beside it; a managed policy could be attached elsewhere",
            "NIST.800.53.R5-IAMNoInlinePolicy",
        )

    def allow(
        self,
        sid: str,
        actions: Sequence[str],
        *resources: str,
        conditions: Mapping[str, Mapping[str, str | Sequence[str]]] | None = None,
    ) -> None:
        """Add a statement that allows `actions` on `resources`."""
        self.add_to_policy(
            iam.PolicyStatement(
                sid=sid, actions=list(actions), resources=list(resources), conditions=dict(conditions or {})
            )
        )

    def deny(
        self,
        sid: str,
        actions: Sequence[str],
        *,
        resources: Sequence[str] | None = None,
        not_resources: Sequence[str] | None = None,
        conditions: Mapping[str, Mapping[str, str | Sequence[str]]] | None = None,
    ) -> None:
        """Add a statement that denies `actions` on `resources`, or on everything but `not_resources`."""
        self.add_to_policy(
            iam.PolicyStatement(
                sid=sid,
                effect=iam.Effect.DENY,
                actions=list(actions),
                resources=resources,
                not_resources=not_resources,
                conditions=dict(conditions or {}),
            )
        )

    def explain(self, reason: str, *wildcards: str) -> None:
        """Record why the role's statements need `wildcards` in their resources."""
        acknowledge(self, reason, *(f"AwsSolutions-IAM5[Resource::{finding(self, arn)}]" for arn in wildcards))

    def log_streams(self, log_group_name: str, streams: str, *, region: str | None = None) -> str:
        """Return the ARN pattern of `streams` in a log group of this stack's account; `region` is the stack's."""
        return cdk.Stack.of(self).format_arn(
            service="logs",
            region=region,
            resource="log-group",
            resource_name=f"{log_group_name}:log-stream:{streams}",
            arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
        )
