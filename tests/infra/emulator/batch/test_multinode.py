"""Multi-node parallel jobs: nodes as processes of this machine."""

import uuid
from typing import Any

import pytest

from tests.support.emulator.batch_calls import Batch, container, until

MAIN = "$AWS_BATCH_JOB_NODE_INDEX = $AWS_BATCH_JOB_MAIN_NODE_INDEX"


def nodes(batch: Batch, job_id: str, count: int) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = batch.client.describe_jobs(jobs=[f"{job_id}#{index}" for index in range(count)])[
        "jobs"
    ]
    return jobs


def submit(batch: Batch, script: str, *, count: int = 2, **more: Any) -> str:
    return batch.submit(batch.multinode_definition(script, nodes=count), batch.queue(), **more)


def test_every_node_knows_its_place(batch: Batch) -> None:
    script = f"env | grep -E '^AWS_BATCH_JOB_(ID|NODE|NUM|MAIN)' | sort; echo done; [ {MAIN} ] && sleep 0.5"
    job_id = submit(batch, script)
    job = batch.ended(job_id)
    assert job["status"] == "SUCCEEDED"
    assert job["nodeProperties"]["numNodes"] == 2
    main, child = nodes(batch, job_id, 2)
    assert main["nodeDetails"] == {"nodeIndex": 0, "isMainNode": True}
    assert child["nodeDetails"] == {"nodeIndex": 1, "isMainNode": False}
    assert batch.output(main) == [
        f"AWS_BATCH_JOB_ID={job_id}#0",
        "AWS_BATCH_JOB_MAIN_NODE_INDEX=0",
        "AWS_BATCH_JOB_NODE_INDEX=0",
        "AWS_BATCH_JOB_NUM_NODES=2",
        "done",
    ]
    assert batch.output(child) == [
        f"AWS_BATCH_JOB_ID={job_id}#1",
        "AWS_BATCH_JOB_MAIN_NODE_INDEX=0",
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS=127.0.0.1",
        "AWS_BATCH_JOB_NODE_INDEX=1",
        "AWS_BATCH_JOB_NUM_NODES=2",
        "done",
    ]
    # The children start once the main node runs, and what is told of the job is what the main node did.
    assert main["startedAt"] <= child["startedAt"]
    assert job["attempts"][0]["container"]["logStreamName"] == main["container"]["logStreamName"]


def test_the_main_nodes_exit_ends_the_job_and_the_others(batch: Batch) -> None:
    script = (
        f"if [ {MAIN} ]; then sleep 0.4; exit 0; fi; trap 'echo stopped; exit 3' TERM; while :; do sleep 0.05; done"
    )
    job_id = submit(batch, script)
    job = batch.ended(job_id)
    assert job["status"] == "SUCCEEDED"
    main, child = nodes(batch, job_id, 2)
    assert (main["status"], main["container"]["exitCode"]) == ("SUCCEEDED", 0)
    assert (child["status"], child["container"]["exitCode"]) == ("FAILED", 3)
    assert batch.output(child) == ["stopped"]
    assert child["stoppedAt"] <= job["stoppedAt"]


def test_the_death_of_a_child_does_nothing(batch: Batch) -> None:
    job_id = submit(batch, f"if [ {MAIN} ]; then echo ready; sleep 600; fi; exit 9", retryStrategy={"attempts": 3})
    until(lambda: True if batch.job(f"{job_id}#1")["status"] == "FAILED" else None, "the child is gone")
    assert batch.said(f"{job_id}#0", "ready")["status"] == "RUNNING"
    assert batch.job(job_id)["status"] == "RUNNING"
    batch.client.terminate_job(jobId=job_id, reason="enough")
    job = batch.ended(job_id)
    assert (job["statusReason"], len(job["attempts"])) == ("enough", 1)


def test_the_main_nodes_failure_starts_all_nodes_again(batch: Batch) -> None:
    main = "sleep 0.3; [ $AWS_BATCH_JOB_ATTEMPT = 2 ]"
    script = f"echo $AWS_BATCH_JOB_ATTEMPT; if [ {MAIN} ]; then {main}; else sleep 600; fi"
    job_id = submit(batch, script, retryStrategy={"attempts": 2})
    assert batch.ended(job_id)["status"] == "SUCCEEDED"
    for node in nodes(batch, job_id, 2):
        streams = [attempt["container"]["logStreamName"] for attempt in node["attempts"]]
        assert [batch.lines(stream) for stream in streams] == [["1"], ["2"]]


def test_the_timeout_is_the_jobs(batch: Batch) -> None:
    job_id = submit(batch, "sleep 600", timeout={"attemptDurationSeconds": 1})
    assert batch.ended(job_id)["statusReason"] == "Job attempt duration exceeded timeout"
    assert [node["status"] for node in nodes(batch, job_id, 2)] == ["FAILED", "FAILED"]


def test_a_multinode_job_on_spot_waits_for_ever(batch: Batch) -> None:
    queue = batch.queue(batch.environment(kind="SPOT"))
    job_id = batch.submit(batch.multinode_definition("true"), queue)
    job = batch.job(job_id)
    assert job["status"] == "RUNNABLE"
    assert "statusReason" not in job
    # And so does what was submitted to that queue after it.
    assert batch.job(batch.submit(batch.definition("true"), queue))["status"] == "RUNNABLE"


def test_all_nodes_need_room_at_once(batch: Batch) -> None:
    queue = batch.queue(batch.environment(max_vcpus=2))
    job_id = batch.submit(batch.multinode_definition("true", nodes=3), queue)
    assert batch.job(job_id)["status"] == "RUNNABLE"


def test_node_overrides(batch: Batch) -> None:
    override = {
        "numNodes": 3,
        "nodePropertyOverrides": [
            {
                "targetNodes": "0:",
                "containerOverrides": {
                    "command": ["sh", "-c", f"echo $WORD; [ {MAIN} ] && sleep 0.6; true"],
                    "environment": [{"name": "WORD", "value": "overridden"}],
                },
            }
        ],
    }
    job_id = submit(batch, "false", nodeOverrides=override)
    job = batch.ended(job_id)
    assert job["status"] == "SUCCEEDED"
    assert job["nodeProperties"]["numNodes"] == 3
    assert [batch.output(node) for node in nodes(batch, job_id, 3)] == [["overridden"]] * 3


def test_ecs_properties_in_a_node_range_and_their_overrides(batch: Batch) -> None:
    command = f"echo $WORD $AWS_BATCH_JOB_NUM_NODES; [ {MAIN} ] && sleep 0.6; true"
    main = container("false", name="main", environment=[{"name": "WORD", "value": "defined"}])
    task = {"ipcMode": "host", "containers": [main]}
    node_range = {"targetNodes": "0:", "ecsProperties": {"taskProperties": [task]}}
    name = f"definition-{uuid.uuid4().hex[:8]}"
    batch.client.register_job_definition(
        jobDefinitionName=name,
        type="multinode",
        nodeProperties={"numNodes": 2, "mainNode": 0, "nodeRangeProperties": [node_range]},
    )
    (shown,) = batch.client.describe_job_definitions(jobDefinitionName=name)["jobDefinitions"]
    (shown_range,) = shown["nodeProperties"]["nodeRangeProperties"]
    assert shown_range["ecsProperties"]["taskProperties"][0]["ipcMode"] == "host"

    override = {"name": "main", "command": ["sh", "-c", command], "environment": [{"name": "WORD", "value": "of"}]}
    overrides = {"targetNodes": "0:", "ecsPropertiesOverride": {"taskProperties": [{"containers": [override]}]}}
    job_id = batch.submit(name, batch.queue(), nodeOverrides={"numNodes": 3, "nodePropertyOverrides": [overrides]})
    job = batch.ended(job_id)
    assert job["status"] == "SUCCEEDED"
    assert job["nodeProperties"]["numNodes"] == 3
    for node in nodes(batch, job_id, 3):
        (ran,) = node["ecsProperties"]["taskProperties"][0]["containers"]
        assert batch.lines(ran["logStreamName"]) == ["of 3"]


def test_the_narrower_range_overrides_the_wider(batch: Batch) -> None:
    name = batch.multinode_definition("true")
    ranges = [
        {"targetNodes": "0:", "container": container("sh", "-c", "echo wide; sleep 0.5")},
        {"targetNodes": "1:1", "container": container("echo", "narrow")},
    ]
    batch.client.register_job_definition(
        jobDefinitionName=name,
        type="multinode",
        nodeProperties={"numNodes": 2, "mainNode": 0, "nodeRangeProperties": ranges},
    )
    job_id = batch.submit(name, batch.queue())
    batch.ended(job_id)
    assert [batch.output(node) for node in nodes(batch, job_id, 2)] == [["wide"], ["narrow"]]


@pytest.mark.parametrize(
    ("targets", "override", "complaint"),
    [
        ("0:1", {"numNodes": 3}, "open upper boundary"),
        ("0:", {"nodePropertyOverrides": [{"targetNodes": "0:0"}]}, "Non matching targets - 0:0"),
    ],
)
def test_node_overrides_that_batch_refuses(
    batch: Batch, targets: str, override: dict[str, Any], complaint: str
) -> None:
    definition = batch.multinode_definition("true", targets=targets)
    with pytest.raises(batch.client.exceptions.ClientException, match=complaint):
        batch.submit(definition, batch.queue(), nodeOverrides=override)
