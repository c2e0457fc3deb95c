"""Availability zones and the VPC of a stage, and what has to lie in one zone."""

from dataclasses import replace
from typing import Any

import pytest

from infra.settings import TEAMS
from infra.stages import ExistingVpc, Stage
from infra.stages.checks import check
from jobs.contract.errors import ConfigurationError

WHERE = "infra/settings.py: stage 'test': "


def test_endpoints_for_jobs_of_several_nodes_have_to_know_the_vpcs_default_group() -> None:
    # On instances with EFA Batch puts containers of such jobs into the VPC's default group.
    vpc = ExistingVpc(vpc_id="vpc-0123456789abcdef0", private_subnet_ids=("subnet-0123456789abcdef0",))
    stage = Stage(name="test", teams=TEAMS, vpc=vpc, interface_endpoints=True, max_multinode_nodes=2)
    with pytest.raises(ConfigurationError) as caught:
        check(stage)
    assert str(caught.value).startswith(f"{WHERE}vpc: default_security_group_id: is needed")
    check(replace(stage, vpc=replace(vpc, default_security_group_id="sg-0123456789abcdef0")))
    check(replace(stage, interface_endpoints=None))
    check(replace(stage, max_multinode_nodes=0))


def test_a_vpc_that_is_there_has_its_own_zones() -> None:
    vpc = ExistingVpc(vpc_id="vpc-0123456789abcdef0", private_subnet_ids=("subnet-0123456789abcdef0",))
    with pytest.raises(ConfigurationError) as caught:
        check(Stage(name="test", teams=TEAMS, vpc=vpc, availability_zone_ids=("use1-az2",)))
    assert str(caught.value) == f"{WHERE}availability_zone_ids: they are those of the subnets in 'vpc'; leave them out"


@pytest.mark.parametrize("setting", [{"max_multinode_nodes": 2}, {"fsx_gib": 1_200}], ids=["nodes", "file system"])
def test_what_lives_in_one_zone_is_not_given_the_first_one_by_letter(setting: dict[str, Any]) -> None:
    # Trap: a region's first zone need not offer the type, and an instance that is asked for there never comes.
    stage = Stage(**{"name": "test", "teams": TEAMS, **setting})
    offers = (
        "aws ec2 describe-instance-type-offerings --location-type availability-zone-id --filters "
        "Name=instance-type,Values=dl1.24xlarge"
    )
    zones = f"availability_zone_ids, first a zone that offers it ({offers})"
    here = f"{WHERE}{next(iter(setting))}: lives in one zone, and no zone is known to offer dl1.24xlarge here; set "
    with pytest.raises(ConfigurationError) as caught:
        check(stage)
    assert str(caught.value) == f"{here}region='us-east-1' or 'us-west-2', or {zones}"
    with pytest.raises(ConfigurationError) as caught:
        check(replace(stage, region="eu-west-1"))
    assert str(caught.value) == f"{here}{zones}"
    # Any of these says which zone: a region whose zone the row knows, a zone, a VPC whose first subnet it is.
    vpc = ExistingVpc(vpc_id="vpc-0123456789abcdef0", private_subnet_ids=("subnet-01234567",))
    for known in ({"region": "us-west-2"}, {"availability_zone_ids": ("use1-az2",)}, {"vpc": vpc}):
        check(replace(stage, **known))


def test_zones_are_of_one_region() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check(Stage(name="test", teams=TEAMS, availability_zone_ids=("use1-az2", "usw2-az1")))
    assert str(caught.value) == (
        f"{WHERE}availability_zone_ids: 'use1-az2' and 'usw2-az1' are in different regions, but a stage has one region"
    )


def test_zones_are_of_the_stages_region() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check(Stage(name="test", teams=TEAMS, region="eu-west-1", availability_zone_ids=("use1-az2", "use1-az4")))
    assert str(caught.value) == (
        f"{WHERE}availability_zone_ids: 'use1-az2' is not in 'eu-west-1', whose zones begin with 'euw1'"
    )
    check(Stage(name="test", teams=TEAMS, region="eu-west-1", availability_zone_ids=("euw1-az2", "euw1-az3")))


def test_zones_are_not_compared_with_a_region_that_is_none() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check(Stage(name="test", teams=TEAMS, region="nowhere", availability_zone_ids=("use1-az2",)))
    assert str(caught.value).startswith(f"{WHERE}region: ")
    assert "\n" not in str(caught.value)
