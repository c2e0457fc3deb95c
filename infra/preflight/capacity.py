"""Checks of capacity: whether EC2 offers what the stage trains on, where, and how much the account may have."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from botocore.exceptions import ClientError

from infra.preflight.account import Account, Finding, error_code, ok, problem, unknown
from infra.stages import Stage
from infra.stages.limits import MAX_QUEUES
from infra.stages.network_plan import DEFAULT_ZONE_COUNT, multinode_subnet_index, zone_ids
from jobs.core.instance_types import INSTANCE_TYPES, InstanceType

GONE = {
    "dl1.24xlarge": (
        "its API has not listed it since mid-2026 (AWS's own scripts/gen_vpc_ip_limits.go in aws/amazon-vpc-cni-k8s, "
        "2026-07-14: 'missing from the EC2 API, but is documented'; no notice of AWS's was found); Batch refuses "
        "types that are not listed, so no deployment could succeed"
    )
}
"""Types that have gone from EC2's answers, with what is known of it."""

OFFER = "instance types"
QUOTA = "vCPU quotas"
BATCH = "Batch's quotas"
RESERVATION = "promised capacity"


def offers(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check that each instance type of new jobs is offered in the region, and in a zone of the stage's subnets."""
    offered = _offered(account, INSTANCE_TYPES)
    zones = _zones(account, stage)
    for row in (stage.row, stage.cpu_row):
        yield _offer(account, stage, row, offered, zones)
    if stage.max_multinode_nodes and offered[stage.row.name]:
        yield _side_by_side(account, stage, offered[stage.row.name], zones)


def quotas(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check that each quota of the stage's instance families holds what its limits would use at once."""
    for (code, market), (vcpus, uses) in _needs(stage).items():
        yield _quota(account, code, market, vcpus, " + ".join(uses))


def batch_quotas(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check that the stage's queues and compute environments have room beside those that are there already."""
    for what in ("job queues", "compute environments"):
        key = what.title().replace(" ", "")
        found = account.pages("batch", f"describe_{what.replace(' ', '_')}", key[0].lower() + key[1:])
        others = sum(item.get("tags", {}).get("trainyard:stage") != stage.name for item in found)
        text = (
            f"{stage.queue_count} {what} of the stage and {others} of others; Batch takes {MAX_QUEUES} in a region of "
            "an account"
        )
        if stage.queue_count + others <= MAX_QUEUES:
            yield ok(BATCH, text)
        else:
            yield problem(
                BATCH,
                text,
                "shares_instances=True for some teams in infra/settings.py, or another region or account: this quota "
                "cannot be raised",
            )


def reservation(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check that the promised capacity which the settings name is there, of the stage's type, and in its subnets."""
    given = stage.capacity_reservation
    if given is None:
        yield ok(RESERVATION, "none is given: On-Demand instances take what EC2 has")
        return
    if given.target.startswith("arn:"):
        yield unknown(RESERVATION, f"{given.target} is a group; what is in it is not looked into", "see the group")
        return
    try:
        answer = account.client("ec2").describe_capacity_reservations(CapacityReservationIds=[given.target])
    except ClientError as error:
        if not error_code(error).startswith("InvalidCapacityReservationId"):
            raise
        answer = {"CapacityReservations": []}
    found: list[Mapping[str, Any]] = answer["CapacityReservations"]
    edit = "name one that is active as `capacity_reservation` in infra/settings.py"
    if not found:
        yield problem(RESERVATION, f"account {account.id} sees no {given.target} in {account.region}", edit)
        return
    yield from _of_reservation(found[0], stage, _zones(account, stage), edit)


def _of_reservation(found: Mapping[str, Any], stage: Stage, zones: list[str], edit: str) -> Iterator[Finding]:
    given = stage.capacity_reservation
    assert given is not None  # noqa: S101 - narrows the type; the caller has looked
    is_block = found.get("ReservationType") == "capacity-block"
    zone, kind = found["AvailabilityZoneId"], "a Capacity Block" if is_block else "an On-Demand Capacity Reservation"
    ends = f" until {found['EndDate']:%Y-%m-%d %H:%M}" if "EndDate" in found else ""
    text = f"{given.target} is {kind} of {found['TotalInstanceCount']} x {found['InstanceType']} in {zone}{ends}"
    only = zones[multinode_subnet_index(stage, stage.row) :][:1] if stage.max_multinode_nodes else zones
    if found["InstanceType"] != stage.instance_type:
        yield problem(RESERVATION, f"{text}; the stage runs on {stage.instance_type}", edit)
    elif is_block != given.is_block:
        yield problem(RESERVATION, text, f"is_block={is_block} in infra/settings.py")
    elif zone not in only:
        yield problem(
            RESERVATION,
            f"{text}; On-Demand instances of the stage start in {', '.join(only)}",
            f'availability_zone_ids=("{zone}", …) in infra/settings.py, that zone first',
        )
    elif found["State"] not in ("active", "scheduled"):
        yield problem(RESERVATION, f"{text}; it is {found['State']}", edit)
    else:
        yield ok(RESERVATION, f"{text}: {found['State']}, {found['AvailableInstanceCount']} free")


def _offered(account: Account, names: Iterable[str]) -> dict[str, list[str]]:
    """Return, by instance type, the ids of the region's zones that offer it."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for item in account.pages(
        "ec2",
        "describe_instance_type_offerings",
        "InstanceTypeOfferings",
        LocationType="availability-zone-id",
        Filters=[{"Name": "instance-type", "Values": list(found)}],
    ):
        found[item["InstanceType"]].append(item["Location"])
    return {name: sorted(zones) for name, zones in found.items()}


def _zones(account: Account, stage: Stage) -> list[str]:
    """Return the ids of the zones in which the stage's subnets are, or will be, in the subnets' order."""
    if stage.vpc is not None:
        ids = list(stage.vpc.private_subnet_ids)
        subnets = account.client("ec2").describe_subnets(Filters=[{"Name": "subnet-id", "Values": ids}])["Subnets"]
        ordered = sorted(subnets, key=lambda subnet: ids.index(subnet["SubnetId"]))
        return list(dict.fromkeys(subnet["AvailabilityZoneId"] for subnet in ordered))
    known = zone_ids(stage)
    if known:
        return list(known)
    region = account.client("ec2").describe_availability_zones(
        Filters=[{"Name": "zone-type", "Values": ["availability-zone"]}]
    )["AvailabilityZones"]
    first = sorted(region, key=lambda zone: str(zone["ZoneName"]))[:DEFAULT_ZONE_COUNT]
    return [zone["ZoneId"] for zone in first]


def _offer(
    account: Account, stage: Stage, row: InstanceType, offered: Mapping[str, list[str]], zones: list[str]
) -> Finding:
    there = offered[row.name]
    if not there:
        withdrawn = f"; {GONE[row.name]}" if row.name in GONE else ""
        others = [
            name
            for name, places in offered.items()
            if places and (INSTANCE_TYPES[name].accelerator == "cpu") == (row.accelerator == "cpu")
        ]
        setting = "cpu_instance_type" if row is stage.cpu_row else "instance_type"
        return problem(
            OFFER,
            f"EC2 offers {row.name} in no zone of {account.region}{withdrawn}",
            f"offered there: {', '.join(others)}; name one as `{setting}` in infra/settings.py, or another `region`"
            if others
            else f"another `region` in infra/settings.py: of the rows of its kind none is offered in {account.region}",
        )
    in_reach = [zone for zone in there if zone in zones]
    if in_reach:
        return ok(OFFER, f"EC2 offers {row.name} in {', '.join(in_reach)}, where the stage's subnets are")
    text = f"EC2 offers {row.name} in {', '.join(there)}; the stage's subnets are in {', '.join(zones) or 'none'}"
    if stage.vpc is not None:
        return problem(OFFER, text, "name subnets in one of those zones under `vpc` in infra/settings.py")
    listed = ", ".join(f'"{zone}"' for zone in there)
    return problem(OFFER, text, f"availability_zone_ids=({listed},) in infra/settings.py")


def _side_by_side(account: Account, stage: Stage, there: list[str], zones: list[str]) -> Finding:
    """Check the one zone in which the nodes of a job start together, and FSx is, whatever the others offer."""
    name = stage.row.name
    zone = zones[multinode_subnet_index(stage, stage.row)] if zones else "none"
    where = "jobs of several nodes, and FSx," if stage.fsx_gib else "jobs of several nodes"
    if zone in there:
        return ok(OFFER, f"EC2 offers {name} in {zone}, where {where} run")
    text = f"{where} run in {zone} alone, where EC2 does not offer {name}; it does in {', '.join(there)}"
    if stage.vpc is not None:
        return problem(OFFER, text, "name a subnet of one of those zones first under `vpc` in infra/settings.py")
    return problem(
        OFFER,
        text,
        f'availability_zone_ids=("{there[0]}", …) in infra/settings.py, that zone first; or region="{account.region}", '
        "whose zones the row knows",
    )


def _needs(stage: Stage) -> dict[tuple[str, str], tuple[int, list[str]]]:
    """Return, by quota code and market, the vCPUs that the stage may use of it, and what for.

    A retiring pool counts like the one of new jobs: while both stand, each may have as many instances. So do each
    team's own, and those that teams share.
    """
    of_type = [(stage.row, ""), *((pool.row, f" of retiring pool {pool.id}") for pool in stage.retiring)]
    one = len(stage.instance_owners) == 1
    owners = ["" if team is None or one else f" of team {team.name}" for team in stage.instance_owners]
    pools = [(row, whose + owner) for row, whose in of_type for owner in owners]
    on_demand_nodes = stage.max_on_demand_nodes + stage.max_multinode_nodes
    needs: dict[tuple[str, str], tuple[int, list[str]]] = {}
    for row, nodes, spot, whose in (
        *((row, stage.max_nodes, True, whose) for row, whose in pools),
        *((row, on_demand_nodes, False, whose) for row, whose in pools),
        *((stage.cpu_row, stage.max_cpu_nodes, True, owner) for owner in owners),
    ):
        if nodes:
            key = (row.spot_quota_code, "Spot") if spot else (row.on_demand_quota_code, "On-Demand")
            vcpus, uses = needs.get(key, (0, []))
            needs[key] = vcpus + nodes * row.vcpus, [*uses, f"{nodes} x {row.name}{whose}"]
    return needs


def _quota(account: Account, code: str, market: str, vcpus: int, uses: str) -> Finding:
    quota = _value(account, code)
    if quota is None:
        return unknown(
            QUOTA,
            f"Service Quotas knows no {code} ({market}) in {account.region}; {vcpus} vCPUs are needed for {uses}",
            f"aws service-quotas get-service-quota --region {account.region} --service-code ec2 --quota-code {code}",
        )
    name = quota.get("QuotaName", code)
    text = f"{quota['Value']:g} vCPUs of '{name}' ({code}, {market}); {vcpus} are needed for {uses}"
    if quota["Value"] >= vcpus:
        return ok(QUOTA, text)
    return problem(
        QUOTA,
        text,
        f"aws service-quotas request-service-quota-increase --region {account.region} --service-code ec2 "
        f"--quota-code {code} --desired-value {vcpus}",
    )


def _value(account: Account, code: str) -> Mapping[str, Any] | None:
    """Return the account's own quota, or AWS's default if never changed; None where Service Quotas has neither."""
    quota: Mapping[str, Any]
    try:
        quota = account.client("service-quotas").get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]
    except ClientError as error:
        if error_code(error) != "NoSuchResourceException":
            raise
    else:
        return quota
    try:
        defaults = account.pages("service-quotas", "list_aws_default_service_quotas", "Quotas", ServiceCode="ec2")
        return next((item for item in defaults if item["QuotaCode"] == code), None)
    except ClientError as error:
        if error_code(error) != "NoSuchResourceException":
            raise
        return None
