"""A role whose permissions stand in a policy of its own, statement by statement, each wildcard with its reason."""

from collections.abc import Mapping, Sequence

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.constructs.stage_stack import acknowledge, finding


class InlineRole(iam.Role):
    """A role whose policy comes and goes with it, and can be attached to no other."""

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
            "What this one role may do changes with the code beside it; a managed policy could be attached elsewhere",
            "NIST.800.53.R5-IAMNoInlinePolicy",
        )

    def allow(
        self,
        sid: str,
        actions: Sequence[str],
        *resources: str,
        conditions: Mapping[str, Mapping[str, str | Sequence[str]]] | None = None,
    ) -> None:
        """Add a statement to the role's policy."""
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
        """Add a statement that no other policy of the role overrules: for `resources`, or all but `not_resources`."""
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
        """Record why `wildcards` among the resources of its statements have to be there."""
        acknowledge(self, reason, *(f"AwsSolutions-IAM5[Resource::{finding(self, arn)}]" for arn in wildcards))

    def log_streams(self, log_group_name: str, streams: str) -> str:
        """Return the ARN of `streams` of a log group in this stack's account and region."""
        return cdk.Stack.of(self).format_arn(
            service="logs",
            resource="log-group",
            resource_name=f"{log_group_name}:log-stream:{streams}",
            arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
        )
