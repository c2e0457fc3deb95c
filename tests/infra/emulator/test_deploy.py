"""The real CDK CLI on the emulator: deploy, preview with `cdk diff`, change and destroy stages and a small app."""

import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs

import pytest
import yaml

from infra.access.permissions_boundary import DIFF_ACTIONS
from infra.access.stack import AUDIENCE, ISSUER
from infra.emulator import ACCOUNT_ID, REGION
from infra.emulator.cloudformation.resource_type import RECORDED, TYPES
from infra.emulator.credentials import Credentials
from infra.emulator.deploy import ROOT, cdk_environment
from infra.settings import STAGES
from infra.stages import Alerts
from jobs.core.stage import parameter_path
from tests.support.emulator.batch_calls import until
from tests.support.infra.deployed_roles import DeployedStage, Role
from tests.support.infra.synthesis import read_assembly, synthesise_for_cli
from tests.support.infra.variants import ALL
from tests.support.jobs.proxies import DENIED, Proxy
from tests.support.running_emulator import Emulator

pytestmark = pytest.mark.timeout(600)  # the first test waits for the deployment

DEPLOY = [sys.executable, "-m", "infra.emulator", "deploy"]


def parameters(aws: Emulator) -> dict[str, str]:
    path = parameter_path("dev")
    pages = aws.client("ssm").get_paginator("get_parameters_by_path").paginate(Path=path, Recursive=True)
    return {item["Name"].removeprefix(path): item["Value"] for page in pages for item in page["Parameters"]}


def test_second_deployment_bootstraps_and_changes_nothing(deployed_aws: Emulator, tmp_path: Path) -> None:
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
    assert re.search(r"\[(\d+)/\1\]", result.stderr)  # the last stack
    assert parameters(deployed_aws) == before
    assert list(tmp_path.iterdir()) == []  # the user's home is not touched


def test_interrupted_deployment_leaves_no_folders(deployed_aws: Emulator, tmp_path: Path) -> None:
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
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 130, log.read_text()
        finally:
            process.kill()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--stage", "pord"], 2, "infra/settings.py has no stage 'pord'; did you mean 'prod'?"),
        (["--stage", "dev"], 3, "no emulator answers at http://localhost:9"),
    ],
)
def test_impossible_deployment_is_an_error_with_a_next_step(arguments: list[str], code: int, message: str) -> None:
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


NODES = STAGES["dev"].max_nodes + 2


def shown(output: str) -> list[str]:
    """Return the lines that show a difference, without the characters of the tree."""
    bare = [line.strip(" │└├─") for line in output.splitlines()]
    return [line for line in bare if line.startswith(("[~]", "[+]", "[-]"))]


def test_diff_shows_only_the_changed_limit(deployed_aws: Emulator, tmp_path: Path) -> None:
    app = synthesise_for_cli(replace(STAGES["dev"], max_nodes=NODES), tmp_path / "assembly")
    arguments = ("--app", app, "--output", str(tmp_path / "cdk.out"))
    code, output = deployed_aws.cdk("diff", "dev/*", "--fail", *arguments, scratch=tmp_path, cwd=ROOT)

    vcpus = STAGES["dev"].row.vcpus
    assert code == 1, output
    assert "Number of stacks with differences: 1" in output
    assert "Could not create a change set" not in output
    lines = shown(output)
    environments = [line for line in lines if line.startswith("[~] AWS::Batch::ComputeEnvironment compute/")]
    assert len(environments) == len(STAGES["dev"].teams)
    assert not any("replace" in line for line in environments)
    assert [line for line in lines if line not in environments] == len(environments) * [
        "[~] ComputeResources",
        "[~] .MaxvCpus:",
        f"[-] {STAGES['dev'].max_nodes * vcpus}",
        f"[+] {NODES * vcpus}",
    ]


def test_full_stage_is_deployed_changed_and_destroyed(deployed_aws: Emulator, tmp_path: Path) -> None:
    def cdk(*arguments: str, **changes: object) -> None:
        row = replace(ALL, termination_protection=False, **changes)  # type: ignore[arg-type]  # of any field
        app = synthesise_for_cli(row, tmp_path / f"assembly-{arguments[0]}-{len(changes)}")
        code, output = deployed_aws.cdk(*arguments, "all/*", "--app", app, scratch=tmp_path)
        assert code == 0, output

    def resources() -> dict[str, set[str]]:
        """Return physical ids by type in all stacks: of the stage, of `dev`, and of the CDK's bootstrap."""
        client, found = deployed_aws.client("cloudformation"), dict[str, set[str]]()
        for stack in client.get_paginator("describe_stacks").paginate().build_full_result()["Stacks"]:
            for one in client.describe_stack_resources(StackName=stack["StackName"])["StackResources"]:
                found.setdefault(one["ResourceType"], set()).add(one["PhysicalResourceId"])
        return found

    before = resources()
    deploy = ("deploy", "--method=direct", "--require-approval=never")
    cdk(*deploy)
    made = resources()
    # The emulator supports no type that no stack has.
    assert TYPES.keys() | RECORDED == {
        "AWS::CDK::Metadata",
        *(name for name in made if not name.startswith("Custom::")),
    }
    check_ci(deployed_aws, app=str(tmp_path / "assembly-deploy-0"), scratch=tmp_path)
    # No change of NAT gateways: the emulator cannot change routes in place.
    changes = {"deploy_from": None, "alerts": Alerts(emails=("sre@example.com",)), "spot_wait_hours": 2}
    cdk(*deploy, **changes)
    changed = resources()
    for name in ("AWS::Batch::ComputeEnvironment", "AWS::EC2::Subnet", "AWS::KMS::Key", "AWS::S3::Bucket"):
        assert changed[name] == made[name]
    assert "AWS::IAM::OIDCProvider" not in changed
    assert not [name for name in changed["AWS::IAM::Role"] if name.startswith("trainyard-all-access-D")]
    assert changed["AWS::SNS::Subscription"] != made["AWS::SNS::Subscription"]
    cdk("destroy", "--force", **changes)
    assert resources() == before
    assert deployed_aws.health()["server_errors"] == []


class RoleProxy(Proxy):
    """Denies the session of a role, which the emulator would admit everywhere, what IAM would deny."""

    def __init__(self, aws: Emulator, role: Role, arn: str) -> None:
        session = aws.client("sts").assume_role(RoleArn=arn, RoleSessionName="GitHubActions")["Credentials"]
        self._credentials = Credentials(session["AccessKeyId"], session["SecretAccessKey"])
        self._role = role
        self.decided: set[tuple[str, str]] = set()
        """Requested actions, and IAM's decisions."""
        super().__init__(aws.endpoint)
        self.aws = replace(aws, endpoint=self.url, credentials=self._credentials)

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        signed = request.headers.get("Authorization", "")
        if f"={self._credentials.access_key_id}/" in signed and b"GetCallerIdentity" not in body:  # IAM never denies it
            action, arn = self._request(body, service=signed.split("/")[3])
            decision = self._role.decide_in(action, arn, {})
            self.decided.add((action, decision))
            if decision != "allowed":
                self._answer(request, 403, {}, DENIED)
                return
        self._answer(request, *self._pass_on(*self.message(request, body)))

    @staticmethod
    def _request(body: bytes, *, service: str) -> tuple[str, str]:
        """Return the action and the resource of a request to STS or CloudFormation."""
        form = {key: value for key, [value] in parse_qs(body.decode()).items()}
        stack = f"arn:aws:cloudformation:{REGION}:{ACCOUNT_ID}:stack/{form.get('StackName')}/id"
        return f"{service}:{form['Action']}", form.get("RoleArn", stack)


def check_ci(aws: Emulator, *, app: str, scratch: Path) -> None:
    """Check the roles of CI in IAM, and run the workflow's commands with the rights that they have."""
    source, iam = ALL.deploy_from, aws.client("iam")
    assert source is not None
    [provider] = [each["Arn"] for each in iam.list_open_id_connect_providers()["OpenIDConnectProviderList"]]
    assert iam.get_open_id_connect_provider(OpenIDConnectProviderArn=provider)["ClientIDList"] == [AUDIENCE]
    jobs = yaml.safe_load((ROOT / ".github/workflows/deploy.yml").read_text())["jobs"]
    templates = {path.split("/")[1]: template for path, template in read_assembly(Path(app)).items()}
    synthesised = DeployedStage("all", templates)

    def run(job: str, subject: str) -> set[tuple[str, str]]:
        """Run the first CDK command of a job, and return what its role requested."""
        arn = aws.client("ssm").get_parameter(Name=parameter_path("all") + f"{job}-role")["Parameter"]["Value"]
        name, role = arn.rpartition("/")[2], synthesised.role("access", job.title())
        [statement] = iam.get_role(RoleName=name)["Role"]["AssumeRolePolicyDocument"]["Statement"]
        assert statement == {
            "Action": "sts:AssumeRoleWithWebIdentity",
            "Condition": {"StringEquals": {f"{ISSUER}:aud": AUDIENCE, f"{ISSUER}:sub": subject}},
            "Effect": "Allow",
            "Principal": {"Federated": provider},
        }
        policies = iam.list_role_policies(RoleName=name)["PolicyNames"]
        kept = [iam.get_role_policy(RoleName=name, PolicyName=each)["PolicyDocument"] for each in policies]
        assert [each for each in kept if each not in role.identity] == []
        assert len(kept) == len(role.identity)
        command = next(step["run"] for step in jobs[job]["steps"] if step.get("run", "").startswith("cdk "))
        arguments = shlex.split(command.partition(" 2>&1")[0].replace("$STAGE", "all"))[1:]
        with RoleProxy(aws, role, arn) as proxy:
            code, output = proxy.aws.cdk(*arguments, "--app", app, scratch=scratch)
        assert code == 0, output
        assert "Number of stacks with differences: 0" in output or 0 < output.count("✅") == output.count(
            "(no changes)"
        )
        return proxy.decided

    # The diff role reads all templates although IAM denies it the lookup role of the bootstrap.
    denied = ("sts:AssumeRole", "implicitly denied")
    assert run("diff", source.pull_request_subject) == {denied, *((action, "allowed") for action in DIFF_ACTIONS)}
    assert run("deploy", source.subject) == {("sts:AssumeRole", "allowed")}


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
    """A folder with three synthesised versions of one app: first, second, broken."""
    folder = tmp_path_factory.mktemp("assemblies")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", APP, str(folder)],
        env={**os.environ, **cdk_environment("http://localhost:9", Credentials.random(), scratch=folder)},
        timeout=120,
        check=True,
    )
    return folder


def test_small_app_deploys_changes_fails_and_is_destroyed(
    fresh_aws: Emulator, tmp_path: Path, assemblies: Path
) -> None:
    ssm = fresh_aws.client("ssm")

    def cdk(*arguments: str, value: str) -> tuple[int, str]:
        return fresh_aws.cdk(*arguments, "--all", "--app", str(assemblies / value), scratch=tmp_path)

    def values() -> dict[str, str]:
        found = ssm.get_parameters(Names=["/cli/producer", "/cli/consumer"])["Parameters"]
        return {item["Name"]: item["Value"].split()[0] for item in found}

    # With change sets, the CLI's default; this project deploys with --method=direct.
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


def test_cli_environment_excludes_the_users_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
