"""Names of stages, which are parts of the names of stacks, and are never cut."""

import pytest

from infra.access.permissions_boundary import name_prefix
from infra.settings import STAGES, TEAMS
from infra.stages import Stage
from infra.stages.checks import check
from jobs.contract.errors import ConfigurationError


def test_the_name_of_a_stage_is_part_of_stack_names() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check(Stage(name="My Stage", teams=TEAMS))
    assert str(caught.value) == (
        "infra/settings.py: stage 'My Stage': name: must be 1 to 13 lower-case letters, digits and hyphens, "
        "not 'My Stage'"
    )


def test_the_name_of_a_stage_is_never_cut() -> None:
    longest = "m" * 13
    check(Stage(name=longest, teams=TEAMS))
    # What the boundary admits is all of the name: nothing of a stage whose name goes on differently.
    assert name_prefix(longest) == f"trainyard-{longest}-"
    with pytest.raises(ConfigurationError, match="name: must be 1 to 13 lower-case letters"):
        check(Stage(name=f"{longest}m", teams=TEAMS))


def test_no_stage_is_called_like_part_of_another() -> None:
    # Trap: the boundary of `dev` admits names that begin with `trainyard-dev-`, so all of a stage `dev-2`.
    for name in STAGES:
        with pytest.raises(ConfigurationError, match=f"name: names of stage '{name}' begin like this one's"):
            check(Stage(name=f"{name}-2", teams=TEAMS))
        check(Stage(name=f"{name}2", teams=TEAMS))
