"""The stages of this project by the real CDK CLI: deployed, previewed by `cdk diff`, changed, destroyed."""

import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from infra.emulator.cloudformation.resource_type import RECORDED, TYPES
from infra.emulator.deploy import ROOT
from infra.settings import STAGES
from infra.stages import Alerts
from jobs.core.stage import parameter_path
from tests.support.emulator.batch_calls import until
from tests.support.infra.synthesis import synthesise_as_the_cli_does
from tests.support.infra.variants import ALL
from tests.support.running_emulator import Emulator

pytestmark = pytest.mark.timeout(600)  # the first waits for the stage to be deployed

DEPLOY = [sys.executable, "-m", "infra.emulator", "deploy"]


def parameters(aws: Emulator) -> dict[str, str]:
    path = parameter_path("dev")
    pages = aws.client("ssm").get_paginator("get_parameters_by_path").paginate(Path=path, Recursive=True)
    return {item["Name"].removeprefix(path): item["Value"] for page in pages for item in page["Parameters"]}


def test_a_second_deployment_bootstraps_and_changes_nothing(deployed_aws: Emulator, tmp_path: Path) -> None:
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


def test_an_interrupted_deployment_leaves_no_folders_behind(deployed_aws: Emulator, tmp_path: Path) -> None:
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


NODES = STAGES["dev"].max_nodes + 2


def shown(said: str) -> list[str]:
    """The lines that tell of a difference, without the tree they hang on."""
    bare = [line.strip(" │└├─") for line in said.splitlines()]
    return [line for line in bare if line.startswith(("[~]", "[+]", "[-]"))]


def test_one_changed_limit_is_all_that_is_shown(deployed_aws: Emulator, tmp_path: Path) -> None:
    app = synthesise_as_the_cli_does(replace(STAGES["dev"], max_nodes=NODES), tmp_path / "assembly")
    arguments = ("--app", app, "--output", str(tmp_path / "cdk.out"))
    code, said = deployed_aws.cdk("diff", "dev/*", "--fail", *arguments, scratch=tmp_path, cwd=ROOT)

    vcpus = STAGES["dev"].row.vcpus
    assert code == 1, said
    assert "Number of stacks with differences: 1" in said
    assert "Could not create a change set" not in said
    lines = shown(said)
    environments = [line for line in lines if line.startswith("[~] AWS::Batch::ComputeEnvironment compute/")]
    assert len(environments) == len(STAGES["dev"].teams)
    assert not any("replace" in line for line in environments)
    assert [line for line in lines if line not in environments] == len(environments) * [
        "[~] ComputeResources",
        "[~] .MaxvCpus:",
        f"[-] {STAGES['dev'].max_nodes * vcpus}",
        f"[+] {NODES * vcpus}",
    ]


def test_a_stage_with_everything_is_deployed_changed_and_destroyed(deployed_aws: Emulator, tmp_path: Path) -> None:
    def cdk(*arguments: str, **changes: object) -> None:
        row = replace(ALL, termination_protection=False, **changes)  # type: ignore[arg-type]  # of any field
        app = synthesise_as_the_cli_does(row, tmp_path / f"assembly-{arguments[0]}-{len(changes)}")
        code, said = deployed_aws.cdk(*arguments, "all/*", "--app", app, scratch=tmp_path)
        assert code == 0, said

    def resources() -> dict[str, set[str]]:
        """Return physical ids by type, of all stacks: of the stage, of `dev` beside it, and of the CDK's bootstrap."""
        client, found = deployed_aws.client("cloudformation"), dict[str, set[str]]()
        for stack in client.get_paginator("describe_stacks").paginate().build_full_result()["Stacks"]:
            for one in client.describe_stack_resources(StackName=stack["StackName"])["StackResources"]:
                found.setdefault(one["ResourceType"], set()).add(one["PhysicalResourceId"])
        return found

    before = resources()
    deploy = ("deploy", "--method=direct", "--require-approval=never")
    cdk(*deploy)
    made = resources()
    # Nothing is known that no stack has.
    assert TYPES.keys() | RECORDED == {
        "AWS::CDK::Metadata",
        *(name for name in made if not name.startswith("Custom::")),
    }
    # Not of NAT gateways: routes cannot change in place here.
    changes = {"deploy_from": None, "alerts": Alerts(emails=("sre@example.com",)), "spot_wait_hours": 2}
    cdk(*deploy, **changes)
    changed = resources()
    for name in ("AWS::Batch::ComputeEnvironment", "AWS::EC2::Subnet", "AWS::KMS::Key", "AWS::S3::Bucket"):
        assert changed[name] == made[name]
    assert "AWS::IAM::OIDCProvider" not in changed
    assert changed["AWS::SNS::Subscription"] != made["AWS::SNS::Subscription"]
    cdk("destroy", "--force", **changes)
    assert resources() == before
    assert deployed_aws.health()["server_errors"] == []
