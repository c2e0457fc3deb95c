"""A sweep without points left starts no more workers; a reclaimed worker keeps its point."""

from pathlib import Path
from typing import Any

import pytest

from infra.observability.functions.batch_jobs import SWEEP_TAG
from infra.observability.functions.end_sweep import found_no_point, handler
from jobs.core.errors import INTERRUPTED_EXIT_CODE, SWEEP_OVER_EXIT_CODE
from jobs.runs.job import job_from
from jobs.spec.sweep import NO_POINT_LEFT_REASON
from tests.infra.observability.functions.conftest import World

TAGS = {"trainyard:stage": "test", "trainyard:run": "r", "trainyard:team": "research", "trainyard:job": "script"}


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGE", "test")
    monkeypatch.setenv("SWEEP_OVER_EXIT_CODE", str(SWEEP_OVER_EXIT_CODE))
    monkeypatch.setenv("NO_POINT_LEFT_REASON", NO_POINT_LEFT_REASON)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        ("SUCCEEDED", 0, True),
        ("FAILED", SWEEP_OVER_EXIT_CODE, True),
        ("FAILED", 1, False),  # for example, it could not read the points; another worker may
        ("FAILED", INTERRUPTED_EXIT_CODE, False),
        ("RUNNABLE", 0, False),
    ],
)
def test_the_exit_code_identifies_a_worker_without_a_point(status: str, code: int, *, expected: bool) -> None:
    child: dict[str, Any] = {"status": status, "attempts": [{"container": {"exitCode": code}}]}
    assert found_no_point(child, SWEEP_OVER_EXIT_CODE) is expected


def test_waiting_workers_are_cancelled_once_no_point_is_left(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a sweep with four workers, two of which run; then no capacity is left, and one of the two is reclaimed
    allow(world, vcpus=2 * 96)
    script = f"while test ! -e {tmp_path}/go; do sleep 0.1; done"
    parent = world.submit("sh", "-c", script, arrayProperties={"size": 4}, tags={**TAGS, SWEEP_TAG: "3"})
    children = [f"{parent}:{index}" for index in range(4)]
    world.reached(children[0], "RUNNING")
    world.reached(children[1], "RUNNING")
    allow(world, vcpus=0)
    world.reclaim(children[1])

    # WHEN the other worker succeeds, and not earlier, and not by another stage's function
    handler(world.event(children[0]), None)
    (tmp_path / "go").touch()
    world.reached(children[0], "SUCCEEDED")
    monkeypatch.setenv("STAGE", "prod")
    handler(world.event(children[0]), None)
    assert world.job(children[2])["status"] == "RUNNABLE"
    monkeypatch.setenv("STAGE", "test")
    handler(world.event(children[0]), None)

    # THEN the two waiting workers are cancelled, and the reclaimed worker runs again and completes the sweep
    assert [world.job(child)["status"] for child in children] == ["SUCCEEDED", "RUNNABLE", "FAILED", "FAILED"]
    assert world.job(children[3])["statusReason"] == NO_POINT_LEFT_REASON
    allow(world, vcpus=2 * 96)
    detail = world.reached(parent, "SUCCEEDED", "FAILED")
    assert detail["status"] == "FAILED", "the state of any array with a cancelled child"
    job = job_from(detail, [world.job(child) for child in children], queue_names={})
    assert (job.state, job.reason, job.nodes) == ("SUCCEEDED", "", {"SUCCEEDED": 2})


def allow(world: World, *, vcpus: int) -> None:
    environment = world.spot.rpartition("/")[2]
    world.batch.update_compute_environment(computeEnvironment=environment, computeResources={"maxvCpus": vcpus})
