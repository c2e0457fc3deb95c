"""Images: an ECR repository for each image that the stage's jobs may run in, and the project that builds and pushes.

The job stack reads an image's parameter at each deployment. `trainyard images push` writes it; CloudFormation only
makes it. It puts the template's value back whenever it updates the parameter, for a changed tag too (aws-cdk issue
25949), so nothing of the parameter ever changes in the template but the URI of its repository: where that is replaced,
for another key say, the images are gone. What is left are ways around the template: tags of the stack itself (`cdk
deploy --tags`) and `--revert-drift`. After those `trainyard submit` refuses, and `trainyard images push` records again
what the registry has.
"""

from aws_cdk import CfnResource, Duration, RemovalPolicy
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_kms as kms
from constructs import Construct

from infra.constructs.stage_stack import StageStack
from infra.image.image_build import ImageBuild
from infra.image.published import images_of_new_jobs
from infra.stages import Stage
from infra.storage.stack import StorageStack
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
