"""The CodeBuild project that builds an image of images/ and pushes it, at a person's or a pipeline's call.

    aws codebuild start-build --project-name "$(aws ssm get-parameter --query Parameter.Value --output text \
        --name /trainyard/dev/image-build/project)" \
        --environment-variables-override name=IMAGE,value=gaudi name=RELEASE,value=1.21.0

What a Dockerfile may count on: its build context is the root of this repository, reduced to `SOURCES`; the build
arguments are those of `python -m jobs.releases` (`HABANA_IMAGE` is Habana's base image of the release) and `REVISION`,
the hash of that source. What it costs: minutes of a build, nothing between builds.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import aws_cdk as cdk
from aws_cdk import aws_codebuild as codebuild
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3_assets as s3_assets
from constructs import Construct

from infra.constructs.inline_role import InlineRole
from infra.constructs.log_group import RetainedLogGroup
from infra.constructs.stage_stack import acknowledge
from infra.settings import Stage
from jobs.stage import image_digest_parameter, parameter_path

ROOT = Path(__file__).parents[2]

SOURCES = ("images", "jobs", "pyproject.toml", "requirements.txt", "README.md", "LICENSE")
"""What of this repository an image is built from; the last two are named by pyproject.toml, which installs `jobs`."""

_BUILD_SPEC = {
    "version": 0.2,
    "env": {"shell": "bash"},
    "phases": {
        "install": {"runtime-versions": {"python": "3.12"}},  # jobs.releases reads TOML, which came with 3.11
        "build": {"on-failure": "ABORT", "commands": [Path(__file__).with_suffix(".sh").read_text()]},
    },
}

_BUILD_TIMEOUT_MINUTES = 120


class ImageBuild(Construct):
    """Builds `images/<IMAGE>/Dockerfile` for RELEASE, tagged IMAGE_TAG or else like the release.

    The three are variables that `start-build` may override. The pushed digest goes into the SSM parameter
    `image-digest/<IMAGE>`. It runs in AWS's network, so it needs no NAT, and Habana's registry wants no account.
    """

    def __init__(
        self,
        scope: Construct,
        name: str,
        *,
        stage: Stage,
        repositories: Mapping[str, ecr.IRepository],
        key: kms.IKey | None,
    ) -> None:
        super().__init__(scope, name)
        source = self._source()
        logs = RetainedLogGroup(self, "Logs", retention_days=stage.log_retention_days)
        digests = [
            cdk.Stack.of(self).format_arn(
                service="ssm",
                resource="parameter",
                resource_name=(parameter_path(stage.name) + image_digest_parameter(image)).removeprefix("/"),
            )
            for image in repositories
        ]
        role = self._role(repositories, source, logs, digests, key)
        variables = {
            "IMAGE": stage.row.image,
            "RELEASE": stage.gaudi_release.name,
            "IMAGE_TAG": stage.image_tag or "",
            "REPOSITORIES": " ".join(f"{image}={item.repository_uri}" for image, item in repositories.items()),
            "DIGEST_PARAMETERS": parameter_path(stage.name) + image_digest_parameter(""),
            "SOURCE_REVISION": source.asset_hash,
        }
        self.project = codebuild.CfnProject(
            self,
            "Project",
            description=f"Builds an image of stage {stage.name} and pushes it",
            service_role=role.role_arn,
            source=codebuild.CfnProject.SourceProperty(
                type="S3",
                location=f"{source.s3_bucket_name}/{source.s3_object_key}",
                build_spec=json.dumps(_BUILD_SPEC, indent=2),  # JSON is YAML
            ),
            artifacts=codebuild.CfnProject.ArtifactsProperty(type="NO_ARTIFACTS"),
            environment=codebuild.CfnProject.EnvironmentProperty(
                type="LINUX_CONTAINER",
                image="aws/codebuild/standard:7.0",
                # 128 GB of disk: Habana's image takes tens of them, twice over while it is unpacked.
                compute_type="BUILD_GENERAL1_LARGE",
                privileged_mode=True,
                environment_variables=[
                    codebuild.CfnProject.EnvironmentVariableProperty(name=variable, value=value)
                    for variable, value in variables.items()
                ],
            ),
            encryption_key=key.key_arn if key else None,
            timeout_in_minutes=_BUILD_TIMEOUT_MINUTES,
            logs_config=codebuild.CfnProject.LogsConfigProperty(
                cloud_watch_logs=codebuild.CfnProject.CloudWatchLogsConfigProperty(
                    status="ENABLED", group_name=logs.log_group_name
                )
            ),
        )
        # CodeBuild tries the role out when the project is made; its policy is a resource of its own.
        self.project.node.add_dependency(role.node.find_child("DefaultPolicy"))
        acknowledge(
            self.project,
            "Building an image takes a Docker engine, which CodeBuild starts in privileged mode only; what it builds "
            "is this repository's own source.",
            "AwsSolutions-CB3",
        )
        if key is None:
            acknowledge(
                self.project,
                "There are no artifacts to encrypt: the image goes to ECR, which encrypts with AWS's key unless the "
                "stage asks for one of its own",
                "AwsSolutions-CB4",
            )

    def _source(self) -> s3_assets.Asset:
        return s3_assets.Asset(
            self,
            "Source",
            path=str(ROOT),
            ignore_mode=cdk.IgnoreMode.DOCKER,
            exclude=["*", *(f"!{name}" for name in SOURCES), "**/__pycache__", "**/*.pyc", "**/.*"],
        )

    def _role(
        self,
        repositories: Mapping[str, ecr.IRepository],
        source: s3_assets.Asset,
        logs: RetainedLogGroup,
        digests: list[str],
        key: kms.IKey | None,
    ) -> iam.Role:
        role = InlineRole(
            self,
            "Role",
            description="Image builds: read the source, push to the stage's repositories, note the digest",
            assumed_by=iam.ServicePrincipal("codebuild.amazonaws.com"),
        )
        role.allow(
            "ReadSource", ["s3:GetObject", "s3:GetObjectVersion"], source.bucket.arn_for_objects(source.s3_object_key)
        )
        role.allow("FindSource", ["s3:GetBucketAcl", "s3:GetBucketLocation"], source.bucket.bucket_arn)
        role.allow("WriteLog", ["logs:CreateLogStream", "logs:PutLogEvents"], logs.log_group_arn)
        role.allow(
            "PushImages",
            [
                "ecr:BatchCheckLayerAvailability",
                "ecr:BatchGetImage",
                "ecr:CompleteLayerUpload",
                "ecr:GetDownloadUrlForLayer",  # an image may be the base of another
                "ecr:InitiateLayerUpload",
                "ecr:PutImage",
                "ecr:UploadLayerPart",
            ],
            *(repository.repository_arn for repository in repositories.values()),
        )
        role.allow("SignIn", ["ecr:GetAuthorizationToken"], "*")
        role.explain("ecr:GetAuthorizationToken knows no resources: it can only be allowed on all of them", "*")
        role.allow("NoteDigests", ["ssm:PutParameter"], *digests)
        if key:
            # CodeBuild itself encrypts what it keeps of a build; ECR uses the key under a grant of its own.
            role.allow("UseKey", ["kms:Decrypt", "kms:GenerateDataKey"], key.key_arn)
        return role
