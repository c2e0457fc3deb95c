"""Stage `prod`, which has every queue: deployed by the real CDK CLI, and jobs of several nodes run in it."""

import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from infra.settings import STAGES
from jobs.contract.plan import plan
from jobs.contract.queues import QUEUES, team_queue_name
from jobs.contract.spec import parse_spec
from jobs.contract.stage import DeployedStage, parameter_path
from tests.support.embedded_aws import DEPLOY_SECONDS, EmbeddedAws, run_embedded_aws
from tests.support.waiting import wait_until

RUN_ID = "probe-20261121-120005-00ab"


@pytest.fixture(scope="module")
def prod_aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedAws]:
    with run_embedded_aws(tmp_path_factory.mktemp("prod")) as aws:
        deployment = subprocess.run(
            [sys.executable, "-m", "infra.emulator", "deploy", "--endpoint", aws.endpoint, "--stage", "prod"],
            env=dict(aws.environment),
            capture_output=True,
            text=True,
            timeout=DEPLOY_SECONDS,
            check=False,
        )
        assert deployment.returncode == 0, deployment.stderr
        yield aws
        assert aws.health()["server_errors"] == []


@pytest.fixture(scope="module")
def stage(prod_aws: EmbeddedAws) -> DeployedStage:
    path = parameter_path("prod")
    pages = prod_aws.client("ssm").get_paginator("get_parameters_by_path").paginate(Path=path, Recursive=True)
    values = {item["Name"].removeprefix(path): item["Value"] for page in pages for item in page["Parameters"]}
    return DeployedStage.from_parameters("prod", values, embedded_processes=2, runs_containers=False)


def test_every_row_of_the_queues_is_there_and_leads_to_its_capacity(
    prod_aws: EmbeddedAws, stage: DeployedStage
) -> None:
    batch = prod_aws.client("batch")
    teams = [team.name for team in STAGES["prod"].teams]
    assert set(stage.queues) == {team_queue_name(name, team) for name in QUEUES for team in teams}
    for name, team in product(QUEUES, teams):
        row = QUEUES[name]
        (queue,) = batch.describe_job_queues(jobQueues=[stage.queue(team_queue_name(name, team))])["jobQueues"]
        assert (queue["state"], queue["status"]) == ("ENABLED", "VALID")
        assert queue["schedulingPolicyArn"]
        order = [
            item["computeEnvironment"]
            for item in sorted(queue["computeEnvironmentOrder"], key=lambda item: item["order"])
        ]
        found = {
            item["computeEnvironmentArn"]: item["computeResources"]
            for item in batch.describe_compute_environments(computeEnvironments=order)["computeEnvironments"]
        }
        types = [found[arn]["type"] for arn in order]
        assert types == [{"spot": "SPOT", "on-demand": "EC2"}[capacity] for capacity in row.capacities]
        placed = "placementGroup" in found[order[0]]
        assert placed == row.several_nodes


def test_the_on_demand_queues_share_one_limit(prod_aws: EmbeddedAws, stage: DeployedStage) -> None:
    batch = prod_aws.client("batch")
    environments = []
    for name in ("spot", "on-demand"):
        (queue,) = batch.describe_job_queues(jobQueues=[stage.queue(team_queue_name(name, "research"))])["jobQueues"]
        environments.append(queue["computeEnvironmentOrder"][-1]["computeEnvironment"])
    assert len(set(environments)) == 1
    (shared,) = batch.describe_compute_environments(computeEnvironments=environments[:1])["computeEnvironments"]
    assert shared["computeResources"]["maxvCpus"] == STAGES["prod"].max_on_demand_nodes * 96


@pytest.mark.parametrize(
    ("resources", "nodes"),
    [({"nnodes": 2}, 2), ({"nnodes": 4}, 4), ({"nnodes": 4, "capacity": "spot"}, 4), ({"capacity": "on-demand"}, 1)],
    ids=str,
)
def test_what_is_planned_for_it_runs(
    prod_aws: EmbeddedAws, stage: DeployedStage, resources: dict[str, Any], nodes: int, tmp_path: Path
) -> None:
    # The main node's end is the job's, so each waits for all.
    script = (
        f'cd "{tmp_path}"; touch "${{AWS_BATCH_JOB_NODE_INDEX:-${{AWS_BATCH_JOB_ARRAY_INDEX:-0}}}}"; '
        f"until [ $(ls | wc -l) = {nodes} ]; do sleep 0.05; done"
    )
    request = planned_to_run(stage, resources, ["sh", "-c", script])
    batch = prod_aws.client("batch")
    job_id = batch.submit_job(**request)["jobId"]
    job = wait_until(
        lambda: batch.describe_jobs(jobs=[job_id])["jobs"][0], lambda job: job["status"] in {"SUCCEEDED", "FAILED"}
    )
    assert job["status"] == "SUCCEEDED", job.get("statusReason")
    # Each node of the job ran the command that was put in through its overrides.
    assert {path.name for path in tmp_path.iterdir()} == {str(index) for index in range(nodes)}


def planned_to_run(stage: DeployedStage, resources: dict[str, Any], command: list[str]) -> dict[str, Any]:
    """The request that the command line would send, with `command` in the container."""
    spec = {
        "name": "probe",
        "job": "finetune-classification",
        "resources": resources,
        "arguments": {"model": "data://shared/m", "train_data": "data://shared/t.jsonl"},
    }
    request = plan(parse_spec(spec, origin="the test"), stage, run_id=RUN_ID).request
    overrides = request.get("nodeOverrides", {}).get("nodePropertyOverrides", [request])[0]["ecsPropertiesOverride"]
    overrides["taskProperties"][0]["containers"][0]["command"] = command
    return request
