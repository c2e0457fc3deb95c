"""Loading and checking infra/settings.py: all mistakes of a row are reported together, with their field or line."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra import settings
from infra.access.permissions_boundary import name_prefix
from infra.settings import STAGES, TEAMS
from infra.stages import Alerts, CapacityReservation, ExistingVpc, GitHub, Pool, Proxy, Stage, Team, checks
from infra.stages.checks import check, selected_stages
from infra.stages.limits import LOG_RETENTION_DAYS
from jobs.core.errors import ConfigurationError

SUBNET = "subnet-0123456789abcdef0"
VPC = ExistingVpc(vpc_id="vpc-0123456789abcdef0", private_subnet_ids=(SUBNET,))
GAUDI = Pool(instance_types=("dl1.24xlarge",))
RETIRING = Pool(instance_types=("p4d.24xlarge",), release="cuda-2026.11")
CUSTOM_AMI = "ami-0123456789abcdef0"
SETTINGS = Path(settings.__file__).read_text()
TEAMS_LINE = 1 + SETTINGS[: SETTINGS.index("TEAMS = ")].count("\n")


def refusal(**row: Any) -> str:
    """Return a stage's mistakes, without the common prefix of their lines."""
    stage = Stage(**{"name": "test", "teams": TEAMS, "region": "us-east-1", **row})
    with pytest.raises(ConfigurationError) as caught:
        check(stage)
    assert caught.value.exit_code == 3
    message = str(caught.value)
    prefix = f"infra/settings.py: stage '{stage.name}': "
    assert message.startswith(prefix)
    return message.replace(prefix, "")


def test_the_shipped_stages_pass_and_can_be_selected() -> None:
    assert [stage.name for stage in selected_stages()] == ["dev", "prod"]
    assert selected_stages("prod") == (STAGES["prod"],)
    with pytest.raises(ConfigurationError, match=r"stage 'dve' is not in infra/settings\.py; did you mean 'dev'"):
        selected_stages("dve")


def test_the_commented_row_switches_the_stage_to_nvidia() -> None:
    # EC2's API no longer lists dl1.24xlarge: a comment beside the shipped row shows the alternative.
    lines = Path(settings.__file__).read_text().splitlines()
    (dev_line,) = (number for number, line in enumerate(lines) if line.strip().startswith('Stage(name="dev"'))
    shipped, shown = (eval(lines[number].strip(" ,#"), vars(settings)) for number in (dev_line, dev_line - 1))
    check(shown)
    assert shown.row.accelerator == "cuda"
    assert shown == replace(shipped, instance_types=shown.instance_types)


def test_a_stage_is_checked_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings.STAGES, "broken", Stage(name="broken", teams=()))
    with pytest.raises(ConfigurationError, match="stage 'broken': teams: at least one is needed"):
        selected_stages()
    # Other stages can still be used.
    assert selected_stages("dev")


@pytest.mark.parametrize(
    ("field", "below", "low", "high", "above"),
    [
        ("max_nodes", 0, 1, 1000, 1001),
        ("max_multinode_nodes", -1, 0, 1000, 1001),
        ("root_volume_gib", 99, 100, 16_384, 16_385),
        ("checkpoint_retention_days", 0, 1, 3650, 3651),
        ("reclaims_before_on_demand", 0, 1, 10, 11),
        ("nat_gateways", -1, 1, 1, 2),  # DL1 is in one zone of the region
        ("spot_wait_hours", 0.1, 1 / 6, 24.0, 24.1),
        ("monthly_budget_usd", 0.0, 0.01, 1e9, float("inf")),
        ("max_usd_per_hour", 3.92, 3.93, 1e9, float("inf")),
    ],
)
def test_numbers_have_limits(field: str, below: float, low: float, high: float, above: float) -> None:
    for wrong in (below, above):
        message = refusal(**{field: wrong})
        assert message.startswith(f"{field}: must be ")
        assert message.endswith(f"not {wrong:g}" if isinstance(wrong, float) else f"not {wrong}")
    for right in (low, high):
        row: dict[str, Any] = {"name": "test", "teams": TEAMS, "region": "us-east-1", field: right}
        check(Stage(**row))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", "My Stage", "must be 1 to 13 lower-case letters, digits and hyphens, not 'My Stage'"),
        ("bootstrap_qualifier", "My-Org", "must be 1 to 10 lower-case letters and digits, not 'My-Org'"),
        *(
            ("vpc_cidr", value, "must be a private /16")
            for value in ("10.1.2.0/24", "11.0.0.0/16", "172.17.0.0/16", "x")
        ),
        ("log_retention_days", 91, "must be one of 1, 3, 5, 7, 14, 30, 60, 90, 120,"),
        *(("fsx_gib", value, "must be 0, 1200 or a multiple of 2400") for value in (1_000, -2_400)),
        ("monthly_budget_usd", float("nan"), "must be at least 0.01, not nan"),
        *(("account", value, "must be the 12 digits") for value in ("*", "\uff11" * 12)),
        ("permissions_boundary", "arn:aws:iam::aws:policy/x", "must be a managed policy's name, without its ARN"),
        ("vpc", replace(VPC, vpc_id="vpc-1"), "vpc_id: must be like 'vpc-0123456789abcdef0', not 'vpc-1'"),
        ("vpc", replace(VPC, private_subnet_ids=()), "private_subnet_ids: at least one is needed"),
        ("vpc", replace(VPC, private_subnet_ids=(SUBNET, SUBNET)), "private_subnet_ids: lists a subnet twice"),
        ("vpc", replace(VPC, default_security_group_id="default"), "default_security_group_id: must be like 'sg-"),
        *(("alerts", Alerts(emails=(email,)), "emails: ") for email in ("someone", "a\x1b@b.c")),
        ("alerts", Alerts(emails=("a@example.org",) * 2), "emails: lists an address twice"),
        ("alerts", Alerts(failed_jobs_an_hour=0), "failed_jobs_an_hour: must be at least 1, not 0"),
        *(
            ("deploy_from", GitHub(repository=name), f"repository: must be 'owner/name', not '{name}'")
            for name in ("trainyard", "org/*", "org/..")
        ),
        *(
            ("deploy_from", GitHub(repository="a/b", branch=name), f"branch: must be a branch name, not '{name}'")
            for name in ("a..b", "a.lock", "a//b", "*", "release/")
        ),
        ("deploy_from", GitHub(repository="a/b", branch="refs/heads/main"), "branch: must be a branch name without"),
        ("deploy_from", GitHub(repository="a/b", owner_id=7), "set both owner_id and repository_id, or neither"),
        ("deploy_from", GitHub(repository="a/b", owner_id=0, repository_id=1), "owner_id: must be at least 1, not 0"),
        ("deploy_from", GitHub(repository="a/b", environment="*"), "environment: must be a name, not '*'"),
        (
            "deploy_from",
            GitHub(repository="org/trainyard", oidc_provider_arn="arn:aws:iam::123456789012:role/x"),
            "oidc_provider_arn: must be the ARN of the provider of token.actions.githubusercontent.com",
        ),
        ("retiring", (GAUDI,), "'dl1-24xlarge-1-21-0' is the pool of new jobs; it cannot retire at the same time"),
        ("retiring", (RETIRING,) * 2, "lists a pool twice"),
        ("retiring", (replace(GAUDI, release="1.24.0"),), "release '1.24.0' supports Gaudi 2 and 3; dl1.24xlarge"),
        ("retiring", (replace(RETIRING, machine_image="ami"),), "machine_image: must be 'ami-…' or 'ssm:/…', not"),
        *(("machine_image", value, "must be 'ami-…' or 'ssm:/…', not") for value in ("ami-xyz", "ssm:relative")),
        *(("root_device_name", value, "must be a device such as '/dev/sda1', not") for value in ("sda1",)),
        *(("region", value, "must be a region's name") for value in ("\ud800", "us-east-1a")),
        ("image_tag", "a b", "must be at most 128 letters, digits, '_', '.' and '-', not 'a b'"),
        *(
            ("availability_zone_ids", (zone,), "must be an id such as 'use1-az2'")
            for zone in ("us-east-1a", "use1-az9")
        ),
        ("availability_zone_ids", ("use1-az2", "use1-az2"), "lists a zone twice"),
        ("egress_ports", (80,), "must include 443, over which jobs reach AWS"),
        ("egress_ports", (443, 0), "must be from 1 to 65535, not 0"),
        ("egress_udp_ports", (53, 53), "lists a port twice"),
        # Everyone who may describe job definitions could read a password.
        ("proxy", Proxy(url="http://me:word@proxy:3128"), "url: must not contain a user or password"),
        *(("proxy", Proxy(url=url), "url: must be 'http://HOST:PORT'") for url in ("proxy:3128", "http://proxy", "")),
        ("proxy", Proxy(url="http://proxy:3128", bypass=("a b",)), "bypass: must be a host, a '.domain', an address"),
        ("proxy", Proxy(url="http://proxy:3128", bypass=("a" * 250, "b" * 250)), "bypass: must have at most 500"),
        ("ebs_key_arn", "alias/ebs", "must be 'arn:aws:kms:REGION:ACCOUNT:key/ID', not 'alias/ebs'"),
        ("cpu_instance_type", "dl1.24xlarge", "must be a type without an accelerator, not 'dl1.24xlarge'"),
        ("cpu_instance_type", "m6i", "unknown instance type 'm6i'"),
        ("instance_types", ("dl1.24xlarg",), "unknown instance type 'dl1.24xlarg'; did you mean 'dl1.24xlarge'?"),
        ("release", "1.24.0", "release '1.24.0' supports Gaudi 2 and 3; dl1.24xlarge has Gaudi 1"),
        ("release", "1.21.1", "unknown release '1.21.1'; did you mean '1.21.0'?"),
    ],
)
def test_values_that_cannot_be_deployed_are_refused(field: str, value: Any, message: str) -> None:
    assert refusal(**{field: value}).startswith(f"{field}: {message}")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"max_nodes": "three"}, "max_nodes: Input should be a valid integer, not 'three'"),
        ({"alerts": Alerts(emails="me@x.org")}, "alerts: emails: Input should be a valid tuple, not 'me@x.org'"),  # type: ignore[arg-type]
        ({"teams": (Team(name="x", share="2"),)}, "team 'x': share: Input should be a valid number, not '2'"),  # type: ignore[arg-type]
        ({"teams": ("x",)}, "teams: Input should be an instance of Team, not 'x'"),
        # Other mistakes are reported only once the types are right.
        ({"teams": (), "max_nodes": 2.5}, "max_nodes: Input should be a valid integer, not 2.5"),
    ],
)
def test_values_of_the_wrong_type_are_refused(row: dict[str, Any], message: str) -> None:
    assert refusal(**row) == message


@pytest.mark.parametrize(
    ("teams", "message"),
    [
        ((), "teams: at least one is needed"),
        ((Team(name="Research"),), "team 'Research': must be at most 31 lower-case letters, digits and hyphens"),
        ((Team(name="shared"),), "team 'shared': the prefix 'shared/' belongs to all teams; choose another name"),
        (
            (Team(name="a", share=0.001, shares_instances=True),),
            "team 'a': share: must be from 0.01 to 1000, not 0.001",
        ),
        (
            (Team(name="a", share=2.0),),
            "team 'a': share: only affects teams that share instances; also set",
        ),
        ((Team(name="a"), Team(name="a")), "team 'a': two teams have this name"),
        ((Team(name="a", monthly_budget_usd=-5),), "team 'a': monthly_budget_usd: must be at least 0.01, not -5"),
        (
            (Team(name="a", max_usd_per_hour=3),),
            "team 'a': max_usd_per_hour: must be at least 3.93, the price of one dl1",
        ),
        (
            (Team(name="a", max_usd_per_hour=30, shares_instances=True),),
            "team 'a': max_usd_per_hour: its instances also run other teams' jobs",
        ),
        (
            (Team(name="a", member_principals=("arn:aws:iam::123456789012:root",)),),
            "team 'a': member_principals: must be ARNs of IAM users or roles, not 'arn:aws:iam::123456789012:root'",
        ),
        *(
            (
                (Team(name="a", secret_variables=(name,)),),
                f"team 'a': secret_variables: '{name}' cannot come from a secret",
            )
            for name in ("AWS_SECRET_ACCESS_KEY", "LD_PRELOAD")
        ),
        ((Team(name="a", secret_variables=("wandb",)),), "team 'a': secret_variables: must be the name of a variable"),
        ((Team(name="ml-ops"), Team(name="mlops")), "team 'mlops': Batch's fair share drops hyphens, so it cannot"),
    ],
)
def test_invalid_teams_are_refused(teams: tuple[Team, ...], message: str) -> None:
    assert refusal(teams=teams).startswith(message)


def test_all_mistakes_are_reported_together() -> None:
    message = refusal(teams=(Team(name="shared"),), max_nodes=0, release="2.0")
    assert [line.split(":")[0] for line in message.splitlines()] == ["max_nodes", "team 'shared'", "release"]


def test_no_stage_name_starts_with_the_name_of_another() -> None:
    # The boundary of `dev` admits names that start with `trainyard-dev-`, so it would admit all of a stage `dev-2`.
    for name in STAGES:
        assert refusal(name=f"{name}-2").startswith(f"name: starts with the name of stage '{name}'")
        check(Stage(name=f"{name}2", teams=TEAMS))
    # AND CloudFormation does not shorten the longest name, so the boundary's prefix is complete.
    assert name_prefix("m" * 13) == f"trainyard-{'m' * 13}-"
    assert refusal(name="m" * 14).startswith("name: must be 1 to 13")


ACCEPTED: list[dict[str, Any]] = [
    {"name": "m" * 13},
    {"nat_gateways": 0, "machine_image": CUSTOM_AMI},
    {"nat_gateways": 0, "vpc": VPC},  # only the VPC's owner knows whether it has a route to AWS
    {"nat_gateways": 3, "availability_zone_ids": ("use1-az1", "use1-az2", "use1-az4")},
    {"nat_gateways": 3, "instance_types": ("p5.48xlarge",), "region": "us-east-1"},
    {"proxy": Proxy(url="http://10.0.0.1:3128", bypass=("10.0.0.0/8", ".corp")), "machine_image": CUSTOM_AMI},
    {"fsx_gib": 1_200, "region": "us-east-1"},
    {"deploy_from": GitHub(repository="org/trainyard", branch="release/1.0")},
    {"retiring": (RETIRING, replace(RETIRING, instance_types=("g5.4xlarge",), release=None))},
    {"instance_types": ("g6e.xlarge", "g5.xlarge", "g5.4xlarge"), "max_on_demand_nodes": 1},
    {"instance_types": ("g6e.48xlarge", "g5.48xlarge", "g6.48xlarge"), "max_on_demand_nodes": 1, "spot_wait_hours": 1},
    {"account": "012345678901", "region": "us-gov-west-1"},
    {"instance_types": ("m6i.4xlarge",), "release": "cpu-2026.11"},
    {"log_retention_days": LOG_RETENTION_DAYS[-1]},
]


def test_extreme_valid_values_are_accepted() -> None:
    for accepted in ACCEPTED:
        check(Stage(**{"name": "test", "teams": TEAMS, **accepted}))
    check(Stage(name="test", teams=TEAMS, alerts=Alerts(failed_jobs_an_hour=1)))
    # Whole numbers are accepted as floats.
    check(Stage(name="test", teams=(Team(name="a", share=2, shares_instances=True),), spot_wait_hours=3))


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ((), "at least one is needed"),
        (("g5.xlarge", "g5.xlarge"), "lists a type twice"),
        (
            ("g6e.12xlarge", "g5.xlarge"),
            "g6e.12xlarge and g5.xlarge cannot share a pool, whose types need the same number of cards, not 4 and 1",
        ),
        (
            ("p4d.24xlarge", "dl1.24xlarge"),
            "p4d.24xlarge and dl1.24xlarge cannot share a pool, whose types need the same image, not cuda and gaudi",
        ),
        # Batch does not count these cards, so a job would not fill the larger type.
        (
            ("m7i.4xlarge", "m7i.8xlarge"),
            "m7i.4xlarge and m7i.8xlarge cannot share a pool, whose types need the same number of vCPUs, not 16 and 32",
        ),
        (
            ("g6e.48xlarge", "g5.48xlarge", "g6.48xlarge"),
            "a queue tries at most 3 compute environments, not 4: one per card and one of On-Demand instances",
        ),
        (
            ("g5.xlarge", "g6e.xlarge", "g5.4xlarge", "p5.4xlarge"),
            "a queue tries at most 3 compute environments, not 5",
        ),
    ],
)
def test_types_that_cannot_share_a_pool_are_refused(types: tuple[str, ...], message: str) -> None:
    found = refusal(instance_types=types, max_on_demand_nodes=1)
    assert found.startswith(f"instance_types: {message}")
    pool = Pool(instance_types=types)
    if len(set(types)) > 1:
        assert refusal(retiring=(pool,), max_on_demand_nodes=1).startswith(f"retiring: instance_types: {message}")


EAST = {"region": "us-east-1", "spot_wait_hours": 1, "fallback_stage": "west"}
WEST = Stage(name="west", teams=TEAMS, region="us-west-2")
OTHER_TYPES = "'west' has p4d.24xlarge, which this stage does not; its types must all be types of this stage"


@pytest.mark.parametrize(
    ("row", "west", "message"),
    [
        ({}, {}, None),
        ({}, {"fallback_stage": "test", "spot_wait_hours": 1}, None),
        ({}, {"teams": (*TEAMS, Team(name="more"))}, None),
        ({"instance_types": ("g5.xlarge", "g6e.xlarge")}, {"instance_types": ("g6e.xlarge",)}, None),
        ({"spot_wait_hours": None}, {}, "also set spot_wait_hours: a job moves after this wait"),
        ({"fallback_stage": "wst"}, {}, "'wst' is not in infra/settings.py; did you mean 'west'?"),
        ({"fallback_stage": "test"}, {}, "'test' is not in infra/settings.py"),
        ({"region": None}, {}, "set 'region' of both 'test' and 'west', to different regions"),
        ({}, {"region": "us-east-1"}, "set 'region' of both 'test' and 'west', to different regions"),
        ({}, {"teams": ("research",)}, "'west' also has mistakes; to list them: cdk synth -c stage=west"),
        ({}, {"account": "123456789012"}, "'west' must have the same account"),
        ({}, {"nat_gateways": 0, "machine_image": CUSTOM_AMI}, "jobs of 'west' could not reach the buckets here"),
        ({"fsx_gib": 1_200}, {}, "jobs find shared data under a path of the file system"),
        ({}, {"teams": TEAMS[:1]}, "'west' needs team 'product'"),
        (
            {},
            {"teams": (TEAMS[0], replace(TEAMS[1], huggingface_token=True))},
            "team 'product' needs the same huggingface_token and secret_variables in 'west'",
        ),
        ({}, {"instance_types": ("p4d.24xlarge",)}, OTHER_TYPES),
    ],
)
def test_a_fallback_stage_can_run_the_jobs_of_this_stage(
    monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], west: dict[str, Any], message: str | None
) -> None:
    monkeypatch.setitem(STAGES, "west", replace(WEST, **west))
    if message is None:
        check(Stage(**{"name": "test", "teams": TEAMS, **EAST, **row}))
    else:
        assert refusal(**{**EAST, **row}).startswith(f"fallback_stage: {message}")


def test_a_custom_bootstrap_qualifier_gets_its_own_stack() -> None:
    row = Stage(name="test", teams=TEAMS)
    assert row.bootstrap_options == []
    own = replace(row, bootstrap_qualifier="mlteam").bootstrap_options
    assert own == ["--qualifier", "mlteam", "--toolkit-stack-name", "CDKToolkit-mlteam"]


def test_an_ami_cannot_be_built_without_nat() -> None:
    message = [refusal(nat_gateways=0), refusal(nat_gateways=0, instance_types=("p4d.24xlarge",), retiring=(GAUDI,))]
    assert [line.partition(": building the AMI of ")[0] for line in message] == [
        "machine_image",
        "retiring: machine_image",
    ]


def test_reserved_capacity_needs_on_demand_nodes_and_an_id() -> None:
    promised = CapacityReservation(target="cr-0123456789abcdef0")
    check(Stage(name="test", teams=TEAMS, region="us-east-1", max_multinode_nodes=2, capacity_reservation=promised))
    assert refusal(capacity_reservation=promised).startswith("capacity_reservation: only On-Demand instances use it")
    wrong = CapacityReservation(target="cr-1")
    message = refusal(max_on_demand_nodes=1, capacity_reservation=wrong)
    assert message.startswith("capacity_reservation: target: must be the id of a capacity reservation")


@pytest.mark.parametrize(
    ("stage", "reservation", "message"),
    [
        ({"region": "us-east-1"}, {}, "set zone_id to the zone of the capacity: aws ec2 describe-capacity"),
        ({}, {}, "set zone_id to the zone of the capacity"),
        ({"availability_zone_ids": ("use1-az1", "use1-az2")}, {"zone_id": "use1-az4"}, "add use1-az4 to availability"),
        ({"region": "eu-central-1"}, {"zone_id": "euc1-az2"}, "add euc1-az2 to availability_zone_ids"),
        ({}, {"subnet_id": SUBNET}, "subnet_id is for an existing `vpc`; set zone_id instead"),
        ({"vpc": VPC}, {"zone_id": "use1-az4"}, "zone_id is for a VPC that the stage creates; set subnet_id instead"),
        ({"vpc": VPC}, {"subnet_id": f"{SUBNET[:-1]}9"}, f"add {SUBNET[:-1]}9 to private_subnet_ids of `vpc`"),
        # One subnet, or reservations in several zones
        ({"vpc": VPC}, {}, None),
        ({}, {"target": "arn:aws:resource-groups:us-east-1:123456789012:group/promised"}, None),
        # The stage adds the zone's subnet.
        ({"region": "us-east-1"}, {"zone_id": "use1-az6"}, None),
    ],
)
def test_a_reservation_in_one_zone_needs_that_zone(
    stage: dict[str, Any], reservation: dict[str, Any], message: str | None
) -> None:
    promised = CapacityReservation(**{"target": "cr-0123456789abcdef0", **reservation})
    row: dict[str, Any] = {"instance_types": ("p5.48xlarge",), "max_on_demand_nodes": 1, "region": None, **stage}
    if message:
        assert refusal(capacity_reservation=promised, **row).startswith(f"capacity_reservation: {message}")
    else:
        check(Stage(name="test", teams=TEAMS, capacity_reservation=promised, **row))


def test_an_ami_is_not_built_behind_a_proxy() -> None:
    message = refusal(proxy=Proxy(url="http://proxy:3128"))
    assert message.startswith("machine_image: building the AMI of 'dl1-24xlarge-1-21-0' would not use the proxy")


def test_a_dedicated_account_has_an_id_and_no_other_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(dedicated_account=True) == "dedicated_account: also set 'account'"
    own: dict[str, Any] = {"dedicated_account": True, "account": "123456789012"}
    check(Stage(name="test", teams=TEAMS, **own))
    monkeypatch.setitem(STAGES, "lab", Stage(name="lab", teams=TEAMS, account="123456789012"))
    assert refusal(**own).startswith("dedicated_account: stage 'lab' has the same account")


def test_a_stage_with_more_queues_than_batch_allows_is_refused() -> None:
    everything: dict[str, Any] = {"region": "us-east-1", "max_on_demand_nodes": 1, "max_multinode_nodes": 2}
    teams = tuple(Team(name=f"team{number}") for number in range(26))
    check(Stage(name="test", teams=teams[:12], **everything))
    check(Stage(name="test", teams=teams[:25]))
    assert "has 13 x 4: one set per team" in refusal(teams=teams[:13], **everything)
    assert "has 26 x 2: one set per team" in refusal(teams=teams)
    # A retiring pool adds queues; teams that share instances have one set together.
    upgraded = {**everything, "retiring": (RETIRING,)}
    # More zones offer P4d than DL1, and multi-node jobs have an environment in each.
    assert "has 6 x 9: one set per team" in refusal(teams=teams[:6], **upgraded)
    several_zones = {**everything, "instance_types": ("p4d.24xlarge",)}
    assert "has 9 x 6: one set per team" in refusal(teams=teams[:9], **several_zones)
    check(Stage(name="test", teams=teams[:12], availability_zone_ids=("use1-az2",), **several_zones))
    shared = tuple(replace(team, shares_instances=True) for team in teams[4:])
    check(Stage(name="test", teams=(*teams[:4], *shared), **upgraded))


def test_endpoints_for_multinode_jobs_need_the_default_group() -> None:
    # On EFA instances, Batch puts the containers of multi-node jobs into the VPC's default group.
    stage = Stage(name="test", teams=TEAMS, vpc=VPC, interface_endpoints=True, max_multinode_nodes=2)
    message = refusal(vpc=VPC, interface_endpoints=True, max_multinode_nodes=2)
    assert message.startswith("vpc: default_security_group_id: is required")
    check(replace(stage, vpc=replace(VPC, default_security_group_id="sg-0123456789abcdef0")))
    check(replace(stage, interface_endpoints=None))
    check(replace(stage, max_multinode_nodes=0))


def test_zones_and_addresses_of_an_existing_vpc_cannot_be_set() -> None:
    assert refusal(vpc=VPC, availability_zone_ids=("use1-az2",)).startswith("availability_zone_ids: follow from")
    assert refusal(vpc=VPC, vpc_cidr="10.1.0.0/16").startswith("vpc_cidr: follows from")


@pytest.mark.parametrize("setting", [{"max_multinode_nodes": 2}, {"fsx_gib": 1_200}])
def test_single_zone_features_need_a_zone_that_offers_the_type(setting: dict[str, Any]) -> None:
    # A region's first zone may not offer the type, and an instance requested there would never start.
    here = f"{next(iter(setting))}: needs one zone, and no zone here is known to offer dl1.24xlarge; set "
    assert refusal(region=None, **setting).startswith(f"{here}region='us-east-1' or 'us-west-2', or availability_zone")
    assert refusal(region="eu-west-1", **setting).startswith(
        f"{here}availability_zone_ids, starting with a zone that offers it"
    )
    for known in ({"region": "us-west-2"}, {"availability_zone_ids": ("use1-az2",)}, {"vpc": VPC}):
        check(Stage(**{"name": "test", "teams": TEAMS, **setting, **known}))


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], object]:
    """Load the settings with `old` replaced by `new`."""

    def run(old: str, new: str) -> object:
        assert SETTINGS.count(old) == 1
        (tmp_path / "edited_settings.py").write_text(SETTINGS.replace(old, new))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "edited_settings", raising=False)
        monkeypatch.setattr(checks, "SETTINGS", "edited_settings")
        return checks.load()

    return run


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("TEAMS = (", "TEAMS = )", "unmatched ')'"),
        ('Team(name="research")', 'Team(names="research")', "Team has no field 'names'; did you mean 'name'?"),
        ('Team(name="research")', "Team()", "TypeError: Team.__init__() missing 1 required"),
        ('Team(name="research")', "Taem()", "NameError: name 'Taem' is not defined"),
        (
            "TEAMS = (",
            'import dataclasses; TEAMS = (dataclasses.replace(Team(name="a"), budget=1),',
            "Team has no field 'budget'",
        ),
    ],
)
def test_a_mistake_in_the_file_is_reported_with_its_line(
    load: Callable[[str, str], object], old: str, new: str, message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(old, new)
    assert str(caught.value).startswith(f"infra/settings.py: {message}")
    assert str(caught.value).endswith(f" (line {TEAMS_LINE})")


def test_an_error_in_other_code_keeps_its_traceback(load: Callable[[str, str], object]) -> None:
    with pytest.raises(ValueError, match="Expecting property name"):
        load("STAGES = {", 'import json\n\njson.loads("{")\nSTAGES = {')


def test_valid_settings_are_loaded(load: Callable[[str, str], dict[str, object]]) -> None:
    assert set(load("max_nodes=16", "max_nodes=17")) == {"dev", "prod"}
