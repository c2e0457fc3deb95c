"""The images for other stacks: names and digests that the image stack and pushes publish."""

from collections.abc import Iterable

from aws_cdk import Fn
from aws_cdk import aws_ecr as ecr

from infra.constructs.stage_stack import StageStack
from infra.stages import Pool, Stage
from jobs.core.images import child_name, image
from jobs.core.instance_types import InstanceType
from jobs.core.stage import image_parameter, image_repository_parameter, parameter_path
from jobs.spec.arguments import JobKind
from jobs.spec.catalog import CATALOG


class PublishedImages:
    """The images, as one other stack uses them: by URIs that CloudFormation reads from SSM during the deployment.

    An export could not be removed while another stack imports it, so no stage could give up an instance type.
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
        release = self._stage.pool.software.name
        return self._image.published(image_parameter(name, release), reader=self._stack)

    def pool_image(self, pool: Pool) -> str:
        """Return the image in a pool's AMI: a URI, or `ssm:` and the parameter that each AMI build reads.

        The parameter's name, not its value: Image Builder recipes cannot change, so otherwise every push would create a
        new AMI. Retiring pools use the image of their release, whatever `image_tag` says.
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
    """Return the row of the instance type that jobs of a kind run on."""
    return stage.row if kind.accelerated else stage.cpu_row
