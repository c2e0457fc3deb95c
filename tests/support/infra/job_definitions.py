"""Job definitions in a template: their logical ids, and their one container."""

from typing import Any

from infra.settings import TEAMS
from jobs.contract.catalog import CATALOG
from jobs.contract.job_kind import JobKind


def logical_id(kind: JobKind) -> str:
    return f"Jobresearch{kind.name.replace('-', '')}"


def logical_ids(*, accelerated: bool) -> set[str]:
    """Return the logical ids of all teams' definitions, for kinds that run on accelerators or for those that do not."""
    return {
        f"Job{team.name}{kind.name.replace('-', '')}"
        for team in TEAMS
        for kind in CATALOG.values()
        if kind.accelerated is accelerated
    }


def logical_ids_with_several_nodes() -> set[str]:
    """Return the logical ids for one team with multi-node capacity; a notebook is on one node always."""
    several = [kind for kind in CATALOG.values() if kind.accelerated and not kind.one_process]
    return {*map(logical_id, CATALOG.values()), *(f"{logical_id(kind)}multinode" for kind in several)}


def container_of(definition: dict[str, Any]) -> dict[str, Any]:
    (task,) = definition["EcsProperties"]["TaskProperties"]
    (container,) = task["Containers"]
    assert isinstance(container, dict)
    return container
