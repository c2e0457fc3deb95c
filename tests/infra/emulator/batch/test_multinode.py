"""Multi-node parallel jobs: nodes as processes of this machine."""

from typing import Any

import pytest

from tests.support.emulator.batch_calls import Batch, container_of, overrides, until

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
    # The children start once the main node runs, and what is told of the job is what the main node did.
    assert main["startedAt"] <= child["startedAt"]
    assert container_of(job["attempts"][0])["logStreamName"] == container_of(main)["logStreamName"]


def test_the_main_nodes_exit_ends_the_job_and_the_others(batch: Batch) -> None:
    script = (
        f"if [ {MAIN} ]; then sleep 0.4; exit 0; fi; trap 'echo stopped; exit 3' TERM; while :; do sleep 0.05; done"
    )
    job_id = submit(batch, script)
    job = batch.ended(job_id)
    assert job["status"] == "SUCCEEDED"
    main, child = nodes(batch, job_id, 2)
    assert (main["status"], container_of(main)["exitCode"]) == ("SUCCEEDED", 0)
    assert (child["status"], container_of(child)["exitCode"]) == ("FAILED", 3)
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
    assert [node["status"] for node in nodes(batch, job_id, 2)] == ["FAILED", "FAILED"]


def test_the_main_nodes_failure_starts_all_nodes_again(batch: Batch) -> None:
    main = "sleep 0.3; [ $AWS_BATCH_JOB_ATTEMPT = 2 ]"
    script = f"echo $AWS_BATCH_JOB_ATTEMPT; if [ {MAIN} ]; then {main}; else sleep 600; fi"
    job_id = submit(batch, script, retryStrategy={"attempts": 2})
    assert batch.ended(job_id)["status"] == "SUCCEEDED"
    for node in nodes(batch, job_id, 2):
        assert [batch.output(attempt) for attempt in node["attempts"]] == [["1"], ["2"]]


def test_a_multinode_job_on_spot_waits_for_ever(batch: Batch) -> None:
    queue = batch.queue(batch.environment(kind="SPOT"))
    job_id = batch.submit(batch.multinode_definition("true"), queue)
    job = batch.job(job_id)
    assert job["status"] == "RUNNABLE"
    assert "statusReason" not in job
    # And so does what was submitted to that queue after it.
    assert batch.job(batch.submit(batch.definition("true"), queue))["status"] == "RUNNABLE"


def test_node_overrides(batch: Batch) -> None:
    command = ["sh", "-c", f"echo $WORD $AWS_BATCH_JOB_NUM_NODES; [ {MAIN} ] && sleep 0.6; true"]
    given = {"targetNodes": "0:", "ecsPropertiesOverride": overrides(command=command, environment={"WORD": "of"})}
    job_id = submit(batch, "false", nodeOverrides={"numNodes": 3, "nodePropertyOverrides": [given]})
    job = batch.ended(job_id)
    assert job["status"] == "SUCCEEDED"
    assert job["nodeProperties"]["numNodes"] == 3
    assert [batch.output(node) for node in nodes(batch, job_id, 3)] == [["of 3"]] * 3
    with pytest.raises(batch.client.exceptions.ClientException, match="Non matching targets - 0:0"):
        submit(batch, "true", nodeOverrides={"nodePropertyOverrides": [{**given, "targetNodes": "0:0"}]})
