import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from infra import settings
from infra.preflight import capacity
from infra.preflight.__main__ import main
from tests.infra.preflight.conftest import stage_of
from tests.support.running_emulator import Emulator, run_emulator

CHECKS = {
    *("instance types", "vCPU quotas", "Batch quotas", "reserved capacity", "VPC", "CDK bootstrap"),
    *(
        "VPC endpoints",
        "service-linked roles",
        "machine image",
        "permissions boundary",
        "OIDC provider",
        "OIDC subject",
    ),
    *("EBS key", "cost allocation tags"),
}


@pytest.fixture(scope="module")
def empty_aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """An emulator with an unprepared account."""
    with run_emulator(tmp_path_factory.mktemp("empty-aws")) as aws:
        yield aws
        assert aws.health()["server_errors"] == []


@pytest.fixture
def preflight(empty_aws: Emulator, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the command for a stage `test` with the given settings, in this process, on that emulator."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**empty_aws.credentials.environment, "AWS_ENDPOINT_URL": empty_aws.endpoint}.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str, **row: Any) -> int:
        monkeypatch.setitem(settings.STAGES, "test", stage_of(**row))
        return main(["--stage", "test", *arguments])

    return run


def test_the_command_prints_a_table_with_next_steps_and_fails(empty_aws: Emulator) -> None:
    # GIVEN an unprepared account, and a shell
    done = subprocess.run(
        [sys.executable, "-m", "infra.preflight"],
        env={**empty_aws.environment, "AWS_DEFAULT_REGION": "us-east-1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    # THEN the table is on stdout, progress on stderr, and the exit code reports problems
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines()[0].split() == ["CHECK", "WHAT"]
    for check in CHECKS:
        assert f"\n{check} " in done.stdout
    assert "Next: cdk bootstrap aws://123456789012/us-east-1" in done.stdout
    first, last = done.stderr.splitlines()
    assert first == "Checking stage 'dev' in account 123456789012, region us-east-1"
    assert "problems" in last


def test_scripts_read_json_and_a_ready_account_exits_with_0(
    preflight: Callable[..., int],
    empty_aws: Emulator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row: dict[str, Any] = {"instance_types": ("p4d.24xlarge",), "region": "us-east-2", "nat_gateways": 0}
    assert preflight("-o", "json", **row) == 3
    rows = json.loads(capsys.readouterr().out)
    assert {row["check"] for row in rows} == CHECKS
    for row_ in rows:
        # Findings that are not ok have a next step.
        assert bool(row_["next_step"]) == (row_["verdict"] != "ok"), row_
    # Budgets count by a tag, of which the emulator's account has no bill.
    assert preflight("-o", "json", **row, monthly_budget_usd=100.0) == 3
    (tags,) = (one for one in json.loads(capsys.readouterr().out) if one["check"] == "cost allocation tags")
    assert (tags["verdict"], tags["text"].split(",")[0]) == ("unknown", "AWS does not know trainyard:stage yet")
    # WHEN the account is bootstrapped, with Spot's role and quotas, which the emulator lacks
    ssm = empty_aws.session.client("ssm", endpoint_url=empty_aws.endpoint, region_name="us-east-2")
    ssm.put_parameter(Name="/cdk-bootstrap/hnb659fds/version", Type="String", Value="30")
    empty_aws.client("iam").create_service_linked_role(AWSServiceName="spot.amazonaws.com")
    monkeypatch.setattr(capacity, "_find_quota", lambda *_: {"Value": 1_000.0})
    # THEN no problems remain
    assert preflight("-o", "json", **row) == 0
    output = capsys.readouterr()
    assert {row["verdict"] for row in json.loads(output.out)} == {"ok"}
    assert output.err.splitlines()[-1].startswith("0 problems, 0 unknown, ")


@pytest.mark.parametrize(
    ("row", "arguments", "message"),
    [
        (
            {"account": "210987654321"},
            [],
            "the credentials belong to account 123456789012, but stage 'test' is for 210987654321",
        ),
        ({"region": "us-east-1"}, ["--region", "us-west-2"], "--region us-west-2: stage 'test' is for us-east-1"),
        ({"region": None}, ["--profile", "nobody"], "cannot determine the AWS account"),
        ({"max_nodes": 0}, [], "stage 'test': max_nodes: must be from 1"),
    ],
    ids=["account", "region", "profile", "settings"],
)
def test_a_wrong_account_or_region_is_refused_before_any_check(
    preflight: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    row: dict[str, Any],
    arguments: list[str],
    message: str,
) -> None:
    assert preflight(*arguments, **row) == 3
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert message in output.err


def test_without_credentials_a_next_step_is_printed(
    preflight: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert preflight() == 3
    error = capsys.readouterr().err
    assert "Unable to locate credentials" in error
    assert "Next: make `aws sts get-caller-identity` work" in error
    assert "Traceback" not in error
