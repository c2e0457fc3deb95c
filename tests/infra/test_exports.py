"""CloudFormation refuses to delete or change an export that is imported: no change of the settings may come to that.

An earlier stack is deployed first, while the later ones still are as they were.
"""

import json
from dataclasses import replace
from typing import Any

import pytest

from infra.stages import Alerts, GitHub, Pool, Stage, Team
from tests.support.infra.synthesis import Templates, templates_of

BASE = Stage(name="test", teams=(Team(name="research"), Team(name="product")), region="us-east-1")
TWO_ZONES = replace(BASE, availability_zone_ids=("use1-az4", "use1-az2"))
EVERYTHING = replace(
    BASE,
    teams=(
        Team(
            name="research",
            monthly_budget_usd=100,
            huggingface_token=True,
            secret_variables=("WANDB_API_KEY",),
            member_principals=("arn:aws:iam::123456789012:role/people",),
        ),
        Team(name="product"),
        Team(name="vision"),
    ),
    fsx_gib=1_200,
    interface_endpoints=True,
    own_kms_key=True,
    max_on_demand_nodes=2,
    max_multinode_nodes=2,
    spot_wait_hours=2,
    permissions_boundary="organisation",
    alerts=Alerts(emails=("ops@example.com",)),
    deploy_from=GitHub(repository="example/models"),
    monthly_budget_usd=100,
)
SHARING = replace(EVERYTHING, teams=tuple(replace(team, shares_instances=True) for team in EVERYTHING.teams))
CUDA = replace(BASE, instance_type="p4d.24xlarge")
BOTH = replace(CUDA, retiring=(Pool(instance_type="dl1.24xlarge"),))

CHANGES = {
    "everything comes": (BASE, EVERYTHING),
    "everything goes": (EVERYTHING, BASE),
    "teams share": (EVERYTHING, SHARING),
    "teams share no more": (SHARING, EVERYTHING),
    "instance type, the old one retiring": (BASE, BOTH),
    "instance type retired": (BOTH, CUDA),
    "instance type at once": (BASE, CUDA),
    "back to Gaudi": (CUDA, replace(BASE, retiring=(Pool(instance_type="p4d.24xlarge"),))),
    "no NAT, and an AMI that is given": (BASE, replace(BASE, nat_gateways=0, machine_image="ami-0123456789abcdef0")),
    "zone added in front": (replace(BASE, availability_zone_ids=("use1-az2",)), TWO_ZONES),
}


@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES)
def test_what_deployed_stacks_import_stays_as_it_is(before: Stage, after: Stage) -> None:
    # GIVEN a stage, and other settings
    old, new = templates_of(before), templates_of(after)
    # THEN nothing that any deployed stack imports goes or changes, those included that leave the app
    assert refused(old, new) == set()


def test_a_zone_goes_once_what_imports_it_has_been_deployed_by_itself() -> None:
    # GIVEN a stage whose first zone goes
    old = templates_of(TWO_ZONES)
    new = templates_of(replace(TWO_ZONES, availability_zone_ids=("use1-az2",)))
    assert refused(old, new)
    # WHEN the stacks that work in it are deployed first, without those that they depend on
    alone = {path: new[path] for path in ("test/compute", "test/machine-image")}
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


def imports(value: Any) -> set[str]:
    """Return the names of all exports that a template imports."""
    if isinstance(value, dict):
        direct = {str(value["Fn::ImportValue"])} if "Fn::ImportValue" in value else set()
        return direct.union(*(imports(item) for item in value.values()))
    if isinstance(value, list):
        return set().union(*(imports(item) for item in value))
    return set()
