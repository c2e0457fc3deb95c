"""Declare the types of IAM, logs, alarms, topics, queues, rules, budgets, functions and builds.

IAM policies are not enforced.
"""

import io
import zipfile
from dataclasses import dataclass
from typing import Any

from moto.ce.responses import CostExplorerResponse
from moto.core.config import default_user_config

from infra.emulator.cloudformation.api import Api, Properties, PropertyError
from infra.emulator.cloudformation.resource_type import (
    TYPES,
    Items,
    PhysicalResource,
    Recreated,
    ResourceType,
    Row,
    Tagging,
    without,
)


class Topic(ResourceType):
    """AWS::SNS::Topic; a change keeps its subscriptions."""

    service = "sns"
    name_property = "TopicName"
    tagging = Tagging()

    def create(self, api: Api, name: str, properties: Properties) -> PhysicalResource:
        attributes = _attributes(properties, self.name_property)
        arn = api("CreateTopic", Name=name, Attributes=attributes, Tags=properties.get("Tags"))["TopicArn"]
        return PhysicalResource(arn, {"TopicArn": arn, "TopicName": name}, name)

    def change(self, api: Api, physical: PhysicalResource, old: Properties, new: Properties) -> PhysicalResource:
        before, after = (_attributes(one, self.name_property) for one in (old, new))
        for name in sorted({*before, *after}):
            api("SetTopicAttributes", TopicArn=physical.ref, AttributeName=name, AttributeValue=after.get(name, ""))
        return physical

    def delete(self, api: Api, physical: PhysicalResource, properties: Properties) -> None:
        api("DeleteTopic", TopicArn=physical.ref)


class Queue(ResourceType):
    """AWS::SQS::Queue; a change keeps its messages."""

    service = "sqs"
    name_property = "QueueName"
    tagging = Tagging(add="TagQueue", remove="UntagQueue", resource="QueueUrl")

    def create(self, api: Api, name: str, properties: Properties) -> PhysicalResource:
        attributes = _attributes(properties, self.name_property)
        url = api("CreateQueue", QueueName=name, Attributes=attributes, Tags=properties.get("Tags"))["QueueUrl"]
        return PhysicalResource(url, {"Arn": api.arn(name), "QueueName": name, "QueueUrl": url}, name)

    def change(self, api: Api, physical: PhysicalResource, old: Properties, new: Properties) -> PhysicalResource:
        api("SetQueueAttributes", QueueUrl=physical.ref, Attributes=_attributes(new, self.name_property))
        return physical

    def delete(self, api: Api, physical: PhysicalResource, properties: Properties) -> None:
        api("DeleteQueue", QueueUrl=physical.ref)


@dataclass(frozen=True)
class ResourcePolicy(Recreated):
    """AWS::SNS::TopicPolicy or AWS::SQS::QueuePolicy."""

    service: str
    resources: str
    """The property that lists the topics or queues."""

    def create(self, api: Api, name: str, properties: Properties) -> PhysicalResource:
        self._put(api, properties, properties["PolicyDocument"])
        return PhysicalResource(name, {}, name)

    def delete(self, api: Api, physical: PhysicalResource, properties: Properties) -> None:
        self._put(api, properties, {"Version": "2012-10-17", "Statement": []})

    def _put(self, api: Api, properties: Properties, policy: Any) -> None:
        for one in properties[self.resources]:
            if self.service == "sns":
                api("SetTopicAttributes", TopicArn=one, AttributeName="Policy", AttributeValue=policy)
            else:
                api("SetQueueAttributes", QueueUrl=one, Attributes={"Policy": policy})


class Rule(Recreated):
    """AWS::Events::Rule."""

    service = "events"
    name_property = "Name"

    def create(self, api: Api, name: str, properties: Properties) -> PhysicalResource:
        arn = api("PutRule", **{**without(properties, "Targets"), "Name": name})["RuleArn"]
        if targets := properties.get("Targets"):
            api("PutTargets", Rule=name, Targets=targets)
        return PhysicalResource(name, {"Arn": arn}, name)

    def delete(self, api: Api, physical: PhysicalResource, properties: Properties) -> None:
        if targets := properties.get("Targets"):
            api("RemoveTargets", Rule=physical.name, Ids=[target["Id"] for target in targets])
        api("DeleteRule", Name=physical.name)


class Budget(Recreated):
    """AWS::Budgets::Budget."""

    service = "budgets"

    def create(self, api: Api, name: str, properties: Properties) -> PhysicalResource:
        budget = {"BudgetName": name, **properties["Budget"]}
        notifications = properties.get("NotificationsWithSubscribers")
        api("CreateBudget", AccountId=api.account.id, Budget=budget, NotificationsWithSubscribers=notifications)
        return PhysicalResource(budget["BudgetName"], {}, name)

    def delete(self, api: Api, physical: PhysicalResource, properties: Properties) -> None:
        api("DeleteBudget", AccountId=api.account.id, BudgetName=physical.ref)


class Function(Row):
    """AWS::Lambda::Function."""

    def create(self, api: Api, name: str, properties: Properties) -> PhysicalResource:
        return super().create(api, name, {**properties, "Code": _packed(properties["Code"])})


def _attributes(properties: Properties, name_property: str) -> dict[str, Any]:
    """Return properties as attributes of the API, which are text."""
    return {
        name: value if isinstance(value, dict) else str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in without(properties, name_property, "Tags").items()
    }


def _packed(code: Properties) -> Properties:
    """Return the location of a function's code. Source text is packed into a zip file."""
    if "ZipFile" not in code:
        return code
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("index.py", code["ZipFile"])
    return {**code, "ZipFile": whole.getvalue()}


def install() -> None:
    """Load the policies that AWS manages, because roles attach them by name. Call it before the server starts."""
    default_user_config["iam"]["load_aws_managed_policies"] = True
    # moto lacks this request. Without a bill, Cost Explorer knows no tag, as in a tag's first hours.
    CostExplorerResponse.list_cost_allocation_tags = lambda _response: '{"CostAllocationTags": []}'


class InlinePolicy(Recreated):
    """AWS::IAM::Policy: the same policy in each of its roles."""

    service = "iam"

    def create(self, api: Api, name: str, properties: Properties) -> PhysicalResource:
        if properties.get("Users") or properties.get("Groups"):
            raise PropertyError("the emulator attaches policies to roles only, not to users or groups")
        policy = {key: properties[key] for key in ("PolicyName", "PolicyDocument")}
        for role in properties["Roles"]:
            api("PutRolePolicy", RoleName=role, **policy)
        return PhysicalResource(name, {}, name)

    def delete(self, api: Api, physical: PhysicalResource, properties: Properties) -> None:
        for role in properties["Roles"]:
            api("DeleteRolePolicy", RoleName=role, PolicyName=properties["PolicyName"])


class ManagedPolicy(Row):
    """AWS::IAM::ManagedPolicy; a changed document becomes a new version, and only the newest is kept."""

    def change(self, api: Api, physical: PhysicalResource, old: Properties, new: Properties) -> PhysicalResource:
        changed = super().change(api, physical, old, new)
        for version in api("ListPolicyVersions", PolicyArn=physical.ref)["Versions"]:
            if not version["IsDefaultVersion"]:
                api("DeletePolicyVersion", PolicyArn=physical.ref, VersionId=version["VersionId"])
        return changed


TYPES |= {
    "AWS::Budgets::Budget": Budget(),
    "AWS::CloudWatch::Alarm": Row(
        service="cloudwatch",
        name_property="AlarmName",
        create_by="PutMetricAlarm",
        attributes={"Arn": ":alarm:{name}"},
        update_by="PutMetricAlarm",
        ids=("AlarmNames[]",),
        delete_by="DeleteAlarms",
    ),
    "AWS::CloudWatch::Dashboard": Row(
        service="cloudwatch",
        name_property="DashboardName",
        create_by="PutDashboard",
        update_by="PutDashboard",
        ignored=frozenset({"Tags"}),
        ids=("DashboardNames[]",),
        delete_by="DeleteDashboards",
    ),
    "AWS::CodeBuild::Project": Row(
        service="codebuild",
        name_property="Name",
        create_by="CreateProject",
        attributes={"Arn": "project.arn"},
        recreate=True,
    ),
    "AWS::Events::Rule": Rule(),
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
        setters={
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
        recreate=True,
        ids=("OpenIDConnectProviderArn",),
        delete_by="DeleteOpenIDConnectProvider",
    ),
    "AWS::IAM::Policy": InlinePolicy(),
    "AWS::IAM::Role": Row(
        service="iam",
        name_property="RoleName",
        create_by="CreateRole",
        attributes={"Arn": "Role.Arn"},
        update_by="UpdateRole",
        reset_values={"Description": "", "MaxSessionDuration": 3600},
        setters={
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
    "AWS::Lambda::EventInvokeConfig": Row(
        service="lambda",
        create_by="PutFunctionEventInvokeConfig",
        update_by="PutFunctionEventInvokeConfig",
        ignored=frozenset({"Qualifier"}),
        ids=("FunctionName",),
        delete_by="DeleteFunctionEventInvokeConfig",
    ),
    "AWS::Lambda::Function": Function(
        service="lambda",
        name_property="FunctionName",
        create_by="CreateFunction",
        attributes={"Arn": "FunctionArn"},
        update_by="UpdateFunctionConfiguration",
        reset_values={"DeadLetterConfig": {}, "Description": "", "Environment": {"Variables": {}}},
        setters={"Code": lambda code: ("UpdateFunctionCode", _packed(code))},
        tagging=Tagging(resource="Resource", attribute="Arn"),
    ),
    "AWS::Lambda::Permission": Row(
        service="lambda",
        name_property="StatementId",
        create_by="AddPermission",
        ids=("FunctionName", "StatementId"),
        delete_by="RemovePermission",
    ),
    "AWS::Logs::LogGroup": Row(
        service="logs",
        name_property="LogGroupName",
        create_by="CreateLogGroup",
        attributes={"Arn": ":log-group:{name}:*"},
        setters={
            "RetentionInDays": lambda days: (
                ("PutRetentionPolicy", {"RetentionInDays": days}) if days else ("DeleteRetentionPolicy", {})
            )
        },
        tagging=Tagging(attribute="Arn"),
    ),
    "AWS::Logs::MetricFilter": Row(
        service="logs",
        name_property="FilterName",
        create_by="PutMetricFilter",
        recreate=True,
        ids=("FilterName", "LogGroupName"),
        delete_by="DeleteMetricFilter",
    ),
    "AWS::SNS::Subscription": Row(
        service="sns",
        create_by="Subscribe",
        ref="SubscriptionArn",
        setters={
            "RedrivePolicy": lambda policy: (
                "SetSubscriptionAttributes",
                {"AttributeName": "RedrivePolicy", "AttributeValue": policy or ""},
            )
        },
        delete_by="Unsubscribe",
    ),
    "AWS::SNS::Topic": Topic(),
    "AWS::SNS::TopicPolicy": ResourcePolicy("sns", "Topics"),
    "AWS::SQS::Queue": Queue(),
    "AWS::SQS::QueuePolicy": ResourcePolicy("sqs", "Queues"),
}
