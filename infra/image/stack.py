"""Images: an ECR repository for each image that the stage's jobs may run in, and the project that builds and pushes.

The job stack reads an image's parameter at each deployment. `trainyard images push` writes it; CloudFormation only
makes it. It puts the template's value back whenever it updates the parameter, for a changed tag too (aws-cdk issue
25949), so nothing of the parameter ever changes in the template but the URI of its repository: where that is replaced,
for another key say, the images are gone. What is left are ways around the template: tags of the stack itself (`cdk
deploy --tags`) and `--revert-drift`. After those `trainyard submit` refuses, and `trainyard images push` records again
what the registry has.
"""

import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import aws_cdk as cdk
from aws_cdk import CfnResource, Duration, RemovalPolicy
from aws_cdk import aws_codebuild as codebuild
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3_assets as s3_assets
from constructs import Construct

from infra.constructs.inline_role import InlineRole
from infra.constructs.stage_stack import RetainedLogGroup, StageStack, acknowledge
from infra.image.published import images_of_new_jobs
from infra.stages import Stage
from infra.storage.stack import StorageStack
from jobs.core.errors import ConfigurationError
from jobs.core.git import NOT_SOURCES, REVISION_VARIABLE, ROOT, SOURCES, repository_of, run_git, source_revision
from jobs.core.images import with_descendants
from jobs.core.stage import (
    IMAGE_BUILD_PROJECT,
    IMAGES,
    NOT_BUILT_TAG,
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
        "install": {"runtime-versions": {"python": "3.12"}},  # jobs.core.releases reads TOML, which came with 3.11
        "build": {"on-failure": "ABORT", "commands": [Path(__file__).with_name("image_build.sh").read_text()]},
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


_KEPT_IMAGES = 50
"""Tagged images a repository keeps; a job definition that names an older one would no longer start."""


def image_releases(stage: Stage) -> list[tuple[str, str]]:
    """Return (image, release) of all that jobs on the stage's pools may run in: each row's image and its children.

    Raises UsageError for a row whose image has no folder, and as the settings' own properties do.
    """
    roots = [
        (stage.cpu_row.image, stage.pool.software.name),
        *((pool.row.image, pool.software.name) for pool in (stage.pool, *stage.retiring)),
    ]
    return sorted({(one.name, release) for root, release in roots for one in with_descendants(root)})


class ImageStack(StageStack):
    """The stack of image repositories. Images can be built again from these sources, so they go when the stack goes."""

    def __init__(self, scope: Construct, *, stage: Stage, storage: StorageStack) -> None:
        super().__init__(scope, "image", stage=stage, description="image repositories and builds")
        key_arn = storage.key_arn(self)
        self._key = kms.Key.from_key_arn(self, "Key", key_arn) if key_arn else None
        pairs = image_releases(stage)
        self.repositories = {name: self._repository(name) for name in sorted({name for name, _ in pairs})}
        for name, repository in self.repositories.items():
            self.publish(image_repository_parameter(name), repository.repository_uri)
        for name, release in pairs:
            self._record(image_parameter(name, release), f"{self.repositories[name].repository_uri}:{NOT_BUILT_TAG}")
        # For a push that names none: the rest of the stage may not be deployed yet.
        self.publish(RELEASE, stage.pool.software.name)
        self.publish(IMAGES, " ".join(images_of_new_jobs(stage)))
        build = ImageBuild(self, "Build", stage=stage, images=pairs, repositories=self.repositories, key=self._key)
        self.publish(IMAGE_BUILD_PROJECT, build.project.ref)

    def _record(self, name: str, first: str) -> None:
        """Publish `first` under `name`, until a push writes something else.

        A bare resource, out of reach of the tags that an organisation adds to all constructs of a stage: see above.
        """
        CfnResource(
            Construct(self, f"Parameter-{name.replace('/', '-')}"),
            "Resource",
            type="AWS::SSM::Parameter",
            properties={
                "Name": parameter_path(self.stage_row.name) + name,
                "Tags": self.instance_tags,
                "Type": "String",
                "Value": first,
            },
        )

    def _repository(self, name: str) -> ecr.Repository:
        return ecr.Repository(
            self,
            "".join(word.capitalize() for word in name.split("-")),
            image_tag_mutability=ecr.TagMutability.IMMUTABLE,
            image_scan_on_push=True,
            encryption=ecr.RepositoryEncryption.KMS if self._key else None,
            encryption_key=self._key,
            removal_policy=RemovalPolicy.DESTROY,
            empty_on_delete=True,
            lifecycle_rules=[
                ecr.LifecycleRule(
                    description="untagged images", tag_status=ecr.TagStatus.UNTAGGED, max_image_age=Duration.days(14)
                ),
                ecr.LifecycleRule(
                    description="all but the newest", tag_status=ecr.TagStatus.ANY, max_image_count=_KEPT_IMAGES
                ),
            ],
        )
