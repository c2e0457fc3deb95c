"""Adding a setting affects nothing else, and no change of settings breaks an export that other stacks import."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.settings import TEAMS
from infra.stages import Pool, Stage, Team
from jobs.core.queues import QUEUES, SPOT
from jobs.core.stage import job_definition_parameter, parameter_path, queue_parameter
from jobs.spec.catalog import CATALOG
from tests.support.infra.synthesis import Templates, imports, synthesise, templates_of
from tests.support.infra.variants import ALL

BASE = Stage(name="test", teams=TEAMS)
MACHINES = ("AWS::Batch::ComputeEnvironment", "AWS::Batch::JobQueue", "AWS::EC2::LaunchTemplate")


def test_adding_a_team_only_adds_its_resources() -> None:
    # WHEN a team is added to the settings
    before, after = templates_of(BASE), templates_of(replace(BASE, teams=(*BASE.teams, Team(name="vision"))))
    added, changed, removed = difference(before, after)
    # THEN it gets its roles, definitions, queues and parameters
    assert Counter(kind for _, kind in added)["AWS::Batch::JobQueue"] == BASE.queue_count / len(BASE.teams)
    assert Counter(kind for name, kind in added if "/jobs/" in name)["AWS::Batch::JobDefinition"] == len(CATALOG)
    assert {parameter_path("test") + job_definition_parameter("vision", kind) for kind in CATALOG} <= published(after)
    # AND elsewhere, only the shares and the monitoring of queues change
    assert {name.split("/")[1] for name, _ in (*added, *changed)} == {"compute", "jobs", "observability"}
    assert [kind for name, kind in changed if "/observability/" not in name] == ["AWS::Batch::SchedulingPolicy"]
    assert removed == []


def test_adding_a_queue_uses_existing_instances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUEUES, "urgent", replace(QUEUES[SPOT], name="urgent"))
    made = synthesise([BASE], tmp_path)
    # Each team gets the queue, on its existing instances.
    added, changed, removed = difference(templates_of(BASE), made)
    assert {parameter_path("test") + queue_parameter("urgent", team=team.name) for team in TEAMS} <= published(made)
    assert Counter(kind for name, kind in added if name.startswith("test/compute/")) == {
        "AWS::Batch::JobQueue": len(TEAMS),
        "AWS::SSM::Parameter": len(TEAMS),
    }
    assert [item for item in changed if item[1].startswith("AWS::Batch")] == []
    assert removed == []


def test_another_instance_type_is_added_beside_the_old_one() -> None:
    # WHEN the stage changes its instance type, and keeps the old pool for jobs that wait for it
    moved = replace(BASE, instance_types=("p4d.24xlarge",), retiring=(Pool(instance_types=("dl1.24xlarge",)),))
    added, changed, removed = difference(templates_of(BASE), after := templates_of(moved))
    # THEN environments, launch templates and queues of the new type are added beside the old ones
    new = Counter(kind for name, kind in added if name.startswith("test/compute/"))
    assert [new[kind] for kind in MACHINES] == [len(TEAMS)] * 3
    assert [item for item in (*changed, *removed) if item[1] in MACHINES] == []
    assert parameter_path("test") + queue_parameter(SPOT, team="research") in published(after)


def test_another_zone_of_multinode_jobs_is_added_beside_the_first() -> None:
    # GIVEN a stage of one zone, WHEN a second zone that offers the type is added
    one = replace(CUDA, availability_zone_ids=("use1-az2",), max_multinode_nodes=2)
    two = replace(one, availability_zone_ids=("use1-az2", "use1-az4"))
    added, changed, removed = difference(templates_of(one), templates_of(two))
    # THEN the first zone's environments stay as they are, and those of other instances get the new subnet in place
    new = [name for name, kind in added if kind == MACHINES[0]]
    assert (len(new), all("multinodeuse1az4" in name for name in new)) == (len(one.teams), True)
    assert [name for name, kind in changed if kind == MACHINES[0] and "multinode" in name] == []
    assert [item for item in removed if item[1].startswith("AWS::Batch")] == []


def test_changing_a_setting_changes_nothing_else() -> None:
    changed_row = replace(BASE, max_nodes=7, checkpoint_retention_days=7)
    added, changed, removed = difference(templates_of(BASE), templates_of(changed_row))
    assert Counter(kind for _, kind in changed) == {
        "AWS::Batch::ComputeEnvironment": len(TEAMS),
        "AWS::S3::Bucket": 1,
    }
    assert added == removed == []


def difference(before: Templates, after: Templates) -> tuple[list[tuple[str, str]], ...]:
    """Return added, changed and removed resources, as `<stack>/<logical id>` with the type."""
    old, new = flat(before), flat(after)
    return (
        [(name, new[name]["Type"]) for name in sorted(new.keys() - old.keys())],
        [(name, new[name]["Type"]) for name in sorted(new.keys() & old.keys()) if new[name] != old[name]],
        [(name, old[name]["Type"]) for name in sorted(old.keys() - new.keys())],
    )


def flat(templates: Templates) -> dict[str, dict[str, Any]]:
    return {
        f"{path}/{name}": resource
        for path, template in templates.items()
        for name, resource in template["Resources"].items()
    }


def published(templates: Templates) -> set[str]:
    return {
        item["Properties"]["Name"]
        for item in flat(templates).values()
        if item["Type"] == "AWS::SSM::Parameter" and isinstance(item["Properties"].get("Name"), str)
    }


REDUCED = Stage(
    name=ALL.name,
    teams=ALL.teams[1:],
    account=ALL.account,
    region=ALL.region,
    availability_zone_ids=ALL.availability_zone_ids,
)
ONE_ZONE = replace(REDUCED, availability_zone_ids=("use1-az2",))
TWO_ZONES = replace(REDUCED, availability_zone_ids=("use1-az4", "use1-az2"))
TOGETHER = replace(ALL, teams=tuple(replace(team, shares_instances=True) for team in ALL.teams))
CUDA = replace(REDUCED, instance_types=("p4d.24xlarge",))

CHANGES = {
    "all features added": (REDUCED, ALL),
    "all features removed": (ALL, REDUCED),
    "teams share instances": (ALL, TOGETHER),
    "teams stop sharing": (TOGETHER, ALL),
    "another instance type": (REDUCED, CUDA),
    "back to Gaudi": (CUDA, REDUCED),
    "zone added in first place": (ONE_ZONE, TWO_ZONES),
}


@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES)
def test_no_imported_export_changes(before: Stage, after: Stage) -> None:

    # GIVEN a deployed stage, and other settings
    old, new = templates_of(before), templates_of(after)

    # THEN no export that a deployed stack imports changes, even if that stack is to be removed
    assert refused(old, new) == set()


def test_a_zone_can_be_removed_after_deploying_its_importers() -> None:

    # GIVEN a stage whose first zone is removed
    old, new = templates_of(TWO_ZONES), templates_of(ONE_ZONE)
    assert refused(old, new)

    # WHEN the stacks that use the zone are deployed first, without the stacks they depend on
    alone = {path: new[path] for path in (f"{ALL.name}/compute", f"{ALL.name}/machine-image")}
    assert {name for template in alone.values() for name in imports(template)} <= exports(old).keys()

    # THEN the rest can be deployed
    assert refused({**old, **alone}, new) == set()


def refused(old: Templates, new: Templates) -> set[str]:
    """Return the exports that deployed stacks import and that would be deleted or changed."""
    current, future = exports(old), exports(new)
    imported = {name for template in old.values() for name in imports(template)}
    return {name for name in imported if current[name] != future.get(name)}


def exports(templates: Templates) -> dict[str, str]:
    """Return the exports of the templates: name -> value."""
    return {
        output["Export"]["Name"]: json.dumps(output["Value"])
        for template in templates.values()
        for output in template.get("Outputs", {}).values()
        if "Export" in output
    }
