"""What a stage may say: all mistakes in a row of settings.py are reported together, before anything is made of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra import settings
from infra.access.permissions_boundary import name_prefix
from infra.settings import STAGES, TEAMS
from infra.stages import Alerts, CapacityReservation, ExistingVpc, GitHub, Pool, Stage, Team
from infra.stages.checks import check, selected_stages
from infra.stages.limits import LOG_RETENTION_DAYS
from jobs.core.errors import ConfigurationError

SUBNET = "subnet-0123456789abcdef0"
VPC = ExistingVpc(vpc_id="vpc-0123456789abcdef0", private_subnet_ids=(SUBNET,))
GAUDI = Pool(instance_type="dl1.24xlarge")
RETIRING = Pool(instance_type="p4d.24xlarge", release="1.23.0")
CUSTOM_AMI = "ami-0123456789abcdef0"


def refusal(**row: Any) -> str:
    """Return what is wrong with a stage: its mistakes, each without the words that begin all of them."""
    stage = Stage(**{"name": "test", "teams": TEAMS, "region": "us-east-1", **row})
    with pytest.raises(ConfigurationError) as caught:
        check(stage)
    assert caught.value.exit_code == 3
    said = str(caught.value)
    where = f"infra/settings.py: stage '{stage.name}': "
    assert said.startswith(where)
    return said.replace(where, "")


def test_the_stages_of_this_repository_pass_and_can_be_selected() -> None:
    assert [stage.name for stage in selected_stages()] == ["dev", "prod"]
    assert selected_stages("prod") == (STAGES["prod"],)
    with pytest.raises(ConfigurationError, match=r"stage 'dve' is not in infra/settings\.py; did you mean 'dev'"):
        selected_stages("dve")


def test_the_way_to_nvidias_cards_is_one_line_beside_the_row_that_it_replaces() -> None:
    # EC2's API does not list dl1.24xlarge any more: the shipped row shows the way out.
    lines = Path(settings.__file__).read_text().splitlines()
    (place,) = (number for number, line in enumerate(lines) if line.strip().startswith('Stage(name="dev"'))
    shipped, shown = (eval(lines[number].strip(" ,#"), vars(settings)) for number in (place, place - 1))
    check(shown)
    assert shown.row.accelerator == "cuda"
    assert shown == replace(shipped, instance_type=shown.instance_type)


def test_a_stage_is_checked_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings.STAGES, "broken", Stage(name="broken", teams=()))
    with pytest.raises(ConfigurationError, match="stage 'broken': teams: at least one is needed"):
        selected_stages()
    # The other stages can still be worked on.
    assert selected_stages("dev")


@pytest.mark.parametrize(
    ("field", "below", "low", "high", "above"),
    [
        ("max_nodes", 0, 1, 1000, 1001),
        ("max_multinode_nodes", -1, 0, 1000, 1001),
        ("root_volume_gib", 99, 100, 16_384, 16_385),
        ("checkpoint_retention_days", 0, 1, 3650, 3651),
        ("reclaims_before_on_demand", 0, 1, 10, 11),
        ("nat_gateways", -1, 1, 2, 3),
        ("spot_wait_hours", 0.1, 1 / 6, 24.0, 24.1),
        ("monthly_budget_usd", 0.0, 0.01, 1e9, float("inf")),
    ],
)
def test_numbers_have_limits(field: str, below: float, low: float, high: float, above: float) -> None:
    for wrong in (below, above):
        said = refusal(**{field: wrong})
        assert said.startswith(f"{field}: must be ")
        assert said.endswith(f"not {wrong:g}" if isinstance(wrong, float) else f"not {wrong}")
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
        ("vpc", replace(VPC, private_subnet_ids=(SUBNET, SUBNET)), "private_subnet_ids: names one twice"),
        ("vpc", replace(VPC, default_security_group_id="default"), "default_security_group_id: must be like 'sg-"),
        *(("alerts", Alerts(emails=(email,)), "emails: ") for email in ("someone", "a\x1b@b.c")),
        ("alerts", Alerts(emails=("a@example.org",) * 2), "emails: names an address twice"),
        ("alerts", Alerts(failed_jobs_an_hour=0), "failed_jobs_an_hour: must be at least 1, not 0"),
        *(
            ("deploy_from", GitHub(repository=name), f"repository: must be 'owner/name', not '{name}'")
            for name in ("trainyard", "org/*", "org/..")
        ),
        *(
            ("deploy_from", GitHub(repository="a/b", branch=name), f"branch: must be a branch's name, not '{name}'")
            for name in ("a..b", "a.lock", "a//b", "*", "release/")
        ),
        ("deploy_from", GitHub(repository="a/b", branch="refs/heads/main"), "branch: must be a branch's name without"),
        ("deploy_from", GitHub(repository="a/b", environment="*"), "environment: must be a name, not '*'"),
        (
            "deploy_from",
            GitHub(repository="org/trainyard", oidc_provider_arn="arn:aws:iam::123456789012:role/x"),
            "oidc_provider_arn: must be that of token.actions.githubusercontent.com",
        ),
        ("retiring", (GAUDI,), "'dl1-24xlarge-1-21-0' is what new jobs run on; it cannot retire as well"),
        ("retiring", (RETIRING,) * 2, "names a pool twice"),
        ("retiring", (replace(GAUDI, release="1.23.0"),), "release '1.23.0' supports Gaudi 2 and 3; dl1.24xlarge"),
        ("retiring", (replace(RETIRING, machine_image="ami"),), "machine_image: must be 'ami-…' or 'ssm:/…', not"),
        *(("machine_image", value, "must be 'ami-…' or 'ssm:/…', not") for value in ("ami-xyz", "ssm:relative")),
        *(("root_device_name", value, "must be a device such as '/dev/sda1', not") for value in ("sda1",)),
        *(("region", value, "must be a region's name") for value in ("\ud800", "us-east-1a")),
        ("image_tag", "a b", "must be at most 128 letters, digits, '_', '.' and '-', not 'a b'"),
        *(("availability_zone_ids", (zone,), "must be ids such as 'use1-az2'") for zone in ("us-east-1a", "use1-az9")),
        ("availability_zone_ids", ("use1-az2", "use1-az2"), "names a zone twice"),
        ("cpu_instance_type", "dl1.24xlarge", "must be a row without an accelerator, not 'dl1.24xlarge'"),
        ("cpu_instance_type", "m6i", "unknown instance type 'm6i'"),
        ("instance_type", "dl1.24xlarg", "unknown instance type 'dl1.24xlarg'; did you mean 'dl1.24xlarge'?"),
        ("release", "1.23.0", "release '1.23.0' supports Gaudi 2 and 3; dl1.24xlarge has Gaudi 1"),
        ("release", "1.21.1", "unknown release '1.21.1'; did you mean '1.21.0'?"),
    ],
)
def test_a_value_that_cannot_be_deployed_is_refused(field: str, value: Any, message: str) -> None:
    assert refusal(**{field: value}).startswith(f"{field}: {message}")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"max_nodes": "three"}, "max_nodes: Input should be a valid integer, not 'three'"),
        ({"alerts": Alerts(emails="me@x.org")}, "alerts: emails: Input should be a valid tuple, not 'me@x.org'"),  # type: ignore[arg-type]
        ({"teams": (Team(name="x", share="2"),)}, "team 'x': share: Input should be a valid number, not '2'"),  # type: ignore[arg-type]
        ({"teams": ("x",)}, "teams: Input should be an instance of Team, not 'x'"),
        # Other mistakes are reported once the types are right.
        ({"teams": (), "max_nodes": 2.5}, "max_nodes: Input should be a valid integer, not 2.5"),
    ],
)
def test_a_value_of_another_type_is_refused(row: dict[str, Any], message: str) -> None:
    assert refusal(**row) == message


@pytest.mark.parametrize(
    ("teams", "message"),
    [
        ((), "teams: at least one is needed"),
        ((Team(name="Research"),), "team 'Research': must be at most 31 lower-case letters, digits and hyphens"),
        ((Team(name="shared"),), "team 'shared': what lies under 'shared/' is for all teams; choose another name"),
        (
            (Team(name="a", share=0.001, shares_instances=True),),
            "team 'a': share: must be from 0.01 to 1000, not 0.001",
        ),
        (
            (Team(name="a", share=2.0),),
            "team 'a': share: counts among teams that share instances; set shares_instances",
        ),
        ((Team(name="a"), Team(name="a")), "team 'a': there are two of that name"),
        ((Team(name="a", monthly_budget_usd=-5),), "team 'a': monthly_budget_usd: must be at least 0.01, not -5"),
        (
            (Team(name="a", member_principals=("arn:aws:iam::123456789012:root",)),),
            "team 'a': member_principals: must be ARNs of IAM users or roles, not 'arn:aws:iam::123456789012:root'",
        ),
        *(
            ((Team(name="a", secret_variables=(name,)),), f"team 'a': secret_variables: '{name}' is none that a secret")
            for name in ("AWS_SECRET_ACCESS_KEY", "LD_PRELOAD")
        ),
        ((Team(name="a", secret_variables=("wandb",)),), "team 'a': secret_variables: must be the name of a variable"),
        ((Team(name="ml-ops"), Team(name="mlops")), "team 'mlops': Batch's fair share drops hyphens and cannot tell"),
    ],
)
def test_teams_that_cannot_be_served_are_refused(teams: tuple[Team, ...], message: str) -> None:
    assert refusal(teams=teams).startswith(message)


def test_all_mistakes_are_reported_together() -> None:
    said = refusal(teams=(Team(name="shared"),), max_nodes=0, release="2.0")
    assert [line.split(":")[0] for line in said.splitlines()] == ["max_nodes", "team 'shared'", "release"]


def test_no_stage_is_called_like_part_of_another() -> None:
    # Trap: the boundary of `dev` admits names that begin with `trainyard-dev-`, so all of a stage `dev-2`.
    for name in STAGES:
        assert refusal(name=f"{name}-2").startswith(f"name: names of stage '{name}' begin like this one's")
        check(Stage(name=f"{name}2", teams=TEAMS))
    # AND the longest name is not cut: what the boundary admits is all of it.
    assert name_prefix("m" * 13) == f"trainyard-{'m' * 13}-"
    assert refusal(name="m" * 14).startswith("name: must be 1 to 13")


ACCEPTED: list[dict[str, Any]] = [
    {"name": "m" * 13},
    {"nat_gateways": 0, "machine_image": CUSTOM_AMI},
    {"nat_gateways": 0, "vpc": VPC},  # whether it has a way out is for its owner to know
    {"nat_gateways": 3, "availability_zone_ids": ("use1-az1", "use1-az2", "use1-az4")},
    {"fsx_gib": 1_200, "region": "us-east-1"},
    {"deploy_from": GitHub(repository="org/trainyard", branch="release/1.0")},
    {"retiring": (RETIRING, replace(RETIRING, release=None))},
    {"account": "012345678901", "region": "us-gov-west-1"},
    {"instance_type": "m6i.4xlarge", "release": "1.23.0"},
    {"log_retention_days": LOG_RETENTION_DAYS[-1]},
]


def test_the_ends_of_what_is_possible_are_accepted() -> None:
    for accepted in ACCEPTED:
        check(Stage(**{"name": "test", "teams": TEAMS, **accepted}))
    check(Stage(name="test", teams=TEAMS, alerts=Alerts(failed_jobs_an_hour=1)))
    # A number may be written without its point.
    check(Stage(name="test", teams=(Team(name="a", share=2, shares_instances=True),), spot_wait_hours=3))


def test_a_bootstrap_of_ones_own_has_a_stack_of_its_own() -> None:
    row = Stage(name="test", teams=TEAMS)
    assert row.bootstrap_options == []
    own = replace(row, bootstrap_qualifier="mlteam").bootstrap_options
    assert own == ["--qualifier", "mlteam", "--toolkit-stack-name", "CDKToolkit-mlteam"]


def test_an_ami_cannot_be_built_without_a_way_out() -> None:
    said = [refusal(nat_gateways=0), refusal(nat_gateways=0, instance_type="p4d.24xlarge", retiring=(GAUDI,))]
    assert [line.partition(": the AMI of ")[0] for line in said] == ["machine_image", "retiring: machine_image"]


def test_promised_capacity_is_for_on_demand_instances_and_has_an_id() -> None:
    promised = CapacityReservation(target="cr-0123456789abcdef0")
    check(Stage(name="test", teams=TEAMS, region="us-east-1", max_multinode_nodes=2, capacity_reservation=promised))
    assert refusal(capacity_reservation=promised).startswith("capacity_reservation: On-Demand instances draw on it")
    wrong = CapacityReservation(target="cr-1")
    said = refusal(max_on_demand_nodes=1, capacity_reservation=wrong)
    assert said.startswith("capacity_reservation: target: must be the id of a capacity reservation")


def test_a_stage_has_as_many_queues_as_batch_takes() -> None:
    everything: dict[str, Any] = {"region": "us-east-1", "max_on_demand_nodes": 1, "max_multinode_nodes": 2}
    teams = tuple(Team(name=f"team{number}") for number in range(26))
    check(Stage(name="test", teams=teams[:12], **everything))
    check(Stage(name="test", teams=teams[:25]))
    assert "these have 13 x 4, a set for each team" in refusal(teams=teams[:13], **everything)
    assert "these have 26 x 2, a set for each team" in refusal(teams=teams)
    # A retiring pool has queues of its own, and teams that share have one set together.
    upgraded = {**everything, "retiring": (RETIRING,)}
    assert "these have 8 x 7, a set for each team" in refusal(teams=teams[:8], **upgraded)
    shared = tuple(replace(team, shares_instances=True) for team in teams[6:])
    check(Stage(name="test", teams=(*teams[:6], *shared), **upgraded))


def test_endpoints_for_jobs_of_several_nodes_have_to_know_the_vpcs_default_group() -> None:
    # On instances with EFA Batch puts containers of such jobs into the VPC's default group.
    stage = Stage(name="test", teams=TEAMS, vpc=VPC, interface_endpoints=True, max_multinode_nodes=2)
    said = refusal(vpc=VPC, interface_endpoints=True, max_multinode_nodes=2)
    assert said.startswith("vpc: default_security_group_id: is needed")
    check(replace(stage, vpc=replace(VPC, default_security_group_id="sg-0123456789abcdef0")))
    check(replace(stage, interface_endpoints=None))
    check(replace(stage, max_multinode_nodes=0))


def test_a_vpc_that_is_there_has_zones_and_addresses_already() -> None:
    assert refusal(vpc=VPC, availability_zone_ids=("use1-az2",)).startswith("availability_zone_ids: they are those of")
    assert refusal(vpc=VPC, vpc_cidr="10.1.0.0/16").startswith("vpc_cidr: it is that of 'vpc'")


@pytest.mark.parametrize("setting", [{"max_multinode_nodes": 2}, {"fsx_gib": 1_200}])
def test_what_lives_in_one_zone_is_not_given_the_first_one_by_letter(setting: dict[str, Any]) -> None:
    # Trap: a region's first zone need not offer the type, and an instance that is asked for there never comes.
    here = f"{next(iter(setting))}: lives in one zone, and no zone is known to offer dl1.24xlarge here; set "
    assert refusal(region=None, **setting).startswith(f"{here}region='us-east-1' or 'us-west-2', or availability_zone")
    assert refusal(region="eu-west-1", **setting).startswith(
        f"{here}availability_zone_ids, first a zone that offers it"
    )
    for known in ({"region": "us-west-2"}, {"availability_zone_ids": ("use1-az2",)}, {"vpc": VPC}):
        check(Stage(**{"name": "test", "teams": TEAMS, **setting, **known}))
