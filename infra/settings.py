"""The file an organisation edits: its stages, teams and limits. Everything deployed follows from it.

cdk deploy 'dev/*'        deploys what the row `dev` says
"""

from dataclasses import dataclass

from jobs.releases import release


@dataclass(frozen=True, kw_only=True)
class Team:
    """Who pays, and whose files are whose."""

    name: str
    """Lower-case letters, digits and hyphens; also the team's prefix in the buckets."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One deployed environment: an account and a region."""

    name: str
    teams: tuple[Team, ...]
    account: str | None = None
    """None: whichever the credentials belong to at deploy time."""
    region: str | None = None
    """None: whichever the CDK CLI is set to. dl1.24xlarge is (or was) offered in us-east-1 and us-west-2 only."""
    instance_type: str = "dl1.24xlarge"
    """What accelerated jobs run on: a row of jobs/instance_types.py."""
    cpu_instance_type: str = "m6i.4xlarge"
    """What corpus and tokenizer jobs run on."""
    release: str = release().name
    """Gaudi software release, a row of images/releases.toml."""
    max_nodes: int = 2
    """Accelerator instances that may run at once; Batch may exceed it by one instance."""
    max_cpu_nodes: int = 4
    root_volume_gib: int = 500
    """Size of an accelerator instance's root volume."""
    log_retention_days: int = 90
    nat_gateways: int = 1
    """0 saves the gateway's hourly price; jobs then reach what VPC endpoints offer and nothing else."""
    machine_image: str = "ssm:/trainyard/machine-image/gaudi"
    """AMI of the accelerator instances: an id, or `ssm:` and the parameter that holds one.

    It must carry the Gaudi driver of `release`, habana-container-runtime as Docker's default runtime, and the ECS
    agent; none that AWS publishes was found to have all three.
    """


TEAMS = (Team(name="research"), Team(name="product"))

STAGES = {
    stage.name: stage
    for stage in (
        Stage(name="dev", teams=TEAMS, max_nodes=2),
        Stage(name="prod", teams=TEAMS, max_nodes=16),
    )
}
