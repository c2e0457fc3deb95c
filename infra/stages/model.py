"""A stage's fields: what each is for, its default, and the type that limits its value."""

from dataclasses import dataclass

from pydantic import ConfigDict

from infra.stages import limits
from jobs.core.images import Release, release_for
from jobs.core.instance_types import InstanceType, instance_type

_CHECKED = ConfigDict(strict=True, revalidate_instances="always")
"""How infra/stages/checks.py looks at rows: no value is converted, and rows that exist already are looked into."""


@dataclass(frozen=True, kw_only=True)
class Team:
    """A team: who pays, and whose files are whose."""

    __pydantic_config__ = _CHECKED

    name: limits.TeamName
    """Lower-case letters, digits and hyphens; also the team's prefix in the buckets."""
    share: limits.Share = 1.0
    """Of teams that share instances: capacity it gets while others wait too, in relation to theirs. 2.0 gets twice what
    1.0 gets."""
    monthly_budget_usd: limits.UsdAMonth | None = None
    """At 80 % alerts are sent; at 100 % its waiting jobs are cancelled and new ones refused until the month is over.
    None: only the stage's budget counts."""
    huggingface_token: bool = False
    """True: a secret is made for its Hugging Face token, and its jobs get what is put into it as HF_TOKEN. They do not
    start before something is."""
    secret_variables: limits.SecretVariables = ()
    """Names of variables whose values a secret holds, as a JSON object: its jobs get them (WANDB_API_KEY,
    MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN, …). They do not start before all of them are in it."""
    member_principals: tuple[limits.MemberPrincipal, ...] = ()
    """ARNs of IAM users or roles whose people may assume the team's role for submitting jobs and reading their results.
    None given: no such role is made, and people submit with rights of their own."""
    shares_instances: bool = False
    """True: its jobs run on the same instances as those of the other teams that say so, in one security group and under
    one instance role, and all of them have the stage's limits (`max_nodes` and its kin) together.

    False: it has queues, instances, a security group and an instance role of its own, and these limits to itself.
    """


@dataclass(frozen=True, kw_only=True)
class CapacityReservation:
    """Capacity that EC2 has promised, on which a pool's On-Demand instances draw and on nothing else."""

    __pydantic_config__ = _CHECKED

    target: limits.ReservationTarget
    """The id (`cr-…`) of an On-Demand Capacity Reservation or of a Capacity Block, or the ARN of a resource group of
    reservations. It is of the pool's instance type, in a zone of the stage's subnets: of the first one for jobs of
    several nodes."""
    is_block: bool = False
    """True: it is a Capacity Block, which ends on a day; EC2 terminates its instances half an hour before that."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Accelerator instances that go together: a type, and the software release that their driver and images have."""

    __pydantic_config__ = _CHECKED

    instance_type: str
    """A row of jobs/core/instance_types.json."""
    release: str | None = None
    """A row of images/releases.toml. None: the default one there."""
    machine_image: limits.MachineImage | None = None
    """The AMI of its instances, as `Stage.machine_image` says it."""
    root_device_name: limits.DeviceName | None = None
    """Root device of an AMI that is given, as `Stage.root_device_name` says it. None: the same as the stage's."""
    capacity_reservation: CapacityReservation | None = None
    """As `Stage.capacity_reservation` says it."""

    @property
    def row(self) -> InstanceType:
        """Return the row of its instance type. Raises UsageError where there is none."""
        return instance_type(self.instance_type)

    @property
    def software(self) -> Release:
        """Return its release.

        Raises ConfigurationError where the release does not support the accelerators, UsageError where none is.
        """
        return release_for(self.row, self.release)

    @property
    def builds_machine_image(self) -> bool:
        """Return whether the stage builds its AMI: as the type's row says, unless one is given."""
        return self.machine_image is None and self.row.machine_image == "stage"

    @property
    def id(self) -> str:
        """Return what names its resources: another type or release makes new ones beside the old."""
        return f"{self.instance_type}-{self.software.name}".replace(".", "-")


@dataclass(frozen=True, kw_only=True)
class ExistingVpc:
    """A VPC that is there already: the stage adds security groups and endpoints that are asked for, nothing else."""

    __pydantic_config__ = _CHECKED

    vpc_id: limits.VpcId
    """The id of the VPC: `vpc-…`."""
    private_subnet_ids: limits.SubnetIds
    """Where instances start: each with a way to AWS (NAT or endpoints), in zones that offer the instance type. Jobs of
    several nodes and FSx live in the first."""
    private_route_table_ids: limits.RouteTableIds = ()
    """The route tables of those subnets. Each gets a route to S3's gateway endpoint, which is free."""
    default_security_group_id: limits.SecurityGroupId | None = None
    """The VPC's default group, which Batch puts the containers of jobs of several nodes into where instances have EFA:
    the endpoints that the stage makes admit it. It stays as its owner has it, and has to let its members reach each
    other by TCP, and AWS by HTTPS. Needed with `max_multinode_nodes` and `interface_endpoints`."""


@dataclass(frozen=True, kw_only=True)
class Alerts:
    """The people who are told of failed jobs, blocked queues, reclaims and budgets."""

    __pydantic_config__ = _CHECKED

    emails: limits.Emails = ()
    """Each address gets a message from SNS and must confirm it once."""
    failed_jobs_an_hour: limits.FailedJobs = 3
    """As many raise the alarm of failed jobs."""


@dataclass(frozen=True, kw_only=True)
class GitHub:
    """The repository that CI deploys from: GitHub Actions, by OIDC, without a long-lived key."""

    __pydantic_config__ = _CHECKED

    repository: limits.Repository
    """`owner/name`."""
    environment: limits.GitHubEnvironment | None = None
    """GitHub environment whose protection rules guard the stage. None: the branch below."""
    branch: limits.Branch = "main"
    """Branch that may deploy where no environment is named, without `refs/heads/`."""
    oidc_provider_arn: limits.OidcProvider | None = None
    """The account's provider of token.actions.githubusercontent.com, of which there can be one. None: it is made."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One deployed environment: an account and a region."""

    __pydantic_config__ = _CHECKED

    name: limits.StageName
    """1 to 13 lower-case letters, digits and hyphens; it is part of what the stage's stacks are called."""
    teams: tuple[Team, ...]
    """Those who submit jobs to it: at least one."""
    account: limits.Account | None = None
    """The 12 digits of its id. None: whichever the credentials belong to at deploy time."""
    region: limits.Region | None = None
    """None: whichever the CDK CLI is set to. dl1.24xlarge is (or was) offered in us-east-1 and us-west-2 only."""

    bootstrap_qualifier: limits.Qualifier = "hnb659fds"
    """That of the CDK bootstrap which its stacks are deployed through (`cdk bootstrap --qualifier`); the default is the
    CDK's own."""

    # What jobs run on
    instance_type: str = "dl1.24xlarge"
    """What accelerated jobs run on: a row of jobs/core/instance_types.json."""
    cpu_instance_type: str = "m6i.4xlarge"
    """What corpus and tokenizer jobs run on: a row of jobs/core/instance_types.json without an accelerator."""
    release: str | None = None
    """Gaudi software release, a row of images/releases.toml: driver, images and what is in them. None: the default one
    there."""
    image_tag: limits.ImageTag | None = None
    """Tag of the images that jobs run, in the stage's repositories: one that `trainyard images push` made, to stay with
    it or to go back to it. None: what was pushed last for the release."""
    retiring: tuple[Pool, ...] = ()
    """Pools that the stage used before: they and their queues stay for what was submitted to them."""
    machine_image: limits.MachineImage | None = None
    """AMI of the accelerator instances: an id, or `ssm:` and the parameter that holds one, read at every deployment.

    None: on Gaudi, one that the stage builds itself with the driver of `release`; on other accelerators, the one that
    AWS recommends for ECS that day. One that is given must carry the driver of `release`, habana-container-runtime as
    Docker's default runtime, and the ECS agent.
    """
    build_unoffered: bool = False
    """True: the AMI of Gaudi instances is built though EC2 lists their type nowhere in the region, as AWS has promised
    some. Else the deployment ends before it takes that hour: Batch refuses types that EC2 does not list."""
    root_device_name: limits.DeviceName = "/dev/sda1"
    """Root device of an AMI that is given: Ubuntu's. Amazon Linux calls it /dev/xvda. Of AMIs that the stage builds, or
    that are AWS's own, it is known."""
    commands_in_jobs: bool | None = None
    """Lets a team's people run commands in the containers of its jobs that run, as root (`trainyard exec`).

    None: yes, but not on a `machine_image` that is given: ECS starts such a job only where the AMI has what the agent
    needs for it, as AWS's own AMIs for ECS have, and those that the stage builds. True: the given one has it too.
    """
    root_volume_gib: limits.VolumeGib = 500
    """Size of an accelerator instance's root volume: the job image, and what jobs write outside S3."""
    cpu_root_volume_gib: limits.CpuVolumeGib = 200
    """The same of a CPU instance."""

    # How much of it
    max_nodes: limits.NodesAtLeastOne = 2
    """Accelerator instances on Spot that each team may have at once, or all that share together; Batch may exceed it by
    one instance."""
    max_on_demand_nodes: limits.Nodes = 0
    """The same at the On-Demand price: where Spot has none, for jobs that were reclaimed too often, and for specs that
    ask for them. 0: none."""
    max_multinode_nodes: limits.Nodes = 0
    """The same, On-Demand and side by side, for jobs of several nodes that start together. 0: no such jobs; those of
    several nodes on Spot draw on `max_nodes`."""
    max_cpu_nodes: limits.NodesAtLeastOne = 4
    """CPU instances that each team may have at once, or all that share together."""
    capacity_reservation: CapacityReservation | None = None
    """Promised capacity that On-Demand instances run in; where it is used up, jobs wait. None: what EC2 has."""
    reclaims_before_on_demand: limits.Reclaims = 3
    """A job that Spot has taken away this often is moved to On-Demand, where the stage allows it."""
    spot_wait_hours: limits.SpotWaitHours | None = None
    """How long a job may wait at the head of the Spot queue for capacity before it is moved to On-Demand, or cancelled
    where the stage has none: up to 24. The Spot queue then has Spot capacity only, and the move takes the place of the
    overflow. None: a job starts On-Demand as soon as Batch finds no Spot, or waits where the stage has none."""

    # Network
    vpc: ExistingVpc | None = None
    """None: the stage makes its own."""
    vpc_cidr: limits.VpcCidr = "10.0.0.0/16"
    """Addresses of the VPC that the stage makes: a private /16, to be chosen on the first day. Another than its
    neighbours' where VPCs are to be connected."""
    availability_zone_ids: limits.ZoneIds = ()
    """Zones of the subnets, all in the stage's region, by id (`use1-az2`), which means the same zone in every account,
    unlike its letter.

    None given: where the region is given and the instance type's row knows its zones there, those; else the first two
    that the region lists. `python -m infra.preflight` asks EC2 which zones offer the type.
    """
    nat_gateways: int = 1
    """0 saves the gateways' hourly price; jobs then reach AWS through VPC endpoints (priced by the hour too) and
    nothing else, so no hf:// source, and no AMI can be built: a Gaudi stage has to be given a `machine_image`."""
    interface_endpoints: bool | None = None
    """VPC endpoints for the AWS services that instances and jobs call. None: where the stage's own VPC has no NAT."""

    # Storage
    own_kms_key: bool = False
    """True: buckets, repositories, secrets and topics are encrypted with a key of the stage's own, not with AWS's.

    To be chosen on the first day. Another choice makes new repositories, whose images have to be built again, and a new
    FSx file system; and jobs of a stage that gives its key up may no longer read what lies there under it.
    """
    fsx_gib: limits.FsxGib = 0
    """FSx for Lustre that shows `shared/` of the data bucket as a file system to accelerated jobs: 1200, or a multiple
    of 2400. 0: none."""
    checkpoint_retention_days: limits.RetentionDays = 30
    """Checkpoints older than this are deleted: a run that has not resumed by then starts anew. Models stay. What is
    kept for further attempts goes at the same age, and is made again when it is needed: packages of scripts,
    recipes of HPUs."""
    noncurrent_retention_days: limits.RetentionDays = 90
    """How long an overwritten or deleted object can be brought back."""
    log_retention_days: limits.LogRetentionDays = 90
    """How long logs are kept, those of jobs included."""

    # Organisation
    monthly_budget_usd: limits.UsdAMonth | None = None
    """What the stage may cost a month: at 80 % alerts are sent; at 100 % no instance starts until the month is over."""
    alerts: Alerts = Alerts()
    """Who is told of what."""
    deploy_from: GitHub | None = None
    """Who may deploy besides people with rights of their own. None: nobody."""
    permissions_boundary: limits.PolicyName | None = None
    """Name of the account's managed policy that every role must carry. None: the stage makes one."""
    termination_protection: bool = False
    """True: CloudFormation refuses to delete any of the stage's stacks."""

    @property
    def instance_owners(self) -> tuple[Team | None, ...]:
        """Return whose instances the stage has: each team's that has its own, after None, for those that others share.

        What a team has follows from its own row, so that one which comes or goes leaves the others' queues alone.
        """
        own = [team for team in self.teams if not team.shares_instances]
        return (*([None] if len(own) < len(self.teams) else []), *own)

    @property
    def queue_count(self) -> int:
        """Return how many job queues the stage has, which is also how many compute environments."""
        of_pool = 1 + bool(self.max_on_demand_nodes) + bool(self.max_multinode_nodes)
        return len(self.instance_owners) * (1 + (1 + len(self.retiring)) * of_pool)

    @property
    def bootstrap_options(self) -> list[str]:
        """Return what `cdk bootstrap` has to be told of its qualifier, whose stack needs a name of its own."""
        qualifier = self.bootstrap_qualifier
        if qualifier == Stage.bootstrap_qualifier:
            return []
        return ["--qualifier", qualifier, "--toolkit-stack-name", f"CDKToolkit-{qualifier}"]

    @property
    def pool(self) -> Pool:
        """Return the pool that new jobs run on."""
        return Pool(
            instance_type=self.instance_type,
            release=self.release,
            machine_image=self.machine_image,
            capacity_reservation=self.capacity_reservation,
        )

    @property
    def bootstrap_parameter(self) -> str:
        """Return the name of the SSM parameter in which its CDK bootstrap has its version."""
        return f"/cdk-bootstrap/{self.bootstrap_qualifier}/version"

    @property
    def row(self) -> InstanceType:
        """Return the accelerator instances' row. Raises UsageError where there is none."""
        return instance_type(self.instance_type)

    @property
    def cpu_row(self) -> InstanceType:
        """Return the CPU instances' row. Raises UsageError where there is none."""
        return instance_type(self.cpu_instance_type)

    def lets_commands_in(self, *, accelerated: bool) -> bool:
        """Return whether people may run commands in jobs, of those on accelerators or of those on CPUs."""
        if self.commands_in_jobs is None:
            return self.machine_image is None or not accelerated
        return self.commands_in_jobs
