"""The project's own stage, deployed by the real CDK CLI, seen through the AWS API."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.contract.queues import CPU_SPOT, SPOT
from jobs.contract.stage import (
    CPU_INSTANCE_TYPE,
    DATA_BUCKET,
    INSTANCE_TYPE,
    RUN_BUCKET,
    parameter_path,
    queue_parameter,
)
from tests.support.embedded_aws import EmbeddedAws
from tests.support.emulator.batch_calls import until

DEPLOY = [sys.executable, "-m", "infra.emulator", "deploy"]


def parameters(aws: Any) -> dict[str, str]:
    path = parameter_path("dev")
    pages = aws.client("ssm").get_paginator("get_parameters_by_path").paginate(Path=path, Recursive=True)
    return {item["Name"].removeprefix(path): item["Value"] for page in pages for item in page["Parameters"]}


def resource_types(aws: Any) -> set[str]:
    cloudformation = aws.client("cloudformation")
    stacks = cloudformation.get_paginator("describe_stacks").paginate().build_full_result()["Stacks"]
    return {
        resource["ResourceType"]
        for stack in stacks
        if stack["StackName"].startswith("trainyard-dev-")
        for resource in cloudformation.describe_stack_resources(StackName=stack["StackName"])["StackResources"]
    }


def test_queues_lead_to_compute_environments_with_launch_templates(deployed_aws: Any) -> None:
    batch, values = deployed_aws.client("batch"), parameters(deployed_aws)
    for name, instance_type in ((SPOT, values[INSTANCE_TYPE]), (CPU_SPOT, values[CPU_INSTANCE_TYPE])):
        (queue,) = batch.describe_job_queues(jobQueues=[values[queue_parameter(name, team="research")]])["jobQueues"]
        assert (queue["state"], queue["status"]) == ("ENABLED", "VALID")
        order = [item["computeEnvironment"] for item in queue["computeEnvironmentOrder"]]
        environments = batch.describe_compute_environments(computeEnvironments=order)["computeEnvironments"]
        assert len(environments) == len(order) >= 1
        resources = environments[0]["computeResources"]
        assert resources["type"] == "SPOT"
        assert resources["instanceTypes"] == [instance_type]
        template = resources["launchTemplate"]["launchTemplateId"]
        (found,) = deployed_aws.client("ec2").describe_launch_templates(LaunchTemplateIds=[template])["LaunchTemplates"]
        assert found["LaunchTemplateId"] == template


def test_buckets_are_versioned_private_and_speak_tls_only(deployed_aws: Any) -> None:
    s3, values = deployed_aws.client("s3"), parameters(deployed_aws)
    for bucket in (values[DATA_BUCKET], values[RUN_BUCKET]):
        assert s3.get_bucket_versioning(Bucket=bucket)["Status"] == "Enabled"
        assert set(s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"].values()) == {True}
        assert "aws:SecureTransport" in s3.get_bucket_policy(Bucket=bucket)["Policy"]


def test_nothing_failed_and_little_is_unproven(deployed_aws: Any) -> None:
    health = deployed_aws.health()

    assert health["server_errors"] == []
    # Of this stage: other tests deploy stacks to the same server. Nothing builds AMIs here, and the CDK's own functions
    # are not run.
    unproven = set(health["unproven"]) & resource_types(deployed_aws)
    assert not [name for name in unproven if not name.startswith(("AWS::ImageBuilder::", "Custom::"))]


def test_a_second_deployment_bootstraps_and_changes_nothing(deployed_aws: Any, tmp_path: Path) -> None:
    before = parameters(deployed_aws)
    result = subprocess.run(
        [*DEPLOY, "--endpoint", deployed_aws.endpoint],
        env={**deployed_aws.environment, "HOME": str(tmp_path), "AWS_PROFILE": "of-the-user"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert "bootstrapping" not in result.stderr
    assert re.search(r"\[(\d+)/\1\]", result.stderr)  # the last of all stacks
    assert parameters(deployed_aws) == before
    assert list(tmp_path.iterdir()) == []  # the home of the user is left alone


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_deployment_leaves_no_folders_behind(
    deployed_aws: EmbeddedAws, tmp_path: Path, number: signal.Signals
) -> None:
    temporary, log = tmp_path / "tmp", tmp_path / "log"
    temporary.mkdir()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*DEPLOY, "--endpoint", deployed_aws.endpoint],
            env={**deployed_aws.environment, "TMPDIR": str(temporary)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            until(lambda: [*temporary.rglob("jsii*"), *temporary.rglob("tmp?*")] or None, "the app runs")
            process.send_signal(number)
            assert process.wait(60) == 130, log.read_text()
        finally:
            process.kill()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--stage", "pord"], 2, "infra/settings.py has no stage 'pord'; did you mean 'prod'?"),
        (["--stage", "dev"], 3, "no embedded AWS answers at http://localhost:9"),
    ],
)
def test_what_cannot_be_deployed_is_an_error_with_a_way_out(arguments: list[str], code: int, message: str) -> None:
    result = subprocess.run(
        [*DEPLOY, "--endpoint", "http://localhost:9", *arguments],  # 9: the discard port, where nothing listens
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert result.returncode == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
