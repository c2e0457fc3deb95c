"""The table of instance types that are considered for a run."""

from collections.abc import Iterator

import pytest
from botocore.stub import Stubber
from rich.console import Console

from jobs.aws.connection import Aws
from jobs.cli.tables import considered_table
from jobs.core.instance_types import instance_type
from jobs.money.aws_prices import current_prices
from jobs.money.estimate import Estimate
from jobs.runs.considered import considered
from tests.support.jobs.planning import LADDER, STAGE, spec

REGION = "us-east-1"


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Aws, Stubber]]:
    """A connection to AWS whose optional requests to EC2 get stubbed responses; nothing leaves this process."""
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setattr("jobs.money.aws_prices._AWS_DOMAINS", ())  # recorded prices
    current_prices.cache_clear()
    aws = Aws(region=REGION)
    with Stubber(aws.quick_ec2) as stub:
        yield aws, stub
    current_prices.cache_clear()


def expected(place: str, *, hours: float, usd: float) -> Estimate:
    figures = {"low_seconds": 1.0, "high_seconds": 1.0, "low_usd": 1.0, "high_usd": 1.0, "on_demand_usd": 1.0}
    return Estimate(place=place, seconds=3600 * hours, usd=usd, arithmetic=(), **figures)


def test_each_type_has_its_price_score_cost_and_reason(ec2: tuple[Aws, Stubber]) -> None:
    # GIVEN scores of one environment, and a refusal for the other
    aws, stub = ec2
    request = {"TargetCapacity": 1, "SingleAvailabilityZone": True, "RegionNames": [REGION]}
    scores = [
        {"Region": REGION, "AvailabilityZoneId": zone, "Score": score}
        for zone, score in (("use1-az1", 3), ("use1-az4", 9))
    ]
    stub.add_response(
        "get_spot_placement_scores", {"SpotPlacementScores": scores}, {"InstanceTypes": ["g6e.xlarge"], **request}
    )
    stub.add_client_error("get_spot_placement_scores", "UnauthorizedOperation")
    known = {"g5.xlarge": expected("g5.xlarge", hours=2, usd=0.9)}
    # WHEN a run asks for an A10G
    rows = considered(aws, LADDER, spec(resources={"gpu": "A10G"}), lambda: known)
    # THEN every type of the stage has a row
    assert [(row.instance_type, row.is_chosen, row.reason) for row in rows] == [
        ("g6e.xlarge", False, "has no A10G"),
        ("g5.xlarge", True, "chosen by price and capacity"),
        ("g5.4xlarge", True, "chosen by price and capacity"),
    ]
    # AND what AWS does not answer is unknown
    assert [row.placement_score for row in rows] == [9, None, None]
    assert [(row.hours, row.usd) for row in rows] == [(None, None), (2, 0.9), (None, None)]
    assert rows[0].card_usd_per_hour == instance_type("g6e.xlarge").spot_usd_per_hour
    assert rows[0].zones == instance_type("g6e.xlarge").zone_ids[REGION]
    # AND the table fits a narrow terminal
    console = Console(width=80)
    with console.capture() as capture:
        console.print(considered_table(rows))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["TYPE", "ZONES", "SPOT/H", "ON-D./H", "CARD/H", "SCORE", "HOURS", "USD", "WHY"]
    assert lines[1].split()[:8] == ["g6e.xlarge", "az1,2,4,6", "1.00", "1.86", "1.00", "9", "unknown", "unknown"]


@pytest.mark.parametrize(
    ("resources", "reasons"),
    [
        ({}, ["chosen", "if EC2 has none above", "if EC2 has none above"]),
        ({"nnodes": 2}, ["chosen", "nodes need equal cards", "nodes need equal cards"]),
        ({"gpu_memory_gib": 40}, ["chosen", *["card has 22.4 GiB"] * 2]),
        (
            {"instance_types": ["g5.xlarge", "g5.4xlarge"]},
            ["not in instance_types", *["chosen by price and capacity"] * 2],
        ),
        ({"capacity": "on-demand"}, ["chosen", "if EC2 has none above", "if EC2 has none above"]),
    ],
)
def test_every_reason(ec2: tuple[Aws, Stubber], resources: dict[str, object], reasons: list[str]) -> None:
    aws, stub = ec2
    if "capacity" not in resources and "nnodes" not in resources:  # only Spot has scores
        stub.add_client_error("get_spot_placement_scores", "RequestLimitExceeded")
        stub.add_client_error("get_spot_placement_scores", "RequestLimitExceeded")
    rows = considered(aws, LADDER, spec(resources=resources), dict)
    assert [row.reason for row in rows] == reasons
    stub.assert_no_pending_responses()


def test_one_type_is_no_choice(ec2: tuple[Aws, Stubber]) -> None:
    assert considered(ec2[0], STAGE, spec(), dict) == []


def test_the_emulator_answers_with_a_recorded_score(emulated: Aws) -> None:
    assert [row.placement_score for row in considered(emulated, LADDER, spec(), dict)] == [8, 8, 8]
