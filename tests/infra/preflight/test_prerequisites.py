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
from tests.infra.preflight.conftest import Ask
from tests.support.embedded_aws import EmbeddedAws

Play = Callable[[str, Callable[[dict[str, Any]], tuple[int, Any]]], None]


@pytest.mark.parametrize(
    ("version", "verdict", "region"),
    [
        (None, "problem", "us-east-2"),
        ("7", "problem", "us-west-1"),
        ("8", "ok", "us-west-2"),
        ("30", "ok", "eu-west-1"),
    ],
)
def test_the_account_is_bootstrapped_for_these_templates(
    asked: Ask, connected: EmbeddedAws, version: str | None, verdict: str, region: str
) -> None:
    if version is not None:
        ssm = connected.session.client("ssm", endpoint_url=connected.endpoint, region_name=region)
        ssm.put_parameter(Name="/cdk-bootstrap/hnb659fds/version", Type="String", Value=version)
    (found,) = asked(bootstrap, region=region)
    assert found.verdict == verdict
    if verdict == "problem":
        assert found.next_step == f"cdk bootstrap aws://123456789012/{region}"


def test_spot_needs_its_service_linked_role_and_the_others_come_by_themselves(
    asked: Ask, connected: EmbeddedAws
) -> None:
    # GIVEN a new account
    before = {item.text.split()[0]: item for item in asked(service_linked_roles, fsx_gib=1_200)}
    assert {service: item.verdict for service, item in before.items()} == {
        "spot.amazonaws.com": "problem",
        "batch.amazonaws.com": "ok",
        "ecs.amazonaws.com": "ok",
        "fsx.amazonaws.com": "ok",
    }
    command = before["spot.amazonaws.com"].next_step
    # WHEN the command that it is told is run
    service = command.removeprefix("aws iam create-service-linked-role --aws-service-name ")
    made = connected.client("iam").create_service_linked_role(AWSServiceName=service)["Role"]["RoleName"]
    # THEN nothing is wrong; and without a file system nobody asks for its role
    assert [(item.verdict, item.text) for item in asked(service_linked_roles)] == [
        ("ok", f"spot.amazonaws.com has {made}"),
        ("ok", "batch.amazonaws.com has none yet, and makes it when the stage is deployed"),
        ("ok", "ecs.amazonaws.com has none yet, and makes it when the stage is deployed"),
    ]


def test_an_ami_that_is_given_by_a_parameter_has_to_be_there_and_visible(asked: Ask, connected: EmbeddedAws) -> None:
    settings = {"machine_image": "ssm:/trainyard/machine-image/gaudi", "root_device_name": "/dev/sda1"}
    # GIVEN no parameter
    (found,) = asked(machine_image, **settings)
    assert (found.verdict, found.text) == (
        "problem",
        "there is no parameter /trainyard/machine-image/gaudi in us-east-1",
    )
    # WHEN it names an AMI that this account does not see
    ssm, ec2 = connected.client("ssm"), connected.client("ec2")
    parameter = {"Name": "/trainyard/machine-image/gaudi", "Type": "String", "Overwrite": True}
    ssm.put_parameter(Value="ami-0123456789abcdef0", **parameter)
    (found,) = asked(machine_image, **settings)
    assert found.verdict == "problem"
    assert "ami-0123456789abcdef0, which this account does not see" in found.text
    # WHEN it names one that it does
    image = ec2.describe_images(Owners=["amazon"], Filters=[{"Name": "root-device-name", "Values": ["/dev/sda1"]}])
    ami_id = image["Images"][0]["ImageId"]
    ssm.put_parameter(Value=ami_id, **parameter)
    (found,) = asked(machine_image, **settings)
    assert (found.verdict, found.text.split()[0]) == ("ok", ami_id)
    # AND when the settings name another root device than the AMI has, the volume's size would go nowhere
    (found,) = asked(machine_image, **{**settings, "root_device_name": "/dev/xvda"})
    assert (found.verdict, found.next_step) == ("problem", 'root_device_name="/dev/sda1" in infra/settings.py')


def test_the_permissions_boundary_is_there(asked: Ask, connected: EmbeddedAws) -> None:
    (found,) = asked(permissions_boundary, permissions_boundary="organisation-boundary")
    assert (found.verdict, found.text) == (
        "problem",
        "there is no policy arn:aws:iam::123456789012:policy/organisation-boundary",
    )
    document = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}'
    connected.client("iam").create_policy(PolicyName="organisation-boundary", PolicyDocument=document)
    (found,) = asked(permissions_boundary, permissions_boundary="organisation-boundary")
    assert found.verdict == "ok"


def test_githubs_oidc_provider_is_made_once(asked: Ask, connected: EmbeddedAws) -> None:
    iam = connected.client("iam")
    arn = "arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com"
    makes, named = GitHub(repository="a/b"), GitHub(repository="a/b", oidc_provider_arn=arn)
    # GIVEN none: the stage can make it, and one that is named is missing
    assert _oidc(asked, makes) == "ok"
    assert _oidc(asked, named) == "problem"
    # WHEN somebody has made it: it is to be named
    iam.create_open_id_connect_provider(Url="https://token.actions.githubusercontent.com", ThumbprintList=["0" * 40])
    (found,) = asked(oidc_provider, deploy_from=makes)
    assert (found.verdict, found.next_step) == (
        "problem",
        f'oidc_provider_arn="{arn}" under `deploy_from` in infra/settings.py',
    )
    assert _oidc(asked, named) == "ok"
    # WHEN it is the stage's own, from an earlier deployment: nothing is to be done
    iam.tag_open_id_connect_provider(OpenIDConnectProviderArn=arn, Tags=[{"Key": "trainyard:stage", "Value": "test"}])
    assert _oidc(asked, makes) == "ok"


def test_what_is_asked_of_another_service_than_the_checks_is_named_right(asked: Ask, play: Play) -> None:
    # The AMI's parameter is SSM's; what is refused is named as IAM knows it.
    play("SSM", lambda _: (400, {"__type": "AccessDeniedException", "message": "no"}))
    (found,) = asked(machine_image, machine_image="ssm:/trainyard/machine-image/gaudi")
    assert (found.verdict, found.text) == ("unknown", "the credentials may not do ssm:GetParameter")


def test_another_refusal_is_unknown_with_what_was_said(asked: Ask, play: Play) -> None:
    play("SSM", lambda _: (400, {"__type": "ValidationException", "message": "not today"}))
    (found,) = asked(bootstrap)
    assert (found.verdict, found.text) == ("unknown", "ssm:GetParameter failed: not today")


def _oidc(asked: Ask, source: GitHub) -> str:
    (found,) = asked(oidc_provider, deploy_from=source)
    return found.verdict
