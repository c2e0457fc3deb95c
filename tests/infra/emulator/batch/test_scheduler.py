"""When jobs run: capacity, order of queues, dependencies, arrays and fair share."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.emulator.batch.scheduler import weight_factor
from tests.support.emulator.batch_calls import Batch


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A job of `held` runs until this file exists; the fixture creates it at the end."""
    path = tmp_path / "gate"
    yield path
    path.touch()


def held(gate: Path, *, say: str = "") -> tuple[str, ...]:
    return "sh", "-c", f"echo {say}; while [ ! -e {gate} ]; do sleep 0.03; done"


def states(batch: Batch, *job_ids: str) -> list[str]:
    return [batch.job(job_id)["status"] for job_id in job_ids]


def test_max_vcpus_limit_a_queue_that_is_first_in_first_out(batch: Batch, gate: Path) -> None:
    first, second = batch.environment(max_vcpus=1), batch.environment(max_vcpus=4)
    queue = batch.queue(first, second)
    running = [batch.submit(batch.definition(*held(gate), vcpus=vcpus), queue) for vcpus in (1, 2)]
    for job_id in running:
        batch.wait_for(job_id, "RUNNING")
    large = batch.submit(batch.definition("true", vcpus=3), queue)
    small = batch.submit(batch.definition("true", vcpus=1), queue)
    assert states(batch, *running, large, small) == ["RUNNING", "RUNNING", "RUNNABLE", "RUNNABLE"]
    assert "startedAt" not in batch.job(large)
    front = batch.client.get_job_queue_snapshot(jobQueue=queue)["frontOfQueue"]["jobs"]
    assert [job["jobArn"].rsplit("/", 1)[-1] for job in front] == [large, small]
    # With more capacity, the waiting jobs start.
    batch.client.update_compute_environment(computeEnvironment=second, computeResources={"maxvCpus": 5})
    assert batch.wait_for_end(large)["startedAt"] <= batch.wait_for_end(small)["startedAt"]
    assert states(batch, *running) == ["RUNNING", "RUNNING"]


def test_queue_with_higher_priority_is_served_first(batch: Batch, gate: Path) -> None:
    environment = batch.environment(max_vcpus=1)
    low, high = batch.queue(environment, priority=1), batch.queue(environment, priority=10)
    definition = batch.definition("true")
    batch.wait_for(batch.submit(batch.definition(*held(gate)), low), "RUNNING")
    later = [batch.submit(definition, queue) for queue in (low, high)]
    gate.touch()
    in_low, in_high = (batch.wait_for_end(job_id) for job_id in later)
    assert in_high["stoppedAt"] <= in_low["startedAt"]


def test_job_larger_than_any_environment_waits_with_a_reason(batch: Batch) -> None:
    job_id = batch.submit(batch.definition("true", vcpus=9), batch.queue(batch.environment(max_vcpus=8)))
    job = batch.job(job_id)
    assert job["status"] == "RUNNABLE"
    assert job["statusReason"].startswith("MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE")
    assert not job["attempts"]
    behind = batch.submit(batch.definition("true"), job["jobQueue"])
    assert "statusReason" not in batch.job(behind)


def test_disabled_environment_starts_no_jobs_until_enabled(batch: Batch) -> None:
    environment = batch.environment()
    queue = batch.queue(environment)
    batch.client.update_compute_environment(computeEnvironment=environment, state="DISABLED")
    job_id = batch.submit(batch.definition("true"), queue)
    assert states(batch, job_id) == ["RUNNABLE"]
    assert batch.job(job_id)["statusReason"].startswith("CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY")
    batch.client.update_compute_environment(computeEnvironment=environment, state="ENABLED")
    assert batch.wait_for_end(job_id)["status"] == "SUCCEEDED"


def test_job_waits_for_its_dependencies(batch: Batch, gate: Path) -> None:
    queue = batch.queue()
    first = batch.submit(batch.definition(*held(gate)), queue)
    second = batch.submit(batch.definition("true"), queue, dependsOn=[{"jobId": first}])
    third = batch.submit(batch.definition("true"), queue, dependsOn=[{"jobId": first}, {"jobId": second}])
    cancelled = batch.submit(batch.definition("true"), queue, dependsOn=[{"jobId": first}])
    batch.client.cancel_job(jobId=cancelled, reason="not needed")
    batch.wait_for(first, "RUNNING")
    assert states(batch, second, third, cancelled) == ["PENDING", "PENDING", "PENDING"]
    assert batch.job(cancelled)["isCancelled"]
    gate.touch()
    assert batch.wait_for_end(cancelled)["statusReason"] == "not needed"
    ended = [batch.wait_for_end(job_id) for job_id in (first, second, third)]
    assert [job["status"] for job in ended] == ["SUCCEEDED"] * 3
    assert ended[0]["stoppedAt"] <= ended[1]["startedAt"] <= ended[1]["stoppedAt"] <= ended[2]["startedAt"]
    assert ended[2]["dependsOn"] == [{"jobId": first}, {"jobId": second}]


def test_failed_dependency_fails_all_dependents(batch: Batch) -> None:
    queue, true = batch.queue(), batch.definition("true")
    failing = batch.submit(batch.definition("sh", "-c", "sleep 0.3; false"), queue)
    second = batch.submit(true, queue, dependsOn=[{"jobId": failing}])
    third = batch.submit(true, queue, dependsOn=[{"jobId": second}])
    late = batch.submit(true, queue, dependsOn=[{"jobId": batch.wait_for_end(failing)["jobId"]}])
    for job_id in (second, third, late):
        job = batch.wait_for_end(job_id)
        assert (job["status"], job["statusReason"]) == ("FAILED", "Dependent Job failed")
        assert job["attempts"] == []


def test_share_with_least_weighted_usage_is_served_first(batch: Batch, gate: Path) -> None:
    shares = [{"shareIdentifier": "product", "weightFactor": 0.0001}]
    policy = batch.client.create_scheduling_policy(
        name=f"policy-{time.time_ns()}", fairsharePolicy={"shareDecaySeconds": 3600, "shareDistribution": shares}
    )["arn"]
    queue = batch.queue(batch.environment(max_vcpus=1), schedulingPolicyArn=policy)
    definition = batch.definition("true")
    first = batch.submit(batch.definition(*held(gate)), queue, shareIdentifier="research")
    batch.wait_for(first, "RUNNING")
    research, product = (
        [batch.submit(definition, queue, shareIdentifier=share) for _ in range(2)] for share in ("research", "product")
    )
    urgent = batch.submit(definition, queue, shareIdentifier="product", schedulingPriorityOverride=9)
    gate.touch()
    jobs = [batch.wait_for_end(job_id) for job_id in (*research, *product, urgent)]
    # The usage of product weighs next to nothing. Within product, priority decides, then age.
    order = [job["jobId"] for job in sorted(jobs, key=lambda job: job["startedAt"])]
    assert order == [urgent, *product, *research]
    assert (jobs[-1]["shareIdentifier"], jobs[-1]["schedulingPriority"]) == ("product", 9)


def test_deleting_a_queue_ends_its_jobs(batch: Batch, gate: Path) -> None:
    queue = batch.queue(batch.environment(max_vcpus=1))
    definition = batch.definition(*held(gate))
    running, waiting = (batch.submit(definition, queue) for _ in range(2))
    batch.wait_for(running, "RUNNING")
    batch.client.update_job_queue(jobQueue=queue, state="DISABLED")
    batch.client.delete_job_queue(jobQueue=queue)
    assert batch.client.describe_job_queues(jobQueues=[queue])["jobQueues"] == []
    assert [batch.wait_for_end(job_id)["status"] for job_id in (running, waiting)] == ["FAILED", "FAILED"]


def children(batch: Batch, job_id: str, size: int) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = batch.client.describe_jobs(jobs=[f"{job_id}:{index}" for index in range(size)])["jobs"]
    return jobs


def test_each_child_has_its_index_and_is_retried_separately(batch: Batch) -> None:
    script = """
        echo $AWS_BATCH_JOB_ID $AWS_BATCH_JOB_ARRAY_INDEX of $AWS_BATCH_JOB_ARRAY_SIZE
        [ $AWS_BATCH_JOB_ARRAY_INDEX = 0 ] || [ $AWS_BATCH_JOB_ATTEMPT = 2 ]
    """
    parent = batch.shell(script, arrayProperties={"size": 2}, tags={"team": "research"}, retryStrategy={"attempts": 2})
    job_id, summary = parent["jobId"], parent["arrayProperties"]["statusSummary"]
    assert (parent["status"], parent["attempts"]) == ("SUCCEEDED", [])
    assert summary == dict.fromkeys(summary, 0) | {"SUCCEEDED": 2}
    assert len(summary) == 7
    for index, child in enumerate(children(batch, job_id, 2)):
        assert child["arrayProperties"] == {"size": 2, "index": index}
        assert child["tags"] == {"team": "research"}
        assert batch.output(child) == [f"{job_id}:{index} {index} of 2"]
        assert len(child["attempts"]) == 1 + index


def test_parent_is_pending_then_fails_if_a_child_fails(batch: Batch) -> None:
    queue = batch.queue()
    script = "[ $AWS_BATCH_JOB_ARRAY_INDEX = 1 ] && exit 7; echo ready; sleep 0.5"
    job_id = batch.submit(batch.definition("sh", "-c", script), queue, arrayProperties={"size": 2})
    after = batch.submit(batch.definition("true"), queue, dependsOn=[{"jobId": job_id}])
    batch.wait_for_line(f"{job_id}:0", "ready")
    assert [batch.job(one)["status"] for one in (job_id, after)] == ["PENDING", "PENDING"]
    parent = batch.wait_for_end(job_id)
    assert (parent["status"], parent["statusReason"]) == ("FAILED", "Array Child Job failed")
    assert [child["status"] for child in children(batch, job_id, 2)] == ["SUCCEEDED", "FAILED"]
    assert batch.wait_for_end(after)["statusReason"] == "Dependent Job failed"


def test_dependent_of_an_array_waits_for_all_children(batch: Batch) -> None:
    queue = batch.queue()
    array = batch.submit(batch.definition("sleep", "0.2"), queue, arrayProperties={"size": 2})
    after = batch.submit(batch.definition("true"), queue, dependsOn=[{"jobId": array}])
    assert batch.wait_for_end(after)["startedAt"] >= max(child["stoppedAt"] for child in children(batch, array, 2))


def test_cancelling_a_parent_cancels_waiting_children(batch: Batch) -> None:
    queue = batch.queue(batch.environment(max_vcpus=0))
    job_id = batch.submit(batch.definition("true"), queue, arrayProperties={"size": 3})
    batch.client.cancel_job(jobId=job_id, reason="not needed")
    parent = batch.wait_for_end(job_id)
    assert (parent["status"], parent["statusReason"]) == ("FAILED", "not needed")
    assert {child["statusReason"] for child in children(batch, job_id, 3)} == {"not needed"}


POLICY = {
    "shareDecaySeconds": 1000,
    "shareDistribution": [
        {"shareIdentifier": "research", "weightFactor": 0.5},
        {"shareIdentifier": "guest*", "weightFactor": 4.0},
    ],
}


@pytest.mark.parametrize(
    ("share", "weight"), [("research", 0.5), ("guest7", 4.0), ("guest", 4.0), ("product", 1.0), ("researcher", 1.0)]
)
def test_weight_of_a_share(share: str, weight: float) -> None:
    assert weight_factor(POLICY, share) == weight
