"""When jobs run: capacity, queues and their order, dependencies, shares."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.emulator.batch_calls import Batch


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A job of `held` runs until this file exists; it does at the end at the latest."""
    path = tmp_path / "gate"
    yield path
    path.touch()


def held(gate: Path, *, say: str = "") -> tuple[str, ...]:
    return "sh", "-c", f"echo {say}; while [ ! -e {gate} ]; do sleep 0.03; done"


def states(batch: Batch, *job_ids: str) -> list[str]:
    return [batch.job(job_id)["status"] for job_id in job_ids]


def test_max_vcpus_bound_what_runs_and_a_queue_is_first_in_first_out(batch: Batch, gate: Path) -> None:
    first, second = batch.environment(max_vcpus=1), batch.environment(max_vcpus=4)
    queue = batch.queue(first, second)
    running = [batch.submit(batch.definition(*held(gate), vcpus=vcpus), queue) for vcpus in (1, 2)]
    for job_id in running:
        batch.reached(job_id, "RUNNING")
    large = batch.submit(batch.definition("true", vcpus=3), queue)
    small = batch.submit(batch.definition("true", vcpus=1), queue)
    assert states(batch, *running, large, small) == ["RUNNING", "RUNNING", "RUNNABLE", "RUNNABLE"]
    assert "startedAt" not in batch.job(large)
    front = batch.client.get_job_queue_snapshot(jobQueue=queue)["frontOfQueue"]["jobs"]
    assert [job["jobArn"].rsplit("/", 1)[-1] for job in front] == [large, small]
    # More capacity starts what waited.
    batch.client.update_compute_environment(computeEnvironment=second, computeResources={"maxvCpus": 5})
    assert batch.ended(large)["startedAt"] <= batch.ended(small)["startedAt"]
    assert states(batch, *running) == ["RUNNING", "RUNNING"]


def test_the_queue_with_the_higher_priority_is_served_first(batch: Batch, gate: Path) -> None:
    environment = batch.environment(max_vcpus=1)
    low, high = batch.queue(environment, priority=1), batch.queue(environment, priority=10)
    definition = batch.definition("true")
    batch.reached(batch.submit(batch.definition(*held(gate)), low), "RUNNING")
    later = [batch.submit(definition, queue) for queue in (low, high)]
    gate.touch()
    in_low, in_high = (batch.ended(job_id) for job_id in later)
    assert in_high["stoppedAt"] <= in_low["startedAt"]


def test_a_job_larger_than_any_environment_waits_and_says_so(batch: Batch) -> None:
    job_id = batch.submit(batch.definition("true", vcpus=9), batch.queue(batch.environment(max_vcpus=8)))
    job = batch.job(job_id)
    assert job["status"] == "RUNNABLE"
    assert job["statusReason"].startswith("MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE")
    assert not job["attempts"]
    behind = batch.submit(batch.definition("true"), job["jobQueue"])
    assert "statusReason" not in batch.job(behind)


def test_a_disabled_environment_starts_nothing_until_it_is_enabled(batch: Batch) -> None:
    environment = batch.environment()
    queue = batch.queue(environment)
    batch.client.update_compute_environment(computeEnvironment=environment, state="DISABLED")
    job_id = batch.submit(batch.definition("true"), queue)
    assert states(batch, job_id) == ["RUNNABLE"]
    assert batch.job(job_id)["statusReason"].startswith("CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY")
    batch.client.update_compute_environment(computeEnvironment=environment, state="ENABLED")
    assert batch.ended(job_id)["status"] == "SUCCEEDED"


def test_a_job_waits_for_what_it_depends_on(batch: Batch, gate: Path) -> None:
    queue = batch.queue()
    first = batch.submit(batch.definition(*held(gate)), queue)
    second = batch.submit(batch.definition("true"), queue, dependsOn=[{"jobId": first}])
    third = batch.submit(batch.definition("true"), queue, dependsOn=[{"jobId": first}, {"jobId": second}])
    cancelled = batch.submit(batch.definition("true"), queue, dependsOn=[{"jobId": first}])
    batch.client.cancel_job(jobId=cancelled, reason="not needed")
    batch.reached(first, "RUNNING")
    assert states(batch, second, third, cancelled) == ["PENDING", "PENDING", "PENDING"]
    assert batch.job(cancelled)["isCancelled"]
    gate.touch()
    assert batch.ended(cancelled)["statusReason"] == "not needed"
    ended = [batch.ended(job_id) for job_id in (first, second, third)]
    assert [job["status"] for job in ended] == ["SUCCEEDED"] * 3
    assert ended[0]["stoppedAt"] <= ended[1]["startedAt"] <= ended[1]["stoppedAt"] <= ended[2]["startedAt"]
    assert ended[2]["dependsOn"] == [{"jobId": first}, {"jobId": second}]


def test_a_failed_dependency_fails_all_that_follow(batch: Batch) -> None:
    queue, true = batch.queue(), batch.definition("true")
    failing = batch.submit(batch.definition("sh", "-c", "sleep 0.3; false"), queue)
    second = batch.submit(true, queue, dependsOn=[{"jobId": failing}])
    third = batch.submit(true, queue, dependsOn=[{"jobId": second}])
    late = batch.submit(true, queue, dependsOn=[{"jobId": batch.ended(failing)["jobId"]}])
    for job_id in (second, third, late):
        job = batch.ended(job_id)
        assert (job["status"], job["statusReason"]) == ("FAILED", "Dependent Job failed")
        assert job["attempts"] == []


def test_the_share_with_the_least_weighted_usage_is_served_first(batch: Batch, gate: Path) -> None:
    shares = [{"shareIdentifier": "product", "weightFactor": 0.0001}]
    policy = batch.client.create_scheduling_policy(
        name=f"policy-{time.time_ns()}", fairsharePolicy={"shareDecaySeconds": 3600, "shareDistribution": shares}
    )["arn"]
    queue = batch.queue(batch.environment(max_vcpus=1), schedulingPolicyArn=policy)
    definition = batch.definition("true")
    first = batch.submit(batch.definition(*held(gate)), queue, shareIdentifier="research")
    batch.reached(first, "RUNNING")
    research, product = (
        [batch.submit(definition, queue, shareIdentifier=share) for _ in range(2)] for share in ("research", "product")
    )
    urgent = batch.submit(definition, queue, shareIdentifier="product", schedulingPriorityOverride=9)
    gate.touch()
    jobs = [batch.ended(job_id) for job_id in (*research, *product, urgent)]
    # Whatever product used weighs next to nothing; within it, the higher priority goes first, then the older job.
    order = [job["jobId"] for job in sorted(jobs, key=lambda job: job["startedAt"])]
    assert order == [urgent, *product, *research]
    assert (jobs[-1]["shareIdentifier"], jobs[-1]["schedulingPriority"]) == ("product", 9)


def test_deleting_a_queue_ends_its_jobs(batch: Batch, gate: Path) -> None:
    queue = batch.queue(batch.environment(max_vcpus=1))
    definition = batch.definition(*held(gate))
    running, waiting = (batch.submit(definition, queue) for _ in range(2))
    batch.reached(running, "RUNNING")
    batch.client.update_job_queue(jobQueue=queue, state="DISABLED")
    batch.client.delete_job_queue(jobQueue=queue)
    assert batch.client.describe_job_queues(jobQueues=[queue])["jobQueues"] == []
    assert [batch.ended(job_id)["status"] for job_id in (running, waiting)] == ["FAILED", "FAILED"]
