"""A team's Hugging Face token: a secret that the template makes empty, and that people fill.

It lives with the buckets in the storage stack, which is kept, and its ARN reaches other stacks through SSM: an export
could not be taken back while a job definition names it, so no team could ever be removed.
"""

import aws_cdk as cdk
from aws_cdk import aws_kms as kms
from aws_cdk import aws_secretsmanager as secretsmanager
from aws_cdk import aws_ssm as ssm

from infra.constructs.inline_role import InlineRole
from infra.constructs.stage_stack import StageStack, acknowledge
from infra.stages import Team
from jobs.contract.stage import huggingface_secret_parameter, parameter_path


class HuggingFaceSecret(secretsmanager.CfnSecret):
    """A secret without a value in the template: until someone puts one in, the team's jobs do not start.

    Deleting the stack, the team, or its `huggingface_token`, keeps the secret.
    """

    def __init__(self, stack: StageStack, name: str, *, team: Team, key: kms.IKey | None) -> None:
        parameter = huggingface_secret_parameter(team.name)
        path = parameter_path(stack.stage_row.name) + parameter
        super().__init__(
            stack,
            name,
            description=(
                f"Hugging Face token of team {team.name}, HF_TOKEN in its jobs. To put it in, or another in its place: "
                f'aws secretsmanager put-secret-value --secret-string file:///dev/stdin --secret-id "$(aws ssm '
                f'get-parameter --name {path} --query Parameter.Value --output text)"; '
                "jobs that run already keep the old one until their next attempt."
            ),
            kms_key_id=key.key_arn if key else None,
        )
        self.apply_removal_policy(cdk.RemovalPolicy.RETAIN)
        cdk.Tags.of(self).add("trainyard:team", team.name)
        stack.publish(parameter, self.ref)
        acknowledge(
            self,
            "Only Hugging Face can make a token of its own, so no function could rotate it: people put a new one in",
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

    def __init__(self, stack: StageStack, *, team: Team, storage: cdk.Stack, key_arn: str | None) -> None:
        stack.add_stack_dependency(storage, "the secret's ARN")
        self.arn = ssm.StringParameter.value_for_string_parameter(
            stack, parameter_path(stack.stage_row.name) + huggingface_secret_parameter(team.name)
        )
        self._key_arn = key_arn

    def let_read(self, role: InlineRole) -> None:
        """Let `role` read it, and decrypt it through Secrets Manager."""
        role.allow("ReadSecret", ["secretsmanager:GetSecretValue"], self.arn)
        if self._key_arn is not None:
            role.allow(
                "DecryptSecret",
                ["kms:Decrypt"],
                self._key_arn,
                conditions={
                    "StringEquals": {
                        "kms:ViaService": f"secretsmanager.{cdk.Stack.of(role).region}.amazonaws.com",
                        "kms:EncryptionContext:SecretARN": self.arn,
                    }
                },
            )
