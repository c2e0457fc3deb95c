from collections.abc import Callable
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from infra.preflight.capacity import GONE, batch_quotas, offers, quotas, reservation
from infra.stages import CapacityReservation, ExistingVpc, Pool, Team
from jobs.contract.instance_types import INSTANCE_TYPES
from tests.infra.preflight.conftest import Ask, stage_of
from tests.support.embedded_aws import EmbeddedAws
from tests.support.emulator import batch_calls

Play = Callable[[str, Callable[[dict[str, Any]], tuple[int, Any]]], None]

# The embedded AWS answers with what EC2 offered when moto 5.2.5 was made: DL1 is gone, P4d is there.


def test_an_instance_type_that_ec2_does_not_offer_is_a_problem_that_names_what_it_offers(asked: Ask) -> None:
    accelerated, cpu = asked(offers, instance_type="dl1.24xlarge")
    assert accelerated.verdict == "problem"
    assert accelerated.text == f"EC2 offers dl1.24xlarge in no zone of us-east-1; {GONE['dl1.24xlarge']}"
    assert "aws/amazon-vpc-cni-k8s, 2026-07-14" in accelerated.text
    assert accelerated.next_step.startswith(
        "offered there: p4d.24xlarge, p5.48xlarge, p5en.48xlarge, g5.4xlarge, g5.48xlarge, g6e.48xlarge; "
    )
    assert "`instance_type` in infra/settings.py" in accelerated.next_step
    assert "m6i" not in accelerated.next_step
    # DL1's only zone is where the stage's subnets would be; CPU instances are offered there too.
    assert (cpu.verdict, cpu.text) == ("ok", "EC2 offers m6i.4xlarge in use1-az2, where the stage's subnets are")


def test_an_instance_type_that_is_offered_in_the_stages_zones_is_fine(asked: Ask) -> None:
    (found, _) = asked(offers, instance_type="p4d.24xlarge")
    zones = INSTANCE_TYPES["p4d.24xlarge"].zone_ids["us-east-1"]
    assert (found.verdict, found.text) == (
        "ok",
        f"EC2 offers p4d.24xlarge in {', '.join(zones)}, where the stage's subnets are",
    )


def test_zones_without_the_instance_type_are_a_problem_with_the_setting_that_cures_it(asked: Ask) -> None:
    (found, _) = asked(offers, instance_type="p4d.24xlarge", availability_zone_ids=("use1-az3",))
    assert found.verdict == "problem"
    assert found.text.endswith("; the stage's subnets are in use1-az3")
    assert found.next_step == (
        'availability_zone_ids=("use1-az1", "use1-az2", "use1-az4", "use1-az6",) in infra/settings.py'
    )


def test_where_settings_name_no_zone_the_regions_first_two_are_looked_at(
    asked: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    (found, _) = asked(offers, instance_type="p4d.24xlarge", region=None)
    assert found.verdict == "ok"
    # us-east-1a and us-east-1b, as the embedded account maps them.
    assert found.text == "EC2 offers p4d.24xlarge in use1-az1, use1-az6, where the stage's subnets are"


def test_zones_of_an_existing_vpc_are_those_of_its_subnets(asked: Ask, connected: EmbeddedAws) -> None:
    ec2 = connected.session.client("ec2", endpoint_url=connected.endpoint, region_name="us-east-1")
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.9.0.0/20", AvailabilityZoneId="use1-az3")["Subnet"]["SubnetId"]
    existing = ExistingVpc(vpc_id=vpc, private_subnet_ids=(subnet,))
    (found, _) = asked(offers, instance_type="p4d.24xlarge", vpc=existing)
    assert found.text.endswith("the stage's subnets are in use1-az3")
    assert found.next_step == "name subnets in one of those zones under `vpc` in infra/settings.py"


def test_quotas_are_held_against_all_that_the_stage_may_use_at_once(asked: Ask, play: Play) -> None:
    # GIVEN an account whose DL Spot quota was raised to two instances, and nothing else
    play("SERVICE_QUOTAS", _quotas(applied={"L-85EED4F7": 192.0}, default={"L-6E869C2A": 0.0, "L-34B43A08": 5.0}))
    # WHEN the stage wants two on Spot, one On-Demand for itself and four for jobs of several nodes
    spot, on_demand, cpu = asked(quotas, max_nodes=2, max_on_demand_nodes=1, max_multinode_nodes=4, max_cpu_nodes=4)
    # THEN the first is enough
    assert (spot.verdict, spot.text) == (
        "ok",
        "192 vCPUs of 'quota L-85EED4F7' (L-85EED4F7, Spot); 192 are needed for 2 x dl1.24xlarge",
    )
    # AND the others are asked for, with AWS's default standing in where nothing was ever changed
    assert (on_demand.verdict, on_demand.text) == (
        "problem",
        "0 vCPUs of 'quota L-6E869C2A' (L-6E869C2A, On-Demand); 480 are needed for 5 x dl1.24xlarge",
    )
    assert on_demand.next_step == (
        "aws service-quotas request-service-quota-increase --region us-east-1 --service-code ec2 "
        "--quota-code L-6E869C2A --desired-value 480"
    )
    assert cpu.verdict == "problem"
    assert cpu.next_step.endswith("--quota-code L-34B43A08 --desired-value 64")


def test_a_retiring_pool_needs_as_much_again_of_its_family(asked: Ask, play: Play) -> None:
    # GIVEN quotas that are enough for one pool
    play("SERVICE_QUOTAS", _quotas(applied={"L-7212CCBC": 192.0, "L-417A185B": 288.0, "L-34B43A08": 64.0}))
    # WHEN a second one of the family stays for what was submitted to it
    retiring = (Pool(instance_type="p4d.24xlarge", release="1.23.0"),)
    limits = {
        "instance_type": "p4d.24xlarge",
        "max_nodes": 2,
        "max_on_demand_nodes": 1,
        "max_multinode_nodes": 2,
        "max_cpu_nodes": 4,
    }
    spot, on_demand, cpu = asked(quotas, retiring=retiring, **limits)
    # THEN both may run all that the limits allow, at once
    assert spot.verdict == "problem"
    assert spot.text.endswith(
        "384 are needed for 2 x p4d.24xlarge + 2 x p4d.24xlarge of retiring pool p4d-24xlarge-1-23-0"
    )
    assert spot.next_step.endswith("--quota-code L-7212CCBC --desired-value 384")
    assert on_demand.next_step.endswith("--quota-code L-417A185B --desired-value 576")
    assert cpu.verdict == "ok"


def test_each_team_needs_as_much_and_those_that_share_need_it_once(asked: Ask, play: Play) -> None:
    play("SERVICE_QUOTAS", _quotas(applied={"L-85EED4F7": 192.0, "L-34B43A08": 64.0}))
    shared = tuple(Team(name=name, shares_instances=True) for name in ("vision", "speech"))
    spot, cpu = asked(quotas, teams=(Team(name="health"), *shared), max_nodes=2, max_cpu_nodes=4)
    assert spot.text.endswith("384 are needed for 2 x dl1.24xlarge + 2 x dl1.24xlarge of team health")
    assert cpu.text.endswith("128 are needed for 4 x m6i.4xlarge + 4 x m6i.4xlarge of team health")
    apart = (Team(name="health"), Team(name="product"))
    spot, _ = asked(quotas, teams=apart, max_nodes=2, max_cpu_nodes=4)
    assert spot.text.endswith("384 are needed for 2 x dl1.24xlarge of team health + 2 x dl1.24xlarge of team product")


def test_queues_have_to_fit_beside_those_of_others(asked: Ask, connected: EmbeddedAws) -> None:
    teams = tuple(Team(name=f"team{number}") for number in range(12))
    wanted: dict[str, Any] = {"teams": teams, "max_on_demand_nodes": 1, "max_multinode_nodes": 2}
    assert [found.verdict for found in asked(batch_quotas, **wanted)] == ["ok", "ok"]
    batch = batch_calls.prepare(connected)

    def queue(**tags: str) -> None:
        batch.queue(batch.environment(tags=tags), tags=tags)

    # What the stage itself has there already counts once.
    queue(**{"trainyard:stage": "test"})
    queue()
    queue()
    assert [found.verdict for found in asked(batch_quotas, **wanted)] == ["ok", "ok"]
    queue(**{"trainyard:stage": "other"})
    queues, environments = asked(batch_quotas, **wanted)
    assert (queues.verdict, environments.verdict) == ("problem", "problem")
    assert queues.text == "48 job queues of the stage and 3 of others; Batch takes 50 in a region of an account"
    assert environments.text.startswith("48 compute environments of the stage and 3 of others")
    assert queues.next_step.startswith("shares_instances=True for some teams in infra/settings.py, or another region")


def test_nodes_that_start_together_need_the_very_zone_that_they_are_in(
    asked: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = {"instance_type": "p4d.24xlarge", "max_multinode_nodes": 2}
    # GIVEN zones of which the second offers the type, which is enough for jobs of one node
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    named = {**several, "region": None, "availability_zone_ids": ("use1-az3", "use1-az2")}
    (one, _, together) = asked(offers, **named)
    assert (one.verdict, together.verdict) == ("ok", "problem")
    assert together.text.startswith(
        "jobs of several nodes run in use1-az3 alone, where EC2 does not offer p4d.24xlarge; it does in use1-az1, "
    )
    assert together.next_step.startswith('availability_zone_ids=("use1-az1", …) in infra/settings.py, that zone first')
    # WHEN either of what it says is done
    for cure in ({"availability_zone_ids": ("use1-az1", "use1-az3")}, {"region": "us-east-1"}):
        (*_, together) = asked(offers, **{**named, **cure})
        assert together.verdict == "ok", together


def test_the_first_subnet_of_a_vpc_that_is_there_is_that_of_several_nodes(asked: Ask, connected: EmbeddedAws) -> None:
    ec2 = connected.client("ec2")
    vpc_id = ec2.create_vpc(CidrBlock="10.30.0.0/16")["Vpc"]["VpcId"]
    without, having = (
        ec2.create_subnet(VpcId=vpc_id, CidrBlock=f"10.30.{index}.0/24", AvailabilityZoneId=zone)["Subnet"]["SubnetId"]
        for index, zone in enumerate(("use1-az3", "use1-az2"))
    )
    verdicts = []
    for subnets in ((without, having), (having, without)):
        vpc = ExistingVpc(vpc_id=vpc_id, private_subnet_ids=subnets)
        (*_, together) = asked(offers, instance_type="p4d.24xlarge", max_multinode_nodes=2, vpc=vpc)
        verdicts.append(together.verdict)
    assert verdicts == ["problem", "ok"]


def test_a_quota_that_nobody_knows_is_unknown(asked: Ask) -> None:
    # The embedded AWS has no quotas of EC2.
    found = asked(quotas, max_nodes=1)
    assert {finding.verdict for finding in found} == {"unknown"}
    assert "96 vCPUs are needed for 1 x dl1.24xlarge" in found[0].text
    # What to do next can be run.
    assert found[0].next_step == (
        "aws service-quotas get-service-quota --region us-east-1 --service-code ec2 --quota-code L-85EED4F7"
    )


def test_a_permission_that_is_missing_is_named(asked: Ask, play: Play) -> None:
    play(
        "SERVICE_QUOTAS",
        lambda _: (400, {"__type": "AccessDeniedException", "message": "not authorized"}),
    )
    (found,) = asked(quotas, max_nodes=1)
    assert (found.verdict, found.text) == ("unknown", "the credentials may not do servicequotas:GetServiceQuota")
    assert found.next_step == "allow servicequotas:GetServiceQuota, or ask who may"


def _quotas(
    *, applied: dict[str, float], default: dict[str, float] | None = None
) -> Callable[[dict[str, Any]], tuple[int, Any]]:
    """Service Quotas of an account with these, as its API reference describes the answers."""

    def quota(code: str, value: float) -> dict[str, Any]:
        return {"QuotaCode": code, "QuotaName": f"quota {code}", "ServiceCode": "ec2", "Value": value}

    def answer(request: dict[str, Any]) -> tuple[int, Any]:
        assert request["ServiceCode"] == "ec2"
        if request["operation"] == "ListAWSDefaultServiceQuotas":
            # In pages of one.
            codes = sorted(default or {})
            index = int(request.get("NextToken", "0"))
            page: dict[str, Any] = {"Quotas": [quota(code, (default or {})[code]) for code in codes[index : index + 1]]}
            if index + 1 < len(codes):
                page["NextToken"] = str(index + 1)
            return 200, page
        code = request["QuotaCode"]
        if code in applied:
            return 200, {"Quota": quota(code, applied[code])}
        return 400, {"__type": "NoSuchResourceException", "message": "no such quota"}

    return answer


RESERVATION = "cr-0123456789abcdef0"


class PromisedCapacity:
    """EC2 of an account with one reservation, which is `changes` from one that fits; the embedded AWS knows none."""

    def __init__(self, **changes: Any) -> None:
        self._found = {
            "CapacityReservationId": RESERVATION,
            "ReservationType": "default",
            "InstanceType": "p5.48xlarge",
            "AvailabilityZoneId": "use1-az1",
            "State": "active",
            "TotalInstanceCount": 4,
            "AvailableInstanceCount": 3,
            **changes,
        }

    def describe_capacity_reservations(self, *, CapacityReservationIds: list[str]) -> dict[str, Any]:  # noqa: N803
        assert CapacityReservationIds == [RESERVATION]
        return {"CapacityReservations": [self._found]}


@pytest.mark.parametrize(
    ("changes", "nodes", "verdict", "said"),
    [
        ({}, 0, "ok", "is an On-Demand Capacity Reservation of 4 x p5.48xlarge in use1-az1: active, 3 free"),
        ({"InstanceType": "p4d.24xlarge"}, 0, "problem", "; the stage runs on p5.48xlarge"),
        ({"State": "expired"}, 0, "problem", "; it is expired"),
        # Instances of jobs of several nodes are in the first zone.
        ({"AvailabilityZoneId": "use1-az2"}, 0, "ok", "in use1-az2"),
        ({"AvailabilityZoneId": "use1-az2"}, 2, "problem", "; On-Demand instances of the stage start in use1-az1"),
        (
            {"ReservationType": "capacity-block", "EndDate": datetime(2026, 12, 1, 11, 30, tzinfo=timezone.utc)},
            0,
            "problem",
            "is a Capacity Block of 4 x p5.48xlarge in use1-az1 until 2026-12-01 11:30",
        ),
    ],
)
def test_promised_capacity_has_to_be_the_stages_type_in_its_zone(
    changes: dict[str, Any], nodes: int, verdict: str, said: str
) -> None:
    stage = stage_of(
        instance_type="p5.48xlarge",
        machine_image=None,
        max_on_demand_nodes=1,
        max_multinode_nodes=nodes,
        availability_zone_ids=("use1-az1", "use1-az2"),
        capacity_reservation=CapacityReservation(target=RESERVATION),
    )
    account = SimpleNamespace(id="123456789012", region="us-east-1", client=lambda _: PromisedCapacity(**changes))
    (found,) = reservation(account, stage)  # type: ignore[arg-type]  # it asks for a client, and nothing else
    assert (found.verdict, said in found.text) == (verdict, True), found
