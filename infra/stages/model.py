"""The fields of a stage and its teams: purpose, default, and the type that limits each value."""

from dataclasses import dataclass, replace

from pydantic import ConfigDict

from infra.stages import limits
from jobs.core.images import Release, release_for
from jobs.core.instance_types import InstanceType, instance_type
from jobs.core.queues import environments

_CHECKED = ConfigDict(strict=True, revalidate_instances="always")
"""How infra/stages/checks.py validates rows: it converts no value, and also validates nested dataclass instances."""


@dataclass(frozen=True, kw_only=True)
class Team:
    """A team, whose jobs, files and costs are separate from other teams'."""

    __pydantic_config__ = _CHECKED

    name: limits.TeamName
    """At most 31 lower-case letters, digits and hyphens. Also the team's prefix in the buckets."""
    share: limits.Share = 1.0
    """Weight of this team among teams that share instances, while jobs of several teams wait: 2.0 gets twice the
    capacity of 1.0. Only valid with `shares_instances=True`."""
    monthly_budget_usd: limits.Usd | None = None
    """Monthly budget of the team in US dollars. At 80 %, alerts are sent. At 100 %, the team's waiting jobs are
    cancelled and new ones refused until the month ends. AWS counts what the tag `trainyard:team` is on, once it is
    activated as a cost allocation tag. By default, only the stage's budget applies."""
    max_usd_per_hour: limits.Usd | None = None
    """Limit of what the team's instances cost an hour, as `Stage.max_usd_per_hour`. Not with `shares_instances=True`.
    By default, only the stage's limit applies."""
    huggingface_token: bool = False
    """Create a secret for the team's Hugging Face token, which its jobs receive as HF_TOKEN. Jobs do not start until
    someone puts a token into the secret."""
    secret_variables: limits.SecretVariables = ()
    """Environment variables that the team's jobs read from a secret (WANDB_API_KEY, MLFLOW_TRACKING_URI,
    MLFLOW_TRACKING_TOKEN, …). The secret is a JSON object with these names as keys. Jobs do not start until it has a
    value for every name."""
    member_principals: tuple[limits.MemberPrincipal, ...] = ()
    """ARNs of IAM users or roles that may assume the team's role, which submits jobs and reads their results.
    Without them, the team gets no role, and people submit with their own permissions."""
    shares_instances: bool = False
    """Run this team's jobs on instances shared with every other team that sets this. These teams share one
    security group, one instance role, and the stage's limits (`max_nodes` and the other `max_…_nodes`).

    By default, the team has its own queues, instances, security group and instance role, and its own limits.
    """


@dataclass(frozen=True, kw_only=True)
class CapacityReservation:
    """Reserved EC2 capacity. A pool's On-Demand instances run in it and nowhere else."""

    __pydantic_config__ = _CHECKED

    target: limits.ReservationTarget
    """Id (`cr-…`) of an On-Demand Capacity Reservation or a Capacity Block, or ARN of a resource group of reservations.
    The capacity must be of the pool's first instance type."""
    zone_id: limits.ZoneId | None = None
    """Zone of the capacity, by id (`use1-az2`), for a `cr-…` if the stage has several zones. On-Demand instances start
    only in this zone, which must be in `availability_zone_ids` if zones are set or unknown. To find the zone: `aws ec2
    describe-capacity-reservations --capacity-reservation-ids cr-… --query
    'CapacityReservations[].AvailabilityZoneId'`."""
    subnet_id: limits.SubnetId | None = None
    """Subnet in the zone of the capacity, instead of `zone_id`, if the stage uses an existing `vpc`."""
    is_block: bool = False
    """Set this if `target` is a Capacity Block. A block ends on a fixed day, and EC2 terminates its instances half an
    hour before the end."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A pool of accelerator instances: their types, and the software release of their driver and images."""

    __pydantic_config__ = _CHECKED

    instance_types: limits.InstanceTypes
    """Rows of jobs/core/instance_types.json; see `Stage.instance_types`."""
    release: str | None = None
    """A row of images/releases.toml for the instance types' image. Defaults to that image's default release."""
    machine_image: limits.MachineImage | None = None
    """AMI of the pool's instances; see `Stage.machine_image`."""
    root_device_name: limits.DeviceName | None = None
    """Root device of a custom AMI; see `Stage.root_device_name`. Defaults to the stage's."""
    capacity_reservation: CapacityReservation | None = None
    """Reserved capacity of the pool; see `Stage.capacity_reservation`."""

    @property
    def rows(self) -> tuple[InstanceType, ...]:
        """Return the rows of the pool's instance types. Raises UsageError if one has none."""
        return tuple(map(instance_type, self.instance_types))

    @property
    def row(self) -> InstanceType:
        """Return the row of the first type, for what all types have in common. Raises UsageError if there is none."""
        return self.rows[0]

    @property
    def job_row(self) -> InstanceType:
        """Return the first row with the vCPUs and memory that every type has: what a job may ask for."""
        rows = self.rows
        return replace(
            rows[0], vcpus=min(row.vcpus for row in rows), job_memory_mib=min(row.job_memory_mib for row in rows)
        )

    @property
    def environments(self) -> list[tuple[InstanceType, ...]]:
        """Return the types of each compute environment, in the order in which Batch tries them."""
        return environments(self.rows)

    @property
    def on_demand_environments(self) -> list[tuple[InstanceType, ...]]:
        """Return the same for On-Demand instances: only the first type if it is reserved."""
        return [self.rows[:1]] if self.capacity_reservation else self.environments

    @property
    def software(self) -> Release:
        """Return the pool's release.

        Raises ConfigurationError if the release does not support the accelerators, UsageError if there is no such
        release.
        """
        found, *_ = [release_for(row, self.release) for row in self.rows]
        return found

    @property
    def builds_machine_image(self) -> bool:
        """Return whether the stage builds the pool's AMI: the instance type requires it, and no AMI is set."""
        return self.machine_image is None and self.row.machine_image == "stage"

    @property
    def id(self) -> str:
        """Return the id in the pool's resource names. Another first type or release gets new resources."""
        return f"{self.instance_types[0]}-{self.software.name}".replace(".", "-")


@dataclass(frozen=True, kw_only=True)
class ExistingVpc:
    """An existing VPC. The stage adds security groups and the endpoints you ask for, and changes nothing else."""

    __pydantic_config__ = _CHECKED

    vpc_id: limits.VpcId
    """Id of the VPC: `vpc-…`."""
    private_subnet_ids: limits.SubnetIds
    """Subnets in which instances start. Each needs a route to AWS (NAT or endpoints), in a zone that offers the
    instance type. Multi-node jobs use the first three, best in different zones. FSx is in the first one."""
    private_route_table_ids: limits.RouteTableIds = ()
    """Route tables of these subnets. Each gets a route to an S3 gateway endpoint, which is free."""
    default_security_group_id: limits.SecurityGroupId | None = None
    """The VPC's default security group. Batch puts the containers of multi-node jobs on EFA instances into it, because
    their compute environment cannot have a group (docs.aws.amazon.com/batch/latest/userguide/mnp-ce), and the stage's
    endpoints admit it. The stage does not change it: its members must be able to reach each other over TCP, and AWS
    over HTTPS. Required with `max_multinode_nodes` and `interface_endpoints`."""


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """The HTTP proxy through which instances and jobs reach everything outside the VPC."""

    __pydantic_config__ = _CHECKED

    url: limits.ProxyUrl
    """`http://HOST:PORT`, without a user. The security groups of jobs allow this port."""
    bypass: limits.ProxyBypass = ()
    """Hosts, domains (`.example.com`), addresses and ranges to reach directly, in addition to the instance itself, S3,
    a VPC that the stage creates and, if the stage creates endpoints, all AWS services of the region. In an existing
    VPC, list its address range."""

    @property
    def port(self) -> int:
        """Return the proxy's port."""
        return int(self.url.rpartition(":")[2])


@dataclass(frozen=True, kw_only=True)
class Alerts:
    """Who is notified about failed jobs, blocked queues, reclaims and budgets."""

    __pydantic_config__ = _CHECKED

    emails: limits.Emails = ()
    """Addresses to notify. SNS sends each a message with a link to confirm the subscription."""
    failed_jobs_an_hour: limits.FailedJobs = 3
    """Failed jobs within an hour that raise the alarm."""


@dataclass(frozen=True, kw_only=True)
class GitHub:
    """The GitHub repository whose Actions deploy the stage, through OIDC and without a long-lived key.

    Its pull requests may read the templates of the stage's stacks, for `cdk diff`.
    """

    __pydantic_config__ = _CHECKED

    repository: limits.Repository
    """The repository: `owner/name`."""
    owner_id: limits.GitHubId | None = None
    """GitHub's number of the owner; `gh api repos/OWNER/NAME --jq .owner.id` prints it. Set it together with
    `repository_id` if the repository was created, renamed or transferred after 15 July 2026, or has opted in to
    immutable subject claims: GitHub's tokens then contain both numbers."""
    repository_id: limits.GitHubId | None = None
    """GitHub's number of the repository; `gh api repos/OWNER/NAME --jq .id` prints it. See `owner_id`."""
    environment: limits.GitHubEnvironment | None = None
    """GitHub environment that may deploy; its protection rules guard the stage. Without it, `branch` may deploy."""
    branch: limits.Branch = "main"
    """Branch that may deploy if `environment` is not set, without `refs/heads/`."""
    oidc_provider_arn: limits.OidcProvider | None = None
    """The account's OIDC provider for token.actions.githubusercontent.com; an account can have only one. By
    default, the stage creates it."""

    @property
    def subject(self) -> str:
        """Return the only subject (`sub`) of GitHub's tokens that may deploy.

        Source: github/docs, content/actions/reference/security/oidc.md, "Immutable subject claims": ids follow names
        after `@`, in repositories created, renamed or transferred after 15 July 2026. The changelog of 2026-04-23
        announced `-` and 18 June instead; GitHub's reference and its users report what is here.
        """
        place = f"environment:{self.environment}" if self.environment else f"ref:refs/heads/{self.branch}"
        return f"{self._repository}:{place}"

    @property
    def pull_request_subject(self) -> str:
        """Return the subject of GitHub's tokens in workflows of pull requests, in jobs without an environment.

        Workflows of pull requests from forks get no token. Source: github/docs, the page named above, "Filtering for
        `pull_request` events".
        """
        return f"{self._repository}:pull_request"

    @property
    def _repository(self) -> str:
        owner, name = self.repository.split("/")
        if self.owner_id is not None:
            owner, name = f"{owner}@{self.owner_id}", f"{name}@{self.repository_id}"
        return f"repo:{owner}/{name}"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One deployed environment, in one account and region."""

    __pydantic_config__ = _CHECKED

    name: limits.StageName
    """1 to 13 lower-case letters, digits and hyphens. Part of the names of the stage's stacks."""
    teams: tuple[Team, ...]
    """The teams that submit jobs: at least one."""
    account: limits.Account | None = None
    """12-digit account id. Defaults to the account of the credentials at deploy time."""
    region: limits.Region | None = None
    """AWS region. Defaults to the CDK CLI's region. EC2 has offered dl1.24xlarge only in us-east-1 and us-west-2."""
    dedicated_account: bool = False
    """Whether nothing but this stage costs money in `account`. Its `monthly_budget_usd` then counts everything in the
    account, and needs no cost allocation tag. Do not set it for the account that pays for an organisation: its budget
    would count all accounts."""

    bootstrap_qualifier: limits.Qualifier = "hnb659fds"
    """Qualifier of the CDK bootstrap that deploys the stacks (`cdk bootstrap --qualifier`). Default: the CDK's own."""

    # Instances, software and AMIs
    instance_types: limits.InstanceTypes = ("dl1.24xlarge",)
    """Instance types of accelerated jobs, in the order in which Batch tries them: rows of
    jobs/core/instance_types.json with the same image and number of cards. A job asks for the vCPUs and memory of the
    smallest.

    Neighbours with the same card share a compute environment, in which Batch picks the type by price and capacity. Each
    other card has a separate environment, which Batch tries when those before it have no capacity; a queue has at most
    three. Jobs whose nodes start together, and reserved capacity, use the first type only.
    """
    cpu_instance_type: str = "m6i.4xlarge"
    """Instance type of corpus and tokenizer jobs: a row of jobs/core/instance_types.json without an accelerator."""
    release: str | None = None
    """Software release of driver and images: a row of images/releases.toml for the accelerator. Defaults to the
    accelerator's default release. Jobs on CPUs always use the default of `cpu`."""
    image_tag: limits.ImageTag | None = None
    """Tag of the images that jobs run, as made by `trainyard images push`: set it to pin a version or to roll back.
    Defaults to the latest push for the release."""
    retiring: tuple[Pool, ...] = ()
    """Pools that the stage used before. They and their queues stay, so that jobs already submitted to them can
    finish."""
    machine_image: limits.MachineImage | None = None
    """AMI of the accelerator instances: an id, or `ssm:` and the name of a parameter that holds one.

    By default, on Gaudi, the stage builds an AMI with the driver of `release`; other accelerators use the AMI that AWS
    recommends for ECS. A custom AMI must have the driver of `release`, habana-container-runtime as Docker's default
    runtime, and the ECS agent.

    Parameters, the stage's and AWS's too, are read at every deployment until `python -m infra.amis update` records the
    id in infra/amis.json.
    """
    cpu_machine_image: limits.MachineImage | None = None
    """The same for CPU instances. By default, they use the AMI that AWS recommends for ECS."""
    allow_unoffered: bool = False
    """Deploy even if EC2 lists an instance type of the stage in no zone of the region, for example because AWS has
    promised some. Otherwise the first stack fails, before anything that costs money is created: Batch refuses unlisted
    types."""
    root_device_name: limits.DeviceName = "/dev/sda1"
    """Root device of a custom AMI. Default: Ubuntu's; Amazon Linux uses /dev/xvda. Ignored for AMIs that the stage
    builds and for AWS's own AMIs, whose root device is known."""
    cpu_root_device_name: limits.DeviceName = "/dev/xvda"
    """Root device of a custom `cpu_machine_image`. Default: Amazon Linux's; Ubuntu uses /dev/sda1."""
    commands_in_jobs: bool | None = None
    """Let team members run commands as root in their running jobs (`trainyard exec`).

    By default they may, except on a custom AMI (`machine_image`, `cpu_machine_image`), because ECS starts such a job
    only if the AMI has what ECS Exec needs. AWS's ECS AMIs and those that the stage builds have it. Set True if your
    AMI has it too.
    """
    root_volume_gib: limits.VolumeGib = 500
    """Root volume of accelerator instances, in GiB. It holds the job image and what jobs write outside S3."""
    cpu_root_volume_gib: limits.CpuVolumeGib = 200
    """Root volume of CPU instances, in GiB."""

    # Capacity limits
    max_nodes: limits.NodesAtLeastOne = 2
    """Maximum number of accelerator Spot instances per team (together for teams that share instances), and per card if
    `instance_types` has several. Batch may exceed it by one instance."""
    max_on_demand_nodes: limits.Nodes = 0
    """Maximum number of On-Demand accelerator instances per team and card: for jobs that find no Spot capacity, were
    reclaimed too often, or ask for On-Demand in their spec. With 0, the stage has no On-Demand capacity."""
    max_multinode_nodes: limits.Nodes = 0
    """Maximum number of On-Demand instances per team and zone for multi-node jobs whose nodes start together. All nodes
    of a job are in one zone, the first with capacity of up to three that offer the first of `instance_types`; several
    jobs may be in several zones. With 0, there are no such jobs; multi-node jobs on Spot count towards `max_nodes`
    instead."""
    max_cpu_nodes: limits.NodesAtLeastOne = 4
    """Maximum number of CPU instances per team (together for teams that share instances)."""
    capacity_reservation: CapacityReservation | None = None
    """Reserved capacity of the first of `instance_types`, for On-Demand instances. When it is used up, jobs wait. By
    default, On-Demand instances take any capacity that EC2 has."""
    reclaims_before_on_demand: limits.Reclaims = 3
    """Number of Spot reclaims after which a job moves to On-Demand, if the stage has On-Demand capacity."""
    spot_wait_hours: limits.SpotWaitHours | None = None
    """Hours, up to 24, that a job may wait for capacity at the head of the Spot queue before it moves to
    `fallback_stage` or to On-Demand, or is cancelled if the stage has neither. With this setting, the Spot queue does
    not fall back to On-Demand instances by itself. Without this setting, a job starts On-Demand as soon as Batch finds
    no Spot capacity; if the stage has no On-Demand capacity, the job waits."""
    fallback_stage: limits.StageName | None = None
    """Name of a stage in another region of the same account, to which a job of one node on Spot moves if it found no
    capacity for `spot_wait_hours`, which must be set. So does a job whose last attempt a reclaim ended, if this stage
    has no On-Demand capacity. A job moves only once.

    The run's files stay here: the job reads and writes them from there, and AWS charges for transfer between regions.
    Deploy the other stage first, push its images, and store its teams' secrets. It needs the teams of this stage, with
    the same secrets, and the same release. Its `instance_types` must all be types of this stage. Two stages can be each
    other's fallback. Jobs of several nodes, CPU jobs, jobs of retiring pools, and sweeps do not move."""

    # Network
    vpc: ExistingVpc | None = None
    """An existing VPC to use. By default, the stage creates a VPC."""
    vpc_cidr: limits.VpcCidr = "10.0.0.0/16"
    """Address range of the VPC that the stage creates: a private /16. Choose it before the first deployment, and
    differently from the VPCs it may be connected to."""
    availability_zone_ids: limits.ZoneIds = ()
    """Zones of the subnets, all in the stage's region, by id (`use1-az2`). Unlike a zone's letter, its id means the
    same zone in every account.

    By default, these are the zones of `region` that are known to offer the instance type. If no zone is known, or
    `region` is not set, they are the region's first two. `python -m infra.preflight` checks with EC2 which zones offer
    the type.
    """
    nat_gateways: int = 1
    """Number of NAT gateways, at most one per zone. 0 saves their hourly price, but jobs then reach AWS only, through
    VPC endpoints (also priced by the hour): no hf:// sources, and no AMI builds, so a Gaudi stage needs a
    `machine_image`."""
    interface_endpoints: bool | None = None
    """Create VPC endpoints for the AWS services that instances and jobs call. By default, only a VPC that the stage
    creates without NAT gets them. They are in the first three zones, or in all zones or subnets that the settings name,
    and serve the whole VPC."""
    egress_ports: limits.EgressPorts = (443,)
    """TCP ports on which jobs and their instances may connect to any address. Security groups refuse all others."""
    egress_udp_ports: limits.Ports = ()
    """The same for UDP: for example 53, if the VPC uses your own DNS servers. AWS's resolver needs no port."""
    proxy: Proxy | None = None
    """HTTP proxy for instances and jobs. By default, they connect directly. Builds of AMIs use no proxy, so a Gaudi
    stage needs a `machine_image`."""

    # Storage
    ebs_key_arn: limits.KmsKeyArn | None = None
    """ARN of your KMS key for the volumes of instances, and for AMIs that the stage builds. By default, EBS uses the
    account's default key. The key's policy must let the service-linked roles of EC2 Auto Scaling and, for Spot, of EC2
    Spot use it; the preflight checks both."""
    own_kms_key: bool = False
    """Encrypt buckets, repositories, secrets and topics with the stage's own KMS key instead of AWS's keys.

    Choose before the first deployment. A later change replaces the repositories, so all images must be built again, and
    the FSx file system. After turning it off, jobs may no longer be able to read data encrypted with the key.
    """
    fsx_gib: limits.FsxGib = 0
    """Size in GiB of an FSx for Lustre file system that shows `shared/` of the data bucket to accelerated jobs: 1200,
    or a multiple of 2400. It is in one zone; jobs in other zones pay EC2's transfer between zones for what they read.
    With 0, there is no file system."""
    checkpoint_retention_days: limits.RetentionDays = 30
    """Days after which checkpoints are deleted; a run that has not resumed by then starts from the beginning. Models
    are kept. Caches for later attempts (packages of scripts, HPU recipes) expire at the same age and are rebuilt when
    needed."""
    noncurrent_retention_days: limits.RetentionDays = 90
    """Days for which an overwritten or deleted object can be restored. Checkpoints and caches: at most 3."""
    log_retention_days: limits.LogRetentionDays = 90
    """Days for which logs are kept, including the logs of jobs. CloudWatch accepts certain values only."""

    # Organisation
    monthly_budget_usd: limits.Usd | None = None
    """Monthly budget of the stage in US dollars. At 80 %, alerts are sent. At 100 %, no instance starts until the month
    ends. AWS counts up to a day late and, without `dedicated_account`, only what the tag `trainyard:stage` is on, once
    it is activated as a cost allocation tag. By default, the stage has no budget."""
    max_usd_per_hour: limits.Usd | None = None
    """Limit of what the stage's instances cost an hour at their recorded prices. They are counted every five minutes.
    Above the limit, no instance starts until running jobs have ended and the cost is below it. By default, there is no
    limit."""
    alerts: Alerts = Alerts()
    """Who is notified, and when."""
    deploy_from: GitHub | None = None
    """GitHub repository that may deploy, in addition to people with their own permissions. Default: none."""
    permissions_boundary: limits.PolicyName | None = None
    """Name of an existing managed policy that every role must have as its boundary. Default: the stage creates one."""
    termination_protection: bool = False
    """Make CloudFormation refuse to delete the stage's stacks."""

    @property
    def instance_owners(self) -> tuple[Team | None, ...]:
        """Return the teams with their own instances, preceded by None if some teams share instances.

        A team's instances follow from its own row, so adding or removing a team does not change the other teams'
        queues.
        """
        with_own_instances = [team for team in self.teams if not team.shares_instances]
        return (*([None] if len(with_own_instances) < len(self.teams) else []), *with_own_instances)

    @property
    def hourly_limits(self) -> dict[str | None, float]:
        """Return the limits of what instances cost an hour, by team; None is the stage."""
        limits = [(None, self.max_usd_per_hour), *((team.name, team.max_usd_per_hour) for team in self.teams)]
        return {owner: usd for owner, usd in limits if usd is not None}

    @property
    def queue_count(self) -> int:
        """Return the number of job queues of the stage."""
        of_every_pool = 1 + bool(self.max_on_demand_nodes) + bool(self.max_multinode_nodes)
        queues = [of_every_pool + len(pool.environments[1:] and pool.environments) for pool in self.pools]
        return len(self.instance_owners) * (1 + sum(queues))

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Return the pool of new jobs, and those that retire."""
        return (self.pool, *self.retiring)

    @property
    def bootstrap_options(self) -> list[str]:
        """Return the arguments of `cdk bootstrap` for the qualifier; a custom one needs its own stack name."""
        qualifier = self.bootstrap_qualifier
        if qualifier == Stage.bootstrap_qualifier:
            return []
        return ["--qualifier", qualifier, "--toolkit-stack-name", f"CDKToolkit-{qualifier}"]

    @property
    def pool(self) -> Pool:
        """Return the pool of new jobs."""
        return Pool(
            instance_types=self.instance_types,
            release=self.release,
            machine_image=self.machine_image,
            capacity_reservation=self.capacity_reservation,
        )

    @property
    def cpu_pool_id(self) -> str:
        """Return the id of the CPU pool; see `Pool.id`."""
        return f"cpu-{self.cpu_instance_type.replace('.', '-')}"

    @property
    def cpu_software(self) -> Release:
        """Return the release of CPU jobs: the pool's if the pool has no accelerators, else the default."""
        return self.pool.software if self.row.image == self.cpu_row.image else release_for(self.cpu_row)

    @property
    def bootstrap_parameter(self) -> str:
        """Return the name of the SSM parameter that holds the version of the CDK bootstrap."""
        return f"/cdk-bootstrap/{self.bootstrap_qualifier}/version"

    @property
    def row(self) -> InstanceType:
        """Return the row of the first accelerator instance type. Raises UsageError if there is none."""
        return self.pool.row

    @property
    def cpu_row(self) -> InstanceType:
        """Return the row of the CPU instance type. Raises UsageError if there is none."""
        return instance_type(self.cpu_instance_type)

    def allows_exec(self, *, accelerated: bool) -> bool:
        """Return whether people may run commands in jobs on accelerators, or on CPUs if `accelerated` is False."""
        if self.commands_in_jobs is None:
            return (self.machine_image if accelerated else self.cpu_machine_image) is None
        return self.commands_in_jobs
