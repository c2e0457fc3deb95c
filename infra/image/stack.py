"""Images: an ECR repository for each job image of the stage, and the project that builds and pushes images.

An image's SSM parameter names its latest push. CloudFormation creates the parameter, `trainyard images push` updates
it, and the job stack reads it at each deployment. Whenever CloudFormation updates the parameter, even for a changed tag
(aws-cdk issue 25949), it writes the template's value back. So the template's parameter only changes with the URI of its
repository: if that is replaced, for example because of another key, its images are gone anyway. Tags of the stack
itself (`cdk deploy --tags`) and `--revert-drift` still reset the parameter. Then `trainyard submit` refuses to submit,
and `trainyard images push` records the registry's images again.

CodeBuild runs `trainyard images push` on the deployed source, for people without a Docker engine, a fast connection to
ECR, or disk space for Habana's image. The variable ARGUMENTS has the command's arguments. Without them, it pushes all
images of the stage's jobs. The build runs in AWS's network, so it needs no NAT, and costs nothing between builds.
"""

import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import aws_cdk as cdk
from aws_cdk import CfnResource, Duration, Fn, RemovalPolicy
from aws_cdk import aws_codebuild as codebuild
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3_assets as s3_assets
from constructs import Construct

from infra.constructs.inline_role import InlineRole
from infra.constructs.stage_stack import RetainedLogGroup, StageStack, acknowledge
from infra.stages import Pool, Stage
from infra.storage.stack import StorageStack
from jobs.core.errors import ConfigurationError
from jobs.core.git import NOT_SOURCES, REVISION_VARIABLE, ROOT, SOURCES, repository_of, run_git, source_revision
from jobs.core.images import child_name, image, with_descendants
from jobs.core.instance_types import InstanceType
from jobs.core.stage import (
    IMAGE_BUILD_PROJECT,
    IMAGES,
    NOT_BUILT_TAG,
    image_parameter,
    image_repository_parameter,
    parameter_path,
    release_parameter,
)
from jobs.spec.arguments import JobKind
from jobs.spec.catalog import CATALOG

_KEPT_IMAGES = 50
"""Number of tagged images that a repository keeps. Jobs whose definition names an older image can no longer start."""

PROGRAM = ("pyproject.toml", "requirements.txt", "README.md", "LICENSE")
"""Files that `pip install` needs besides the sources to install `trainyard`."""

_BUILD_SPEC = {
    "version": 0.2,
    "env": {"shell": "bash"},
    "phases": {
        "install": {"runtime-versions": {"python": "3.12"}},  # jobs.core.images needs tomllib, new in Python 3.11
        "build": {"on-failure": "ABORT", "commands": [Path(__file__).with_name("image_build.sh").read_text()]},
    },
}

_BUILD_TIMEOUT_MINUTES = 120
"""Enough for several images, including Habana's large one."""


class PublishedImages:
    """The images for use in another stack, by URIs that CloudFormation reads from SSM when it deploys that stack.

    With exports, which cannot be removed while they are in use, no stage could drop an instance type.
    """

    def __init__(self, stack: StageStack, *, image: StageStack, names: Iterable[str]) -> None:
        """Read the published URIs. `names`: images whose repositories `stack` uses."""
        self._stack = stack
        self._stage = stack.stage_row
        self._image = image
        self._uris = {name: image.published(image_repository_parameter(name), reader=stack) for name in names}
        self.repositories = {
            name: ecr.Repository.from_repository_name(stack, f"Images-{name}", Fn.select(1, Fn.split("/", uri)))
            for name, uri in self._uris.items()
        }

    def job_image(self, kind: JobKind) -> str:
        """Return the URI of the image that new jobs of `kind` run: the latest push before the deployment.

        Deploying after a push is enough: the CDK CLI updates a stack with SSM parameters even if its template is
        unchanged. `image_tag` in the settings takes precedence.
        """
        name = child_name(row_of(self._stage, kind).image, kind.image)
        if self._stage.image_tag:
            return f"{self._uris[name]}:{self._stage.image_tag}"
        stage = self._stage
        release = stage.pool.software if kind.accelerated else stage.cpu_software
        return self._image.published(image_parameter(name, release.name), reader=self._stack)

    def pool_image(self, pool: Pool) -> str:
        """Return the image in a pool's AMI: a URI, or `ssm:` and the parameter that each AMI build reads.

        The parameter's name, not its value: Image Builder recipes cannot change, so otherwise every push would create a
        new AMI. Retiring pools ignore `image_tag` and use the image of their release.
        """
        if self._stage.image_tag and pool == self._stage.pool:
            return f"{self._uris[pool.row.image]}:{self._stage.image_tag}"
        return f"ssm:{pool_image_parameter(self._stage, pool)}"


def pool_image_parameter(stage: Stage, pool: Pool) -> str:
    """Return the name of the SSM parameter of the image that most jobs on a pool run."""
    return parameter_path(stage.name) + image_parameter(pool.row.image, pool.software.name)


def images_of_new_jobs(stage: Stage) -> list[str]:
    """Return the names of the images of newly submitted jobs.

    Raises UsageError for a job kind whose image has no folder.
    """
    return sorted({image(child_name(row_of(stage, kind).image, kind.image)).name for kind in CATALOG.values()})


def images_of_all_jobs(stage: Stage) -> list[str]:
    """Return the names of the images of new jobs, and of jobs that still wait for a retiring pool."""
    accelerated = [kind for kind in CATALOG.values() if kind.accelerated]
    retiring = {child_name(pool.row.image, kind.image) for pool in stage.retiring for kind in accelerated}
    return sorted({*images_of_new_jobs(stage), *(image(name).name for name in retiring)})


def row_of(stage: Stage, kind: JobKind) -> InstanceType:
    """Return the instance type that jobs of a kind run on: `Pool.job_row` if there are several."""
    return stage.pool.job_row if kind.accelerated else stage.cpu_row


class ImageBuild(Construct):
    """A CodeBuild project that runs `trainyard images push ARGUMENTS`; `start-build` can override the variable."""

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
        """Create the project. `images`: pairs (image, release) that the project may push."""
        super().__init__(scope, name)
        source = self._source()
        logs = RetainedLogGroup(self, "Logs", retention_days=stage.log_retention_days)
        parameters = [image_parameter(image, release) for image, release in images]
        role = self._role(stage=stage, repositories=repositories, source=source, logs=logs, written=parameters, key=key)
        revision = _revision(source)
        if "-dirty-" in revision:
            cdk.Annotations.of(self).add_warning_v2(
                "trainyard:dirty-source",
                f"images/ or jobs/ differ from the last commit (revision {revision}), so CodeBuild would refuse to "
                f"push the images. Commit, and deploy '{stage.name}/image' before you start a build. This affects "
                "nothing else, and nothing at all on the emulator.",
            )
        variables = {"ARGUMENTS": "", "TRAINYARD_STAGE": stage.name, REVISION_VARIABLE: revision}
        self.project = self._project(stage=stage, role=role, source=source, logs=logs, variables=variables, key=key)
        # CodeBuild checks the role when it creates the project, and the role's policy is a separate resource.
        self.project.node.add_dependency(role.node.find_child("DefaultPolicy"))
        acknowledge(
            self.project,
            "Building an image needs a Docker engine, which CodeBuild only starts in privileged mode; it builds this "
            "repository's own source.",
            "AwsSolutions-CB3",
        )
        if key is None:
            acknowledge(
                self.project,
                "There are no artifacts to encrypt: images go to ECR, which encrypts them with AWS's key unless the "
                "stage has its own",
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
                # For its 128 GB of disk: the size of Habana's image is not published, and unpacking needs it twice.
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
            description="Image builds: read the source, push to the stage's repositories, record the pushes",
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
                "ecr:BatchGetImage",  # the digest of a tag
                "ecr:CompleteLayerUpload",
                "ecr:GetDownloadUrlForLayer",  # a parent image that was pushed before
                "ecr:InitiateLayerUpload",
                "ecr:PutImage",
                "ecr:UploadLayerPart",
            ],
            *(repository.repository_arn for repository in repositories.values()),
        )
        role.allow("SignIn", ["ecr:GetAuthorizationToken"], "*")
        role.explain("ecr:GetAuthorizationToken supports no resources: it can only be allowed on all of them", "*")

        def parameter(name: str) -> str:
            path = (parameter_path(stage.name) + name).removeprefix("/")
            return cdk.Stack.of(self).format_arn(service="ssm", resource="parameter", resource_name=path)

        # The push looks up every image in images/ and reports those that the stage lacks.
        all_images = [parameter(image_repository_parameter("*")), parameter(image_parameter("*", "*"))]
        all_images.append(parameter(release_parameter("*")))
        role.allow("ReadImages", ["ssm:GetParameters"], parameter(IMAGES), *all_images)
        role.explain("The names of the stage's images, some of which other settings may have created", *all_images)
        role.allow("RecordImages", ["ssm:PutParameter"], *(parameter(name) for name in written))
        if key:
            # For CodeBuild's own data; ECR uses the key under its own grant.
            role.allow("UseKey", ["kms:Decrypt", "kms:GenerateDataKey"], key.key_arn)
        return role


def _revision(source: s3_assets.Asset, root: Path = ROOT) -> str:
    """Return the revision for image tags: git's, or a hash of all sources if they are not in git.

    Raises ConfigurationError if the sources are in a repository that git cannot read.
    """
    try:
        return source_revision(root)
    except ConfigurationError:
        if repository_of(root) is not None and not _is_readable(root):
            raise
        return source.asset_hash[:12]


def _is_readable(root: Path) -> bool:
    try:
        return bool(run_git("rev-parse", "--git-dir", folder=root))
    except (OSError, subprocess.SubprocessError):
        return False


def image_releases(stage: Stage) -> list[tuple[str, str]]:
    """Return pairs (image, release) for all jobs on the stage's pools: each instance type's image and its children.

    Raises UsageError for an instance type whose image has no folder, and the errors of the settings' properties.
    """
    roots = [
        (stage.cpu_row.image, stage.cpu_software.name),
        *((pool.row.image, pool.software.name) for pool in stage.pools),
    ]
    return sorted({(image.name, release) for root, release in roots for image in with_descendants(root)})


class ImageStack(StageStack):
    """The stack of image repositories. They are deleted with the stack, because images can be built again."""

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
        # A push without a release reads these, because the rest of the stage may not be deployed yet.
        software = {stage.cpu_row.image: stage.cpu_software, stage.row.image: stage.pool.software}
        for root, row in software.items():
            self.publish(release_parameter(root), row.name)
        self.publish(IMAGES, " ".join(images_of_new_jobs(stage)))
        build = ImageBuild(self, "Build", stage=stage, images=pairs, repositories=self.repositories, key=self._key)
        self.publish(IMAGE_BUILD_PROJECT, build.project.ref)

    def _record(self, name: str, initial: str) -> None:
        """Publish `initial` under `name`; pushes update the value.

        This is a bare resource, so that tags an organisation adds to all constructs do not change it; see above.
        """
        CfnResource(
            Construct(self, f"Parameter-{name.replace('/', '-')}"),
            "Resource",
            type="AWS::SSM::Parameter",
            properties={
                "Name": parameter_path(self.stage_row.name) + name,
                "Tags": self.instance_tags,
                "Type": "String",
                "Value": initial,
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
