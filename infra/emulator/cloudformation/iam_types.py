"""Roles and policies; their users survive a change. The policies are not enforced."""

from moto.core.config import default_user_config

from infra.emulator.cloudformation.api import Api, Properties, PropertyError
from infra.emulator.cloudformation.resource_type import TYPES, Items, Made, Remade, Row, Tagging


def install() -> None:
    """Know the policies that AWS manages: roles attach them by name."""
    default_user_config["iam"]["load_aws_managed_policies"] = True


class Policy(Remade):
    """AWS::IAM::Policy: the same policy, in each of its roles."""

    service = "iam"

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        if properties.get("Users") or properties.get("Groups"):
            raise PropertyError("the emulator attaches policies to roles only, not to users or groups")
        policy = {key: properties[key] for key in ("PolicyName", "PolicyDocument")}
        for role in properties["Roles"]:
            api("PutRolePolicy", RoleName=role, **policy)
        return Made(name, {}, name)

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        for role in properties["Roles"]:
            api("DeleteRolePolicy", RoleName=role, PolicyName=properties["PolicyName"])


class ManagedPolicy(Row):
    """AWS::IAM::ManagedPolicy; another document is another version of it, and only the newest is kept."""

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        changed = super().change(api, made, old, new)
        self._delete_old_versions(api, made)
        return changed

    def _delete_old_versions(self, api: Api, made: Made) -> None:
        for version in api("ListPolicyVersions", PolicyArn=made.ref)["Versions"]:
            if not version["IsDefaultVersion"]:
                api("DeletePolicyVersion", PolicyArn=made.ref, VersionId=version["VersionId"])


TYPES |= {
    "AWS::IAM::InstanceProfile": Row(
        service="iam",
        name_property="InstanceProfileName",
        create_by="CreateInstanceProfile",
        attributes={"Arn": "InstanceProfile.Arn"},
        items={"Roles": Items("AddRoleToInstanceProfile", "RemoveRoleFromInstanceProfile", "RoleName")},
    ),
    "AWS::IAM::ManagedPolicy": ManagedPolicy(
        service="iam",
        name_property="ManagedPolicyName",
        create_by="CreatePolicy",
        renamed={"ManagedPolicyName": "PolicyName"},
        ref="Policy.Arn",
        attributes={"PolicyArn": "Policy.Arn"},
        sets={
            "PolicyDocument": lambda document: (
                "CreatePolicyVersion",
                {"PolicyDocument": document, "SetAsDefault": True},
            )
        },
        items={"Roles": Items("AttachRolePolicy", "DetachRolePolicy", "RoleName")},
        ids=("PolicyArn",),
        tagging=Tagging(add="TagPolicy", remove="UntagPolicy", resource="PolicyArn"),
    ),
    "AWS::IAM::OIDCProvider": Row(  # moto can neither add nor remove a client
        service="iam",
        create_by="CreateOpenIDConnectProvider",
        ref="OpenIDConnectProviderArn",
        attributes={"Arn": "OpenIDConnectProviderArn"},
        remade=True,
        ids=("OpenIDConnectProviderArn",),
        delete_by="DeleteOpenIDConnectProvider",
    ),
    "AWS::IAM::Policy": Policy(),
    "AWS::IAM::Role": Row(
        service="iam",
        name_property="RoleName",
        create_by="CreateRole",
        attributes={"Arn": "Role.Arn"},
        update_by="UpdateRole",
        emptied={"Description": "", "MaxSessionDuration": 3600},
        sets={
            "AssumeRolePolicyDocument": lambda document: ("UpdateAssumeRolePolicy", {"PolicyDocument": document}),
            "PermissionsBoundary": lambda boundary: (
                ("PutRolePermissionsBoundary", {"PermissionsBoundary": boundary})
                if boundary
                else ("DeleteRolePermissionsBoundary", {})
            ),
        },
        items={
            "ManagedPolicyArns": Items("AttachRolePolicy", "DetachRolePolicy", "PolicyArn"),
            "Policies": Items("PutRolePolicy", "DeleteRolePolicy", "PolicyName"),
        },
        tagging=Tagging(add="TagRole", remove="UntagRole", resource="RoleName"),
    ),
}
