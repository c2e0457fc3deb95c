"""Stages for the tests of plans, and functions that read a plan."""

from dataclasses import replace
from typing import Any

from jobs.core.instance_types import instance_type
from jobs.core.stage import DeployedStage
from jobs.spec.catalog import CATALOG
from jobs.spec.plan import Plan
from jobs.spec.spec import JobSpec, parse_spec

RUN_ID = "reviews-20261121-120005-00ab"

STAGE = DeployedStage(
    name="dev",
    data_bucket="data-bucket",
    run_bucket="run-bucket",
    log_group="logs",
    instance_types=(instance_type("dl1.24xlarge"),),
    cpu_instance_type=instance_type("m6i.4xlarge"),
    queues={"spot": "arn:queue/gaudi", "cpu-spot": "arn:queue/cpu"},
    job_definitions={
        **{("research", kind): f"arn:definition/{kind}:1" for kind in CATALOG},
        ("research", "finetune-classification"): "arn:definition/research:3",
        ("nlp-core", "finetune-classification"): "arn:definition/nlp:1",
    },
)
EMULATED = replace(STAGE, emulated_processes=2)
LARGE = replace(
    STAGE,
    queues={**STAGE.queues, "on-demand": "arn:queue/on-demand", "multinode": "arn:queue/multinode"},
    multinode_job_definitions={
        **{("research", kind): f"arn:definition/{kind}-several:1" for kind in CATALOG},
        ("research", "finetune-classification"): "arn:definition/several:7",
    },
)
"""A stage with On-Demand instances and multi-node jobs."""
LADDER = replace(
    LARGE,
    instance_types=tuple(map(instance_type, ("g6e.xlarge", "g5.xlarge", "g5.4xlarge"))),
    queues={**LARGE.queues, "spot-g6e.xlarge": "arn:queue/l40s", "spot-g5.xlarge": "arn:queue/a10g"},
)
"""A stage whose pool has two cards, one of them in two sizes."""


ARGUMENTS = {"model": "data://shared/m", "train_data": "data://shared/t.jsonl"}


def spec(**changed: Any) -> JobSpec:
    return parse_spec(
        {
            "name": "reviews",
            "job": "finetune-classification",
            "arguments": ARGUMENTS,
            **changed,
        },
        origin="a.yaml",
    )


def command_of(planned: Plan) -> list[str]:
    (container,) = planned.request["ecsPropertiesOverride"]["taskProperties"][0]["containers"]
    command = container["command"]
    assert isinstance(command, list)
    return command


def environment_of(planned: Plan) -> dict[str, str]:
    (container,) = planned.request["ecsPropertiesOverride"]["taskProperties"][0]["containers"]
    return {item["name"]: item["value"] for item in container["environment"]}
