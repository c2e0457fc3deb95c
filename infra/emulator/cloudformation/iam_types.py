"""Roles and policies; their users survive a change. The policies are not enforced."""

from collections.abc import Iterable
from typing import Any

from moto.core.config import default_user_config

from infra.emulator.cloudformation.api import Api, Properties, PropertyError
from infra.emulator.cloudformation.resource_type import TYPES, Made, ResourceType


def install() -> None:
    """Know the policies that AWS manages: roles attach them by name."""
    default_user_config["iam"]["load_aws_managed_policies"] = True


class Role(ResourceType):
    """AWS::IAM::Role."""

    service = "iam"
    name_property = "RoleName"
    tagging = ("TagRole", "UntagRole", "RoleName")

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        request = {key: item for key, item in properties.items() if key not in ("ManagedPolicyArns", "Policies")}
        role = api("CreateRole", **{**request, "RoleName": name})["Role"]
        made = Made(name, {"Arn": role["Arn"], "RoleId": role["RoleId"]}, name)
        try:
            self._set_policies(api, name, {}, properties)
        except Exception:
            self.delete(api, made, properties)
            raise
        return made

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        role = made.name
        api("UpdateAssumeRolePolicy", RoleName=role, PolicyDocument=new["AssumeRolePolicyDocument"])
        session = new.get("MaxSessionDuration", 3600)
        api("UpdateRole", RoleName=role, Description=new.get("Description", ""), MaxSessionDuration=session)
        if boundary := new.get("PermissionsBoundary"):
            api("PutRolePermissionsBoundary", RoleName=role, PermissionsBoundary=boundary)
        elif old.get("PermissionsBoundary"):
            api("DeleteRolePermissionsBoundary", RoleName=role)
        self._set_policies(api, role, old, new)
        return made

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        role = made.name
        for policy in api("ListAttachedRolePolicies", RoleName=role)["AttachedPolicies"]:
            api("DetachRolePolicy", RoleName=role, PolicyArn=policy["PolicyArn"])
        for policy in api("ListRolePolicies", RoleName=role)["PolicyNames"]:
            api("DeleteRolePolicy", RoleName=role, PolicyName=policy)
        for profile in api("ListInstanceProfilesForRole", RoleName=role)["InstanceProfiles"]:
            api("RemoveRoleFromInstanceProfile", RoleName=role, InstanceProfileName=profile["InstanceProfileName"])
        api("DeleteRole", RoleName=role)

    def _set_policies(self, api: Api, role: str, old: Properties, new: Properties) -> None:
        """Set the template's own policies; those that other resources attach stay."""
        for policy in _gone(old, new, "ManagedPolicyArns"):
            api("DetachRolePolicy", RoleName=role, PolicyArn=policy)
        for policy in _gone(new, old, "ManagedPolicyArns"):
            api("AttachRolePolicy", RoleName=role, PolicyArn=policy)
        named = {policy["PolicyName"] for policy in new.get("Policies", [])}
        for policy in old.get("Policies", []):
            if policy["PolicyName"] not in named:
                api("DeleteRolePolicy", RoleName=role, PolicyName=policy["PolicyName"])
        for policy in new.get("Policies", []):
            api("PutRolePolicy", RoleName=role, **policy)


class Policy(ResourceType):
    """AWS::IAM::Policy: the same policy, in each of its roles."""

    service = "iam"

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        _only_roles(properties)
        for role in properties["Roles"]:
            api(
                "PutRolePolicy",
                RoleName=role,
                PolicyName=properties["PolicyName"],
                PolicyDocument=properties["PolicyDocument"],
            )
        return Made(name, {}, name)

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        if new["PolicyName"] != old["PolicyName"]:
            self.delete(api, made, old)
        self._remove(api, _gone(old, new, "Roles"), old["PolicyName"])
        return self.create(api, made.name, new)

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        del made
        self._remove(api, properties["Roles"], properties["PolicyName"])

    def _remove(self, api: Api, roles: Iterable[str], policy: str) -> None:
        for role in roles:
            api("DeleteRolePolicy", RoleName=role, PolicyName=policy)


class ManagedPolicy(ResourceType):
    """AWS::IAM::ManagedPolicy; another document is another version of it."""

    service = "iam"
    name_property = "ManagedPolicyName"
    tagging = ("TagPolicy", "UntagPolicy", "PolicyArn")

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        _only_roles(properties)
        request = {key: properties.get(key) for key in ("Path", "Description", "PolicyDocument", "Tags")}
        arn = api("CreatePolicy", PolicyName=name, **request)["Policy"]["Arn"]
        made = Made(arn, {"PolicyArn": arn}, name)
        self._attach(api, made, {}, properties)
        return made

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        if new["PolicyDocument"] != old["PolicyDocument"]:
            self._delete_old_versions(api, made)
            api("CreatePolicyVersion", PolicyArn=made.ref, PolicyDocument=new["PolicyDocument"], SetAsDefault=True)
        self._attach(api, made, old, new)
        return made

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        for role in api("ListEntitiesForPolicy", PolicyArn=made.ref)["PolicyRoles"]:
            api("DetachRolePolicy", PolicyArn=made.ref, RoleName=role["RoleName"])
        self._delete_old_versions(api, made)
        api("DeletePolicy", PolicyArn=made.ref)

    def _attach(self, api: Api, made: Made, old: Properties, new: Properties) -> None:
        for role in _gone(old, new, "Roles"):
            api("DetachRolePolicy", PolicyArn=made.ref, RoleName=role)
        for role in _gone(new, old, "Roles"):
            api("AttachRolePolicy", PolicyArn=made.ref, RoleName=role)

    def _delete_old_versions(self, api: Api, made: Made) -> None:
        for version in api("ListPolicyVersions", PolicyArn=made.ref)["Versions"]:
            if not version["IsDefaultVersion"]:
                api("DeletePolicyVersion", PolicyArn=made.ref, VersionId=version["VersionId"])


class InstanceProfile(ResourceType):
    """AWS::IAM::InstanceProfile."""

    service = "iam"
    name_property = "InstanceProfileName"

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        answer = api("CreateInstanceProfile", InstanceProfileName=name, Path=properties.get("Path"))
        self._fill(api, name, {}, properties)
        return Made(name, {"Arn": answer["InstanceProfile"]["Arn"]}, name)

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        self._fill(api, made.name, old, new)
        return made

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        self._fill(api, made.name, properties, {})
        api("DeleteInstanceProfile", InstanceProfileName=made.name)

    def _fill(self, api: Api, name: str, old: Properties, new: Properties) -> None:
        for role in _gone(old, new, "Roles"):
            api("RemoveRoleFromInstanceProfile", InstanceProfileName=name, RoleName=role)
        for role in _gone(new, old, "Roles"):
            api("AddRoleToInstanceProfile", InstanceProfileName=name, RoleName=role)


class OidcProvider(ResourceType):
    """AWS::IAM::OIDCProvider."""

    service = "iam"
    tagging = ("TagOpenIDConnectProvider", "UntagOpenIDConnectProvider", "OpenIDConnectProviderArn")

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        arn = api("CreateOpenIDConnectProvider", **{"ThumbprintList": [], **properties})["OpenIDConnectProviderArn"]
        return Made(arn, {"Arn": arn}, name)

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        self.delete(api, made, old)  # moto can neither add nor remove a client
        return self.create(api, made.name, new)

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        del properties
        api("DeleteOpenIDConnectProvider", OpenIDConnectProviderArn=made.ref)


def _gone(before: Properties, after: Properties, name: str) -> list[Any]:
    return [item for item in before.get(name, []) if item not in after.get(name, [])]


def _only_roles(properties: Properties) -> None:
    if properties.get("Users") or properties.get("Groups"):
        raise PropertyError("the embedded AWS attaches policies to roles only, not to users or groups")


TYPES |= {
    "AWS::IAM::InstanceProfile": InstanceProfile(),
    "AWS::IAM::ManagedPolicy": ManagedPolicy(),
    "AWS::IAM::OIDCProvider": OidcProvider(),
    "AWS::IAM::Policy": Policy(),
    "AWS::IAM::Role": Role(),
}
