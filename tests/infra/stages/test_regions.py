import botocore.session
import pytest

from infra.settings import TEAMS
from infra.stages import Stage
from infra.stages.checks import check
from infra.stages.regions import REGIONS, zone_prefix
from jobs.contract.errors import ConfigurationError
from jobs.contract.instance_types import INSTANCE_TYPES

SDK = botocore.session.get_session()
SDK_REGIONS = [
    region
    for partition in SDK.get_available_partitions()
    for region in SDK.get_available_regions("ec2", partition_name=partition)
]
REFUSED = "infra/settings.py: stage 'test': region: must be a region of AWS that infra/stages/regions.py knows, not "


@pytest.mark.parametrize("region", SDK_REGIONS)
def test_every_region_that_the_sdk_knows_is_accepted(region: str) -> None:
    check(Stage(name="test", teams=TEAMS, region=region))


@pytest.mark.parametrize("region", ["us-east-3", "eu-east-1", "ap-southeast-12", "us-gov-central-1", "eusc-fr-west-1"])
def test_a_region_that_opens_later_is_accepted(region: str) -> None:
    assert region not in REGIONS
    check(Stage(name="test", teams=TEAMS, region=region))


@pytest.mark.parametrize(
    ("region", "message"),
    [
        ("us-est-1", "'us-est-1'; did you mean 'us-east-1' or 'us-west-1'?"),
        ("us-east-1 ", "'us-east-1 '; did you mean 'us-east-1'?"),
        ("us-east-1a", "'us-east-1a'; did you mean 'us-east-1'?"),
        ("US-EAST-2", "'US-EAST-2'; did you mean 'us-east-2'?"),
        ("us-east-0", "'us-east-0'; did you mean 'us-east-1' or 'us-east-2'?"),
        ("ue-central-2", "'ue-central-2'; did you mean 'eu-central-2'?"),
        ("aws-global", "'aws-global'"),
        ("nowhere", "'nowhere'"),
        ("*", "'*'"),
        ("", "''"),
    ],
)
def test_what_is_no_region_is_refused(region: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check(Stage(name="test", teams=TEAMS, region=region))
    assert str(caught.value) == REFUSED + message


@pytest.mark.parametrize(
    ("region", "prefix"),
    [
        ("us-east-1", "use1"),
        ("ap-south-1", "aps1"),
        ("ap-southeast-1", "apse1"),
        ("ap-northeast-3", "apne3"),
        ("ca-central-1", "cac1"),
        ("il-central-1", "ilc1"),
        ("cn-north-1", "cnn1"),
        ("cn-northwest-1", "cnnw1"),
        ("us-gov-west-1", "usgw1"),
        # Nothing public says how these regions call their zones.
        ("us-isob-east-1", None),
        ("eusc-de-east-1", None),
    ],
)
def test_the_ids_of_a_regions_zones_begin_with_its_short_name(region: str, prefix: str | None) -> None:
    assert zone_prefix(region) == prefix


def test_the_zones_of_the_instance_types_begin_so_too() -> None:
    zones = [
        (region, zone) for row in INSTANCE_TYPES.values() for region in row.zone_ids for zone in row.zone_ids[region]
    ]
    assert zones
    assert all(zone.startswith(f"{zone_prefix(region)}-az") for region, zone in zones)


def test_no_two_regions_share_the_beginning_of_their_zones() -> None:
    prefixes = [zone_prefix(region) for region in REGIONS if zone_prefix(region)]
    assert len(set(prefixes)) == len(prefixes)
