"""How many teams a stage may have, each with queues of its own, and what is for those alone that share theirs."""

from dataclasses import replace
from typing import Any

import pytest

from infra.stages import Pool, Stage, Team
from infra.stages.checks import check
from jobs.contract.errors import ConfigurationError
from jobs.contract.releases import releases

OLDER = list(releases())[-1]

WHERE = "infra/settings.py: stage 'test': "


def test_a_stage_has_as_many_queues_as_batch_takes() -> None:
    everything: dict[str, Any] = {"region": "us-east-1", "max_on_demand_nodes": 1, "max_multinode_nodes": 2}
    teams = tuple(Team(name=f"team{number}") for number in range(26))
    check(Stage(name="test", teams=teams[:12], **everything))
    check(Stage(name="test", teams=teams[:25]))
    with pytest.raises(ConfigurationError) as caught:
        check(Stage(name="test", teams=teams[:13], **everything))
    assert str(caught.value) == (
        f"{WHERE}teams: Batch takes 50 queues, and as many compute environments, in a region of an account; these have "
        "13 x 4, a set for each team and one for all that share. Set shares_instances=True for more of them, or give "
        "some a stage elsewhere"
    )
    with pytest.raises(ConfigurationError, match="these have 26 x 2, a set"):
        check(Stage(name="test", teams=teams))
    # A release is upgraded in place only where there is room for the old pool beside the new one.
    upgraded = {**everything, "retiring": (Pool(instance_type="dl1.24xlarge", release=OLDER),)}
    check(Stage(name="test", teams=teams[:7], **upgraded))
    with pytest.raises(ConfigurationError, match="these have 8 x 7, a set"):
        check(Stage(name="test", teams=teams[:8], **upgraded))
    # Those that share have one set together.
    shared = tuple(replace(team, shares_instances=True) for team in teams[6:])
    check(Stage(name="test", teams=(*teams[:6], *shared), **upgraded))


def test_a_share_is_for_teams_that_share() -> None:
    teams = (Team(name="a", share=2.0), Team(name="b"))
    with pytest.raises(ConfigurationError) as caught:
        check(Stage(name="test", teams=teams))
    assert str(caught.value) == (
        f"{WHERE}team 'a': share: counts among teams that share instances; set shares_instances=True too"
    )
    check(Stage(name="test", teams=(replace(teams[0], shares_instances=True), teams[1])))
