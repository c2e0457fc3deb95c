"""Zones and endpoints of a stage's network that follow from the settings alone.

The network stack and the preflight use this module. The preflight must not load the CDK.
"""

from collections.abc import Sequence

from infra.stages import Pool, Stage
from jobs.core.instance_types import InstanceType
from jobs.core.queues import MAX_QUEUE_ENVIRONMENTS

DEFAULT_ZONE_COUNT = 2
"""Number of the region's first zones to use if neither the settings nor the instance types' rows name zones."""

MAX_ENDPOINT_ZONES = 3
"""Maximum number of zones with endpoints, unless the settings name zones. Each endpoint is paid per zone, and serves
the whole VPC, because its name resolves to its addresses (repost.aws/knowledge-center/vpc-interface-configure-dns)."""

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
    if stage.availability_zone_ids:
        return stage.availability_zone_ids
    # Include the zones of retiring pools, because their instances run there.
    offering = [zone for pool in stage.pools for row in pool.rows for zone in row.zone_ids.get(stage.region or "", ())]
    # Last, so that they move no subnet. Never alone, because then they would replace the first two zones.
    reserved = [pool.capacity_reservation.zone_id for pool in stage.pools if offering and pool.capacity_reservation]
    return tuple(dict.fromkeys((*offering, *filter(None, reserved))))


def offering_indices(stage: Stage, types: Sequence[InstanceType]) -> list[int]:
    """Return the indices of the stage's subnets in zones known to offer one of the types; empty if none is known."""
    if stage.vpc is not None:
        return []
    known = [zone for row in types for zone in row.zone_ids.get(stage.region or "", ())]
    return [index for index, zone in enumerate(zone_ids(stage)) if zone in known]


def subnet_names(stage: Stage) -> tuple[str, ...]:
    """Return the ids of an existing VPC's subnets, or of the zones of the stage's subnets if they are known."""
    return zone_ids(stage) if stage.vpc is None else stage.vpc.private_subnet_ids


def reserved_subnet_index(stage: Stage, pool: Pool) -> int | None:
    """Return the index of the only subnet for the pool's On-Demand instances, or None if they may use several.

    A launch that targets a reservation fails in every other zone (Amazon EC2 user guide, "Launch instances into an
    existing Capacity Reservation" and "Launch instances using Capacity Blocks").
    """
    reservation, names = pool.capacity_reservation, subnet_names(stage)
    place = reservation and (reservation.zone_id or reservation.subnet_id)
    return names.index(place) if place in names else None


def multinode_subnet_indices(stage: Stage, pool: Pool) -> list[int]:
    """Return the indices of the subnets for a pool's multi-node jobs, at most three: one for each compute environment.

    EFA and placement groups cannot span zones, so each zone has its own environment. Batch tries them in this order: if
    one "can't provide a suitable compute resource, the scheduler attempts to run the job on the next compute
    environment" (AWS Batch User Guide, "Compute environments").

    A stage's own subnets count if their zones are known to offer the type; if none is known, only the first counts. The
    subnets of an existing VPC all count, because their zones have to offer it.
    """
    reserved = reserved_subnet_index(stage, pool)
    if reserved is not None:
        return [reserved]
    found = range(len(stage.vpc.private_subnet_ids)) if stage.vpc else offering_indices(stage, pool.rows[:1]) or [0]
    return list(found)[:MAX_QUEUE_ENVIRONMENTS]


def environment_count(stage: Stage) -> int:
    """Return the number of compute environments of the stage."""
    found = [
        len(pool.environments)
        + len(pool.on_demand_environments) * bool(stage.max_on_demand_nodes)
        + len(multinode_subnet_indices(stage, pool)) * bool(stage.max_multinode_nodes)
        for pool in stage.pools
    ]
    return len(stage.instance_owners) * (1 + sum(found))


def fsx_subnet_index(stage: Stage) -> int:
    """Return the index of the subnet for FSx, in the first zone known to offer the accelerators."""
    return next(iter(offering_indices(stage, [stage.row])), 0)


def egress_ports(stage: Stage) -> dict[tuple[str, int], str]:
    """Return protocol and port of what jobs may connect to outside, each with the description of its rule."""
    ports = [("tcp", port) for port in stage.egress_ports] + [("udp", port) for port in stage.egress_udp_ports]
    proxy = {("tcp", stage.proxy.port): "The proxy"} if stage.proxy else {}
    https = {("tcp", 443): "AWS, Hugging Face, package registries"}
    return {**dict.fromkeys(ports, "Allowed by the settings"), **proxy, **https}


def uses_default_security_group(stage: Stage) -> bool:
    """Return whether containers of the stage's jobs are in the VPC's default group; see infra/network/stack.py."""
    return bool(stage.max_multinode_nodes) and any(pool.row.efa_cards for pool in stage.pools)


def endpoint_zone_count(stage: Stage) -> int | None:
    """Return how many of the stage's subnets get endpoints, or None for all: those that the settings name."""
    return None if stage.vpc or stage.availability_zone_ids else MAX_ENDPOINT_ZONES


def has_interface_endpoints(stage: Stage) -> bool:
    """Return whether the stage creates interface endpoints: on request, or if its own VPC has no NAT."""
    if stage.interface_endpoints is not None:
        return stage.interface_endpoints
    return stage.vpc is None and stage.nat_gateways == 0
