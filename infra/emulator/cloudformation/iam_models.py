"""Roles, managed policies and identity providers; a change keeps whoever uses them.

moto's model of a role loses its managed policies and every change. Nothing enforces what the policies say.
"""

import json
from typing import Any

from moto.core.config import default_user_config
from moto.iam.models import iam_backends

from infra.emulator.cloudformation.api_model import Api, ApiModel, ApiResource, document, tag_changes
from infra.emulator.resource_model import AccountRegion, ChangeableModel, Properties


def install() -> None:
    """Know the policies that AWS manages: roles attach them by name."""
    default_user_config["iam"]["load_aws_managed_policies"] = True


class Role(ChangeableModel):
    """AWS::IAM::Role. Nothing enforces what its policies say."""

    resource_type = "AWS::IAM::Role"
    name_property = "RoleName"

    @classmethod
    def create(cls, name: str, properties: Properties, place: AccountRegion) -> Any:
        iam = _iam(place)
        iam.create_role(
            role_name=name,
            assume_role_policy_document=_document(properties["AssumeRolePolicyDocument"]),
            path=properties.get("Path", "/"),
            permissions_boundary=properties.get("PermissionsBoundary", ""),
            description=properties.get("Description", ""),
            tags=properties.get("Tags", []),
            max_session_duration=properties.get("MaxSessionDuration", 3600),
        )
        role = iam.get_role(name)
        try:
            _set_policies(iam, role, {}, properties)
        except Exception:
            cls.delete(name, place)
            raise
        return role

    @classmethod
    def update(cls, resource: Any, name: str, properties: Properties, place: AccountRegion) -> Any:
        if name != resource.name:
            role = cls.create(name, properties, place)
            cls.delete(resource.name, place)
            return role
        iam = _iam(place)
        role = resource
        iam.update_assume_role_policy(role.name, _document(properties["AssumeRolePolicyDocument"]))
        role.description = properties.get("Description", "")
        role.max_session_duration = properties.get("MaxSessionDuration", 3600)
        role.permissions_boundary_arn = properties.get("PermissionsBoundary", "")
        role.tags = properties.get("Tags", [])
        _set_policies(iam, role, role.declared, properties)
        return role

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        iam = _iam(place)
        role = iam.get_role(name)
        for policy in list(role.managed_policies.values()):
            policy.detach_from(role)
        role.policies.clear()
        for profile in iam.instance_profiles.values():
            profile.delete_role(role_name=name)
        iam.delete_role(name)


def _iam(place: AccountRegion) -> Any:
    return iam_backends[place.account_id]["aws"]


def _set_policies(iam: Any, role: Any, old: Properties, new: Properties) -> None:
    """The role's own policies from the template; those that other resources attach to it stay."""
    wanted = new.get("ManagedPolicyArns", [])
    for arn in old.get("ManagedPolicyArns", []):
        if arn not in wanted and arn in role.managed_policies:
            iam.detach_role_policy(arn, role.name)
    for arn in wanted:
        if arn not in role.managed_policies:
            iam.attach_role_policy(arn, role.name)
    for policy in old.get("Policies", []):
        role.policies.pop(policy["PolicyName"], None)
    for policy in new.get("Policies", []):
        role.put_policy(policy["PolicyName"], _document(policy["PolicyDocument"]))
    role.declared = {key: new.get(key, []) for key in ("ManagedPolicyArns", "Policies")}


def _document(document: Any) -> str:
    return document if isinstance(document, str) else json.dumps(document)


_HOLDERS = (("Roles", "Role"), ("Users", "User"), ("Groups", "Group"))


class ManagedPolicy(ApiModel):
    """AWS::IAM::ManagedPolicy; another document is another version of it."""

    resource_type = "AWS::IAM::ManagedPolicy"
    name_property = "ManagedPolicyName"
    service = "iam"
    replaced_by = frozenset({"Description", "Path"})

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        arn = api(
            "CreatePolicy",
            PolicyName=name,
            Path=properties.get("Path", "/"),
            Description=properties.get("Description"),
            PolicyDocument=document(properties["PolicyDocument"]),
            Tags=properties.get("Tags"),
        )["Policy"]["Arn"]
        resource = ApiResource(name, properties, ref=arn, PolicyArn=arn)
        _attach(api, arn, {}, properties)
        return resource

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        arn = resource.physical_resource_id
        if properties["PolicyDocument"] != resource.properties["PolicyDocument"]:
            for version in api("ListPolicyVersions", PolicyArn=arn)["Versions"]:
                if not version["IsDefaultVersion"]:
                    api("DeletePolicyVersion", PolicyArn=arn, VersionId=version["VersionId"])
            text = document(properties["PolicyDocument"])
            api("CreatePolicyVersion", PolicyArn=arn, PolicyDocument=text, SetAsDefault=True)
        _attach(api, arn, resource.properties, properties)

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        holders = api("ListEntitiesForPolicy", PolicyArn=resource.physical_resource_id)
        for _, kind in _HOLDERS:
            for holder in holders[f"Policy{kind}s"]:
                api(
                    f"Detach{kind}Policy",
                    PolicyArn=resource.physical_resource_id,
                    **{f"{kind}Name": holder[f"{kind}Name"]},
                )
        for version in api("ListPolicyVersions", PolicyArn=resource.physical_resource_id)["Versions"]:
            if not version["IsDefaultVersion"]:
                api("DeletePolicyVersion", PolicyArn=resource.physical_resource_id, VersionId=version["VersionId"])
        api("DeletePolicy", PolicyArn=resource.physical_resource_id)


class OidcProvider(ApiModel):
    """AWS::IAM::OIDCProvider."""

    resource_type = "AWS::IAM::OIDCProvider"
    service = "iam"
    replaced_by = frozenset({"Url"})

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        request = {"ThumbprintList": [], **properties}
        arn = api("CreateOpenIDConnectProvider", **request)["OpenIDConnectProviderArn"]
        return ApiResource(name, properties, ref=arn, Arn=arn)

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        arn = resource.physical_resource_id
        old, new = (set(one.get("ClientIdList", [])) for one in (resource.properties, properties))
        if old != new:  # moto can neither add nor remove one
            cls.remove(api, resource)
            cls.make(api, resource.name, properties)
            return
        thumbprints: list[Any] = properties.get("ThumbprintList", [])
        if thumbprints != resource.properties.get("ThumbprintList", []):
            api("UpdateOpenIDConnectProviderThumbprint", OpenIDConnectProviderArn=arn, ThumbprintList=thumbprints)
        added, gone = tag_changes(resource.properties, properties)
        if gone:
            api("UntagOpenIDConnectProvider", OpenIDConnectProviderArn=arn, TagKeys=gone)
        if added:
            api("TagOpenIDConnectProvider", OpenIDConnectProviderArn=arn, Tags=added)

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        api("DeleteOpenIDConnectProvider", OpenIDConnectProviderArn=resource.physical_resource_id)


def _attach(api: Api, arn: str, old: Properties, new: Properties) -> None:
    for key, kind in _HOLDERS:
        before, after = set(old.get(key, [])), set(new.get(key, []))
        for holder in sorted(before - after):
            api(f"Detach{kind}Policy", PolicyArn=arn, **{f"{kind}Name": holder})
        for holder in sorted(after - before):
            api(f"Attach{kind}Policy", PolicyArn=arn, **{f"{kind}Name": holder})
