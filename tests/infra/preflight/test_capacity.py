from datetime import datetime, timezone
from typing import Any

import pytest

from infra.preflight.capacity import GONE, batch_quotas, offers, quotas, reservation
from infra.stages import CapacityReservation, ExistingVpc, Pool, Team
from tests.infra.preflight.conftest import asked, refusal

P4D = ("use1-az1", "use1-az2", "use1-az4", "use1-az6")
SUBNETS = ("subnet-0000000000000000a", "subnet-0000000000000000b")


def ec2(**zones: tuple[str, ...]) -> dict[str, Any]:
    """Return an EC2 that offers P4d in its zones and CPU instances everywhere, in a region with three zones."""
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
    ("settings", "verdict", "said", "next_step"),
    [
        (
            {"instance_type": "dl1.24xlarge"},
            "problem",
            f"EC2 offers dl1.24xlarge in no zone of us-east-1; {GONE['dl1.24xlarge']}",
            "offered there: p4d.24xlarge; name one as `instance_type` in infra/settings.py",
        ),
        ({}, "ok", f"EC2 offers p4d.24xlarge in {', '.join(P4D)}, where the stage's subnets are", ""),
        (
            {"availability_zone_ids": ("use1-az3",)},
            *("problem", "; the stage's subnets are in use1-az3"),
            'availability_zone_ids=("use1-az1", "use1-az2", "use1-az4", "use1-az6",) in infra/settings.py',
        ),
        # If nobody knows a zone, the region's first two by letter are taken.
        ({"region": None}, "ok", "EC2 offers p4d.24xlarge in use1-az1, use1-az6, where", ""),
        (
            {"vpc": vpc(SUBNETS[0])},
            *("problem", "the stage's subnets are in use1-az3"),
            "name subnets in one of those zones under `vpc` in infra/settings.py",
        ),
    ],
)
def test_the_instance_type_is_offered_where_the_stages_subnets_are(
    *, settings: dict[str, Any], verdict: str, said: str, next_step: str
) -> None:
    found, cpu = asked(offers, ec2(), **{"instance_type": "p4d.24xlarge", **settings})
    assert (found.verdict, said in found.text) == (verdict, True), found
    assert found.next_step.startswith(next_step)
    assert cpu.verdict == "ok"


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        ({"region": None, "availability_zone_ids": ("use1-az3", "use1-az2")}, "problem"),
        ({"availability_zone_ids": ("use1-az1", "use1-az3")}, "ok"),
        ({}, "ok"),
        ({"vpc": vpc(*SUBNETS)}, "problem"),
        ({"vpc": vpc(*reversed(SUBNETS))}, "ok"),
    ],
)
def test_nodes_that_start_together_need_the_very_zone_that_they_are_in(settings: dict[str, Any], verdict: str) -> None:
    one, _, together = asked(offers, ec2(), instance_type="p4d.24xlarge", max_multinode_nodes=2, **settings)
    assert (one.verdict, together.verdict) == ("ok", verdict)
    if verdict == "problem":
        assert together.text.startswith("jobs of several nodes run in use1-az3 alone, where EC2 does not offer")
        cure = "name a subnet of one of those" if "vpc" in settings else 'availability_zone_ids=("use1-az1", …)'
        assert together.next_step.startswith(cure)


def service_quotas(applied: dict[str, float], default: dict[str, float] | None = None) -> dict[str, Any]:
    def quota(code: str, value: float) -> dict[str, Any]:
        return {"QuotaCode": code, "QuotaName": f"quota {code}", "Value": value}

    def get(operation: str, *, QuotaCode: str, **_: Any) -> dict[str, Any]:  # noqa: N803
        if QuotaCode in applied:
            return {"Quota": quota(QuotaCode, applied[QuotaCode])}
        return dict(refusal("NoSuchResourceException")(operation))

    defaults = [quota(code, value) for code, value in (default or {}).items()]
    return {"get_service_quota": get, "list_aws_default_service_quotas": {"Quotas": defaults}}


def test_quotas_are_held_against_all_that_the_stage_may_use_at_once() -> None:
    # GIVEN an account whose DL Spot quota was raised to two instances, and nothing else
    account = service_quotas({"L-85EED4F7": 192.0}, {"L-6E869C2A": 0.0})
    # WHEN the stage wants two on Spot, one On-Demand for itself and four for jobs of several nodes
    limits = {"max_nodes": 2, "max_on_demand_nodes": 1, "max_multinode_nodes": 4, "max_cpu_nodes": 4}
    spot, on_demand, cpu = asked(quotas, account, **limits)
    # THEN the first is enough
    assert (spot.verdict, spot.text) == (
        "ok",
        "192 vCPUs of 'quota L-85EED4F7' (L-85EED4F7, Spot); 192 are needed for 2 x dl1.24xlarge",
    )
    # AND the others are asked for: AWS's default stands in where nothing was ever changed
    assert (on_demand.verdict, on_demand.text) == (
        "problem",
        "0 vCPUs of 'quota L-6E869C2A' (L-6E869C2A, On-Demand); 480 are needed for 5 x dl1.24xlarge",
    )
    assert on_demand.next_step == (
        "aws service-quotas request-service-quota-increase --region us-east-1 --service-code ec2 "
        "--quota-code L-6E869C2A --desired-value 480"
    )
    # AND one that Service Quotas does not know is unknown, with a command that can be run
    assert (cpu.verdict, "64 vCPUs are needed for 4 x m6i.4xlarge" in cpu.text) == ("unknown", True)
    assert cpu.next_step.endswith("get-service-quota --region us-east-1 --service-code ec2 --quota-code L-34B43A08")


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        # A pool that retires needs as much again.
        (
            {"instance_type": "p4d.24xlarge", "retiring": (Pool(instance_type="p4d.24xlarge", release="1.23.0"),)},
            "384 are needed for 2 x p4d.24xlarge + 2 x p4d.24xlarge of retiring pool p4d-24xlarge-1-23-0",
        ),
        # So does each team, but those that share.
        (
            {
                "teams": (
                    Team(name="health"),
                    *(Team(name=name, shares_instances=True) for name in ("vision", "speech")),
                )
            },
            "384 are needed for 2 x dl1.24xlarge + 2 x dl1.24xlarge of team health",
        ),
        (
            {"teams": (Team(name="health"), Team(name="product"))},
            "384 are needed for 2 x dl1.24xlarge of team health + 2 x dl1.24xlarge of team product",
        ),
    ],
)
def test_pools_and_teams_need_as_much_each(settings: dict[str, Any], needed: str) -> None:
    account = service_quotas(dict.fromkeys(("L-85EED4F7", "L-7212CCBC", "L-34B43A08"), 192.0))
    spot, *_ = asked(quotas, account, max_nodes=2, **settings)
    assert (spot.verdict, spot.text.partition("; ")[2]) == ("problem", needed)


def test_queues_have_to_fit_beside_those_of_others() -> None:
    teams = tuple(Team(name=f"team{number}") for number in range(12))
    ours, others = ({"tags": {"trainyard:stage": "test"}}, {"tags": {"trainyard:stage": "other"}})

    def found(*there: dict[str, Any]) -> list[Any]:
        account = {
            "describe_job_queues": {"jobQueues": there},
            "describe_compute_environments": {"computeEnvironments": there},
        }
        return asked(batch_quotas, account, teams=teams, max_on_demand_nodes=1, max_multinode_nodes=2)

    # What the stage itself has there already counts once.
    assert [one.verdict for one in found(ours, others, {})] == ["ok", "ok"]
    queues, environments = found(ours, others, {}, others)
    assert (queues.verdict, environments.verdict) == ("problem", "problem")
    assert queues.text == "48 job queues of the stage and 3 of others; Batch takes 50 in a region of an account"
    assert environments.text.startswith("48 compute environments of the stage and 3 of others")
    assert queues.next_step.startswith("shares_instances=True for some teams in infra/settings.py, or another region")


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
    ("changes", "nodes", "verdict", "said"),
    [
        ({}, 0, "ok", "is an On-Demand Capacity Reservation of 4 x p5.48xlarge in use1-az1: active, 3 free"),
        ({"InstanceType": "p4d.24xlarge"}, 0, "problem", "; the stage runs on p5.48xlarge"),
        ({"State": "expired"}, 0, "problem", "; it is expired"),
        # Instances of jobs of several nodes are in the first zone.
        ({"AvailabilityZoneId": "use1-az2"}, 0, "ok", "in use1-az2"),
        ({"AvailabilityZoneId": "use1-az2"}, 2, "problem", "; On-Demand instances of the stage start in use1-az1"),
        (BLOCK, 0, "problem", "is a Capacity Block of 4 x p5.48xlarge in use1-az1 until 2026-12-01 11:30"),
        (None, 0, "problem", "account 123456789012 sees no cr-0123456789abcdef0 in us-east-1"),
    ],
)
def test_promised_capacity_has_to_be_the_stages_type_in_its_zone(
    *, changes: dict[str, Any] | None, nodes: int, verdict: str, said: str
) -> None:
    there = (
        refusal("InvalidCapacityReservationId.NotFound")
        if changes is None
        else {"CapacityReservations": [{**RESERVATION, **changes}]}
    )
    (found,) = asked(
        reservation,
        {"describe_capacity_reservations": there},
        instance_type="p5.48xlarge",
        max_on_demand_nodes=1,
        max_multinode_nodes=nodes,
        availability_zone_ids=("use1-az1", "use1-az2"),
        capacity_reservation=CapacityReservation(target="cr-0123456789abcdef0"),
    )
    assert (found.verdict, said in found.text) == (verdict, True), found
