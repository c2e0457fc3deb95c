"""Images: one ECR repository for each folder under images/ that the stage's jobs run in."""

from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_ecr as ecr
from constructs import Construct

from infra.constructs.stage_stack import StageStack
from infra.settings import Stage
from jobs.instance_types import InstanceType
from jobs.stage import image_repository_parameter

_KEPT_IMAGES = 50
"""Tagged images a repository keeps; a job definition that names an older one would no longer start."""


class ImageStack(StageStack):
    """Repositories with generated names. Images are built from this repository, so they go when the stack goes."""

    def __init__(self, scope: Construct, *, stage: Stage) -> None:
        super().__init__(scope, "image", stage=stage, description="image repositories", stateful=True)
        self._tag = stage.job_image_tag
        self.repositories = {image: self._repository(image) for image in sorted({stage.row.image, stage.cpu_row.image})}
        for image, repository in self.repositories.items():
            self.publish(image_repository_parameter(image), repository.repository_uri)

    def job_image(self, row: InstanceType) -> str:
        """URI of the image that jobs on `row` run."""
        return self.repositories[row.image].repository_uri_for_tag(self._tag)

    def _repository(self, image: str) -> ecr.Repository:
        return ecr.Repository(
            self,
            image.capitalize(),
            image_tag_mutability=ecr.TagMutability.IMMUTABLE,
            image_scan_on_push=True,
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
