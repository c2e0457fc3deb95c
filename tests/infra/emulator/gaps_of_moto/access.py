"""Secrets, keys, policies and identity providers: each is made, changed in place, and deleted."""

import json
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.emulator.stack_requests import LAMBDA_ROLE, Clients, attribute, stack, update


def secret_without_a_value(clients: Clients) -> None:
    def resources(description: str, tag: str) -> dict[str, Any]:
        properties = {"Description": description, "Tags": [{"Key": tag, "Value": "1"}]}
        return {"It": {"Type": "AWS::SecretsManager::Secret", "Properties": properties}}

    secrets = clients("secretsmanager")
    with stack(clients, "gap-secret", resources("first", "old"), Arn={"Ref": "It"}) as outputs:
        secrets.put_secret_value(SecretId=outputs["Arn"], SecretString="the user's")
        assert update(clients, "gap-secret", resources("second", "new"), Arn={"Ref": "It"}) == outputs
        shown = secrets.describe_secret(SecretId=outputs["Arn"])
        assert (shown["ARN"], shown["Description"]) == (outputs["Arn"], "second")
        assert shown["Tags"] == [{"Key": "new", "Value": "1"}]
        assert secrets.get_secret_value(SecretId=outputs["Arn"])["SecretString"] == "the user's"
    assert "DeletedDate" in secrets.describe_secret(SecretId=outputs["Arn"])


def generated_secret(clients: Clients) -> None:
    generate = {"SecretStringTemplate": '{"user": "me"}', "GenerateStringKey": "password", "PasswordLength": 20}
    resources = {"It": {"Type": "AWS::SecretsManager::Secret", "Properties": {"GenerateSecretString": generate}}}
    with stack(clients, "gap-generated", resources, Arn={"Ref": "It"}) as outputs:
        value = json.loads(clients("secretsmanager").get_secret_value(SecretId=outputs["Arn"])["SecretString"])
        assert (value["user"], len(value["password"])) == ("me", 20)


def key_and_alias(clients: Clients) -> None:
    def resources(description: str) -> dict[str, Any]:
        statement = {"Effect": "Allow", "Principal": "*", "Action": "kms:*", "Resource": "*", "Sid": description}
        properties = {
            "Description": description,
            "EnableKeyRotation": True,
            "KeyPolicy": {"Version": "2012-10-17", "Statement": [statement]},
            "PendingWindowInDays": 7,
        }
        alias = {"AliasName": "alias/gap", "TargetKeyId": attribute("Arn")}
        return {
            "It": {"Type": "AWS::KMS::Key", "Properties": properties},
            "Alias": {"Type": "AWS::KMS::Alias", "Properties": alias},
        }

    kms = clients("kms")
    with stack(clients, "gap-key", resources("first"), Id={"Ref": "It"}) as outputs:
        assert update(clients, "gap-key", resources("second"), Id={"Ref": "It"}) == outputs
        key = kms.describe_key(KeyId="alias/gap")["KeyMetadata"]
        assert (key["KeyId"], key["Description"]) == (outputs["Id"], "second")
        assert kms.get_key_rotation_status(KeyId=outputs["Id"])["KeyRotationEnabled"] is True
        policy = json.loads(kms.get_key_policy(KeyId=outputs["Id"], PolicyName="default")["Policy"])
        assert policy["Statement"][0]["Sid"] == "second"
    assert kms.describe_key(KeyId=outputs["Id"])["KeyMetadata"]["KeyState"] == "PendingDeletion"
    assert not [alias for alias in kms.list_aliases()["Aliases"] if alias["AliasName"] == "alias/gap"]


def managed_policy_changes_under_its_holders(clients: Clients) -> None:
    def resources(action: str) -> dict[str, Any]:
        statement = {"Effect": "Allow", "Action": action, "Resource": "*"}
        properties = {
            "ManagedPolicyName": "gap-boundary",
            "PolicyDocument": {"Version": "2012-10-17", "Statement": [statement]},
        }
        holder = {
            **LAMBDA_ROLE["Properties"],
            "PermissionsBoundary": {"Ref": "It"},
            "ManagedPolicyArns": [{"Ref": "It"}],
        }
        return {
            "It": {"Type": "AWS::IAM::ManagedPolicy", "Properties": properties},
            "Holder": {"Type": "AWS::IAM::Role", "Properties": holder},
        }

    iam = clients("iam")
    names = {"Arn": {"Ref": "It"}, "Role": {"Ref": "Holder"}}
    with stack(clients, "gap-policy", resources("s3:GetObject"), **names) as outputs:
        for action in ("s3:PutObject", "s3:ListBucket"):
            assert update(clients, "gap-policy", resources(action), **names) == outputs
        policy = iam.get_policy(PolicyArn=outputs["Arn"])["Policy"]
        version = iam.get_policy_version(PolicyArn=outputs["Arn"], VersionId=policy["DefaultVersionId"])
        assert version["PolicyVersion"]["Document"]["Statement"][0]["Action"] == "s3:ListBucket"
        (attached,) = iam.list_attached_role_policies(RoleName=outputs["Role"])["AttachedPolicies"]
        assert attached["PolicyArn"] == outputs["Arn"]
        boundary = iam.get_role(RoleName=outputs["Role"])["Role"]["PermissionsBoundary"]
        assert boundary["PermissionsBoundaryArn"] == outputs["Arn"]
    with pytest.raises(ClientError, match="NoSuchEntity"):
        iam.get_policy(PolicyArn=outputs["Arn"])


def identity_provider(clients: Clients) -> None:
    def resources(audience: str) -> dict[str, Any]:
        properties = {"Url": "https://token.actions.githubusercontent.com", "ClientIdList": [audience]}
        return {"It": {"Type": "AWS::IAM::OIDCProvider", "Properties": properties}}

    iam = clients("iam")
    with stack(clients, "gap-oidc", resources("first"), Arn={"Ref": "It"}) as outputs:
        assert update(clients, "gap-oidc", resources("sts.amazonaws.com"), Arn={"Ref": "It"}) == outputs
        assert outputs["Arn"].endswith(":oidc-provider/token.actions.githubusercontent.com")
        shown = iam.get_open_id_connect_provider(OpenIDConnectProviderArn=outputs["Arn"])
        assert shown["ClientIDList"] == ["sts.amazonaws.com"]
    assert not iam.list_open_id_connect_providers()["OpenIDConnectProviderList"]


GAPS = (
    secret_without_a_value,
    generated_secret,
    key_and_alias,
    managed_policy_changes_under_its_holders,
    identity_provider,
)
