"""IAM roles with their managed policies, and changes to them, both of which moto's model loses."""

import json
from collections.abc import Mapping
from typing import Any

from moto.core.common_models import CloudFormationModel
from moto.core.config import default_user_config
from moto.iam.models import iam_backends


def install() -> None:
    """Know the policies that AWS manages: roles attach them by name."""
    default_user_config["iam"]["load_aws_managed_policies"] = True


class Role(CloudFormationModel):
    """AWS::IAM::Role. Nothing enforces what its policies say."""

    @staticmethod
    def cloudformation_name_type() -> str:
        return "RoleName"

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::IAM::Role"

    @classmethod
    def create_from_cloudformation_json(
        cls,
        resource_name: str,
        cloudformation_json: Mapping[str, Any],
        account_id: str,
        region_name: str,
        **_: Any,
    ) -> Any:
        del region_name
        iam = iam_backends[account_id]["aws"]
        properties = cloudformation_json["Properties"]
        iam.create_role(
            role_name=resource_name,
            assume_role_policy_document=_document(properties["AssumeRolePolicyDocument"]),
            path=properties.get("Path", "/"),
            permissions_boundary=properties.get("PermissionsBoundary", ""),
            description=properties.get("Description", ""),
            tags=properties.get("Tags", []),
            max_session_duration=properties.get("MaxSessionDuration", 3600),
        )
        role = iam.get_role(resource_name)
        try:
            _set_policies(iam, role, {}, properties)
        except Exception:
            cls.delete_from_cloudformation_json(resource_name, cloudformation_json, account_id, "")
            raise
        return role

    @classmethod
    def update_from_cloudformation_json(
        cls,
        original_resource: Any,
        new_resource_name: str,
        cloudformation_json: Mapping[str, Any],
        account_id: str,
        region_name: str,
    ) -> Any:
        properties = cloudformation_json["Properties"]
        if new_resource_name != original_resource.name:
            role = cls.create_from_cloudformation_json(new_resource_name, cloudformation_json, account_id, region_name)
            cls.delete_from_cloudformation_json(original_resource.name, {}, account_id, region_name)
            return role
        iam = iam_backends[account_id]["aws"]
        role = original_resource
        iam.update_assume_role_policy(role.name, _document(properties["AssumeRolePolicyDocument"]))
        role.description = properties.get("Description", "")
        role.max_session_duration = properties.get("MaxSessionDuration", 3600)
        role.permissions_boundary_arn = properties.get("PermissionsBoundary", "")
        role.tags = properties.get("Tags", [])
        _set_policies(iam, role, role.declared, properties)
        return role

    @classmethod
    def delete_from_cloudformation_json(
        cls, resource_name: str, cloudformation_json: Mapping[str, Any], account_id: str, region_name: str
    ) -> None:
        del cloudformation_json, region_name
        iam = iam_backends[account_id]["aws"]
        role = iam.get_role(resource_name)
        for policy in list(role.managed_policies.values()):
            policy.detach_from(role)
        role.policies.clear()
        for profile in iam.instance_profiles.values():
            profile.delete_role(role_name=resource_name)
        iam.delete_role(resource_name)


def _set_policies(iam: Any, role: Any, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
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
