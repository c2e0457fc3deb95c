import copy
from typing import Any

import pytest

from infra.idle_costs import FREE, PRICES, Line, idle_costs, summary, table
from infra.settings import STAGES
from jobs.contract.prices import GB_OF_S3, stored
from tests.support.infra.synthesis import Templates


def lines_of(templates: Templates, stage: str) -> list[Line]:
    return idle_costs([template for path, template in templates.items() if path.startswith(f"{stage}/")])


def by_type(templates: Templates, stage: str) -> dict[str, float | None]:
    return {line.price.type: line.usd_a_month for line in lines_of(templates, stage)}


def test_each_type_of_a_template_has_a_price_or_is_free(templates: Templates, variants: Templates) -> None:
    resources = [each for template in {**templates, **variants}.values() for each in template["Resources"].values()]
    priced = {price.type for price in PRICES}
    assert priced | FREE == {resource["Type"] for resource in resources}
    assert priced & FREE == set()
    with pytest.raises(KeyError, match="AWS::RDS::DBInstance"):
        idle_costs([{"Resources": {"Db": {"Type": "AWS::RDS::DBInstance"}}}])


def test_a_stage_costs_its_way_out_and_what_the_settings_ask_for(templates: Templates, variants: Templates) -> None:
    paid = {resource_type: usd for resource_type, usd in by_type(templates, "dev").items() if usd}
    assert paid == {
        "AWS::EC2::NatGateway": pytest.approx(32.85),
        "AWS::EC2::EIP": pytest.approx(3.65),
        "AWS::CloudWatch::Dashboard": 3,
        "AWS::CloudWatch::Alarm": pytest.approx(0.3),
    }
    everything = by_type(variants, "all")
    assert everything["AWS::FSx::FileSystem"] == pytest.approx(174)  # 1,200 GiB
    assert everything["AWS::KMS::Key"] == 1
    assert everything["AWS::EC2::NatGateway"] == pytest.approx(2 * 32.85)
    assert not {"AWS::EC2::NatGateway", "AWS::EC2::EIP"} & by_type(variants, "closed").keys()
    more: dict[str, Any] = copy.deepcopy(templates["dev/network"])
    more["Resources"]["Second"] = {"Type": "AWS::EC2::NatGateway"}
    totals = [sum(line.usd_a_month or 0 for line in idle_costs([each])) for each in (templates["dev/network"], more)]
    assert totals[1] - totals[0] == pytest.approx(32.85)


def test_an_interface_endpoint_costs_in_each_of_its_subnets(variants: Templates) -> None:
    endpoints = [
        resource["Properties"]
        for path, template in variants.items()
        for resource in template["Resources"].values()
        if path.startswith("all/") and resource["Type"] == "AWS::EC2::VPCEndpoint"
    ]
    hours = sum(len(endpoint["SubnetIds"]) for endpoint in endpoints if endpoint["VpcEndpointType"] == "Interface")
    assert hours >= 10
    assert by_type(variants, "all")["AWS::EC2::VPCEndpoint"] == pytest.approx(hours * 7.3)


def test_the_table_and_the_summary_add_up(templates: Templates) -> None:
    lines = lines_of(templates, "dev")
    rows = list(table({"dev": lines, "prod": lines_of(templates, "prod")}))
    assert "**$39.80**" in rows[-1]
    assert len({row.count("|") for row in rows}) == 1
    stage = STAGES["dev"]
    assert summary(stage, lines) == {
        "stage": "dev",
        "usd_a_month": pytest.approx(39.8),
        "instance_type": stage.instance_type,
        "cpu_instance_type": stage.cpu_instance_type,
        "builds_machine_image": True,
        "several_nodes_on_demand": False,
    }


def test_a_run_and_a_stage_pay_the_same_for_what_s3_keeps() -> None:
    [bucket] = (price for price in PRICES if price.type == "AWS::S3::Bucket")
    assert stored({"model/model.safetensors": GB_OF_S3}).usd_per_month == bucket.usd
