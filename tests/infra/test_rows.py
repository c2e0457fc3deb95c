"""What an organisation adds is a row: each adds what it should, and changes nothing of the others."""

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
from tests.support.infra.synthesis import Templates, synthesise, templates_of

BASE = Stage(name="test", teams=TEAMS)
MACHINES = ("AWS::Batch::ComputeEnvironment", "AWS::Batch::JobQueue", "AWS::EC2::LaunchTemplate")


def test_a_team_is_a_row() -> None:
    # WHEN a team is added to the settings
    before, after = templates_of(BASE), templates_of(replace(BASE, teams=(*BASE.teams, Team(name="vision"))))
    added, changed, removed = difference(before, after)
    # THEN it gets its roles, its definitions, its queues and their names
    assert Counter(kind for _, kind in added)["AWS::Batch::JobQueue"] == BASE.queue_count / len(BASE.teams)
    assert Counter(kind for name, kind in added if "/jobs/" in name)["AWS::Batch::JobDefinition"] == len(CATALOG)
    assert {parameter_path("test") + job_definition_parameter("vision", kind) for kind in CATALOG} <= published(after)
    # AND of the others only the list of shares changes, and what observes queues
    assert {name.split("/")[1] for name, _ in (*added, *changed)} == {"compute", "jobs", "observability"}
    assert [kind for name, kind in changed if "/observability/" not in name] == ["AWS::Batch::SchedulingPolicy"]
    assert removed == []


def test_a_queue_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUEUES, "urgent", replace(QUEUES[SPOT], name="urgent"))
    made = synthesise([BASE], tmp_path)
    # Each team has the queue under its name, on the instances that are there.
    added, changed, removed = difference(templates_of(BASE), made)
    assert {parameter_path("test") + queue_parameter("urgent", team=team.name) for team in TEAMS} <= published(made)
    assert Counter(kind for name, kind in added if name.startswith("test/compute/")) == {
        "AWS::Batch::JobQueue": len(TEAMS),
        "AWS::SSM::Parameter": len(TEAMS),
    }
    assert [item for item in changed if item[1].startswith("AWS::Batch")] == []
    assert removed == []


def test_another_instance_type_is_a_row() -> None:
    # WHEN the stage moves to a type that has a row, and keeps its old pool for what waits there
    moved = replace(BASE, instance_type="p4d.24xlarge", retiring=(Pool(instance_type="dl1.24xlarge"),))
    added, changed, removed = difference(templates_of(BASE), after := templates_of(moved))
    # THEN environments, launch templates and queues of the new type are added beside each team's old ones
    new = Counter(kind for name, kind in added if name.startswith("test/compute/"))
    assert [new[kind] for kind in MACHINES] == [len(TEAMS)] * 3
    assert [item for item in (*changed, *removed) if item[1] in MACHINES] == []
    assert parameter_path("test") + queue_parameter(SPOT, team="research") in published(after)


def test_a_setting_changes_what_it_names_and_nothing_else() -> None:
    changed_row = replace(BASE, max_nodes=7, checkpoint_retention_days=7)
    added, changed, removed = difference(templates_of(BASE), templates_of(changed_row))
    assert Counter(kind for _, kind in changed) == {
        "AWS::Batch::ComputeEnvironment": len(TEAMS),
        "AWS::S3::Bucket": 1,
    }
    assert added == removed == []


def difference(before: Templates, after: Templates) -> tuple[list[tuple[str, str]], ...]:
    """Return resources that came, changed and went: each `<stack>/<logical id>` with its type."""
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
