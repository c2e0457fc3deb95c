"""Attempts: retries, timeouts, termination, cancellation, reclaims, multi-node jobs and secrets."""

import json
import time
import urllib.error
import uuid
from typing import Any

import pytest

from tests.support.emulator.batch_calls import STOP_TIMEOUT_SECONDS, Batch, container_of, overrides, until

STUBBORN = "trap 'echo got TERM' TERM; echo ready; while :; do sleep 0.05; done"
"""Reports SIGTERM and keeps running."""
PATIENT = "trap 'echo bye; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
"""Exits on SIGTERM."""


def exit_codes(job: dict[str, Any]) -> list[int | None]:
    return [container_of(attempt).get("exitCode") for attempt in job["attempts"]]


def test_failed_job_is_retried_with_the_next_attempt_number(batch: Batch) -> None:
    job = batch.shell('echo $AWS_BATCH_JOB_ATTEMPT; [ "$AWS_BATCH_JOB_ATTEMPT" = 3 ]', retryStrategy={"attempts": 5})
    assert job["status"] == "SUCCEEDED"
    assert exit_codes(job) == [1, 1, 0]
    assert [batch.output(attempt) for attempt in job["attempts"]] == [["1"], ["2"], ["3"]]
    times = [moment for attempt in job["attempts"] for moment in (attempt["startedAt"], attempt["stoppedAt"])]
    assert times == sorted(times)
    assert job["startedAt"] == pytest.approx(times[-2], abs=50)


def test_strategy_of_submission_replaces_that_of_definition(batch: Batch) -> None:
    rules = [{"onExitCode": "1", "action": "EXIT"}]
    definition = batch.definition("false", retryStrategy={"attempts": 4, "evaluateOnExit": rules})
    queue = batch.queue()
    first = batch.wait_for_end(batch.submit(definition, queue))
    assert exit_codes(first) == [1]
    assert first["retryStrategy"]["evaluateOnExit"] == [{"onExitCode": "1", "action": "exit"}]
    second = batch.wait_for_end(batch.submit(definition, queue, retryStrategy={"attempts": 2}))
    assert (second["status"], exit_codes(second)) == ("FAILED", [1, 1])
    assert second["retryStrategy"] == {"attempts": 2}


def test_timeout_ends_the_job_without_a_retry(batch: Batch) -> None:
    started = time.monotonic()
    job = batch.shell(STUBBORN, timeout={"attemptDurationSeconds": 1}, retryStrategy={"attempts": 3})
    assert time.monotonic() - started >= 1 + STOP_TIMEOUT_SECONDS
    assert job["status"] == "FAILED"
    assert job["statusReason"] == "Job attempt duration exceeded timeout"
    assert job["timeout"] == {"attemptDurationSeconds": 1}
    assert exit_codes(job) == [137]
    assert batch.output(job) == ["ready", "got TERM"]


def test_terminated_job_gets_sigterm_and_may_exit_by_itself(batch: Batch) -> None:
    job_id = batch.submit(batch.definition("sh", "-c", PATIENT), batch.queue(), retryStrategy={"attempts": 3})
    batch.wait_for_line(job_id, "ready")
    batch.client.cancel_job(jobId=job_id, reason="no effect on running jobs")
    batch.client.terminate_job(jobId=job_id, reason="budget is used up")
    job = batch.wait_for_end(job_id)
    assert (job["status"], job["statusReason"]) == ("FAILED", "budget is used up")
    assert (job["isCancelled"], job["isTerminated"]) == (False, True)
    assert exit_codes(job) == [5]
    assert batch.output(job) == ["ready", "bye"]
    # An ended job does not change, and cannot be reclaimed.
    batch.client.terminate_job(jobId=job_id, reason="late")
    assert batch.job(job_id) == job
    for ended in (job_id, "00000000-0000-0000-0000-000000000000"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            batch.aws.reclaim(ended)


@pytest.mark.parametrize("action", ["cancel_job", "terminate_job"])
def test_waiting_job_is_cancelled_at_once(batch: Batch, action: str) -> None:
    queue = batch.queue(batch.environment(max_vcpus=0))
    job_id = batch.submit(batch.definition("true"), queue, retryStrategy={"attempts": 3})
    assert batch.job(job_id)["status"] == "RUNNABLE"
    getattr(batch.client, action)(jobId=job_id, reason="changed my mind")
    job = batch.job(job_id)
    assert (job["status"], job["statusReason"]) == ("FAILED", "changed my mind")
    assert job["isCancelled"]
    assert job["attempts"] == []


def test_reclaimed_job_is_retried_if_the_rules_allow_it(batch: Batch) -> None:
    strategy = {
        "attempts": 3,
        "evaluateOnExit": [{"onStatusReason": "Host EC2*", "action": "RETRY"}, {"onReason": "*", "action": "EXIT"}],
    }
    script = f'[ "$AWS_BATCH_JOB_ATTEMPT" = 2 ] && exit 0; {PATIENT}'
    job_id = batch.submit(batch.definition("sh", "-c", script), batch.queue(), retryStrategy=strategy)
    batch.wait_for_line(job_id, "ready")
    assert batch.aws.reclaim(job_id) == {"jobId": job_id, "reclaimed": True}
    job = batch.wait_for_end(job_id)
    assert job["status"] == "SUCCEEDED"
    lost, finished = job["attempts"]
    assert lost["statusReason"].startswith("Host EC2 (instance i-0")
    assert lost["statusReason"].endswith(") terminated.")
    # It exited on SIGTERM, but nothing was left to report the exit code.
    assert batch.output(lost) == ["ready", "bye"]
    assert "exitCode" not in container_of(lost)
    assert container_of(finished)["exitCode"] == 0


MAIN = "$AWS_BATCH_JOB_NODE_INDEX = $AWS_BATCH_JOB_MAIN_NODE_INDEX"


def nodes(batch: Batch, job_id: str, count: int) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = batch.client.describe_jobs(jobs=[f"{job_id}#{index}" for index in range(count)])[
        "jobs"
    ]
    return jobs


def submit(batch: Batch, script: str, *, count: int = 2, **more: Any) -> str:
    return batch.submit(batch.multinode_definition(script, nodes=count), batch.queue(), **more)


def test_each_node_has_its_index_and_address(batch: Batch) -> None:
    script = f"env | grep -E '^AWS_BATCH_JOB_(ID|NODE|NUM|MAIN)' | sort; echo done; [ {MAIN} ] && sleep 0.5"
    job_id = submit(batch, script)
    job = batch.wait_for_end(job_id)
    assert (job["status"], job["nodeProperties"]["numNodes"]) == ("SUCCEEDED", 2)
    for index, node in enumerate(nodes(batch, job_id, 2)):
        assert node["nodeDetails"] == {"nodeIndex": index, "isMainNode": index == 0}
        assert batch.output(node) == [
            f"AWS_BATCH_JOB_ID={job_id}#{index}",
            "AWS_BATCH_JOB_MAIN_NODE_INDEX=0",
            *["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS=127.0.0.1"][:index],
            f"AWS_BATCH_JOB_NODE_INDEX={index}",
            "AWS_BATCH_JOB_NUM_NODES=2",
            "done",
        ]
    main, child = nodes(batch, job_id, 2)
    # The other nodes start after the main node, and the job shows the task of the main node.
    assert main["startedAt"] <= child["startedAt"]
    assert container_of(job["attempts"][0])["logStreamName"] == container_of(main)["logStreamName"]


def test_exit_of_main_node_ends_job_and_other_nodes(batch: Batch) -> None:
    script = (
        f"if [ {MAIN} ]; then sleep 0.4; exit 0; fi; trap 'echo stopped; exit 3' TERM; while :; do sleep 0.05; done"
    )
    job_id = submit(batch, script)
    job = batch.wait_for_end(job_id)
    assert job["status"] == "SUCCEEDED"
    main, child = nodes(batch, job_id, 2)
    assert (main["status"], container_of(main)["exitCode"]) == ("SUCCEEDED", 0)
    assert (child["status"], container_of(child)["exitCode"]) == ("FAILED", 3)
    assert batch.output(child) == ["stopped"]
    assert child["stoppedAt"] <= job["stoppedAt"]


def test_exit_of_another_node_does_nothing(batch: Batch) -> None:
    job_id = submit(batch, f"if [ {MAIN} ]; then echo ready; sleep 600; fi; exit 9", retryStrategy={"attempts": 3})
    until(lambda: True if batch.job(f"{job_id}#1")["status"] == "FAILED" else None, "the other node has failed")
    assert batch.wait_for_line(f"{job_id}#0", "ready")["status"] == "RUNNING"
    assert batch.job(job_id)["status"] == "RUNNING"
    batch.client.terminate_job(jobId=job_id, reason="enough")
    job = batch.wait_for_end(job_id)
    assert (job["statusReason"], len(job["attempts"])) == ("enough", 1)
    assert [node["status"] for node in nodes(batch, job_id, 2)] == ["FAILED", "FAILED"]


def test_failure_of_main_node_restarts_all_nodes(batch: Batch) -> None:
    main = "sleep 0.3; [ $AWS_BATCH_JOB_ATTEMPT = 2 ]"
    script = f"echo $AWS_BATCH_JOB_ATTEMPT; if [ {MAIN} ]; then {main}; else sleep 600; fi"
    job_id = submit(batch, script, retryStrategy={"attempts": 2})
    assert batch.wait_for_end(job_id)["status"] == "SUCCEEDED"
    for node in nodes(batch, job_id, 2):
        assert [batch.output(attempt) for attempt in node["attempts"]] == [["1"], ["2"]]


def test_multinode_job_on_spot_waits_forever(batch: Batch) -> None:
    queue = batch.queue(batch.environment(kind="SPOT"))
    job_id = batch.submit(batch.multinode_definition("true"), queue)
    job = batch.job(job_id)
    assert job["status"] == "RUNNABLE"
    assert "statusReason" not in job
    # So does the next job in that queue.
    assert batch.job(batch.submit(batch.definition("true"), queue))["status"] == "RUNNABLE"


def test_all_nodes_start_in_the_first_zone_with_capacity(batch: Batch) -> None:
    # GIVEN an environment in each of two zones, and room for one node in the first
    other = batch.aws.client("ec2").create_subnet(
        VpcId=batch.vpc, CidrBlock="10.0.1.0/24", AvailabilityZoneId="use1-az2"
    )["Subnet"]
    zone_a, zone_b = batch.environment(max_vcpus=2), batch.environment(max_vcpus=2, subnet=other["SubnetId"])
    queue = batch.queue(zone_a, zone_b)
    busy = batch.submit(batch.definition("sh", "-c", PATIENT), queue)
    batch.wait_for_line(busy, "ready")
    metadata = "curl -s $AWS_EC2_METADATA_SERVICE_ENDPOINT/latest/meta-data/placement/availability-zone"
    script = f"echo $AWS_BATCH_CE_NAME $({metadata}); [ {MAIN} ] && sleep 0.6; true"

    def places() -> list[list[str]]:
        job_id = batch.submit(batch.multinode_definition(script), queue)
        assert batch.wait_for_end(job_id)["status"] == "SUCCEEDED"
        return [batch.output(node) for node in nodes(batch, job_id, 2)]

    # THEN both nodes of a job start in the other zone, not one in each
    assert places() == [[f"{zone_b} {other['AvailabilityZone']}"]] * 2
    # AND so they do if the first zone has no instances at all, and in the first if it has enough
    batch.client.terminate_job(jobId=busy, reason="enough")
    batch.wait_for_end(busy)
    batch.client.update_compute_environment(computeEnvironment=zone_a, state="DISABLED")
    assert places() == [[f"{zone_b} {other['AvailabilityZone']}"]] * 2
    batch.client.update_compute_environment(computeEnvironment=zone_a, state="ENABLED")
    assert [output[0].split()[0] for output in places()] == [zone_a] * 2


def test_node_overrides(batch: Batch) -> None:
    command = ["sh", "-c", f"echo $WORD $AWS_BATCH_JOB_NUM_NODES; [ {MAIN} ] && sleep 0.6; true"]
    given = {"targetNodes": "0:", "ecsPropertiesOverride": overrides(command=command, environment={"WORD": "of"})}
    job_id = submit(batch, "false", nodeOverrides={"numNodes": 3, "nodePropertyOverrides": [given]})
    job = batch.wait_for_end(job_id)
    assert job["status"] == "SUCCEEDED"
    assert job["nodeProperties"]["numNodes"] == 3
    assert [batch.output(node) for node in nodes(batch, job_id, 3)] == [["of 3"]] * 3
    with pytest.raises(batch.client.exceptions.ClientException, match="Non matching targets - 0:0"):
        submit(batch, "true", nodeOverrides={"nodePropertyOverrides": [{**given, "targetNodes": "0:0"}]})


VALUE = "hf_a-secret-token"


def run_with_secret(batch: Batch, value_from: str, command: str) -> dict[str, Any]:
    container = {"secrets": [{"name": "HF_TOKEN", "valueFrom": value_from}]}
    definition = batch.definition("sh", "-c", command, container=container)
    return batch.wait_for_end(batch.submit(definition, batch.queue()))


def secret(batch: Batch, **more: Any) -> str:
    arn: str = batch.aws.client("secretsmanager").create_secret(Name=f"secret-{uuid.uuid4().hex[:8]}", **more)["ARN"]
    return arn


def test_secret_is_only_in_the_environment(batch: Batch) -> None:
    arn = secret(batch, SecretString=VALUE)
    # The length proves that it is set; the command line of the process does not contain it.
    job = run_with_secret(batch, arn, 'echo ${#HF_TOKEN}; tr "\\0" " " </proc/$$/cmdline | grep -c "$HF_TOKEN"; true')
    assert job["status"] == "SUCCEEDED"
    shown = container_of(job)
    assert batch.lines(shown["logStreamName"]) == [str(len(VALUE)), "0"]
    assert shown["secrets"] == [{"name": "HF_TOKEN", "valueFrom": arn}]
    assert VALUE not in json.dumps(job, default=str)
    assert VALUE not in batch.aws.log.read_text()


def test_one_key_and_an_old_version_of_a_secret_are_read(batch: Batch) -> None:
    arn = secret(batch, SecretString="{}")
    newer = batch.aws.client("secretsmanager").put_secret_value(SecretId=arn, SecretString='{"token": "newer"}')
    assert batch.output(run_with_secret(batch, f"{arn}:token::", "echo $HF_TOKEN")) == ["newer"]
    batch.aws.client("secretsmanager").put_secret_value(SecretId=arn, SecretString='{"token": "newest"}')
    job = run_with_secret(batch, f"{arn}:token::{newer['VersionId']}", "echo $HF_TOKEN")
    assert batch.output(job) == ["newer"]


@pytest.mark.parametrize(
    "source",
    [
        "{secret}",  # without a value
        "{secret}:token::",
        "arn:aws:secretsmanager:us-east-1:123456789012:secret:not-there-AbCdEf",
        "/a/parameter",  # of Systems Manager
    ],
)
def test_job_with_unreadable_secret_fails_before_it_runs(batch: Batch, source: str) -> None:
    job = run_with_secret(batch, source.format(secret=secret(batch)), "echo it ran")
    assert job["status"] == "FAILED"
    assert job["statusReason"].startswith("Fetching secret data from AWS Secrets Manager in region us-east-1: secret ")
    assert "exitCode" not in container_of(job["attempts"][0])
