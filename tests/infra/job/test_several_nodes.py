"""Job definitions for several nodes that start together."""

from collections.abc import Callable
from typing import Any

import pytest

from infra.stages import Team
from jobs.contract.stage import job_definition_parameter
from jobs.contract.submit_job import CONTAINER_NAME
from tests.support.infra.job_definitions import logical_ids_with_several_nodes
from tests.support.infra.synthesis import resources


@pytest.fixture
def several(synthesised: Any) -> Callable[..., dict[str, Any]]:
    """The definition for several nodes of a stage with given settings."""

    def made(**settings: Any) -> dict[str, Any]:
        jobs = synthesised(max_multinode_nodes=4, **settings)["jobs"]
        found = resources(jobs, "AWS::Batch::JobDefinition")
        assert set(found) == logical_ids_with_several_nodes()
        return found["Jobresearchfinetuneclassificationmultinode"]

    return made


def test_several_nodes_are_one_open_range_with_the_first_as_main(several: Callable[..., dict[str, Any]]) -> None:
    # Trap: with a range that ends (CDK renders `0:1`), a submission could not name another number of nodes.
    definition = several()
    assert definition["Type"] == "multinode"
    nodes = definition["NodeProperties"]
    (of_nodes,) = nodes["NodeRangeProperties"]
    assert (nodes["NumNodes"], nodes["MainNode"], of_nodes["TargetNodes"]) == (2, 0, "0:")
    # One type of instance is in the queue's environment; a range that named another would never be placed.
    assert set(of_nodes) == {"TargetNodes", "EcsProperties"}
    assert not {"EcsProperties", "ContainerProperties"} & definition.keys()


def test_several_nodes_get_efas_devices_and_memory_that_may_be_pinned(several: Callable[..., dict[str, Any]]) -> None:
    # Trap: the accelerator's container runtime does not hand on EFA's devices.
    container = _container_of_nodes(several())
    assert container["LinuxParameters"]["Devices"] == [
        {
            "HostPath": f"/dev/infiniband/uverbs{index}",
            "ContainerPath": f"/dev/infiniband/uverbs{index}",
            "Permissions": ["READ", "WRITE", "MKNOD"],
        }
        for index in range(4)
    ]
    assert container["Ulimits"] == [{"Name": "memlock", "SoftLimit": -1, "HardLimit": -1}]
    assert "Privileged" not in container


@pytest.mark.parametrize(
    ("instance_type", "devices", "gpus"),
    [("dl1.24xlarge", 4, None), ("p4d.24xlarge", 4, "8"), ("g5.4xlarge", 0, "1"), ("g5.48xlarge", 1, "8")],
)
def test_several_nodes_follow_from_the_instance_types_row(
    several: Callable[..., dict[str, Any]], instance_type: str, devices: int, gpus: str | None
) -> None:
    settings = {} if instance_type == "dl1.24xlarge" else {"machine_image": None}
    container = _container_of_nodes(several(instance_type=instance_type, **settings))
    assert len(container["LinuxParameters"].get("Devices", [])) == devices
    asked = {item["Type"]: item["Value"] for item in container["ResourceRequirements"]}
    assert asked.get("GPU") == gpus


def test_several_nodes_share_all_else_with_one_node(synthesised: Any) -> None:
    jobs = synthesised(max_multinode_nodes=4, fsx_gib=1_200, teams=(Team(name="research", huggingface_token=True),))[
        "jobs"
    ]
    definitions = resources(jobs, "AWS::Batch::JobDefinition")
    one = definitions["Jobresearchfinetuneclassification"]
    several = definitions["Jobresearchfinetuneclassificationmultinode"]
    own = {"Type", "EcsProperties", "NodeProperties"}
    assert {name: several[name] for name in several.keys() - own} == {name: one[name] for name in one.keys() - own}
    (task,), (of_nodes,) = one["EcsProperties"]["TaskProperties"], several["NodeProperties"]["NodeRangeProperties"]
    (node_task,) = of_nodes["EcsProperties"]["TaskProperties"]
    node_task["Containers"][0]["LinuxParameters"].pop("Devices")
    assert node_task == task
    assert several["ResourceRetentionPolicy"] == {"SkipDeregisterOnUpdate": True}


def test_several_nodes_are_published_where_the_stage_has_capacity_for_them(synthesised: Any, several: Any) -> None:
    def published(jobs: dict[str, Any]) -> dict[str, Any]:
        return {item["Name"]: item["Value"] for item in resources(jobs, "AWS::SSM::Parameter").values()}

    name = f"/trainyard/test/{job_definition_parameter('research', 'finetune-classification', several_nodes=True)}"
    assert name not in published(synthesised()["jobs"])
    found = published(synthesised(max_multinode_nodes=2)["jobs"])
    assert found[name] == {"Ref": "Jobresearchfinetuneclassificationmultinode"}


def _container_of_nodes(definition: dict[str, Any]) -> dict[str, Any]:
    (of_nodes,) = definition["NodeProperties"]["NodeRangeProperties"]
    (task,) = of_nodes["EcsProperties"]["TaskProperties"]
    assert task["IpcMode"] == "host"
    (container,) = task["Containers"]
    assert isinstance(container, dict)
    assert container["Name"] == CONTAINER_NAME
    return container
