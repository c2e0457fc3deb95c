"""Attempts: retries, timeouts, termination, cancelling, reclaimed instances."""

import time
import urllib.error
from typing import Any

import pytest

from tests.support.emulator.batch_calls import STOP_TIMEOUT_SECONDS, Batch, main

STUBBORN = "trap 'echo got TERM' TERM; echo ready; while :; do sleep 0.05; done"
"""Says what it got and stays."""
PATIENT = "trap 'echo bye; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
"""Leaves when asked."""


def exit_codes(job: dict[str, Any]) -> list[int | None]:
    return [main(attempt).get("exitCode") for attempt in job["attempts"]]


def test_a_failed_job_is_started_again_with_the_next_attempt_number(batch: Batch) -> None:
    job = batch.shell('echo $AWS_BATCH_JOB_ATTEMPT; [ "$AWS_BATCH_JOB_ATTEMPT" = 3 ]', retryStrategy={"attempts": 5})
    assert job["status"] == "SUCCEEDED"
    assert exit_codes(job) == [1, 1, 0]
    assert [batch.output(attempt) for attempt in job["attempts"]] == [["1"], ["2"], ["3"]]
    times = [moment for attempt in job["attempts"] for moment in (attempt["startedAt"], attempt["stoppedAt"])]
    assert times == sorted(times)
    assert job["startedAt"] == pytest.approx(times[-2], abs=50)


def test_the_submissions_strategy_replaces_the_definitions_whole(batch: Batch) -> None:
    rules = [{"onExitCode": "1", "action": "EXIT"}]
    definition = batch.definition("false", retryStrategy={"attempts": 4, "evaluateOnExit": rules})
    queue = batch.queue()
    first = batch.ended(batch.submit(definition, queue))
    assert exit_codes(first) == [1]
    assert first["retryStrategy"]["evaluateOnExit"] == [{"onExitCode": "1", "action": "exit"}]
    second = batch.ended(batch.submit(definition, queue, retryStrategy={"attempts": 2}))
    assert (second["status"], exit_codes(second)) == ("FAILED", [1, 1])
    assert second["retryStrategy"] == {"attempts": 2}


def test_a_timeout_ends_the_job_for_good(batch: Batch) -> None:
    started = time.monotonic()
    job = batch.shell(STUBBORN, timeout={"attemptDurationSeconds": 1}, retryStrategy={"attempts": 3})
    assert time.monotonic() - started >= 1 + STOP_TIMEOUT_SECONDS
    assert job["status"] == "FAILED"
    assert job["statusReason"] == "Job attempt duration exceeded timeout"
    assert job["timeout"] == {"attemptDurationSeconds": 1}
    assert exit_codes(job) == [137]
    assert batch.output(job) == ["ready", "got TERM"]


def test_a_terminated_job_gets_sigterm_and_may_leave_by_itself(batch: Batch) -> None:
    job_id = batch.submit(batch.definition("sh", "-c", PATIENT), batch.queue(), retryStrategy={"attempts": 3})
    batch.said(job_id, "ready")
    batch.client.cancel_job(jobId=job_id, reason="this leaves alone what runs")
    batch.client.terminate_job(jobId=job_id, reason="budget is used up")
    job = batch.ended(job_id)
    assert (job["status"], job["statusReason"]) == ("FAILED", "budget is used up")
    assert (job["isCancelled"], job["isTerminated"]) == (False, True)
    assert exit_codes(job) == [5]
    assert batch.output(job) == ["ready", "bye"]
    # What has ended stays as it is, and no instance can be taken from it.
    batch.client.terminate_job(jobId=job_id, reason="late")
    assert batch.job(job_id) == job
    for ended in (job_id, "00000000-0000-0000-0000-000000000000"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            batch.aws.reclaim(ended)


@pytest.mark.parametrize("action", ["cancel_job", "terminate_job"])
def test_a_job_that_waits_for_capacity_is_cancelled_at_once(batch: Batch, action: str) -> None:
    queue = batch.queue(batch.environment(max_vcpus=0))
    job_id = batch.submit(batch.definition("true"), queue, retryStrategy={"attempts": 3})
    assert batch.job(job_id)["status"] == "RUNNABLE"
    getattr(batch.client, action)(jobId=job_id, reason="changed my mind")
    job = batch.job(job_id)
    assert (job["status"], job["statusReason"]) == ("FAILED", "changed my mind")
    assert job["isCancelled"]
    assert job["attempts"] == []


def test_a_reclaimed_instance_starts_the_job_again_where_the_rules_say_so(batch: Batch) -> None:
    strategy = {
        "attempts": 3,
        "evaluateOnExit": [{"onStatusReason": "Host EC2*", "action": "RETRY"}, {"onReason": "*", "action": "EXIT"}],
    }
    script = f'[ "$AWS_BATCH_JOB_ATTEMPT" = 2 ] && exit 0; {PATIENT}'
    job_id = batch.submit(batch.definition("sh", "-c", script), batch.queue(), retryStrategy=strategy)
    batch.said(job_id, "ready")
    assert batch.aws.reclaim(job_id) == {"jobId": job_id, "reclaimed": True}
    job = batch.ended(job_id)
    assert job["status"] == "SUCCEEDED"
    lost, finished = job["attempts"]
    assert lost["statusReason"].startswith("Host EC2 (instance i-0")
    assert lost["statusReason"].endswith(") terminated.")
    # It had its SIGTERM and left, but nobody was there any more to report the exit code.
    assert batch.output(lost) == ["ready", "bye"]
    assert "exitCode" not in main(lost)
    assert main(finished)["exitCode"] == 0
