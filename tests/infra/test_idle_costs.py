import pytest

from infra.idle_costs import PRICES, Line, idle_costs, summary, table
from infra.settings import STAGES
from jobs.money.prices import GB_OF_S3, stored
from tests.support.infra.synthesis import Templates


def lines_of(templates: Templates, stage: str) -> list[Line]:
    return idle_costs([template for path, template in templates.items() if path.startswith(f"{stage}/")])


def by_type(templates: Templates, stage: str) -> dict[str, float | None]:
    return {line.price.type: line.usd_per_month for line in lines_of(templates, stage)}


def test_an_idle_stage_only_pays_for_nat_and_storage(templates: Templates) -> None:
    costs = by_type(templates, "dev")
    assert costs["AWS::S3::Bucket"] is None
    assert {resource_type: pytest.approx(usd) for resource_type, usd in costs.items() if usd} == {
        "AWS::EC2::NatGateway": 32.85,
        "AWS::EC2::EIP": 3.65,
        # Within every account's free allowance.
        "AWS::CloudWatch::Dashboard": 3.0,
        "AWS::CloudWatch::Alarm": 0.3,
    }
    rows = list(table({stage: lines_of(templates, stage) for stage in ("dev", "prod")}))
    assert rows[-1] == "| **total, without storage** | | **$39.80** | **$39.80** | |"
    assert rows[2].startswith("| NAT gateway | $0.045 per hour | 1: $32.85 | 1: $32.85 | nat_gateways=0 |")
    assert len({row.count("|") for row in rows}) == 1
    # Other programs read this summary.
    assert summary(STAGES["dev"], lines_of(templates, "dev")) == {
        "stage": "dev",
        "usd_a_month": pytest.approx(39.8),
        "instance_type": "dl1.24xlarge",
        "cpu_instance_type": "m6i.4xlarge",
        "builds_machine_image": True,
        "several_nodes_on_demand": False,
    }


def test_optional_resources_are_counted(variants: Templates) -> None:
    costs = by_type(variants, "all")
    assert costs["AWS::FSx::FileSystem"] == pytest.approx(174)  # 1,200 GiB
    assert costs["AWS::KMS::Key"] == 1
    # Eleven interface endpoints in two zones; gateway endpoints are free.
    assert costs["AWS::EC2::VPCEndpoint"] == pytest.approx(11 * 2 * 7.3)
    [row] = (row for row in table({"all": lines_of(variants, "all")}) if "interface endpoint" in row)
    assert "| 22: $160.60 |" in row
    assert not {"AWS::EC2::NatGateway", "AWS::EC2::EIP"} & by_type(variants, "closed").keys()
    # Runs and stages use the same price of S3.
    [bucket] = (price for price in PRICES if price.type == "AWS::S3::Bucket")
    assert stored({"model/model.safetensors": GB_OF_S3}, 0).usd_per_month == bucket.usd
