"""CloudFormation refuses to delete or change an export that is imported: no change of the settings may come to that.

An earlier stack is deployed first, while the later ones still are as they were.
"""

import json
from dataclasses import replace

import pytest

from infra.stages import Stage
from tests.support.infra.synthesis import Templates, imports, templates_of
from tests.support.infra.variants import ALL

BASE = Stage(
    name=ALL.name,
    teams=ALL.teams[1:],
    account=ALL.account,
    region=ALL.region,
    availability_zone_ids=ALL.availability_zone_ids,
)
ONE_ZONE = replace(BASE, availability_zone_ids=("use1-az2",))
TWO_ZONES = replace(BASE, availability_zone_ids=("use1-az4", "use1-az2"))
TOGETHER = replace(ALL, teams=tuple(replace(team, shares_instances=True) for team in ALL.teams))
CUDA = replace(BASE, instance_type="p4d.24xlarge")

CHANGES = {
    "everything comes": (BASE, ALL),
    "everything goes": (ALL, BASE),
    "teams share": (ALL, TOGETHER),
    "teams share no more": (TOGETHER, ALL),
    "instance type at once": (BASE, CUDA),
    "back to Gaudi": (CUDA, BASE),
    "zone added in front": (ONE_ZONE, TWO_ZONES),
}


@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES)
def test_what_deployed_stacks_import_stays_as_it_is(before: Stage, after: Stage) -> None:
    # GIVEN a stage, and other settings
    old, new = templates_of(before), templates_of(after)
    # THEN nothing that any deployed stack imports goes or changes, those included that leave the app
    assert refused(old, new) == set()


def test_a_zone_goes_once_what_imports_it_has_been_deployed_by_itself() -> None:
    # GIVEN a stage whose first zone goes
    old, new = templates_of(TWO_ZONES), templates_of(ONE_ZONE)
    assert refused(old, new)
    # WHEN the stacks that work in it are deployed first, without those that they depend on
    alone = {path: new[path] for path in (f"{ALL.name}/compute", f"{ALL.name}/machine-image")}
    assert {name for template in alone.values() for name in imports(template)} <= exports(old).keys()
    # THEN the rest follows
    assert refused({**old, **alone}, new) == set()


def refused(old: Templates, new: Templates) -> set[str]:
    """Return the exports that deployed stacks import, and that would go or change."""
    there, then = exports(old), exports(new)
    imported = {name for template in old.values() for name in imports(template)}
    return {name for name in imported if there[name] != then.get(name)}


def exports(templates: Templates) -> dict[str, str]:
    """Return what the templates give as the values of exports, by their names."""
    return {
        output["Export"]["Name"]: json.dumps(output["Value"])
        for template in templates.values()
        for output in template.get("Outputs", {}).values()
        if "Export" in output
    }
