"""The images as other stacks see them: by the names and digests that the image stack and pushes publish."""

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
    """The images as one other stack sees them, by the URIs that CloudFormation reads from SSM as it deploys.

    An export could not be taken back while another stack imports it, so no stage could leave an instance type.
    """

    def __init__(self, stack: StageStack, *, image: StageStack, names: Iterable[str]) -> None:
        """`names`: those whose repositories `stack` has to do with."""
        self._stack = stack
        self._stage = stack.stage_row
        self._image = image
        self._uris = {name: image.published(image_repository_parameter(name), reader=stack) for name in names}
        self.repositories = {
            name: ecr.Repository.from_repository_name(stack, f"Images-{name}", Fn.select(1, Fn.split("/", uri)))
            for name, uri in self._uris.items()
        }

    def job_image(self, kind: JobKind) -> str:
        """Return the URI of the image that new jobs of `kind` run: the one that was pushed last before the deployment.

        The CDK CLI updates a stack whose parameters come from SSM also where its template is the same, so a deployment
        after a push is all that it takes. `image_tag` of the settings goes before.
        """
        name = child_name(row_of(self._stage, kind).image, kind.image)
        if self._stage.image_tag:
            return f"{self._uris[name]}:{self._stage.image_tag}"
        release = self._stage.pool.software.name
        return self._image.published(image_parameter(name, release), reader=self._stack)

    def pool_image(self, pool: Pool) -> str:
        """Return the image that a pool's AMI holds: a URI, or `ssm:` and the parameter that names it at each build.

        Not what the parameter holds at a deployment: recipes of Image Builder cannot change, and every push would make
        a new AMI. A pool that retires keeps its release's, whatever `image_tag` says.
        """
        if self._stage.image_tag and pool == self._stage.pool:
            return f"{self._uris[pool.row.image]}:{self._stage.image_tag}"
        return f"ssm:{pool_image_parameter(self._stage, pool)}"


def pool_image_parameter(stage: Stage, pool: Pool) -> str:
    """Return the name of the SSM parameter of the image that most jobs on a pool run."""
    return parameter_path(stage.name) + image_parameter(pool.row.image, pool.software.name)


def images_of_new_jobs(stage: Stage) -> list[str]:
    """Return the names of the images of jobs that are submitted from now on.

    Raises UsageError for a kind whose image has no folder.
    """
    return sorted({image(child_name(row_of(stage, kind).image, kind.image)).name for kind in CATALOG.values()})


def images_of_all_jobs(stage: Stage) -> list[str]:
    """Return the same and the images of jobs that still wait for a pool that retires."""
    accelerated = [kind for kind in CATALOG.values() if kind.accelerated]
    retiring = {child_name(pool.row.image, kind.image) for pool in stage.retiring for kind in accelerated}
    return sorted({*images_of_new_jobs(stage), *(image(name).name for name in retiring)})


def row_of(stage: Stage, kind: JobKind) -> InstanceType:
    """Return the instance type that jobs of a kind run on."""
    return stage.row if kind.accelerated else stage.cpu_row
