from typing import Any

import pytest

from infra.emulator.cloudformation import storage_types
from infra.emulator.cloudformation.resources import replacing_properties

ENVIRONMENT = "AWS::Batch::ComputeEnvironment"
SPOT = {"Type": "SPOT", "MaxvCpus": 8, "InstanceTypes": ["dl1.24xlarge"]}


@pytest.mark.parametrize(
    ("kind", "old", "new", "replaced"),
    [
        ("AWS::SSM::Parameter", {"Value": "1"}, {"Value": "2"}, []),
        ("AWS::SSM::Parameter", {"Name": "a", "Value": "1"}, {"Name": "b", "Value": "2"}, ["Name"]),
        ("AWS::Budgets::Budget", {"Budget": {"BudgetName": "a"}}, {"Budget": {"BudgetName": "b"}}, ["Budget"]),
        ("AWS::Budgets::Budget", {"Budget": {"TimeUnit": "DAILY"}}, {"Budget": {"TimeUnit": "MONTHLY"}}, []),
        (ENVIRONMENT, {"ComputeResources": SPOT}, {"ComputeResources": {**SPOT, "MaxvCpus": 16}}, []),
        (ENVIRONMENT, {"ComputeResources": SPOT}, {"ComputeResources": {**SPOT, "Type": "EC2"}}, ["ComputeResources"]),
        (
            ENVIRONMENT,
            {"ComputeResources": SPOT},
            {"ComputeResources": {**SPOT, "Type": "EC2"}, "ReplaceComputeEnvironment": "false"},
            [],
        ),
        ("Custom::Anything", {"Name": "a"}, {"Name": "b"}, []),
    ],
)
def test_properties_that_replace_a_resource(
    kind: str, old: dict[str, Any], new: dict[str, Any], replaced: list[str]
) -> None:
    assert replacing_properties(kind, old, new) == replaced


def test_parameters_may_change_while_they_are_listed() -> None:
    parameters = dict.fromkeys(("/a/1", "/a/2", "/a/3"))
    names = storage_types._parameter_names(parameters)
    assert next(names) == "/a/1"
    del parameters["/a/2"]
    parameters["/a/4"] = None
    assert list(names) == ["/a/3"]
