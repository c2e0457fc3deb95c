"""Secrets of a team: its Hugging Face token, and environment variables of its jobs. People fill in the values.

The secrets are in the storage stack, which is kept like its buckets. Other stacks read their ARNs from SSM: an export
could not be removed while a job definition uses it, so no team could ever be removed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import aws_cdk as cdk
from aws_cdk import aws_kms as kms
from aws_cdk import aws_secretsmanager as secretsmanager

from infra.constructs.inline_role import InlineRole
from infra.constructs.stage_stack import StageStack, acknowledge
from infra.stages import Team
from jobs.core.stage import huggingface_secret_parameter, parameter_path, variables_secret_parameter


@dataclass(frozen=True, kw_only=True)
class SecretKind:
    """A kind of secret that a team can have."""

    name: str
    parameter: str
    """SSM parameter that holds the secret's ARN, below the stage's path."""
    description: str
    """What people put into the secret."""
    variables: tuple[str, ...]
    """Environment variables that jobs get from the secret."""
    is_json: bool
    """Whether the secret is a JSON object with a key per variable. Otherwise, it is the value of its only variable."""

    def value_from(self, variable: str, arn: str) -> str:
        """Return the reference to a variable's value for a job definition (ECS `valueFrom`)."""
        return f"{arn}:{variable}::" if self.is_json else arn


def secret_kinds(team: Team) -> Iterator[SecretKind]:
    """Yield the kinds of secrets that a team has."""
    if team.huggingface_token:
        yield SecretKind(
            name="HuggingFaceToken",
            parameter=huggingface_secret_parameter(team.name),
            description=f"Hugging Face token of team {team.name}, HF_TOKEN in its jobs",
            variables=("HF_TOKEN",),
            is_json=False,
        )
    if team.secret_variables:
        names = ", ".join(team.secret_variables)
        yield SecretKind(
            name="Variables",
            parameter=variables_secret_parameter(team.name),
            description=f"Variables of the jobs of team {team.name}: a JSON object with the keys {names}",
            variables=team.secret_variables,
            is_json=True,
        )


class TeamSecret(secretsmanager.CfnSecret):
    """A secret without a value in the template. The team's jobs do not start until someone puts a value into it.

    Deleting the stack, the team, or the setting that created it keeps the secret.
    """

    def __init__(self, stack: StageStack, kind: SecretKind, *, team: Team, key: kms.IKey | None) -> None:
        path = parameter_path(stack.stage_row.name) + kind.parameter
        super().__init__(
            stack,
            f"{kind.name}-{team.name}",
            description=(
                f"{kind.description}. To set it: aws secretsmanager put-secret-value --secret-string file:///dev/stdin "
                f'--secret-id "$(aws ssm get-parameter --name {path} --query Parameter.Value --output text)"; '
                "running jobs keep the old value until their next attempt."
            ),
            kms_key_id=key.key_arn if key else None,
        )
        self.apply_removal_policy(cdk.RemovalPolicy.RETAIN)
        cdk.Tags.of(self).add("trainyard:team", team.name)
        stack.publish(kind.parameter, self.ref)
        acknowledge(
            self,
            "Only the service that issued the value can issue a new one, so no function could rotate it; people do",
            "AwsSolutions-SMG4",
            "NIST.800.53.R5-SecretsManagerRotationEnabled",
        )
        if key is None:
            acknowledge(
                self,
                "The stage has no KMS key; AWS's key for Secrets Manager encrypts the secret at no charge",
                "NIST.800.53.R5-SecretsManagerUsingKMSKey",
            )


class PublishedSecret:
    """A team's secret for use in another stack, by the ARN that CloudFormation reads from SSM during the deployment."""

    def __init__(self, stack: StageStack, kind: SecretKind, *, storage: StageStack, key_arn: str | None) -> None:
        self._kind = kind
        self._key_arn = key_arn
        self._arn = storage.published(kind.parameter, reader=stack)

    @property
    def values(self) -> dict[str, str]:
        """Return each variable's reference to its value, for a job definition."""
        return {variable: self._kind.value_from(variable, self._arn) for variable in self._kind.variables}

    def grant_read(self, role: InlineRole) -> None:
        """Let `role` read the secret, and decrypt it through Secrets Manager."""
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
