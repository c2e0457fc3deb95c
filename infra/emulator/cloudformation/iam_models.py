"""IAM roles with their managed policies, and changes to them, both of which moto's model loses."""

import json
from typing import Any

from moto.core.config import default_user_config
from moto.iam.models import iam_backends

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
