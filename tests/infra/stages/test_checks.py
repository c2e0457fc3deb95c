"""What a stage may say: every mistake in a row of settings.py is told at once, before anything is made of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra import settings
from infra.settings import STAGES, TEAMS
from infra.stages import Alerts, CapacityReservation, ExistingVpc, GitHub, Pool, Stage, Team
from infra.stages.checks import check, selected_stages
from infra.stages.limits import LOG_RETENTION_DAYS
from jobs.contract.errors import ConfigurationError
from jobs.contract.releases import release, releases

FITTING = ", ".join(row.name for row in releases().values() if 1 in row.gaudi)
OLDER = list(releases())[-1]

WHERE = "infra/settings.py: stage 'test': "


def test_the_stages_of_this_repository_pass() -> None:
    assert [stage.name for stage in selected_stages()] == ["dev", "prod"]


def test_the_way_to_nvidias_cards_is_one_line_beside_the_row_that_it_replaces() -> None:
    # EC2's API has not listed dl1.24xlarge since mid-2026: whoever reads the shipped row has to see the way out.
    lines = Path(settings.__file__).read_text().splitlines()
    (place,) = (number for number, line in enumerate(lines) if line.strip().startswith('Stage(name="dev"'))
    comment = [line.strip().lstrip("# ") for line in lines[place - 3 : place]]
    assert "EC2's API has not listed since mid-2026" in " ".join(comment)
    shipped, shown = (eval(line.strip(" ,"), vars(settings)) for line in (lines[place], comment[-1]))
    check(shown)
    assert shown.row.accelerator == "cuda"
    assert shown == replace(shipped, instance_type=shown.instance_type)
    # The page with the commands that deploy it says the same, and what asks EC2 first.
    readme = " ".join((Path(settings.__file__).parents[1] / "README.md").read_text().split())
    deploying = readme[readme.index("## Deploy for your organisation") :]
    assert f'instance_type="{shown.instance_type}"' in deploying
    asked = "EC2's API has not listed `dl1.24xlarge` since mid-2026"
    assert deploying.index("python -m infra.preflight") < deploying.index("cdk deploy") < deploying.index(asked)


def test_one_stage_can_be_selected() -> None:
    assert selected_stages("prod") == (STAGES["prod"],)


def test_a_stage_that_is_not_there_is_named_with_the_closest_one() -> None:
    with pytest.raises(ConfigurationError) as caught:
        selected_stages("dve")
    assert str(caught.value) == (
        "stage 'dve' is not in infra/settings.py; did you mean 'dev'?\nNext: name one that is there, or add a row"
    )
    assert caught.value.exit_code == 3


def test_a_stage_is_checked_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings.STAGES, "broken", Stage(name="broken", teams=()))
    with pytest.raises(ConfigurationError, match="stage 'broken': teams: at least one is needed"):
        selected_stages()
    # The other stages can still be worked on.
    assert selected_stages("dev")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_nodes", 0, "must be from 1 to 1000, not 0"),
        ("max_cpu_nodes", 1001, "must be from 1 to 1000, not 1001"),
        ("root_volume_gib", 50, "must be from 100 to 16384, not 50"),
        ("cpu_root_volume_gib", 16_385, "must be from 30 to 16384, not 16385"),
        ("share_decay_hours", 169, "must be from 1 to 168, not 169"),
        ("bootstrap_qualifier", "My-Org", "must be 1 to 10 lower-case letters and digits, not 'My-Org'"),
        *(
            ("vpc_cidr", value, f"must be a private /16 that is not Docker's own, such as '10.1.0.0/16', not '{value}'")
            for value in ("10.0.0.0/8", "10.1.2.0/24", "11.0.0.0/16", "172.17.0.0/16", "10.1.1.0/16", "private")
        ),
        ("checkpoint_retention_days", 0, "must be from 1 to 3650, not 0"),
        ("noncurrent_retention_days", 0, "must be from 1 to 3650, not 0"),
        ("nat_gateways", 3, "must be from 0 to 2, one a zone, not 3"),
        ("nat_gateways", -1, "must be from 0 to 2, one a zone, not -1"),
        (
            "log_retention_days",
            91,
            (
                "must be one of 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, "
                "1827, 2192, 2557, 2922, 3653"
            ),
        ),
        ("max_on_demand_nodes", -1, "must be from 0 to 1000, not -1"),
        ("max_multinode_nodes", 1001, "must be from 0 to 1000, not 1001"),
        ("reclaims_before_on_demand", 0, "must be from 1 to 10, not 0"),
        ("spot_wait_hours", 25.0, "must be from 10 minutes (0.17) to 24, not 25"),
        ("spot_wait_hours", 0.1, "must be from 10 minutes (0.17) to 24, not 0.1"),
        ("fsx_gib", 1_000, "must be 0, 1200 or a multiple of 2400, not 1000"),
        ("fsx_gib", -2_400, "must be 0, 1200 or a multiple of 2400, not -2400"),
        ("monthly_budget_usd", 0.0, "must be at least 0.01, not 0"),
        ("monthly_budget_usd", 5e-324, "must be at least 0.01, not 4.94066e-324"),
        ("monthly_budget_usd", float("nan"), "must be at least 0.01, not nan"),
        ("monthly_budget_usd", float("inf"), "must be at most 1000000000 (None: no budget), not inf"),
        ("monthly_budget_usd", 2e9, "must be at most 1000000000 (None: no budget), not 2e+09"),
        ("account", "", "must be the 12 digits of an account's id, not ''"),
        ("account", "*", "must be the 12 digits of an account's id, not '*'"),
        ("account", "12345", "must be the 12 digits of an account's id, not '12345'"),
        ("account", "123456789012 ", "must be the 12 digits of an account's id, not '123456789012 '"),
        ("account", "\uff11" * 12, "must be the 12 digits of an account's id, not '" + "\uff11" * 12 + "'"),
        (
            "permissions_boundary",
            "arn:aws:iam::aws:policy/x",
            "must be a managed policy's name, without its ARN, not 'arn:aws:iam::aws:policy/x'",
        ),
        (
            "vpc",
            ExistingVpc(vpc_id="vpc-1", private_subnet_ids=("subnet-0123456789abcdef0",)),
            "vpc_id: must be like 'vpc-0123456789abcdef0', not 'vpc-1'",
        ),
        (
            "vpc",
            ExistingVpc(vpc_id="vpc-0123456789abcdef0", private_subnet_ids=()),
            "private_subnet_ids: at least one is needed",
        ),
        (
            "vpc",
            ExistingVpc(vpc_id="vpc-0123456789abcdef0", private_subnet_ids=("subnet-0123456789abcdef0",) * 2),
            "private_subnet_ids: names one twice",
        ),
        (
            "vpc",
            ExistingVpc(
                vpc_id="vpc-0123456789abcdef0",
                private_subnet_ids=("subnet-0123456789abcdef0",),
                default_security_group_id="default",
            ),
            "default_security_group_id: must be like 'sg-0123456789abcdef0', not 'default'",
        ),
        ("alerts", Alerts(emails=("someone",)), "emails: 'someone' is no e-mail address"),
        ("alerts", Alerts(emails=("a\x1b@b.c",)), "emails: 'a\\x1b@b.c' is no e-mail address"),
        ("alerts", Alerts(emails=("a@b..c",)), "emails: 'a@b..c' is no e-mail address"),
        ("alerts", Alerts(emails=("x" * 65 + "@b.cd",)), f"emails: '{'x' * 65}@b.cd' is no e-mail address"),
        ("alerts", Alerts(emails=("a@example.org",) * 2), "emails: names an address twice"),
        ("alerts", Alerts(never_joined_minutes=5), "never_joined_minutes: must be from 10 to 240, not 5"),
        ("alerts", Alerts(blocked_queue_minutes=5), "blocked_queue_minutes: must be from 10 to 1440, not 5"),
        ("alerts", Alerts(failed_jobs_an_hour=0), "failed_jobs_an_hour: must be at least 1, not 0"),
        ("deploy_from", GitHub(repository="trainyard"), "repository: must be 'owner/name', not 'trainyard'"),
        ("deploy_from", GitHub(repository="org/*"), "repository: must be 'owner/name', not 'org/*'"),
        ("deploy_from", GitHub(repository="org/.."), "repository: must be 'owner/name', not 'org/..'"),
        ("deploy_from", GitHub(repository="-/-"), "repository: must be 'owner/name', not '-/-'"),
        *(
            ("deploy_from", GitHub(repository="a/b", branch=name), f"branch: must be a branch's name, not '{name}'")
            for name in ("a..b", "a.lock", "a//b", ".a", "a.", "a/.b", "-a", "ä")
        ),
        ("deploy_from", GitHub(repository="org/trainyard", branch="*"), "branch: must be a branch's name, not '*'"),
        (
            "deploy_from",
            GitHub(repository="org/trainyard", branch="refs/heads/main"),
            "branch: must be a branch's name without 'refs/heads/' before it, not 'refs/heads/main'",
        ),
        (
            "deploy_from",
            GitHub(repository="org/trainyard", branch="release/"),
            "branch: must be a branch's name, not 'release/'",
        ),
        ("deploy_from", GitHub(repository="org/trainyard", environment="*"), "environment: must be a name, not '*'"),
        (
            "deploy_from",
            GitHub(repository="org/trainyard", environment="production "),
            "environment: must be a name, not 'production '",
        ),
        (
            "deploy_from",
            GitHub(repository="org/trainyard", oidc_provider_arn="arn:aws:iam::123456789012:role/x"),
            (
                "oidc_provider_arn: must be that of token.actions.githubusercontent.com, not "
                "'arn:aws:iam::123456789012:role/x'"
            ),
        ),
        (
            "retiring",
            (Pool(instance_type="dl1.24xlarge"),),
            f"'dl1-24xlarge-{release().name.replace('.', '-')}' is what new jobs run on; it cannot retire as well",
        ),
        ("retiring", (Pool(instance_type="dl1.24xlarge", release=OLDER),) * 2, "names a pool twice"),
        (
            "retiring",
            (Pool(instance_type="dl1.24xlarge", release="1.23.0"),),
            (f"release '1.23.0' supports Gaudi 2 and 3; dl1.24xlarge has Gaudi 1\nNext: choose one of {FITTING}"),
        ),
        (
            "retiring",
            (Pool(instance_type="dl1.24xlarge", release=OLDER, machine_image="ami"),),
            "machine_image: must be 'ami-…' or 'ssm:/…', not 'ami'",
        ),
        ("machine_image", "ami-xyz", "must be 'ami-…' or 'ssm:/…', not 'ami-xyz'"),
        ("machine_image", "ssm:relative", "must be 'ami-…' or 'ssm:/…', not 'ssm:relative'"),
        ("root_device_name", "sda1", "must be a device such as '/dev/sda1', not 'sda1'"),
        (
            "region",
            "\ud800",
            "must be a region of AWS that infra/stages/regions.py knows, not '\\ud800'",
        ),
        (
            "account",
            "\u0661\u0662\u0663456789012",
            "must be the 12 digits of an account's id, not '\u0661\u0662\u0663456789012'",
        ),
        ("root_device_name", "/dev/ä", "must be a device such as '/dev/sda1', not '/dev/ä'"),
        ("image_tag", "a b", "must be at most 128 letters, digits, '_', '.' and '-', not 'a b'"),
        (
            "availability_zone_ids",
            ("us-east-1a",),
            "must be ids such as 'use1-az2', not 'us-east-1a'",
        ),
        ("availability_zone_ids", ("use1-az2", "use1-az2"), "names a zone twice"),
        ("availability_zone_ids", ("use1-az9",), "must be ids such as 'use1-az2', not 'use1-az9'"),
        (
            "cpu_instance_type",
            "dl1.24xlarge",
            "must be a row without an accelerator, not 'dl1.24xlarge'",
        ),
        (
            "instance_type",
            "dl1.24xlarg",
            (
                "instance type 'dl1.24xlarg' has no row; did you mean 'dl1.24xlarge'?\n"
                "Next: add a row to jobs/contract/instance_types.py, or name one that is there"
            ),
        ),
        (
            "release",
            "1.23.0",
            (f"release '1.23.0' supports Gaudi 2 and 3; dl1.24xlarge has Gaudi 1\nNext: choose one of {FITTING}"),
        ),
        ("release", "1.21.1", "release '1.21.1' has no row; did you mean '1.21.0'?"),
    ],
)
def test_a_value_that_cannot_be_deployed_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check(Stage(**{"name": "test", "teams": TEAMS, "region": "us-east-1", field: value}))
    assert str(caught.value) == f"{WHERE}{field}: {message}"


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
        ((Team(name="a"), Team(name="a")), "team 'a': there are two of that name"),
        ((Team(name="a", monthly_budget_usd=-5),), "team 'a': monthly_budget_usd: must be at least 0.01, not -5"),
        (
            (Team(name="a", monthly_budget_usd=float("inf")),),
            "team 'a': monthly_budget_usd: must be at most 1000000000 (None: no budget), not inf",
        ),
        (
            (Team(name="a", member_principals=("arn:aws:iam::123456789012:root",)),),
            "team 'a': member_principals: must be ARNs of IAM users or roles, not 'arn:aws:iam::123456789012:root'",
        ),
        *(
            (
                (Team(name="a", secret_variables=(name,)),),
                f"team 'a': secret_variables: '{name}' is none that a secret may hold",
            )
            for name in ("AWS_SECRET_ACCESS_KEY", "TRAINYARD_RUN_URI", "HF_TOKEN", "LD_PRELOAD")
        ),
        (
            (Team(name="a", secret_variables=("wandb_api_key",)),),
            "team 'a': secret_variables: must be the name of a variable, such as 'WANDB_API_KEY', not 'wandb_api_key'",
        ),
        (
            (Team(name="ml-ops"), Team(name="mlops")),
            "team 'mlops': Batch's fair share drops hyphens and cannot tell it from team 'ml-ops'",
        ),
    ],
)
def test_teams_that_cannot_be_told_apart_or_served_are_refused(teams: tuple[Team, ...], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check(Stage(name="test", teams=teams))
    assert str(caught.value) == WHERE + message


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check(Stage(name="test", teams=(Team(name="shared"),), max_nodes=0, release="2.0"))
    assert [line.removeprefix(WHERE).split(":")[0] for line in str(caught.value).splitlines()] == [
        "max_nodes",
        "team 'shared'",
        "release",
    ]


@pytest.mark.parametrize(
    "accepted",
    [
        {"nat_gateways": 0, "machine_image": "ami-0123456789abcdef0"},
        {"nat_gateways": 0, "instance_type": "p4d.24xlarge"},
        {"vpc": ExistingVpc(vpc_id="vpc-0123456789abcdef0", private_subnet_ids=("subnet-01234567",))},
        {"fsx_gib": 1_200, "region": "us-east-1"},
        {"vpc_cidr": "192.168.0.0/16", "bootstrap_qualifier": "mlteam"},
        {"fsx_gib": 4_800, "availability_zone_ids": ("euw1-az1",)},
        {"spot_wait_hours": 24.0},
        {"alerts": Alerts(emails=("ml@example.org",))},
        {"deploy_from": GitHub(repository="org/trainyard", branch="release/1.0")},
        {"retiring": (Pool(instance_type="dl1.24xlarge", release=OLDER),)},
        {"nat_gateways": 3, "availability_zone_ids": ("use1-az1", "use1-az2", "use1-az4")},
        {"monthly_budget_usd": 1_000_000_000},
        {"account": "012345678901", "region": "us-west-2"},
        {"machine_image": "ami-0123456789abcdef0"},
        {"retiring": (Pool(instance_type="dl1.24xlarge", release=OLDER, machine_image="ami-0123456789abcdef0"),)},
        {
            "instance_type": "g5.4xlarge",
            "machine_image": "ssm:/aws/service/ecs/optimized-ami/amazon-linux-2/gpu/recommended/image_id",
            "root_device_name": "/dev/xvda",
        },
        {"instance_type": "p4d.24xlarge", "machine_image": None},
        {"instance_type": "m6i.4xlarge", "release": "1.23.0"},
        {"image_tag": "1.21.0-2"},
        {"log_retention_days": LOG_RETENTION_DAYS[-1]},
        {"teams": tuple(Team(name=f"team{share:.0f}", share=share, shares_instances=True) for share in (0.01, 1000.0))},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_the_ends_of_what_is_possible_are_accepted(accepted: dict[str, Any]) -> None:
    check(Stage(**{"name": "test", "teams": TEAMS, **accepted}))


def test_an_ami_cannot_be_built_where_there_is_no_way_out() -> None:
    retiring = (Pool(instance_type="dl1.24xlarge", release=OLDER),)
    with pytest.raises(ConfigurationError) as caught:
        check(Stage(name="test", teams=TEAMS, nat_gateways=0, retiring=retiring))
    assert [line.removeprefix(WHERE) for line in str(caught.value).splitlines()] == [
        f"{field}: the AMI of '{pool}' is built from vault.habana.ai, which nat_gateways=0 leaves no way to; allow 1, "
        "or name an AMI that another stage or account has built"
        for field, pool in (
            ("machine_image", f"dl1-24xlarge-{release().name.replace('.', '-')}"),
            ("retiring: machine_image", f"dl1-24xlarge-{OLDER.replace('.', '-')}"),
        )
    ]
    # Whether a VPC that is given has a way out is for its owner to know.
    vpc = ExistingVpc(vpc_id="vpc-0123456789abcdef0", private_subnet_ids=("subnet-01234567",))
    check(Stage(name="test", teams=TEAMS, nat_gateways=0, vpc=vpc))


def test_a_retiring_pools_root_device_is_looked_at_too() -> None:
    retiring = (Pool(instance_type="dl1.24xlarge", release=OLDER, root_device_name="sda1"),)
    with pytest.raises(ConfigurationError) as caught:
        check(Stage(name="test", teams=TEAMS, retiring=retiring))
    assert str(caught.value) == f"{WHERE}retiring: root_device_name: must be a device such as '/dev/sda1', not 'sda1'"


def test_promised_capacity_is_for_on_demand_instances_and_has_an_id() -> None:
    promised: dict[str, Any] = {
        "name": "test",
        "teams": TEAMS,
        "region": "us-east-1",
        "capacity_reservation": CapacityReservation(target="cr-0123456789abcdef0"),
    }
    check(Stage(**{**promised, "max_multinode_nodes": 2}))
    with pytest.raises(
        ConfigurationError, match="capacity_reservation: On-Demand instances draw on it; set max_on_demand"
    ):
        check(Stage(**promised))
    wrong = CapacityReservation(target="cr-1")
    with pytest.raises(ConfigurationError, match=r"target: must be the id of a capacity reservation, .* not 'cr-1'"):
        check(Stage(**{**promised, "max_on_demand_nodes": 1, "capacity_reservation": wrong}))
