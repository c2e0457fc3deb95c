"""Managed policies and identity providers: a change keeps whoever uses them."""

from typing import Any

from infra.emulator.cloudformation.api_model import Api, ApiModel, ApiResource, document, tag_changes
from infra.emulator.resource_model import Properties

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
