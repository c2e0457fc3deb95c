"""CloudFormation refuses to delete or change an export that is imported: no change of the settings may come to that.

An earlier stack is deployed first, while the later ones still are as they were.
"""

import json
from dataclasses import replace
from typing import Any

import pytest

from infra.stages import Alerts, GitHub, Pool, Stage, Team
from tests.support.infra.synthesis import Templates, templates_of

RESEARCH, PRODUCT = Team(name="research"), Team(name="product")
BASE = Stage(name="test", teams=(RESEARCH, PRODUCT), region="us-east-1")
TWO_ZONES = replace(BASE, availability_zone_ids=("use1-az4", "use1-az2"))
EXPENSIVE = Team(
    name="research",
    monthly_budget_usd=100,
    huggingface_token=True,
    secret_variables=("WANDB_API_KEY",),
    member_principals=("arn:aws:iam::123456789012:role/people",),
)
SHARING = tuple(replace(team, shares_instances=True) for team in BASE.teams)
EVERYWHERE = replace(BASE, fsx_gib=1_200, interface_endpoints=True)
"""A stage whose instances reach what other stacks make."""
DL1, P4D = Pool(instance_type="dl1.24xlarge"), Pool(instance_type="p4d.24xlarge")

CHANGES = {
    "instance type, the old one retiring": (BASE, replace(BASE, instance_type="p4d.24xlarge", retiring=(DL1,))),
    "instance type retired": (
        replace(BASE, instance_type="p4d.24xlarge", retiring=(DL1,)),
        replace(BASE, instance_type="p4d.24xlarge"),
    ),
    "instance type at once": (BASE, replace(BASE, instance_type="p4d.24xlarge")),
    "back to Gaudi": (
        replace(BASE, instance_type="p4d.24xlarge"),
        replace(BASE, retiring=(P4D,)),
    ),
    # Its row knows no zones: the old ones are named, or their subnets would go.
    "no accelerator any more": (
        BASE,
        replace(BASE, instance_type="m6i.4xlarge", availability_zone_ids=("use1-az2",)),
    ),
    "release, the old one retiring": (
        replace(BASE, release="1.20.0"),
        replace(BASE, retiring=(replace(DL1, release="1.20.0"),)),
    ),
    "release retired": (replace(BASE, retiring=(replace(DL1, release="1.20.0"),)), BASE),
    "release at once": (replace(BASE, release="1.20.0"), BASE),
    "an AMI is given": (BASE, replace(BASE, machine_image="ami-0123456789abcdef0")),
    "endpoints instead of NAT": (
        BASE,
        replace(BASE, nat_gateways=0, machine_image="ami-0123456789abcdef0"),
    ),
    "endpoints beside NAT": (BASE, replace(BASE, interface_endpoints=True)),
    "endpoints go": (replace(BASE, interface_endpoints=True, max_multinode_nodes=2), BASE),
    "zone added in front": (replace(BASE, availability_zone_ids=("use1-az2",)), TWO_ZONES),
    "file system": (BASE, replace(BASE, fsx_gib=1_200)),
    "file system goes": (replace(BASE, fsx_gib=1_200), BASE),
    "key": (replace(BASE, teams=(EXPENSIVE,)), replace(BASE, teams=(EXPENSIVE,), own_kms_key=True)),
    "key goes": (replace(BASE, teams=(EXPENSIVE,), own_kms_key=True), replace(BASE, teams=(EXPENSIVE,))),
    "team added": (BASE, replace(BASE, teams=(*BASE.teams, replace(EXPENSIVE, name="vision")))),
    "team removed": (replace(BASE, teams=(EXPENSIVE, PRODUCT)), replace(BASE, teams=(PRODUCT,))),
    "team with less": (replace(BASE, teams=(EXPENSIVE,)), replace(BASE, teams=(RESEARCH,))),
    "teams share": (EVERYWHERE, replace(EVERYWHERE, teams=SHARING)),
    "teams share no more": (replace(EVERYWHERE, teams=SHARING), EVERYWHERE),
    "limits": (
        replace(BASE, max_on_demand_nodes=2, max_multinode_nodes=2, spot_wait_hours=2),
        replace(BASE, max_nodes=9, max_cpu_nodes=1),
    ),
    "boundary of the account": (BASE, replace(BASE, permissions_boundary="organisation")),
    "boundary of its own": (replace(BASE, permissions_boundary="organisation"), BASE),
    "alerts, CI and budget go": (
        replace(
            BASE,
            alerts=Alerts(emails=("ops@example.com",)),
            deploy_from=GitHub(repository="example/models"),
            monthly_budget_usd=100,
        ),
        BASE,
    ),
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
