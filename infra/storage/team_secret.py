"""Secrets of a team, which the template makes empty and people fill: its Hugging Face token, and variables of its jobs.

They live with the buckets in the storage stack, which is kept, and their ARNs reach other stacks through SSM: an export
could not be taken back while a job definition names it, so no team could ever be removed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import aws_cdk as cdk
from aws_cdk import aws_kms as kms
from aws_cdk import aws_secretsmanager as secretsmanager
from aws_cdk import aws_ssm as ssm

from infra.constructs.inline_role import InlineRole
from infra.constructs.stage_stack import StageStack, acknowledge
from infra.stages import Team
from jobs.core.stage import huggingface_secret_parameter, parameter_path, variables_secret_parameter


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One of the secrets that a team may have."""

    name: str
    parameter: str
    """The parameter that holds its ARN, below the stage's path."""
    what: str
    """What people put into it."""
    variables: tuple[str, ...]
    """The variables that jobs have from it."""
    is_json: bool
    """True: its value is a JSON object with a key for each variable, else it is the variable's value."""

    def value_of(self, variable: str, arn: str) -> str:
        """Return what a job definition names as the place of a variable's value (`valueFrom` of ECS)."""
        return f"{arn}:{variable}::" if self.is_json else arn


def kinds_of(team: Team) -> Iterator[Kind]:
    """Yield the secrets that a team has."""
    if team.huggingface_token:
        yield Kind(
            name="HuggingFaceToken",
            parameter=huggingface_secret_parameter(team.name),
            what=f"Hugging Face token of team {team.name}, HF_TOKEN in its jobs. To put it in, or another in its place",
            variables=("HF_TOKEN",),
            is_json=False,
        )
    if team.secret_variables:
        names = ", ".join(team.secret_variables)
        yield Kind(
            name="Variables",
            parameter=variables_secret_parameter(team.name),
            what=f"Variables of the jobs of team {team.name}: a JSON object with {names}. To put it in, or another",
            variables=team.secret_variables,
            is_json=True,
        )


class TeamSecret(secretsmanager.CfnSecret):
    """A secret without a value in the template: until someone puts one in, the team's jobs do not start.

    Deleting the stack, the team, or the setting that asks for it, keeps the secret.
    """

    def __init__(self, stack: StageStack, kind: Kind, *, team: Team, key: kms.IKey | None) -> None:
        path = parameter_path(stack.stage_row.name) + kind.parameter
        super().__init__(
            stack,
            f"{kind.name}-{team.name}",
            description=(
                f"{kind.what}: aws secretsmanager put-secret-value --secret-string file:///dev/stdin --secret-id "
                f'"$(aws ssm get-parameter --name {path} --query Parameter.Value --output text)"; '
                "jobs that run already keep the old one until their next attempt."
            ),
            kms_key_id=key.key_arn if key else None,
        )
        self.apply_removal_policy(cdk.RemovalPolicy.RETAIN)
        cdk.Tags.of(self).add("trainyard:team", team.name)
        stack.publish(kind.parameter, self.ref)
        acknowledge(
            self,
            "Only the service that gave it can make another, so no function could rotate it: people put a new one in",
            "AwsSolutions-SMG4",
            "NIST.800.53.R5-SecretsManagerRotationEnabled",
        )
        if key is None:
            acknowledge(
                self,
                "The stage asked for no key of its own; AWS's key for Secrets Manager encrypts it without a price",
                "NIST.800.53.R5-SecretsManagerUsingKMSKey",
            )


class PublishedSecret:
    """The same secret as another stack sees it, by the ARN that CloudFormation reads from SSM as it deploys."""

    def __init__(self, stack: StageStack, kind: Kind, *, storage: cdk.Stack, key_arn: str | None) -> None:
        stack.add_stack_dependency(storage, "the secret's ARN")
        self._kind = kind
        self._key_arn = key_arn
        self._arn = ssm.StringParameter.value_for_string_parameter(
            stack, parameter_path(stack.stage_row.name) + kind.parameter
        )

    @property
    def values(self) -> dict[str, str]:
        """Return where a job definition finds the value of each variable."""
        return {variable: self._kind.value_of(variable, self._arn) for variable in self._kind.variables}

    def let_read(self, role: InlineRole) -> None:
        """Let `role` read it, and decrypt it through Secrets Manager."""
        role.allow(f"Read{self._kind.name}", ["secretsmanager:GetSecretValue"], self._arn)
        if self._key_arn is not None:
            role.allow(
                f"Decrypt{self._kind.name}",
                ["kms:Decrypt"],
                self._key_arn,
                conditions={
                    "StringEquals": {
                        "kms:ViaService": f"secretsmanager.{cdk.Stack.of(role).region}.amazonaws.com",
                        "kms:EncryptionContext:SecretARN": self._arn,
                    }
                },
            )
