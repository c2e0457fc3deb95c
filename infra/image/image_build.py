"""The CodeBuild project that builds the stage's images and pushes them, at a person's or a pipeline's call.

    aws codebuild start-build --project-name "$(aws ssm get-parameter --query Parameter.Value --output text \
        --name /trainyard/dev/image-build/project)" \
        --environment-variables-override 'name=ARGUMENTS,value=gaudi --release 1.21.0'

It runs `trainyard images push` on the source as it was deployed: what a person's machine does, where a Docker engine, a
fast line to ECR or the room for Habana's image is missing. ARGUMENTS are that command's; without any, it pushes all
that the stage's jobs run in. It works in AWS's network, so it needs no NAT, and Habana's registry wants no account.
What it costs: minutes of a build, nothing between builds.
"""

import json
import subprocess
from collections.abc import Iterable, Mapping
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
from infra.stages import Stage
from jobs.core.errors import ConfigurationError
from jobs.core.git import NOT_SOURCES, REVISION_VARIABLE, ROOT, SOURCES, repository_of, run_git, source_revision
from jobs.core.stage import (
    IMAGES,
    RELEASE,
    image_parameter,
    image_repository_parameter,
    parameter_path,
)

PROGRAM = ("pyproject.toml", "requirements.txt", "README.md", "LICENSE")
"""What `pip install` needs besides the sources, to make `trainyard` of them."""

_BUILD_SPEC = {
    "version": 0.2,
    "env": {"shell": "bash"},
    "phases": {
        "install": {"runtime-versions": {"python": "3.12"}},  # jobs.core.images reads TOML, which came with 3.11
        "build": {"on-failure": "ABORT", "commands": [Path(__file__).with_suffix(".sh").read_text()]},
    },
}

_BUILD_TIMEOUT_MINUTES = 120
"""For several images, Habana's large one among them."""


class ImageBuild(Construct):
    """A CodeBuild project that runs `trainyard images push ARGUMENTS`; `start-build` may override that variable."""

    def __init__(
        self,
        scope: Construct,
        name: str,
        *,
        stage: Stage,
        images: Iterable[tuple[str, str]],
        repositories: Mapping[str, ecr.IRepository],
        key: kms.IKey | None,
    ) -> None:
        """`images`: (image, release) of all that it may push."""
        super().__init__(scope, name)
        source = self._source()
        logs = RetainedLogGroup(self, "Logs", retention_days=stage.log_retention_days)
        parameters = [image_parameter(image, release) for image, release in images]
        role = self._role(stage=stage, repositories=repositories, source=source, logs=logs, written=parameters, key=key)
        revision = _revision(source)
        if "-dirty-" in revision:
            cdk.Annotations.of(self).add_warning_v2(
                "trainyard:dirty-source",
                f"images/ or jobs/ differ from the last commit (revision {revision}): CodeBuild would refuse to push "
                f"what is built of them. Commit, and deploy '{stage.name}/image' before a build is started; all else "
                "works as it is, and so does an emulator.",
            )
        variables = {"ARGUMENTS": "", "TRAINYARD_STAGE": stage.name, REVISION_VARIABLE: revision}
        self.project = self._project(stage=stage, role=role, source=source, logs=logs, variables=variables, key=key)
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

    def _project(
        self,
        *,
        stage: Stage,
        role: iam.IRole,
        source: s3_assets.Asset,
        logs: RetainedLogGroup,
        variables: Mapping[str, str],
        key: kms.IKey | None,
    ) -> codebuild.CfnProject:
        return codebuild.CfnProject(
            self,
            "Project",
            description=f"Builds images of stage {stage.name} and pushes them",
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
                # For its 128 GB of disk: the size of Habana's image is not published, and unpacking takes it twice.
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

    def _source(self) -> s3_assets.Asset:
        return s3_assets.Asset(
            self,
            "Source",
            path=str(ROOT),
            ignore_mode=cdk.IgnoreMode.DOCKER,
            exclude=["*", *(f"!{name}" for name in (*SOURCES, *PROGRAM)), *NOT_SOURCES],
        )

    def _role(
        self,
        *,
        stage: Stage,
        repositories: Mapping[str, ecr.IRepository],
        source: s3_assets.Asset,
        logs: RetainedLogGroup,
        written: Iterable[str],
        key: kms.IKey | None,
    ) -> iam.Role:
        role = InlineRole(
            self,
            "Role",
            description="Image builds: read the source, push to the stage's repositories, record what was pushed",
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
                "ecr:BatchGetImage",  # which digest a tag has
                "ecr:CompleteLayerUpload",
                "ecr:GetDownloadUrlForLayer",  # a parent that was pushed already, to build on
                "ecr:InitiateLayerUpload",
                "ecr:PutImage",
                "ecr:UploadLayerPart",
            ],
            *(repository.repository_arn for repository in repositories.values()),
        )
        role.allow("SignIn", ["ecr:GetAuthorizationToken"], "*")
        role.explain("ecr:GetAuthorizationToken knows no resources: it can only be allowed on all of them", "*")

        def parameter(name: str) -> str:
            path = (parameter_path(stage.name) + name).removeprefix("/")
            return cdk.Stack.of(self).format_arn(service="ssm", resource="parameter", resource_name=path)

        # It looks for every image of images/, and says which of them the stage lacks.
        all_of_them = [parameter(image_repository_parameter("*")), parameter(image_parameter("*", "*"))]
        role.allow("ReadImages", ["ssm:GetParameters"], parameter(IMAGES), parameter(RELEASE), *all_of_them)
        role.explain("The names of the stage's own images, some of which other settings may have made", *all_of_them)
        role.allow("RecordImages", ["ssm:PutParameter"], *(parameter(name) for name in written))
        if key:
            # CodeBuild itself encrypts what it keeps of a build; ECR uses the key under a grant of its own.
            role.allow("UseKey", ["kms:Decrypt", "kms:GenerateDataKey"], key.key_arn)
        return role


def _revision(source: s3_assets.Asset, root: Path = ROOT) -> str:
    """Return what images are tagged by: git's revision, or a hash of all that is sent if the sources are not in git.

    Raises ConfigurationError if they are in a repository that git does not read.
    """
    try:
        return source_revision(root)
    except ConfigurationError:
        if repository_of(root) is not None and not _is_read(root):
            raise
        return source.asset_hash[:12]


def _is_read(root: Path) -> bool:
    try:
        return bool(run_git("rev-parse", "--git-dir", folder=root))
    except (OSError, subprocess.SubprocessError):
        return False
