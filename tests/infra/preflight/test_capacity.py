from datetime import datetime, timezone
from typing import Any

import pytest

from infra.preflight.capacity import WITHDRAWN, batch_quotas, offers, quotas, reservation
from infra.stages import CapacityReservation, ExistingVpc, Pool, Team
from tests.infra.preflight.conftest import findings, refusal

P4D = ("use1-az1", "use1-az2", "use1-az4", "use1-az6")
SUBNETS = ("subnet-0000000000000000a", "subnet-0000000000000000b")


def ec2(**zones: tuple[str, ...]) -> dict[str, Any]:
    """Return EC2's answers: P4d is offered in some zones, CPU instances in all, and the region has three zones."""
    offered = {"p4d.24xlarge": P4D, "m6i.4xlarge": (*P4D, "use1-az3"), **zones}

    def offerings(_: str, *, Filters: list[dict[str, Any]], **__: Any) -> dict[str, Any]:  # noqa: N803
        wanted = Filters[0]["Values"]
        found = [{"InstanceType": name, "Location": zone} for name in wanted for zone in offered.get(name, ())]
        return {"InstanceTypeOfferings": found}

    letters = [{"ZoneName": f"us-east-1{letter}", "ZoneId": f"use1-az{id_}"} for letter, id_ in ("c4", "a1", "b6")]
    subnets = [
        {"SubnetId": subnet, "AvailabilityZoneId": zone}
        for subnet, zone in zip(SUBNETS, ("use1-az3", "use1-az2"), strict=True)
    ]
    return {
        "describe_instance_type_offerings": offerings,
        "describe_availability_zones": {"AvailabilityZones": letters},
        "describe_subnets": lambda _, *, Filters: {  # noqa: N803
            "Subnets": [one for one in subnets if one["SubnetId"] in Filters[0]["Values"]]
        },
    }


def vpc(*subnets: str) -> ExistingVpc:
    return ExistingVpc(vpc_id="vpc-0123456789abcdef0", private_subnet_ids=subnets)


@pytest.mark.parametrize(
    ("settings", "verdict", "text", "next_step"),
    [
        (
            {"instance_types": ("dl1.24xlarge",)},
            "problem",
            f"EC2 offers dl1.24xlarge in no zone of us-east-1; {WITHDRAWN['dl1.24xlarge']}",
            "set `instance_types` in infra/settings.py to one that is offered (p4d.24xlarge), or change `region`",
        ),
        ({}, "ok", f"EC2 offers p4d.24xlarge in {', '.join(P4D)}, where the stage has subnets", ""),
        (
            {"availability_zone_ids": ("use1-az3",)},
            *("problem", "; the stage's subnets are in use1-az3"),
            'set availability_zone_ids=("use1-az1", "use1-az2", "use1-az4", "use1-az6",) in infra/settings.py',
        ),
        # If no zone is known, the region's first two by letter are used.
        ({"region": None}, "ok", "EC2 offers p4d.24xlarge in use1-az1, use1-az6, where", ""),
        (
            {"vpc": vpc(SUBNETS[0])},
            *("problem", "the stage's subnets are in use1-az3"),
            "list subnets in one of these zones under `vpc` in infra/settings.py",
        ),
    ],
)
def test_the_instance_type_is_offered_in_zones_of_the_subnets(
    *, settings: dict[str, Any], verdict: str, text: str, next_step: str
) -> None:
    found, cpu = findings(offers, ec2(), **{"instance_types": ("p4d.24xlarge",), **settings})
    assert (found.verdict, text in found.text) == (verdict, True), found
    assert found.next_step.startswith(next_step)
    assert cpu.verdict == "ok"


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        ({"region": None, "availability_zone_ids": ("use1-az3", "use1-az2")}, "problem"),
        ({"availability_zone_ids": ("use1-az1", "use1-az3")}, "ok"),
        ({}, "ok"),
        ({"vpc": vpc(*SUBNETS)}, "problem"),
        ({"vpc": vpc(SUBNETS[1])}, "ok"),
    ],
)
def test_multinode_jobs_need_the_type_in_their_zones(settings: dict[str, Any], verdict: str) -> None:
    one, _, together = findings(offers, ec2(), instance_types=("p4d.24xlarge",), max_multinode_nodes=2, **settings)
    assert (one.verdict, together.verdict) == ("ok", verdict)
    if verdict == "problem":
        assert together.text.startswith("EC2 does not offer p4d.24xlarge in use1-az3, of the zone")
        next_step = (
            "list subnets in these zones first" if "vpc" in settings else 'set availability_zone_ids=("use1-az1", …)'
        )
        assert together.next_step.startswith(next_step)


def service_quotas(applied: dict[str, float], default: dict[str, float] | None = None) -> dict[str, Any]:
    def quota(code: str, value: float) -> dict[str, Any]:
        return {"QuotaCode": code, "QuotaName": f"quota {code}", "Value": value}

    def get(operation: str, *, QuotaCode: str, **_: Any) -> dict[str, Any]:  # noqa: N803
        if QuotaCode in applied:
            return {"Quota": quota(QuotaCode, applied[QuotaCode])}
        return dict(refusal("NoSuchResourceException")(operation))

    defaults = [quota(code, value) for code, value in (default or {}).items()]
    return {"get_service_quota": get, "list_aws_default_service_quotas": {"Quotas": defaults}}


def test_quotas_must_cover_all_that_the_stage_may_use_at_once() -> None:
    # GIVEN an account whose DL Spot quota was raised to two instances, and nothing else
    account = service_quotas({"L-85EED4F7": 192.0}, {"L-6E869C2A": 0.0})
    # WHEN the stage allows two Spot nodes, one On-Demand node, and four for multi-node jobs
    limits = {"max_nodes": 2, "max_on_demand_nodes": 1, "max_multinode_nodes": 4, "max_cpu_nodes": 4}
    spot, on_demand, cpu = findings(quotas, account, **limits)
    # THEN the Spot quota is sufficient
    assert (spot.verdict, spot.text) == (
        "ok",
        "192 vCPUs of 'quota L-85EED4F7' (L-85EED4F7, Spot); the stage needs 192 for 2 x dl1.24xlarge",
    )
    # AND the On-Demand quota, which still has AWS's default, must be increased
    assert on_demand.verdict == "problem"
    assert on_demand.text == (
        "0 vCPUs of 'quota L-6E869C2A' (L-6E869C2A, On-Demand); the stage needs 480 for 1 x dl1.24xlarge + "
        "4 x dl1.24xlarge for multi-node jobs"
    )
    assert on_demand.next_step == (
        "aws service-quotas request-service-quota-increase --region us-east-1 --service-code ec2 "
        "--quota-code L-6E869C2A --desired-value 480"
    )
    # AND a quota missing in Service Quotas is unknown, with a command to look it up
    assert (cpu.verdict, "the stage needs 64 vCPUs for 4 x m6i.4xlarge" in cpu.text) == ("unknown", True)
    assert cpu.next_step.endswith("get-service-quota --region us-east-1 --service-code ec2 --quota-code L-34B43A08")


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        # A retiring pool needs the same again.
        (
            {
                "instance_types": ("p4d.24xlarge",),
                "retiring": (Pool(instance_types=("p4d.24xlarge",)),),
            },
            "the stage needs 384 for 2 x p4d.24xlarge + 2 x p4d.24xlarge of retiring pool p4d-24xlarge-cuda-2026-11",
        ),
        # So does each team, except those that share instances.
        (
            {
                "teams": (
                    Team(name="health"),
                    *(Team(name=name, shares_instances=True) for name in ("vision", "speech")),
                )
            },
            "the stage needs 384 for 2 x dl1.24xlarge + 2 x dl1.24xlarge of team health",
        ),
        # So does each zone of multi-node jobs: they may run in all of them.
        (
            {"instance_types": ("p4d.24xlarge",), "max_nodes": 1, "max_multinode_nodes": 2},
            "the stage needs 576 for 6 x p4d.24xlarge for multi-node jobs in 3 zones",
        ),
        (
            {"teams": (Team(name="health"), Team(name="product"))},
            "the stage needs 384 for 2 x dl1.24xlarge of team health + 2 x dl1.24xlarge of team product",
        ),
    ],
)
def test_each_pool_and_team_needs_its_own_quota(settings: dict[str, Any], needed: str) -> None:
    account = service_quotas(dict.fromkeys(("L-85EED4F7", "L-7212CCBC", "L-417A185B", "L-34B43A08"), 192.0))
    found = findings(quotas, account, **{"max_nodes": 2, **settings})
    assert [one.text.partition("; ")[2] for one in found if one.verdict == "problem"] == [needed]


def test_queues_must_fit_beside_existing_ones() -> None:
    teams = tuple(Team(name=f"team{number}") for number in range(12))
    ours, others = ({"tags": {"trainyard:stage": "test"}}, {"tags": {"trainyard:stage": "other"}})

    def found(*there: dict[str, Any]) -> list[Any]:
        account = {
            "describe_job_queues": {"jobQueues": there},
            "describe_compute_environments": {"computeEnvironments": there},
        }
        return findings(batch_quotas, account, teams=teams, max_on_demand_nodes=1, max_multinode_nodes=2)

    # The stage's existing queues are not counted twice.
    assert [one.verdict for one in found(ours, others, {})] == ["ok", "ok"]
    queues, environments = found(ours, others, {}, others)
    assert (queues.verdict, environments.verdict) == ("problem", "problem")
    assert queues.text == "48 job queues of this stage and 3 others; Batch allows 50 per account and region"
    assert environments.text.startswith("48 compute environments of this stage and 3 others")
    assert queues.next_step.startswith("set shares_instances=True for some teams in infra/settings.py, or use another")


RESERVATION = {
    "ReservationType": "default",
    "InstanceType": "p5.48xlarge",
    "AvailabilityZoneId": "use1-az1",
    "State": "active",
    "TotalInstanceCount": 4,
    "AvailableInstanceCount": 3,
}
BLOCK = {"ReservationType": "capacity-block", "EndDate": datetime(2026, 12, 1, 11, 30, tzinfo=timezone.utc)}


@pytest.mark.parametrize(
    ("changes", "verdict", "text"),
    [
        ({}, "ok", "is an On-Demand Capacity Reservation of 4 x p5.48xlarge in use1-az1: active, 3 free"),
        ({"InstanceType": "p4d.24xlarge"}, "problem", "; the stage uses p5.48xlarge"),
        ({"State": "expired"}, "problem", "; it is expired"),
        ({"AvailabilityZoneId": "use1-az2"}, "problem", "; On-Demand instances of the stage start in use1-az1"),
        (BLOCK, "problem", "is a Capacity Block of 4 x p5.48xlarge in use1-az1 until 2026-12-01 11:30"),
        (None, "problem", "account 123456789012 has no cr-0123456789abcdef0 in us-east-1"),
    ],
)
def test_reserved_capacity_must_match_the_stages_type_and_zone(
    changes: dict[str, Any] | None, verdict: str, text: str
) -> None:
    answer = (
        refusal("InvalidCapacityReservationId.NotFound")
        if changes is None
        else {"CapacityReservations": [{**RESERVATION, **changes}]}
    )
    (found,) = findings(
        reservation,
        {"describe_capacity_reservations": answer},
        instance_types=("p5.48xlarge",),
        max_on_demand_nodes=1,
        availability_zone_ids=("use1-az2", "use1-az1"),
        capacity_reservation=CapacityReservation(target="cr-0123456789abcdef0", zone_id="use1-az1"),
    )
    assert (found.verdict, text in found.text) == (verdict, True), found
