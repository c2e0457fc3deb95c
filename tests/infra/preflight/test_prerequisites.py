import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.preflight.prerequisites import (
    bootstrap,
    ebs_key,
    machine_image,
    oidc_provider,
    oidc_subject,
    permissions_boundary,
    service_linked_roles,
)
from infra.stages import GitHub, amis
from tests.infra.preflight.conftest import ACCOUNT, findings, refusal, stage_of


def parameter(value: str) -> dict[str, Any]:
    return {"get_parameter": {"Parameter": {"Value": value}}}


NO_PARAMETER = {"get_parameter": refusal("ParameterNotFound")}


@pytest.mark.parametrize(
    ("answers", "verdict"), [(NO_PARAMETER, "problem"), (parameter("7"), "problem"), (parameter("8"), "ok")]
)
def test_the_bootstrap_must_be_recent_enough(answers: dict[str, Any], verdict: str) -> None:
    (found,) = findings(bootstrap, answers)
    assert found.verdict == verdict
    assert found.next_step == ("" if verdict == "ok" else f"cdk bootstrap aws://{ACCOUNT}/us-east-1")


def test_only_spots_service_linked_role_must_exist_beforehand() -> None:
    def roles(existing: str) -> Callable[..., dict[str, Any]]:
        return lambda _, *, PathPrefix: {"Roles": [{"RoleName": "ForSpot"}] if existing in PathPrefix else []}  # noqa: N803

    spot, *others = findings(service_linked_roles, {"list_roles": roles("nothing")}, fsx_gib=1_200)
    assert (spot.verdict, spot.next_step) == (
        "problem",
        "aws iam create-service-linked-role --aws-service-name spot.amazonaws.com",
    )
    assert [(one.verdict, one.text.partition(":")[0]) for one in others] == [
        ("ok", f"{service}.amazonaws.com") for service in ("batch", "ecs", "fsx")
    ]
    first, *_ = findings(service_linked_roles, {"list_roles": roles("spot")})
    assert (first.verdict, first.text) == ("ok", "spot.amazonaws.com: ForSpot")


KEY = f"arn:aws:kms:us-east-1:{ACCOUNT}:key/0ea3fef3"
ROLES = {
    name: f"arn:aws:iam::{ACCOUNT}:role/aws-service-role/{service}.amazonaws.com/AWSServiceRoleFor{name}"
    for service, name in (("autoscaling", "AutoScaling"), ("spot", "EC2Spot"))
}


@pytest.mark.parametrize(
    ("principals", "grants", "verdicts"),
    [
        ([f"arn:aws:iam::{ACCOUNT}:root"], [], ["problem", "problem"]),
        ([*ROLES.values()], [], ["ok", "ok"]),
        ([ROLES["AutoScaling"]], [], ["ok", "problem"]),
        ([], [ROLES["EC2Spot"]], ["problem", "ok"]),
        ("*", [], ["ok", "ok"]),
    ],
)
@pytest.mark.parametrize("own", [True, False])
def test_the_roles_that_start_instances_need_the_ebs_key(
    principals: Any, grants: list[str], verdicts: list[str], *, own: bool
) -> None:
    policy = {"Statement": [{"Effect": "Allow", "Principal": {"AWS": principals}}]}
    answers = {
        "get_ebs_default_kms_key_id": {"KmsKeyId": "alias/aws/ebs" if own else KEY},
        "describe_key": {"KeyMetadata": {"KeyState": "Enabled"}},
        "get_key_policy": {"Policy": json.dumps(policy)},
        "list_grants": {"Grants": [{"GranteePrincipal": role} for role in grants]},
    }
    found = findings(ebs_key, answers, ebs_key_arn=KEY if own else None)
    assert [one.verdict for one in found] == verdicts
    for one, role in zip(found, ROLES.values(), strict=True):
        assert (f"--key-id {KEY} --grantee-principal {role} " in one.next_step) is (one.verdict == "problem")


@pytest.mark.parametrize("answer", [refusal("NotFoundException"), {"KeyMetadata": {"KeyState": "PendingDeletion"}}])
def test_awss_ebs_key_is_fine_and_a_missing_one_is_not(answer: Any) -> None:
    (found,) = findings(ebs_key, {"get_ebs_default_kms_key_id": {"KmsKeyId": "alias/aws/ebs"}})
    assert found.verdict == "ok"
    (found,) = findings(ebs_key, {"describe_key": answer}, ebs_key_arn=KEY)
    assert (found.verdict, KEY in found.text) == ("problem", True)


IMAGES = {"describe_images": {"Images": [{"RootDeviceName": "/dev/sda1", "Name": "gaudi"}]}}


@pytest.mark.parametrize(
    ("answers", "verdict", "text"),
    [
        (NO_PARAMETER, "problem", "SSM parameter /our/gaudi does not exist in us-east-1"),
        (
            {**parameter("ami-1"), "describe_images": refusal("InvalidAMIID.NotFound")},
            *("problem", "/our/gaudi is ami-1, which is not visible to this account in us-east-1"),
        ),
        ({**parameter("ami-1"), **IMAGES}, "ok", "ami-1 (gaudi) is visible"),
        (
            {"get_parameter": refusal("AccessDeniedException")},
            "unknown",
            "the credentials may not call ssm:GetParameter",
        ),
        (
            {"get_parameter": refusal("ValidationException", "not today")},
            "unknown",
            "ssm:GetParameter failed: not today",
        ),
    ],
)
def test_an_ami_from_a_parameter_must_exist_and_be_visible(answers: dict[str, Any], verdict: str, text: str) -> None:
    found, *cpu = findings(machine_image, answers, machine_image="ssm:/our/gaudi")
    assert (found.verdict, found.text) == (verdict, text)
    assert ["newest AMI" in other.text for other in cpu] == ([] if verdict == "unknown" else [True])
    assert bool(found.next_step) is (verdict != "ok")


def test_the_root_device_must_be_the_amis() -> None:
    for field in ("", "cpu_"):
        settings = {f"{field}machine_image": "ami-1", f"{field}root_device_name": "/dev/xvda"}
        (found,) = (each for each in findings(machine_image, IMAGES, **settings) if "newest AMI" not in each.text)
        assert (found.verdict, found.next_step) == (
            "problem",
            f'set {field}root_device_name="/dev/sda1" in infra/settings.py',
        )


def test_a_recorded_ami_must_still_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amis, "RECORD", tmp_path / "amis.json")
    source = amis.ami_sources(stage_of())["cpu-m6i-4xlarge"]
    amis.write_record({"test": {source: ["ami-2", "ami-1"]}})
    _, found = findings(machine_image, {"describe_images": refusal("InvalidAMIID.NotFound")})
    assert found.text == "infra/amis.json is ami-2, which is not visible to this account in us-east-1"
    assert found.next_step == "python -m infra.amis update --stage test, or rollback"


@pytest.mark.parametrize(("answer", "verdict"), [(refusal("NoSuchEntity"), "problem"), ({}, "ok")])
def test_the_permissions_boundary_must_exist(answer: Any, verdict: str) -> None:
    (found,) = findings(permissions_boundary, {"get_policy": answer}, permissions_boundary="organisation-boundary")
    assert found.verdict == verdict
    assert f"arn:aws:iam::{ACCOUNT}:policy/organisation-boundary" in found.text


ARN = f"arn:aws:iam::{ACCOUNT}:oidc-provider/token.actions.githubusercontent.com"


@pytest.mark.parametrize(
    ("exists", "stage", "named", "verdict", "next_step"),
    [
        (False, "", False, "ok", ""),  # the stage creates it
        (False, "", True, "problem", "set oidc_provider_arn=None in infra/settings.py, to let the stage create one"),
        (True, "", False, "problem", f'set oidc_provider_arn="{ARN}" under `deploy_from` in infra/settings.py'),
        (True, "", True, "ok", ""),
        (True, "test", False, "ok", ""),  # created by an earlier deployment of the stage
    ],
)
def test_githubs_oidc_provider_is_created_once(
    *, exists: bool, stage: str, named: bool, verdict: str, next_step: str
) -> None:
    answers = {
        "list_open_id_connect_providers": {"OpenIDConnectProviderList": [{"Arn": ARN}] if exists else []},
        "get_open_id_connect_provider": {"Tags": [{"Key": "trainyard:stage", "Value": stage}] if stage else []},
    }
    source = GitHub(repository="a/b", oidc_provider_arn=ARN if named else None)
    (found,) = findings(oidc_provider, answers, deploy_from=source)
    assert (found.verdict, found.next_step) == (verdict, next_step)


def test_a_repository_without_ids_is_a_warning_because_only_github_knows_its_subject() -> None:
    (found,) = findings(oidc_subject, {}, deploy_from=GitHub(repository="a/b"))
    assert (found.verdict, "repo:a/b:ref:refs/heads/main only" in found.text) == ("unknown", True)
    assert found.next_step.startswith("run `gh api repos/a/b --jq '.owner.id, .id, .created_at'`")
    (found,) = findings(oidc_subject, {}, deploy_from=GitHub(repository="a/b", owner_id=1, repository_id=2))
    assert (found.verdict, "repo:a@1/b@2:ref:refs/heads/main" in found.text) == ("ok", True)
