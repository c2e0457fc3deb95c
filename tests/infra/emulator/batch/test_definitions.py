"""Job definitions: revisions, what DescribeJobDefinitions shows, what is refused."""

import uuid
from typing import Any

import pytest

from tests.support.emulator.batch_calls import Batch, container

NODES = {"numNodes": 2, "mainNode": 0, "nodeRangeProperties": [{"targetNodes": "0:", "container": container("true")}]}


def describe(batch: Batch, **request: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = batch.client.describe_job_definitions(**request)["jobDefinitions"]
    return found


def test_a_definition_is_shown_whole(batch: Batch) -> None:
    main = container(
        "python",
        name="main",
        logConfiguration={"logDriver": "awslogs", "options": {"awslogs-group": "/group"}},
        ulimits=[{"name": "memlock", "softLimit": -1, "hardLimit": -1}],
    )
    task = {"containers": [main], "ipcMode": "host", "taskRoleArn": "arn:aws:iam::123456789012:role/job"}
    name = f"definition-{uuid.uuid4().hex[:8]}"
    request = {
        "type": "container",
        "ecsProperties": {"taskProperties": [task]},
        "parameters": {"Name": "Value"},
        "retryStrategy": {"attempts": 3, "evaluateOnExit": [{"onReason": "*", "action": "EXIT"}]},
        "timeout": {"attemptDurationSeconds": 600},
        "propagateTags": True,
        "schedulingPriority": 7,
    }
    batch.client.register_job_definition(jobDefinitionName=name, tags={"Team": "research"}, **request)
    (shown,) = describe(batch, jobDefinitionName=name)
    assert {key: shown[key] for key in ("parameters", "timeout", "propagateTags", "schedulingPriority")} == {
        key: request[key] for key in ("parameters", "timeout", "propagateTags", "schedulingPriority")
    }
    assert shown["retryStrategy"]["evaluateOnExit"] == [{"onReason": "*", "action": "exit"}]
    assert (shown["tags"], shown["status"], shown["revision"]) == ({"Team": "research"}, "ACTIVE", 1)
    assert shown["platformCapabilities"] == ["EC2"]
    (shown_task,) = shown["ecsProperties"]["taskProperties"]
    assert {key: shown_task[key] for key in ("ipcMode", "taskRoleArn")} == {
        "ipcMode": "host",
        "taskRoleArn": task["taskRoleArn"],
    }
    assert {key: shown_task["containers"][0][key] for key in main} == main


def test_registering_again_makes_a_revision(batch: Batch) -> None:
    name = batch.definition("echo", "one")
    batch.client.register_job_definition(
        jobDefinitionName=name, type="container", containerProperties=container("echo", "two")
    )
    revisions = describe(batch, jobDefinitionName=name)
    assert [one["revision"] for one in revisions] == [2, 1]
    queue = batch.queue()
    outputs = [batch.output(batch.ended(batch.submit(which, queue))) for which in (name, f"{name}:1")]
    assert outputs == [["two"], ["one"]]
    batch.client.deregister_job_definition(jobDefinition=revisions[0]["jobDefinitionArn"])
    assert batch.output(batch.ended(batch.submit(name, queue))) == ["one"]
    assert [one["revision"] for one in describe(batch, jobDefinitionName=name, status="ACTIVE")] == [1]
    batch.client.deregister_job_definition(jobDefinition=f"{name}:1")
    with pytest.raises(batch.client.exceptions.ClientException, match="not in ACTIVE status"):
        batch.submit(name, queue)


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ({"type": "container"}, "exactly one of containerProperties and ecsProperties"),
        ({"type": "container", "containerProperties": {"image": "x"}}, "vCPU is not provided"),
        ({"type": "multinode", "containerProperties": container()}, "must have nodeProperties"),
        ({"type": "multinode", "nodeProperties": {**NODES, "mainNode": 2}}, "mainNode must be fewer"),
        (
            {
                "type": "multinode",
                "nodeProperties": {
                    **NODES,
                    "nodeRangeProperties": [{"targetNodes": "1:", "container": container("true")}],
                },
            },
            "must account for all nodes",
        ),
        (
            {
                "type": "container",
                "ecsProperties": {"taskProperties": [{"containers": [container(name="a"), container(name="a")]}]},
            },
            "name of its own",
        ),
        (
            {"type": "container", "ecsProperties": {"taskProperties": [{"containers": [container(essential=False)]}]}},
            "at least one essential container",
        ),
        (
            {"type": "container", "containerProperties": container(), "retryStrategy": {"attempts": 11}},
            "between 1 and 10",
        ),
        (
            {"type": "container", "containerProperties": container(), "timeout": {"attemptDurationSeconds": 0}},
            "must be at least 1",  # of this server, which was started so; 60 by default
        ),
        ({"type": "container", "containerProperties": container("x" * 25_000)}, "limit is 24576 bytes"),
    ],
)
def test_what_batch_refuses(batch: Batch, request_: dict[str, Any], complaint: str) -> None:
    with pytest.raises(batch.client.exceptions.ClientException, match=complaint):
        batch.client.register_job_definition(jobDefinitionName="refused", **request_)
    assert describe(batch, jobDefinitionName="refused") == []


@pytest.mark.parametrize("name", ["with space", "-first", "x" * 129])
def test_names_that_batch_refuses(batch: Batch, name: str) -> None:
    with pytest.raises(batch.client.exceptions.ClientException, match="jobDefinitionName"):
        batch.client.register_job_definition(
            jobDefinitionName=name, type="container", containerProperties=container("true")
        )


def test_a_multinode_definition_is_shown_whole(batch: Batch) -> None:
    (shown,) = describe(batch, jobDefinitionName=batch.multinode_definition("true"))
    assert shown["type"] == "multinode"
    assert shown["nodeProperties"]["numNodes"] == 2
    assert shown["nodeProperties"]["nodeRangeProperties"][0]["container"]["image"] == "stand-in"


def test_definitions_come_page_by_page(batch: Batch) -> None:
    name = batch.definition("true")
    for _ in range(2):
        batch.client.register_job_definition(
            jobDefinitionName=name, type="container", containerProperties=container("true")
        )
    pages = batch.client.get_paginator("describe_job_definitions").paginate(
        jobDefinitionName=name, PaginationConfig={"PageSize": 2}
    )
    assert [[one["revision"] for one in page["jobDefinitions"]] for page in pages] == [[3, 2], [1]]
