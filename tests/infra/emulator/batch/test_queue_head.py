"""Jobs at the head of a queue that cannot be placed: what they say, and when jobStateTimeLimitActions cancels them."""

import pytest
from botocore.exceptions import ClientError

from tests.support.emulator.batch_calls import Batch

TOO_LARGE = "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE"
NO_CAPACITY = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"


def limits(*reasons: str, seconds: int = 600) -> list[dict[str, object]]:
    """0.6 s on this server, which scales them."""
    return [
        {"reason": reason, "state": "RUNNABLE", "maxTimeSeconds": seconds, "action": "CANCEL"} for reason in reasons
    ]


def test_a_head_that_fits_nowhere_is_cancelled_and_the_next_job_runs(batch: Batch) -> None:
    queue = batch.queue(batch.environment(max_vcpus=8), jobStateTimeLimitActions=limits(TOO_LARGE))
    stuck = batch.submit(batch.definition("true", vcpus=9), queue)
    behind = batch.submit(batch.definition("true"), queue)
    assert batch.job(behind)["status"] == "RUNNABLE"
    assert "statusReason" not in batch.job(behind)

    ended = batch.ended(stuck)
    assert ended["status"] == "FAILED"
    assert ended["statusReason"] == f"Canceled by JobStateTimeLimit action due to reason: {TOO_LARGE}"
    assert ended["isCancelled"] is True
    assert batch.ended(behind)["status"] == "SUCCEEDED"


def test_without_any_enabled_environment_capacity_is_what_is_missing(batch: Batch) -> None:
    first, second = batch.environment(), batch.environment()
    queue = batch.queue(first, second, jobStateTimeLimitActions=limits(NO_CAPACITY))
    for environment in (first, second):
        batch.client.update_compute_environment(computeEnvironment=environment, state="DISABLED")
    job_id = batch.submit(batch.definition("true"), queue)
    assert batch.job(job_id)["statusReason"] == (
        f"{NO_CAPACITY} - Service cannot fulfill the capacity requested for instance type [dl1.24xlarge]"
    )
    assert batch.ended(job_id)["statusReason"].endswith(NO_CAPACITY)


def test_only_the_reason_of_the_action_counts(batch: Batch) -> None:
    environment = batch.environment()
    queue = batch.queue(environment, jobStateTimeLimitActions=limits(TOO_LARGE))
    batch.client.update_compute_environment(computeEnvironment=environment, state="DISABLED")
    job_id = batch.submit(batch.definition("true"), queue)
    other = batch.queue(batch.environment(max_vcpus=8), jobStateTimeLimitActions=limits(TOO_LARGE))
    batch.ended(batch.submit(batch.definition("true", vcpus=9), other))  # as long as the other would have taken

    assert batch.job(job_id)["status"] == "RUNNABLE"
    batch.client.update_compute_environment(computeEnvironment=environment, state="ENABLED")
    ended = batch.ended(job_id)
    assert ended["status"] == "SUCCEEDED"
    assert "Canceled" not in ended.get("statusReason", "")


def test_who_waits_for_others_is_no_stuck_head(batch: Batch) -> None:
    queue = batch.queue(batch.environment(max_vcpus=1), jobStateTimeLimitActions=limits(NO_CAPACITY, TOO_LARGE))
    running = batch.submit(batch.definition("sleep", "1.5"), queue)  # longer than the limit
    waiting = batch.submit(batch.definition("true"), queue)
    batch.reached(running, "RUNNING")
    assert "statusReason" not in batch.job(waiting)
    assert batch.ended(waiting)["status"] == "SUCCEEDED"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"maxTimeSeconds": 599}, "between 600 and 86400"),
        ({"reason": "UNDETERMINED"}, "reason must be one of"),
        ({"action": "TERMINATE"}, "action CANCEL"),
    ],
)
def test_actions_that_batch_refuses(batch: Batch, change: dict[str, object], words: str) -> None:
    (action,) = limits(NO_CAPACITY)
    with pytest.raises(ClientError, match=words):
        batch.queue(jobStateTimeLimitActions=[{**action, **change}])
