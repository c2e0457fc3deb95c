"""Array jobs: children, their parent, and dependencies between arrays."""

from typing import Any

from tests.support.emulator.batch_calls import Batch


def children(batch: Batch, job_id: str, size: int) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = batch.client.describe_jobs(jobs=[f"{job_id}:{index}" for index in range(size)])["jobs"]
    return jobs


def test_every_child_knows_its_index_and_is_retried_by_itself(batch: Batch) -> None:
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


def test_a_parent_is_pending_while_children_run_and_fails_with_one_of_them(batch: Batch) -> None:
    queue = batch.queue()
    script = "[ $AWS_BATCH_JOB_ARRAY_INDEX = 1 ] && exit 7; echo ready; sleep 0.5"
    job_id = batch.submit(batch.definition("sh", "-c", script), queue, arrayProperties={"size": 2})
    after = batch.submit(batch.definition("true"), queue, dependsOn=[{"jobId": job_id}])
    batch.said(f"{job_id}:0", "ready")
    assert [batch.job(one)["status"] for one in (job_id, after)] == ["PENDING", "PENDING"]
    parent = batch.ended(job_id)
    assert (parent["status"], parent["statusReason"]) == ("FAILED", "Array Child Job failed")
    assert [child["status"] for child in children(batch, job_id, 2)] == ["SUCCEEDED", "FAILED"]
    assert batch.ended(after)["statusReason"] == "Dependent Job failed"


def test_a_job_that_depends_on_an_array_waits_for_all_of_it(batch: Batch) -> None:
    queue = batch.queue()
    array = batch.submit(batch.definition("sleep", "0.2"), queue, arrayProperties={"size": 2})
    after = batch.submit(batch.definition("true"), queue, dependsOn=[{"jobId": array}])
    assert batch.ended(after)["startedAt"] >= max(child["stoppedAt"] for child in children(batch, array, 2))


def test_cancelling_a_parent_cancels_the_children_that_wait(batch: Batch) -> None:
    queue = batch.queue(batch.environment(max_vcpus=0))
    job_id = batch.submit(batch.definition("true"), queue, arrayProperties={"size": 3})
    batch.client.cancel_job(jobId=job_id, reason="not needed")
    parent = batch.ended(job_id)
    assert (parent["status"], parent["statusReason"]) == ("FAILED", "not needed")
    assert {child["statusReason"] for child in children(batch, job_id, 3)} == {"not needed"}
