"""Checks of capacity: EC2's offer of the stage's instance types, their zones, quotas, and reserved capacity."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from botocore.exceptions import ClientError

from infra.preflight.account import Account, Finding, error_code, ok, problem, unknown
from infra.preflight.network import subnet_zones
from infra.stages import Stage
from infra.stages.limits import MAX_QUEUES
from infra.stages.network_plan import environment_count, multinode_subnet_indices, reserved_subnet_index
from jobs.core.instance_types import INSTANCE_TYPES, InstanceType

WITHDRAWN = {
    "dl1.24xlarge": (
        "EC2's API has not listed it since mid-2026 (AWS's own scripts/gen_vpc_ip_limits.go in aws/amazon-vpc-cni-k8s, "
        "2026-07-14: 'missing from the EC2 API, but is documented'; no announcement by AWS was found). Batch refuses "
        "unlisted types, so a deployment cannot succeed"
    )
}
"""Instance types that EC2's API no longer lists, and what is known about each."""

OFFER = "instance types"
QUOTA = "vCPU quotas"
BATCH = "Batch quotas"
RESERVATION = "reserved capacity"


def offers(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check that the instance types of new jobs are offered in the region, in zones of the stage's subnets."""
    offered = _offered(account, INSTANCE_TYPES)
    zones = subnet_zones(account, stage)
    for row in (*stage.pool.rows, stage.cpu_row):
        yield _offer(account, stage, row, offered, zones)
    if stage.max_multinode_nodes and offered[stage.row.name]:
        yield _multinode_offer(account, stage, offered[stage.row.name], zones)


def quotas(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check that each vCPU quota covers what the stage's limits allow at the same time."""
    for (code, market), (vcpus, uses) in _needs(stage).items():
        uses_text = " + ".join(uses)
        if code is None:
            yield unknown(
                QUOTA,
                f"the code of the {market} quota is not known; the stage needs {vcpus} vCPUs for {uses_text}",
                "look it up in the console of Service Quotas, and add it to QUOTAS in jobs/core/instance_types.py",
            )
            continue
        yield _quota(account, code, market, vcpus, uses_text)


def batch_quotas(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check that the stage's queues and compute environments fit beside existing ones."""
    for what in ("job queues", "compute environments"):
        key = what.title().replace(" ", "")
        found = account.pages("batch", f"describe_{what.replace(' ', '_')}", key[0].lower() + key[1:])
        others = sum(item.get("tags", {}).get("trainyard:stage") != stage.name for item in found)
        own = stage.queue_count if what == "job queues" else environment_count(stage)
        text = f"{own} {what} of this stage and {others} others; Batch allows {MAX_QUEUES} per account and region"
        if own + others <= MAX_QUEUES:
            yield ok(BATCH, text)
        else:
            yield problem(
                BATCH,
                text,
                "set shares_instances=True for some teams in infra/settings.py, or use another region or account: this "
                "quota cannot be raised",
            )


def reservation(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check that the capacity reservation in the settings exists, with the stage's type, in its subnet's zone."""
    configured = stage.capacity_reservation
    if configured is None:
        yield ok(RESERVATION, "not configured; On-Demand instances take any capacity that EC2 has")
        return
    if configured.target.startswith("arn:"):
        yield unknown(
            RESERVATION, f"{configured.target} is a group, whose reservations are not checked", "check the group"
        )
        return
    try:
        answer = account.client("ec2").describe_capacity_reservations(CapacityReservationIds=[configured.target])
    except ClientError as error:
        if not error_code(error).startswith("InvalidCapacityReservationId"):
            raise
        answer = {"CapacityReservations": []}
    found: list[Mapping[str, Any]] = answer["CapacityReservations"]
    edit = "set `capacity_reservation` in infra/settings.py to an active one"
    if not found:
        yield problem(RESERVATION, f"account {account.id} has no {configured.target} in {account.region}", edit)
        return
    index = reserved_subnet_index(stage, stage.pool) or 0  # a stage without it has one subnet
    yield _reservation_finding(found[0], stage, subnet_zones(account, stage)[index:][:1], edit)


def _reservation_finding(found: Mapping[str, Any], stage: Stage, zones: list[str], edit: str) -> Finding:
    configured = stage.capacity_reservation
    assert configured is not None  # noqa: S101 - narrows the type; the caller has checked
    is_block = found.get("ReservationType") == "capacity-block"
    zone, kind = found["AvailabilityZoneId"], "a Capacity Block" if is_block else "an On-Demand Capacity Reservation"
    ends = f" until {found['EndDate']:%Y-%m-%d %H:%M}" if "EndDate" in found else ""
    text = f"{configured.target} is {kind} of {found['TotalInstanceCount']} x {found['InstanceType']} in {zone}{ends}"
    if found["InstanceType"] != stage.row.name:
        return problem(RESERVATION, f"{text}; the stage uses {stage.row.name}", edit)
    if is_block != configured.is_block:
        return problem(RESERVATION, text, f"set is_block={is_block} in infra/settings.py")
    if zone not in zones:
        setting = f'zone_id="{zone}"' if stage.vpc is None else f"subnet_id to a subnet in {zone}"
        return problem(
            RESERVATION,
            f"{text}; On-Demand instances of the stage start in {', '.join(zones)}",
            f"set {setting} under `capacity_reservation` in infra/settings.py",
        )
    if found["State"] not in ("active", "scheduled"):
        return problem(RESERVATION, f"{text}; it is {found['State']}", edit)
    return ok(RESERVATION, f"{text}: {found['State']}, {found['AvailableInstanceCount']} free")


def _offered(account: Account, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the ids of the region's zones that offer each instance type."""
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


def _offer(
    account: Account, stage: Stage, row: InstanceType, offered: Mapping[str, list[str]], zones: list[str]
) -> Finding:
    offering = offered[row.name]
    if not offering:
        withdrawn = f"; {WITHDRAWN[row.name]}" if row.name in WITHDRAWN else ""
        others = [
            name
            for name, offering_zones in offered.items()
            if offering_zones and (INSTANCE_TYPES[name].accelerator == "cpu") == (row.accelerator == "cpu")
        ]
        setting = "cpu_instance_type" if row is stage.cpu_row else "instance_types"
        return problem(
            OFFER,
            f"EC2 offers {row.name} in no zone of {account.region}{withdrawn}",
            f"set `{setting}` in infra/settings.py to one that is offered ({', '.join(others)}), or change `region`"
            if others
            else f"change `region` in infra/settings.py: {account.region} offers no supported type of this kind",
        )
    in_reach = [zone for zone in offering if zone in zones]
    if in_reach:
        return ok(OFFER, f"EC2 offers {row.name} in {', '.join(in_reach)}, where the stage has subnets")
    zones = list(dict.fromkeys(zones)) or ["no zone"]
    text = f"EC2 offers {row.name} in {', '.join(offering)}; the stage's subnets are in {', '.join(zones)}"
    if stage.vpc is not None:
        return problem(OFFER, text, "list subnets in one of these zones under `vpc` in infra/settings.py")
    listed = ", ".join(f'"{zone}"' for zone in offering)
    return problem(OFFER, text, f"set availability_zone_ids=({listed},) in infra/settings.py")


def _multinode_offer(account: Account, stage: Stage, offering: list[str], zones: list[str]) -> Finding:
    """Check the zones of multi-node jobs whose nodes start together."""
    name = stage.row.name
    used = [zones[index] for index in multinode_subnet_indices(stage, stage.pool) if index < len(zones)] or ["no zone"]
    used = list(dict.fromkeys(used))
    where = f"zone{'s' if len(used) > 1 else ''} of multi-node jobs"
    missing = [zone for zone in used if zone not in offering]
    if not missing:
        return ok(OFFER, f"EC2 offers {name} in {', '.join(used)}, the {where}")
    text = f"EC2 does not offer {name} in {', '.join(missing)}, of the {where}; it does in {', '.join(offering)}"
    if stage.vpc is not None:
        return problem(OFFER, text, "list subnets in these zones first under `vpc` in infra/settings.py, up to three")
    return problem(
        OFFER,
        text,
        f'set availability_zone_ids=("{offering[0]}", …) in infra/settings.py, with this zone first; or set '
        f'region="{account.region}", whose zones are known',
    )


def _needs(stage: Stage) -> dict[tuple[str | None, str], tuple[int, list[str]]]:
    """Return the vCPUs that the stage may use of each (quota code, market), and for what.

    Retiring pools count like the current one, because both may have their maximum number of instances at the same time.
    So do each team's own instances and those that teams share.
    """
    labelled = [(stage.pool, ""), *((pool, f" of retiring pool {pool.id}") for pool in stage.retiring)]
    one_owner = len(stage.instance_owners) == 1
    owners = ["" if team is None or one_owner else f" of team {team.name}" for team in stage.instance_owners]
    pools = [(pool, label + owner) for pool, label in labelled for owner in owners]
    needs: dict[tuple[str | None, str], tuple[int, list[str]]] = {}
    for types, nodes, spot, of in (
        *((types, stage.max_nodes, True, of) for pool, of in pools for types in pool.environments),
        *((types, stage.max_on_demand_nodes, False, of) for pool, of in pools for types in pool.on_demand_environments),
        *(
            (pool.rows[:1], stage.max_multinode_nodes * zones, False, f"{of} for multi-node jobs{each}")
            for pool, of in pools
            for zones in [len(multinode_subnet_indices(stage, pool))]
            for each in [f" in {zones} zones" if zones > 1 else ""]
        ),
        *(((stage.cpu_row,), stage.max_cpu_nodes, True, of) for of in owners),
    ):
        if nodes:
            row = min(types, key=lambda row: row.vcpus)  # as the environment's maxvCpus
            key = (row.spot_quota_code, "Spot") if spot else (row.on_demand_quota_code, "On-Demand")
            vcpus, uses = needs.get(key, (0, []))
            needs[key] = vcpus + nodes * row.vcpus, [*uses, f"{nodes} x {row.name}{of}"]
    return needs


def _quota(account: Account, code: str, market: str, vcpus: int, uses: str) -> Finding:
    quota = _find_quota(account, code)
    if quota is None:
        return unknown(
            QUOTA,
            f"Service Quotas has no {code} ({market}) in {account.region}; the stage needs {vcpus} vCPUs for {uses}",
            f"aws service-quotas get-service-quota --region {account.region} --service-code ec2 --quota-code {code}",
        )
    name = quota.get("QuotaName", code)
    text = f"{quota['Value']:g} vCPUs of '{name}' ({code}, {market}); the stage needs {vcpus} for {uses}"
    if quota["Value"] >= vcpus:
        return ok(QUOTA, text)
    return problem(
        QUOTA,
        text,
        f"aws service-quotas request-service-quota-increase --region {account.region} --service-code ec2 "
        f"--quota-code {code} --desired-value {vcpus}",
    )


def _find_quota(account: Account, code: str) -> Mapping[str, Any] | None:
    """Return the account's quota, or AWS's default if it was never changed, or None if there is neither."""
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
