import copy
from typing import Any

import pytest

from infra.idle_costs import FREE, PRICES, Line, idle_costs, summary, table
from infra.settings import STAGES
from jobs.contract.prices import GB_OF_S3, stored
from tests.support.infra.synthesis import Templates


def test_of_every_type_it_is_known_what_it_costs_while_nothing_runs(templates: Templates, variants: Templates) -> None:
    types = {
        resource["Type"]
        for template in {**templates, **variants}.values()
        for resource in template["Resources"].values()
    }
    priced = {price.type for price in PRICES}
    assert types - priced - FREE == set()
    # Nothing is told of what no stage could have any more.
    assert (priced | FREE) - types == set()
    assert priced & FREE == set()


def test_a_type_of_which_nothing_is_known_is_an_error() -> None:
    with pytest.raises(KeyError, match="AWS::RDS::DBInstance"):
        idle_costs([{"Resources": {"Db": {"Type": "AWS::RDS::DBInstance"}}}])


def test_a_stage_costs_nothing_but_its_way_out_storage_and_what_was_asked_for(templates: Templates) -> None:
    costs = _by_type(templates, "dev")
    assert costs["AWS::EC2::NatGateway"] == pytest.approx(32.85)
    assert costs["AWS::EC2::EIP"] == pytest.approx(3.65)
    paid = {resource_type for resource_type, usd in costs.items() if usd}
    # The last two are within what every account has free.
    assert paid == {
        "AWS::EC2::NatGateway",
        "AWS::EC2::EIP",
        "AWS::CloudWatch::Dashboard",
        "AWS::CloudWatch::Alarm",
    }
    assert sum(1 for line in _lines(templates, "dev") for _ in range(line.count) if "Dashboard" in line.price.type) <= 3
    assert sum(line.count for line in _lines(templates, "dev") if "Alarm" in line.price.type) <= 10


def test_what_is_asked_for_is_counted(variants: Templates) -> None:
    costs = _by_type(variants, "all")
    assert costs["AWS::FSx::FileSystem"] == pytest.approx(174)  # 1,200 GiB
    assert costs["AWS::KMS::Key"] == 1
    assert costs["AWS::EC2::NatGateway"] == pytest.approx(2 * 32.85)
    endpoints = [
        resource["Properties"]
        for path, template in variants.items()
        for resource in template["Resources"].values()
        if path.startswith("all/") and resource["Type"] == "AWS::EC2::VPCEndpoint"
    ]
    hours = sum(len(endpoint["SubnetIds"]) for endpoint in endpoints if endpoint["VpcEndpointType"] == "Interface")
    assert hours >= 10
    assert costs["AWS::EC2::VPCEndpoint"] == pytest.approx(hours * 7.3)


def test_without_nat_its_hours_are_gone(variants: Templates) -> None:
    assert not {"AWS::EC2::NatGateway", "AWS::EC2::EIP"} & _by_type(variants, "closed").keys()


def test_one_more_costs_one_more(templates: Templates) -> None:
    broken: dict[str, Any] = copy.deepcopy(templates["dev/network"])
    broken["Resources"]["Second"] = {"Type": "AWS::EC2::NatGateway"}
    before, after = (
        sum(line.usd_a_month or 0 for line in idle_costs([template])) for template in (templates["dev/network"], broken)
    )
    assert after - before == pytest.approx(32.85)


def test_the_table_adds_up_and_names_its_sources(templates: Templates) -> None:
    stages = {stage: _lines(templates, stage) for stage in ("dev", "prod")}
    rows = list(table(stages))
    total = sum(line.usd_a_month or 0 for line in stages["dev"])
    assert f"**${total:.2f}**" in rows[-1]
    assert rows[0].count("|") == rows[1].count("|") == rows[2].count("|") == rows[-1].count("|")
    for price in PRICES:
        assert price.source
        assert price.turned_off_by


def _lines(templates: Templates, stage: str) -> list[Line]:
    return idle_costs([template for path, template in templates.items() if path.startswith(f"{stage}/")])


def _by_type(templates: Templates, stage: str) -> dict[str, float | None]:
    return {line.price.type: line.usd_a_month for line in _lines(templates, stage)}


def test_one_stage_says_for_programs_what_it_costs_and_what_jobs_would_run_on(templates: Templates) -> None:
    stage = STAGES["dev"]
    said = summary(stage, _lines(templates, "dev"))
    assert (said["stage"], said["instance_type"]) == ("dev", stage.instance_type)
    assert said["cpu_instance_type"] == stage.cpu_instance_type
    assert said["usd_a_month"] == pytest.approx(39.8)
    assert (said["builds_machine_image"], said["several_nodes_on_demand"]) == (True, False)


def test_a_run_and_a_stage_pay_the_same_for_what_s3_keeps() -> None:
    [bucket] = (price for price in PRICES if price.type == "AWS::S3::Bucket")
    assert stored({"model/model.safetensors": GB_OF_S3}).usd_per_month == bucket.usd
