"""What a stage's network consists of, as far as it follows from the settings alone: zones and endpoints.

Both the network's stack and the preflight read it; the latter without loading the CDK.
"""

from infra.stages import Stage
from jobs.core.instance_types import InstanceType

ZONES_WHERE_NONE_IS_KNOWN = 2
"""How many of a region's zones are taken, in their order, where neither settings nor rows name any."""

ENDPOINT_SERVICES = (
    *("ecr.api", "ecr.dkr"),
    *("ecs", "ecs-agent", "ecs-telemetry"),
    "logs",
    "sts",
    # Session Manager; SSM's agent needs no endpoint of ec2messages any more where it reaches ssmmessages.
    *("ssm", "ssmmessages"),
    "secretsmanager",
    "batch",
)
"""All that an instance and its job call to join, pull, log, read secrets and be reached: `com.amazonaws.<region>.…`."""


def zone_ids(stage: Stage) -> tuple[str, ...]:
    """Return the zones of the stage's own subnets: those it names, else those known to offer its accelerators.

    None where neither is known; `python -m infra.preflight` asks EC2.
    """
    if stage.availability_zone_ids or stage.region is None:
        return stage.availability_zone_ids
    # Those of pools that retire stay: their instances live there.
    rows = [pool.row for pool in (stage.pool, *stage.retiring)]
    return tuple(dict.fromkeys(zone for row in rows for zone in row.zone_ids.get(stage.region, ())))


def offering_indices(stage: Stage, row: InstanceType) -> list[int]:
    """Return which of the stage's subnets are in zones that are known to offer the type; none where nobody knows."""
    if stage.vpc is not None:
        return []
    known = row.zone_ids.get(stage.region or "", ())
    return [index for index, zone in enumerate(zone_ids(stage)) if zone in known]


def side_by_side_index(stage: Stage, row: InstanceType) -> int:
    """Return which of the stage's subnets has jobs of several nodes and FSx: EFA and placement groups span no zones."""
    return next(iter(offering_indices(stage, row)), 0)


def uses_default_security_group(stage: Stage) -> bool:
    """Return whether containers of its jobs are in the VPC's default group: see infra/network/stack.py."""
    pools = (stage.pool, *stage.retiring)
    return bool(stage.max_multinode_nodes) and any(pool.row.network_cards for pool in pools)


def has_interface_endpoints(stage: Stage) -> bool:
    """Return whether the stage makes interface endpoints: it asks for them, or its own VPC has no other way out."""
    if stage.interface_endpoints is not None:
        return stage.interface_endpoints
    return stage.vpc is None and stage.nat_gateways == 0
