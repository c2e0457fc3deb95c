"""Zones and endpoints of a stage's network that follow from the settings alone.

The network stack and the preflight use this module. The preflight must not load the CDK.
"""

from infra.stages import Stage
from jobs.core.instance_types import InstanceType

DEFAULT_ZONE_COUNT = 2
"""Number of the region's first zones to use if neither the settings nor the instance types' rows name zones."""

ENDPOINT_SERVICES = (
    *("ecr.api", "ecr.dkr"),
    *("ecs", "ecs-agent", "ecs-telemetry"),
    "logs",
    "sts",
    # Session Manager. SSM's agent needs no ec2messages endpoint if it reaches ssmmessages.
    *("ssm", "ssmmessages"),
    "secretsmanager",
    "batch",
)
"""Services that an instance and its job call to join the cluster, pull images, log, read secrets and accept sessions:
`com.amazonaws.<region>.…`."""


def zone_ids(stage: Stage) -> tuple[str, ...]:
    """Return the zones of the stage's own subnets: those in the settings, else those known to offer its accelerators.

    Empty if neither is known. `python -m infra.preflight` checks with EC2.
    """
    if stage.availability_zone_ids or stage.region is None:
        return stage.availability_zone_ids
    # Include the zones of retiring pools, because their instances run there.
    rows = [pool.row for pool in (stage.pool, *stage.retiring)]
    return tuple(dict.fromkeys(zone for row in rows for zone in row.zone_ids.get(stage.region, ())))


def offering_indices(stage: Stage, row: InstanceType) -> list[int]:
    """Return the indices of the stage's subnets in zones known to offer the type; empty if none is known."""
    if stage.vpc is not None:
        return []
    known = row.zone_ids.get(stage.region or "", ())
    return [index for index, zone in enumerate(zone_ids(stage)) if zone in known]


def multinode_subnet_index(stage: Stage) -> int:
    """Return the index of the subnet for multi-node jobs and FSx: EFA and placement groups cannot span zones."""
    return next(iter(offering_indices(stage, stage.row)), 0)


def uses_default_security_group(stage: Stage) -> bool:
    """Return whether containers of the stage's jobs are in the VPC's default group; see infra/network/stack.py."""
    pools = (stage.pool, *stage.retiring)
    return bool(stage.max_multinode_nodes) and any(pool.row.network_cards for pool in pools)


def has_interface_endpoints(stage: Stage) -> bool:
    """Return whether the stage creates interface endpoints: on request, or if its own VPC has no NAT."""
    if stage.interface_endpoints is not None:
        return stage.interface_endpoints
    return stage.vpc is None and stage.nat_gateways == 0
