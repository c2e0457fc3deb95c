"""The real CDK CLI with an app of its own: change sets, imports between stacks, failures, destruction."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.emulator.credentials import Credentials
from infra.emulator.deploy import cdk_environment
from tests.support.running_emulator import Emulator

APP = """
import sys

import aws_cdk as cdk
from aws_cdk import aws_batch as batch, aws_ec2 as ec2, aws_ssm as ssm

for value in ("first", "second", "broken"):
    app = cdk.App(outdir=f"{sys.argv[1]}/{value}")
    producer = cdk.Stack(app, "Producer", synthesizer=cdk.BootstraplessSynthesizer())
    vpc = ec2.Vpc(producer, "Vpc", max_azs=2, nat_gateways=1)
    ssm.CfnParameter(producer, "Parameter", type="String", name="/cli/producer", value=value)
    consumer = cdk.Stack(app, "Consumer", synthesizer=cdk.BootstraplessSynthesizer())
    ssm.CfnParameter(consumer, "Parameter", type="String", name="/cli/consumer", value=f"{value} {vpc.vpc_id}")
    if value == "broken":
        order = batch.CfnJobQueue.ComputeEnvironmentOrderProperty(order=1, compute_environment="arn:aws:batch:none")
        batch.CfnJobQueue(producer, "Queue", priority=1, compute_environment_order=[order])
    app.synth()
"""


@pytest.fixture(scope="module")
def assemblies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three versions of one app, synthesised: first, second, broken."""
    folder = tmp_path_factory.mktemp("assemblies")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", APP, str(folder)],
        env={**os.environ, **cdk_environment("http://localhost:9", Credentials.random(), scratch=folder)},
        timeout=120,
        check=True,
    )
    return folder


def test_deploys_changes_fails_and_destroys(fresh_aws: Emulator, tmp_path: Path, assemblies: Path) -> None:
    ssm = fresh_aws.client("ssm")

    def cdk(*arguments: str, value: str) -> tuple[int, str]:
        return fresh_aws.cdk(*arguments, "--all", "--app", str(assemblies / value), scratch=tmp_path)

    def values() -> dict[str, str]:
        found = ssm.get_parameters(Names=["/cli/producer", "/cli/consumer"])["Parameters"]
        return {item["Name"]: item["Value"].split()[0] for item in found}

    # By change sets, as the CLI does unless it is told otherwise; deployments of this project are direct.
    deploy = ("deploy", "--require-approval", "never", "--method=change-set")
    for value in ("first", "second"):
        code, output = cdk(*deploy, value=value)
        assert code == 0, output
        assert values() == {"/cli/producer": value, "/cli/consumer": value}

    code, output = cdk(*deploy, value="broken")
    assert code == 1
    assert "arn:aws:batch:none" in output
    assert values() == {"/cli/producer": "second", "/cli/consumer": "second"}

    code, output = cdk("destroy", "--force", value="second")
    assert code == 0, output
    assert fresh_aws.client("cloudformation").describe_stacks()["Stacks"] == []
    assert fresh_aws.client("ec2").describe_vpcs(Filters=[{"Name": "isDefault", "Values": ["false"]}])["Vpcs"] == []
    assert values() == {}
    assert fresh_aws.health()["server_errors"] == []


def test_environment_holds_nothing_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "CDK_CONTEXT_JSON"):
        monkeypatch.setenv(name, "of-the-user")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example")

    credentials = Credentials.random()
    environment = cdk_environment("http://localhost:1", credentials, scratch=tmp_path)

    assert "of-the-user" not in environment.values()
    assert environment["AWS_ENDPOINT_URL"] == "http://localhost:1"
    assert environment["AWS_ACCESS_KEY_ID"] == credentials.access_key_id
    assert environment["HOME"] == str(tmp_path)
    assert "localhost" in environment["NO_PROXY"]
