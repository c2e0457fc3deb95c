"""The file an organisation edits: its stages, teams and limits. Everything deployed follows from it.

cdk deploy 'dev/*'        deploys what the row `dev` says
"""

from dataclasses import dataclass

from jobs.instance_types import InstanceType, instance_type
from jobs.releases import Release, release_for


@dataclass(frozen=True, kw_only=True)
class Team:
    """Who pays, and whose files are whose."""

    name: str
    """Lower-case letters, digits and hyphens; also the team's prefix in the buckets."""
    share: float = 1.0
    """Capacity it gets while others wait too, in relation to theirs: 2.0 gets twice what 1.0 gets."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One deployed environment: an account and a region."""

    name: str
    teams: tuple[Team, ...]
    account: str | None = None
    """None: whichever the credentials belong to at deploy time."""
    region: str | None = None
    """None: whichever the CDK CLI is set to. dl1.24xlarge is (or was) offered in us-east-1 and us-west-2 only."""
    availability_zone_ids: tuple[str, ...] = ()
    """Zones of the subnets, by id (`use1-az2`), which means the same zone in every account, unlike its letter.

    None given: the first two that the region lists. dl1.24xlarge is (or was) offered in use1-az2 of us-east-1 and in
    usw2-az1 of us-west-2 only; `aws ec2 describe-instance-type-offerings --location-type availability-zone-id` tells.
    """
    instance_type: str = "dl1.24xlarge"
    """What accelerated jobs run on: a row of jobs/instance_types.py."""
    cpu_instance_type: str = "m6i.4xlarge"
    """What corpus and tokenizer jobs run on: a row of jobs/instance_types.py without an accelerator."""
    release: str | None = None
    """Gaudi software release, a row of images/releases.toml. None: the default one there."""
    image_tag: str | None = None
    """Tag of the images that jobs run, in the stage's repositories. None: the release's name."""
    machine_image: str = "ssm:/trainyard/machine-image/gaudi"
    """AMI of the accelerator instances: an id, or `ssm:` and the parameter that holds one, read at every deployment.

    It must carry the Gaudi driver of `release`, habana-container-runtime as Docker's default runtime, and the ECS
    agent; none that AWS publishes was found to have all three.
    """
    root_device_name: str = "/dev/sda1"
    """Root device of that AMI: Ubuntu's. Amazon Linux calls it /dev/xvda."""
    root_volume_gib: int = 500
    """Size of an accelerator instance's root volume: the job image, and what jobs write outside S3."""
    cpu_root_volume_gib: int = 200
    max_nodes: int = 2
    """Accelerator instances that may run at once; Batch may exceed it by one instance."""
    max_cpu_nodes: int = 4
    share_decay_hours: int = 24
    """For how long what a team has used counts against it while teams compete."""
    nat_gateways: int = 1
    """0 saves the gateways' hourly price; jobs then reach AWS through VPC endpoints (priced by the hour too) and
    nothing else, so no hf:// source."""
    log_retention_days: int = 90
    checkpoint_retention_days: int = 30
    """Checkpoints older than this are deleted: a run that has not resumed by then starts anew. Models stay."""
    noncurrent_retention_days: int = 90
    """How long an overwritten or deleted object can be brought back."""
    termination_protection: bool = False
    """True: CloudFormation refuses to delete the stacks that hold data and images."""

    @property
    def row(self) -> InstanceType:
        """The accelerator instances' row. Raises UsageError where there is none."""
        return instance_type(self.instance_type)

    @property
    def cpu_row(self) -> InstanceType:
        """The CPU instances' row. Raises UsageError where there is none."""
        return instance_type(self.cpu_instance_type)

    @property
    def gaudi_release(self) -> Release:
        """Raises ConfigurationError where the release does not support the accelerators, UsageError where none is."""
        return release_for(self.row, self.release)

    @property
    def job_image_tag(self) -> str:
        return self.image_tag or self.gaudi_release.name


TEAMS = (Team(name="research"), Team(name="product"))

STAGES = {
    stage.name: stage
    for stage in (
        Stage(name="dev", teams=TEAMS, max_nodes=2),
        Stage(name="prod", teams=TEAMS, max_nodes=16, termination_protection=True),
    )
}
