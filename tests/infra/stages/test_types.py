"""Values of another type than a setting has, which are refused before all other checks."""

from typing import Any

import pytest

from infra.settings import TEAMS
from infra.stages import Alerts, Pool, Stage, Team
from infra.stages.checks import check
from jobs.contract.errors import ConfigurationError

WHERE = "infra/settings.py: stage 'test': "


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_nodes", "three", "max_nodes: must be a whole number, not 'three'"),
        ("max_nodes", 2.5, "max_nodes: must be a whole number, not 2.5"),
        ("max_nodes", True, "max_nodes: must be a whole number, not True"),
        ("max_nodes", None, "max_nodes: must be a whole number, not None"),
        ("name", None, "name: must be a string, not None"),
        ("region", 1, "region: must be a string or None, not 1"),
        ("spot_wait_hours", "2", "spot_wait_hours: must be a number or None, not '2'"),
        ("monthly_budget_usd", True, "monthly_budget_usd: must be a number or None, not True"),
        ("own_kms_key", 1, "own_kms_key: must be True or False, not 1"),
        ("interface_endpoints", "no", "interface_endpoints: must be True or False or None, not 'no'"),
        ("teams", Team(name="x"), "teams: must be a tuple of Team; a tuple of one needs a comma: (Team(…),)"),
        ("teams", [Team(name="x")], "teams: must be a tuple of Team, not list"),
        ("teams", None, "teams: must be a tuple of Team, not None"),
        ("teams", (Team(name="x", share="2"),), "teams[0]: share: must be a number, not '2'"),  # type: ignore[arg-type]
        (
            "teams",
            (Team(name="x"), Team(name="y", member_principals=("arn", 7))),  # type: ignore[arg-type]
            "teams[1]: member_principals[1]: must be a string, not 7",
        ),
        (
            "retiring",
            Pool(instance_type="dl1.24xlarge"),
            "retiring: must be a tuple of Pool; a tuple of one needs a comma: (Pool(…),)",
        ),
        ("retiring", ("dl1.24xlarge",), "retiring[0]: must be Pool(…), not 'dl1.24xlarge'"),
        ("alerts", None, "alerts: must be Alerts(…), not None"),
        ("alerts", "me@x.org", "alerts: must be Alerts(…), not 'me@x.org'"),
        (
            "alerts",
            Alerts(emails="me@x.org"),  # type: ignore[arg-type]
            "alerts: emails: must be a tuple of strings; a tuple of one needs a comma: ('me@x.org',)",
        ),
        ("vpc", "vpc-0123456789abcdef0", "vpc: must be ExistingVpc(…) or None, not 'vpc-0123456789abcdef0'"),
        ("deploy_from", Team(name="x"), "deploy_from: must be GitHub(…) or None, not Team"),
    ],
)
def test_a_value_of_another_type_is_refused(field: str, value: Any, message: str) -> None:
    row = {"name": "test", "teams": TEAMS, field: value}
    with pytest.raises(ConfigurationError) as caught:
        check(Stage(**row))
    assert str(caught.value) == f"infra/settings.py: stage '{row['name']}': {message}"


def test_wrong_types_are_told_together_and_alone() -> None:
    settings: dict[str, Any] = {"max_nodes": "three", "alerts": Alerts(failed_jobs_an_hour=1.5)}  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError) as caught:
        # No team is a mistake too, but of another kind.
        check(Stage(name="test", teams=(), **settings))
    assert str(caught.value).splitlines() == [
        f"{WHERE}max_nodes: must be a whole number, not 'three'",
        f"{WHERE}alerts: failed_jobs_an_hour: must be a whole number, not 1.5",
    ]


def test_a_number_may_be_written_without_its_point() -> None:
    check(
        Stage(
            name="test",
            teams=(Team(name="a", share=2, shares_instances=True, monthly_budget_usd=500),),
            spot_wait_hours=3,
        )
    )
