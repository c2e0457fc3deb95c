"""Checks of capacity: whether EC2 offers what the stage trains on, where, and how much the account may have."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from botocore.exceptions import ClientError

from infra.preflight.account import Account, error_code
from infra.preflight.finding import Finding, ok, problem, unknown
from infra.stages import Stage
from infra.stages.network_plan import ZONES_WHERE_NONE_IS_KNOWN, zone_ids
from jobs.contract.instance_types import INSTANCE_TYPES, InstanceType

OFFER = "instance types"
QUOTA = "vCPU quotas"


def offers(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check that each instance type of new jobs is offered in the region, and in a zone of the stage's subnets."""
    offered = _offered(account, INSTANCE_TYPES)
    zones = _zones(account, stage)
    for row in (stage.row, stage.cpu_row):
        yield _offer(account, stage, row, offered, zones)


def quotas(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check that each quota of the stage's instance families holds what its limits would use at once."""
    for (code, market), (vcpus, uses) in _needs(stage).items():
        yield _quota(account, code, market, vcpus, " + ".join(uses))


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
    """Return the ids of the zones in which the stage's subnets are, or will be."""
    if stage.vpc is not None:
        subnets = account.client("ec2").describe_subnets(
            Filters=[{"Name": "subnet-id", "Values": list(stage.vpc.private_subnet_ids)}]
        )["Subnets"]
        return sorted({subnet["AvailabilityZoneId"] for subnet in subnets})
    known = zone_ids(stage)
    if known:
        return list(known)
    region = account.client("ec2").describe_availability_zones(
        Filters=[{"Name": "zone-type", "Values": ["availability-zone"]}]
    )["AvailabilityZones"]
    first = sorted(region, key=lambda zone: str(zone["ZoneName"]))[:ZONES_WHERE_NONE_IS_KNOWN]
    return [zone["ZoneId"] for zone in first]


def _offer(
    account: Account, stage: Stage, row: InstanceType, offered: Mapping[str, list[str]], zones: list[str]
) -> Finding:
    there = offered[row.name]
    if not there:
        # First-generation Gaudi vanished from EC2's answers in mid-2026; no announcement was found.
        withdrawn = "; AWS seems to have withdrawn it in 2026, unconfirmed" if row.gaudi_generation == 1 else ""
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


def _needs(stage: Stage) -> dict[tuple[str, str], tuple[int, list[str]]]:
    """Return, by quota code and market, the vCPUs that the stage may use of it, and what for.

    A retiring pool counts like the one of new jobs: while both stand, each may have as many instances.
    """
    pools = [(stage.row, ""), *((pool.row, f" of retiring pool {pool.id}") for pool in stage.retiring)]
    on_demand_nodes = stage.max_on_demand_nodes + stage.max_multinode_nodes
    needs: dict[tuple[str, str], tuple[int, list[str]]] = {}
    for row, nodes, spot, whose in (
        *((row, stage.max_nodes, True, whose) for row, whose in pools),
        *((row, on_demand_nodes, False, whose) for row, whose in pools),
        (stage.cpu_row, stage.max_cpu_nodes, True, ""),
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
