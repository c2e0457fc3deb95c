"""Images: an ECR repository for each folder under images/ that the stage's jobs run in, and the project that builds."""

from collections.abc import Iterable

from aws_cdk import Duration, Fn, RemovalPolicy
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_kms as kms
from constructs import Construct

from infra.constructs.image_build import ImageBuild
from infra.constructs.stage_stack import StageStack
from infra.settings import Pool, Stage
from infra.storage_stack import StorageStack
from jobs.instance_types import InstanceType
from jobs.stage import IMAGE_BUILD_PROJECT, image_repository_parameter

_KEPT_IMAGES = 50
"""Tagged images a repository keeps; a job definition that names an older one would no longer start."""


class ImageStack(StageStack):
    """Repositories with generated names. Images are built from this repository, so they go when the stack goes."""

    def __init__(self, scope: Construct, *, stage: Stage, storage: StorageStack) -> None:
        super().__init__(scope, "image", stage=stage, description="image repositories and builds")
        key_arn = storage.key_arn(self)
        self._key = kms.Key.from_key_arn(self, "Key", key_arn) if key_arn else None
        rows = (stage.row, stage.cpu_row, *(pool.row for pool in stage.retiring))
        self.repositories = {image: self._repository(image) for image in sorted({row.image for row in rows})}
        for image, repository in self.repositories.items():
            self.publish(image_repository_parameter(image), repository.repository_uri)
        build = ImageBuild(self, "Build", stage=stage, repositories=self.repositories, key=self._key)
        self.publish(IMAGE_BUILD_PROJECT, build.project.ref)

    def _repository(self, image: str) -> ecr.Repository:
        return ecr.Repository(
            self,
            image.capitalize(),
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


class PublishedImages:
    """The repositories as another stack sees them, by the URIs that CloudFormation reads from SSM as it deploys.

    An export could not be taken back while another stack imports it, so no stage could leave an instance type.
    """

    def __init__(self, stack: StageStack, *, image: ImageStack, names: Iterable[str]) -> None:
        """`names`: which of them `stack` has to do with."""
        self._stage = stack.stage_row
        self._uris = {name: image.published(image_repository_parameter(name), reader=stack) for name in names}
        self.repositories = {
            name: ecr.Repository.from_repository_name(stack, f"Images-{name}", Fn.select(1, Fn.split("/", uri)))
            for name, uri in self._uris.items()
        }

    def job_image(self, row: InstanceType) -> str:
        """URI of the image that jobs on `row` run.

        By its tag, which cannot be moved and so is one image for ever, and can be named before it is built.
        """
        return f"{self._uris[row.image]}:{self._stage.job_image_tag}"

    def pool_image(self, pool: Pool) -> str:
        """URI of the image that jobs on a pool run; those of one that retires keep their release's."""
        tag = self._stage.job_image_tag if pool == self._stage.pool else pool.software.name
        return f"{self._uris[pool.row.image]}:{tag}"
