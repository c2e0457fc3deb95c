"""What an organisation adds is a row: each adds what it should, and changes nothing of the others."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.stages import Pool, Stage, Team
from jobs.contract.catalog import CATALOG
from jobs.contract.instance_types import INSTANCE_TYPES
from jobs.contract.queues import QUEUES, SPOT
from jobs.contract.stage import job_definition_parameter, parameter_path, queue_parameter
from tests.support.infra.synthesis import Templates, synthesise, templates_of

BASE = Stage(name="test", teams=(Team(name="research"), Team(name="product")))


@pytest.fixture
def base() -> Templates:
    return templates_of(BASE)


def test_a_team_is_a_row(base: Templates) -> None:
    # WHEN a team is added to the settings
    after = templates_of(replace(BASE, teams=(*BASE.teams, Team(name="vision"))))
    added, changed, removed = difference(base, after)
    # THEN it gets its roles, its definitions, its queues and their names, and of the others only the list of shares
    # changes
    assert {name.split("/")[1] for name, _ in added} <= {"compute", "jobs", "observability"}
    assert Counter(kind for _, kind in added)["AWS::Batch::JobQueue"] == BASE.queue_count / len(BASE.teams)
    assert Counter(kind for name, kind in added if "/jobs/" in f"/{name}")["AWS::Batch::JobDefinition"] == len(CATALOG)
    assert {parameter_path("test") + job_definition_parameter("vision", kind) for kind in CATALOG} <= published(after)
    assert {(name.split("/")[1], kind) for name, kind in changed if kind.startswith("AWS::Batch")} == {
        ("compute", "AWS::Batch::SchedulingPolicy")
    }
    assert removed == []


def test_a_stage_is_a_row(base: Templates, tmp_path: Path) -> None:
    # WHEN a stage is added that differs in nothing but its name
    after = synthesise([BASE, replace(BASE, name="other")], tmp_path)
    # THEN the first is as it was, and the second has the same resources
    assert {path: template for path, template in after.items() if path.startswith("test/")} == base
    assert types(after, "other") == types(after, "test")


def test_another_instance_type_is_a_row(base: Templates) -> None:
    # WHEN the stage moves to a type that has a row, and keeps its old pool for what waits there
    row = replace(BASE, instance_type="p4d.24xlarge", machine_image=None, retiring=(BASE.pool,))
    before = templates_of(replace(BASE, machine_image=None))
    after = templates_of(row)
    added, _, removed = difference(before, after)
    # THEN compute environments, launch templates and queues of the new type stand beside each team's old ones
    new = Counter(kind for name, kind in added if name.startswith("test/compute/"))
    kinds = ("AWS::Batch::ComputeEnvironment", "AWS::EC2::LaunchTemplate", "AWS::Batch::JobQueue")
    assert [new[kind] for kind in kinds] == [len(BASE.teams)] * 3
    assert [(name, kind) for name, kind in removed if kind.startswith(("AWS::Batch::C", "AWS::Batch::JobQ"))] == []
    instances = instance_types(after)
    assert {"p4d.24xlarge", "dl1.24xlarge"} <= instances
    assert queue_parameter(SPOT, team="research") in {
        name.removeprefix(parameter_path("test")) for name in published(after)
    }


@pytest.mark.parametrize("name", sorted(name for name, row in INSTANCE_TYPES.items() if row.accelerators))
def test_every_row_of_instance_types_makes_a_stage(name: str) -> None:
    after = templates_of(replace(BASE, instance_type=name, machine_image=None))
    assert instance_types(after) == {name, BASE.cpu_instance_type}


def test_a_release_is_a_row() -> None:
    # WHEN a stage upgrades, with the old release still there for what waits
    old = replace(BASE, machine_image=None, release="1.20.0")
    before = templates_of(old)
    new = replace(BASE, machine_image=None, retiring=(Pool(instance_type=BASE.instance_type, release="1.20.0"),))
    after = templates_of(new)
    # THEN nothing of the old pool's machines changes or goes
    added, changed, removed = difference(before, after)
    machines = ("AWS::Batch::ComputeEnvironment", "AWS::Batch::JobQueue", "AWS::EC2::LaunchTemplate")
    assert {kind for _, kind in added} >= set(machines)
    assert [item for item in (*changed, *removed) if item[1] in machines] == []


def test_a_queue_is_a_row(base: Templates, tmp_path: Path) -> None:
    # WHEN a queue is added to the table
    urgent = replace(QUEUES[SPOT], name="urgent", purpose="jobs that others wait for")
    with added_queue(urgent.name, urgent):
        after = synthesise([BASE], tmp_path)
    added, changed, removed = difference(base, after)
    # THEN each team has it under its name, on the instances that are there
    assert {parameter_path("test") + queue_parameter("urgent", team=team.name) for team in BASE.teams} <= published(
        after
    )
    assert Counter(kind for name, kind in added if name.startswith("test/compute/")) == {
        "AWS::Batch::JobQueue": len(BASE.teams),
        "AWS::SSM::Parameter": len(BASE.teams),
    }
    assert [item for item in changed if item[1].startswith("AWS::Batch")] == []
    assert removed == []


def difference(before: Templates, after: Templates) -> tuple[list[tuple[str, str]], ...]:
    """Resources that came, changed and went: each `<stack>/<logical id>` with its type."""
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


def types(templates: Templates, stage: str) -> Mapping[str, int]:
    return Counter(item["Type"] for path, item in flat(templates).items() if path.startswith(f"{stage}/"))


def published(templates: Templates) -> set[str]:
    return {
        item["Properties"]["Name"]
        for item in flat(templates).values()
        if item["Type"] == "AWS::SSM::Parameter" and isinstance(item["Properties"].get("Name"), str)
    }


def instance_types(templates: Templates) -> set[str]:
    return {
        name
        for item in flat(templates).values()
        if item["Type"] == "AWS::Batch::ComputeEnvironment"
        for name in json.loads(json.dumps(item["Properties"]["ComputeResources"]["InstanceTypes"]))
    }


@contextmanager
def added_queue(name: str, row: Any) -> Iterator[None]:
    """The table with one more row, as if it stood in jobs/contract/queues.py."""
    QUEUES[name] = row
    try:
        yield
    finally:
        del QUEUES[name]
