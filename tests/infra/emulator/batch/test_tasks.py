"""Jobs of several containers: order, and which of them counts."""

import pytest

from tests.support.emulator.batch_calls import Batch, container, until


def outcome(batch: Batch, *containers: dict[str, object], **more: object) -> tuple[str, dict[str, int | None]]:
    """The job's state, and the containers' exit codes."""
    job = batch.ended(batch.submit(batch.ecs_definition(containers), batch.queue(), **more))
    shown = job["ecsProperties"]["taskProperties"][0]["containers"]
    return job["status"], {one["name"]: one.get("exitCode") for one in shown}


def test_the_end_of_an_essential_container_stops_the_others(batch: Batch) -> None:
    main, sidecar = container("true", name="main"), container("sleep", "600", name="sidecar", essential=False)
    assert outcome(batch, main, sidecar) == ("SUCCEEDED", {"main": 0, "sidecar": 143})


def test_a_container_that_is_not_essential_may_fail(batch: Batch) -> None:
    main = container("sh", "-c", "sleep 0.3", name="main")
    assert outcome(batch, main, container("false", name="helper", essential=False)) == (
        "SUCCEEDED",
        {"main": 0, "helper": 1},
    )


def test_the_first_essential_container_that_fails_fails_the_job(batch: Batch) -> None:
    first, second = container("sh", "-c", "exit 4", name="first"), container("sleep", "600", name="second")
    assert outcome(batch, first, second) == ("FAILED", {"first": 4, "second": 143})


def test_a_container_starts_after_those_it_depends_on(batch: Batch) -> None:
    setup = container("sh", "-c", "sleep 0.3; date +%s%N", name="setup", essential=False)
    main = container(
        "sh", "-c", "date +%s%N", name="main", dependsOn=[{"containerName": "setup", "condition": "SUCCESS"}]
    )
    job = batch.ended(batch.submit(batch.ecs_definition([main, setup]), batch.queue()))
    assert job["status"] == "SUCCEEDED"
    shown = {one["name"]: one for one in job["ecsProperties"]["taskProperties"][0]["containers"]}
    (done,), (begun,) = (batch.lines(shown[name]["logStreamName"]) for name in ("setup", "main"))
    assert int(done) <= int(begun)


@pytest.mark.parametrize(("condition", "state"), [("SUCCESS", "FAILED"), ("COMPLETE", "SUCCEEDED")])
def test_a_failed_setup_counts_where_success_was_asked_for(batch: Batch, condition: str, state: str) -> None:
    setup = container("false", name="setup", essential=False)
    main = container("true", name="main", dependsOn=[{"containerName": "setup", "condition": condition}])
    assert outcome(batch, setup, main)[0] == state


def test_a_containers_own_stop_timeout_counts(batch: Batch) -> None:
    script = "trap 'sleep 1.5; exit 6' TERM; echo ready; while :; do sleep 0.05; done"
    definition = batch.ecs_definition([container("sh", "-c", script, name="main", stopTimeout=10)])
    job_id = batch.submit(definition, batch.queue())
    batch.reached(job_id, "RUNNING")
    stream = batch.job(job_id)["ecsProperties"]["taskProperties"][0]["containers"][0]["logStreamName"]
    until(lambda: batch.lines(stream) or None, "the container is ready")
    batch.client.terminate_job(jobId=job_id, reason="enough")
    (task,) = batch.ended(job_id)["attempts"][0]["taskProperties"]
    assert task["containers"][0]["exitCode"] == 6
