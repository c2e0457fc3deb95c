from collections.abc import Callable
from typing import Any

import pytest

from infra.preflight.prerequisites import (
    bootstrap,
    machine_image,
    oidc_provider,
    permissions_boundary,
    service_linked_roles,
)
from infra.stages import GitHub
from tests.infra.preflight.conftest import ACCOUNT, asked, refusal


def parameter(value: str) -> dict[str, Any]:
    return {"get_parameter": {"Parameter": {"Value": value}}}


NO_PARAMETER = {"get_parameter": refusal("ParameterNotFound")}


@pytest.mark.parametrize(
    ("answers", "verdict"), [(NO_PARAMETER, "problem"), (parameter("7"), "problem"), (parameter("8"), "ok")]
)
def test_the_account_is_bootstrapped_for_these_templates(answers: dict[str, Any], verdict: str) -> None:
    (found,) = asked(bootstrap, answers)
    assert found.verdict == verdict
    assert found.next_step == ("" if verdict == "ok" else f"cdk bootstrap aws://{ACCOUNT}/us-east-1")


def test_spot_needs_its_service_linked_role_and_the_others_come_by_themselves() -> None:
    def roles(there: str) -> Callable[..., dict[str, Any]]:
        return lambda _, *, PathPrefix: {"Roles": [{"RoleName": "ForSpot"}] if there in PathPrefix else []}  # noqa: N803

    spot, *others = asked(service_linked_roles, {"list_roles": roles("nothing")}, fsx_gib=1_200)
    assert (spot.verdict, spot.next_step) == (
        "problem",
        "aws iam create-service-linked-role --aws-service-name spot.amazonaws.com",
    )
    assert [(one.verdict, one.text.split()[0]) for one in others] == [
        ("ok", f"{service}.amazonaws.com") for service in ("batch", "ecs", "fsx")
    ]
    first, *_ = asked(service_linked_roles, {"list_roles": roles("spot")})
    assert (first.verdict, first.text) == ("ok", "spot.amazonaws.com has ForSpot")


IMAGES = {"describe_images": {"Images": [{"RootDeviceName": "/dev/sda1", "Name": "gaudi"}]}}


@pytest.mark.parametrize(
    ("answers", "verdict", "said"),
    [
        (NO_PARAMETER, "problem", "there is no parameter /our/gaudi in us-east-1"),
        (
            {**parameter("ami-1"), "describe_images": refusal("InvalidAMIID.NotFound")},
            *("problem", "/our/gaudi says ami-1, which this account does not see in us-east-1"),
        ),
        ({**parameter("ami-1"), **IMAGES}, "ok", "ami-1 (gaudi) is visible"),
        ({"get_parameter": refusal("AccessDeniedException")}, "unknown", "the credentials may not do ssm:GetParameter"),
        (
            {"get_parameter": refusal("ValidationException", "not today")},
            "unknown",
            "ssm:GetParameter failed: not today",
        ),
    ],
)
def test_an_ami_that_is_given_by_a_parameter_has_to_be_there_and_visible(
    answers: dict[str, Any], verdict: str, said: str
) -> None:
    (found,) = asked(machine_image, answers, machine_image="ssm:/our/gaudi")
    assert (found.verdict, found.text) == (verdict, said)
    assert bool(found.next_step) is (verdict != "ok")


def test_another_root_device_than_the_amis_would_leave_the_volumes_size_to_nothing() -> None:
    (found,) = asked(machine_image, IMAGES, machine_image="ami-1", root_device_name="/dev/xvda")
    assert (found.verdict, found.next_step) == ("problem", 'root_device_name="/dev/sda1" in infra/settings.py')


@pytest.mark.parametrize(("answer", "verdict"), [(refusal("NoSuchEntity"), "problem"), ({}, "ok")])
def test_the_permissions_boundary_is_there(answer: Any, verdict: str) -> None:
    (found,) = asked(permissions_boundary, {"get_policy": answer}, permissions_boundary="organisation-boundary")
    assert found.verdict == verdict
    assert f"arn:aws:iam::{ACCOUNT}:policy/organisation-boundary" in found.text


ARN = f"arn:aws:iam::{ACCOUNT}:oidc-provider/token.actions.githubusercontent.com"


@pytest.mark.parametrize(
    ("there", "stage", "named", "verdict", "next_step"),
    [
        (False, "", False, "ok", ""),  # the stage makes it
        (False, "", True, "problem", "oidc_provider_arn=None, to have one made, in infra/settings.py"),
        (True, "", False, "problem", f'oidc_provider_arn="{ARN}" under `deploy_from` in infra/settings.py'),
        (True, "", True, "ok", ""),
        (True, "test", False, "ok", ""),  # the stage's own, from an earlier deployment
    ],
)
def test_githubs_oidc_provider_is_made_once(
    *, there: bool, stage: str, named: bool, verdict: str, next_step: str
) -> None:
    answers = {
        "list_open_id_connect_providers": {"OpenIDConnectProviderList": [{"Arn": ARN}] if there else []},
        "get_open_id_connect_provider": {"Tags": [{"Key": "trainyard:stage", "Value": stage}] if stage else []},
    }
    source = GitHub(repository="a/b", oidc_provider_arn=ARN if named else None)
    (found,) = asked(oidc_provider, answers, deploy_from=source)
    assert (found.verdict, found.next_step) == (verdict, next_step)
