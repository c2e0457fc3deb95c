"""Logs, alarms, topics, queues, rules, budgets, functions and builds."""

import io
import zipfile
from typing import Any

from infra.emulator.cloudformation.api import Api, Properties
from infra.emulator.cloudformation.resource_type import TYPES, Made, Plain, ResourceType, without

_NO_STATEMENTS = {"Version": "2012-10-17", "Statement": list[Any]()}


class LogGroup(Plain):
    """AWS::Logs::LogGroup; it keeps its streams when its template changes."""

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        made = super().create(api, name, properties)
        self._retain(api, made, properties)
        return made

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        super().change(api, made, without(old, "RetentionInDays"), without(new, "RetentionInDays"))
        self._retain(api, made, new)
        return made

    def tagged_by(self, made: Made) -> str:
        return str(made.attributes["Arn"]).removesuffix(":*")

    def _retain(self, api: Api, made: Made, properties: Properties) -> None:
        if days := properties.get("RetentionInDays"):
            api("PutRetentionPolicy", LogGroupName=made.name, RetentionInDays=days)
        else:
            api("DeleteRetentionPolicy", LogGroupName=made.name)


class MetricFilter(Plain):
    """AWS::Logs::MetricFilter."""

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        api("DeleteMetricFilter", FilterName=made.ref, LogGroupName=properties["LogGroupName"])


class Topic(ResourceType):
    """AWS::SNS::Topic; it keeps its subscriptions when its template changes."""

    service = "sns"
    name_property = "TopicName"
    tagging = ("TagResource", "UntagResource", "ResourceArn")

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        attributes = _attributes(properties, "Tags", "TopicName")
        arn = api("CreateTopic", Name=name, Attributes=attributes, Tags=properties.get("Tags"))["TopicArn"]
        return Made(arn, {"TopicArn": arn, "TopicName": name}, name)

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        before, after = (_attributes(one, "Tags", "TopicName") for one in (old, new))
        for name in sorted({*before, *after}):
            api("SetTopicAttributes", TopicArn=made.ref, AttributeName=name, AttributeValue=after.get(name, ""))
        return made

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        api("DeleteTopic", TopicArn=made.ref)


class Subscription(ResourceType):
    """AWS::SNS::Subscription."""

    service = "sns"

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        where = {key: properties[key] for key in ("TopicArn", "Protocol", "Endpoint")}
        attributes = _attributes(properties, *where)
        arn = api("Subscribe", **where, Attributes=attributes, ReturnSubscriptionArn=True)["SubscriptionArn"]
        return Made(arn, {"Arn": arn}, name)

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        for name, value in _attributes(new, "Endpoint", "Protocol", "TopicArn").items():
            api("SetSubscriptionAttributes", SubscriptionArn=made.ref, AttributeName=name, AttributeValue=value)
        return made

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        api("Unsubscribe", SubscriptionArn=made.ref)


class TopicPolicy(ResourceType):
    """AWS::SNS::TopicPolicy."""

    service = "sns"

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        self._put(api, properties["Topics"], properties["PolicyDocument"])
        return Made(name, {"Id": name}, name)

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        self._put(api, [topic for topic in old["Topics"] if topic not in new["Topics"]], _NO_STATEMENTS)
        return self.create(api, made.name, new)

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        self._put(api, properties["Topics"], _NO_STATEMENTS)

    def _put(self, api: Api, topics: list[str], policy: Any) -> None:
        for topic in topics:
            api("SetTopicAttributes", TopicArn=topic, AttributeName="Policy", AttributeValue=policy)


class Queue(Plain):
    """AWS::SQS::Queue; it keeps its messages when its template changes."""

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        attributes = _attributes(properties, "QueueName", "Tags")
        url = api("CreateQueue", QueueName=name, Attributes=attributes, Tags=properties.get("Tags"))["QueueUrl"]
        return Made(url, {"Arn": api.arn(name), "QueueName": name, "QueueUrl": url}, name)

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        api("SetQueueAttributes", QueueUrl=made.ref, Attributes=_attributes(new, "QueueName", "Tags"))
        return made


class QueuePolicy(ResourceType):
    """AWS::SQS::QueuePolicy."""

    service = "sqs"

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        self._put(api, properties["Queues"], properties["PolicyDocument"])
        return Made(name, {"Id": name}, name)

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        self._put(api, [queue for queue in old["Queues"] if queue not in new["Queues"]], _NO_STATEMENTS)
        return self.create(api, made.name, new)

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        self._put(api, properties["Queues"], _NO_STATEMENTS)

    def _put(self, api: Api, queues: list[str], policy: Any) -> None:
        for queue in queues:
            api("SetQueueAttributes", QueueUrl=queue, Attributes={"Policy": policy})


class Rule(ResourceType):
    """AWS::Events::Rule."""

    service = "events"
    name_property = "Name"
    tagging = ("TagResource", "UntagResource", "ResourceARN")

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        arn = api("PutRule", **{**without(properties, "Targets"), "Name": name})["RuleArn"]
        if targets := properties.get("Targets"):
            api("PutTargets", Rule=name, Targets=targets)
        return Made(name, {"Arn": arn}, name)

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        self._remove(api, made, _ids(old) - _ids(new))
        return self.create(api, made.name, without(new, "Tags"))

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        self._remove(api, made, _ids(properties))
        api("DeleteRule", Name=made.name)

    def tagged_by(self, made: Made) -> str:
        return str(made.attributes["Arn"])

    def _remove(self, api: Api, made: Made, targets: set[str]) -> None:
        if targets:
            api("RemoveTargets", Rule=made.name, Ids=sorted(targets))


class Budget(ResourceType):
    """AWS::Budgets::Budget; moto can make and delete one, so a change does both."""

    service = "budgets"

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        budget = {"BudgetName": name, **properties["Budget"]}
        notifications = properties.get("NotificationsWithSubscribers")
        api("CreateBudget", AccountId=api.account.id, Budget=budget, NotificationsWithSubscribers=notifications)
        return Made(budget["BudgetName"], {}, name)

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        self.delete(api, made, old)
        return self.create(api, made.name, new)

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        api("DeleteBudget", AccountId=api.account.id, BudgetName=made.ref)


class Function(ResourceType):
    """AWS::Lambda::Function."""

    service = "lambda"
    name_property = "FunctionName"
    tagging = ("TagResource", "UntagResource", "Resource")

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        arn = api("CreateFunction", **{**properties, "FunctionName": name, "Code": _code(properties)})["FunctionArn"]
        return Made(name, {"Arn": arn}, name)

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        api("UpdateFunctionCode", FunctionName=made.name, **_code(new))
        defaults: dict[str, Any] = {"DeadLetterConfig": {}, "Description": "", "Environment": {"Variables": {}}}
        request = without(new, "Architectures", "Code", "PackageType", "Tags")
        api("UpdateFunctionConfiguration", **{**defaults, **request, "FunctionName": made.name})
        return made

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        api("DeleteFunction", FunctionName=made.name)

    def tagged_by(self, made: Made) -> str:
        return str(made.attributes["Arn"])


class Permission(Plain):
    """AWS::Lambda::Permission."""

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        api("AddPermission", **properties, StatementId=name)
        return Made(name, {"Id": name}, name)

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        api("RemovePermission", FunctionName=properties["FunctionName"], StatementId=made.name)


def _attributes(properties: Properties, *besides: str) -> dict[str, Any]:
    """Return properties that the API takes as attributes, which are text."""
    return {
        name: value if isinstance(value, dict) else str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in without(properties, *besides).items()
    }


def _ids(properties: Properties) -> set[str]:
    return {target["Id"] for target in properties.get("Targets", [])}


def _code(properties: Properties) -> dict[str, Any]:
    """Return where a function's code is; source text is packed first."""
    code = dict(properties["Code"])
    if "ZipFile" in code:
        whole = io.BytesIO()
        with zipfile.ZipFile(whole, "w") as archive:
            archive.writestr("index.py", code["ZipFile"])
        code["ZipFile"] = whole.getvalue()
    return code


TYPES |= {
    "AWS::Budgets::Budget": Budget(),
    "AWS::CloudWatch::Alarm": Plain(
        service="cloudwatch",
        name_property="AlarmName",
        create_by="PutMetricAlarm",
        attributes={"Arn": ":alarm:{name}"},
        delete_by=("DeleteAlarms", "AlarmNames[]"),
        put=True,
    ),
    "AWS::CloudWatch::Dashboard": Plain(
        service="cloudwatch",
        name_property="DashboardName",
        create_by="PutDashboard",
        delete_by=("DeleteDashboards", "DashboardNames[]"),
        left_out=frozenset({"Tags"}),
        put=True,
    ),
    "AWS::CodeBuild::Project": Plain(
        service="codebuild",
        name_property="Name",
        create_by="CreateProject",
        attributes={"Arn": "project.arn"},
        delete_by=("DeleteProject", "Name"),
        remade=True,
    ),
    "AWS::Events::Rule": Rule(),
    "AWS::Lambda::EventInvokeConfig": Plain(
        service="lambda",
        create_by="PutFunctionEventInvokeConfig",
        ref="=FunctionName",
        delete_by=("DeleteFunctionEventInvokeConfig", "FunctionName"),
        left_out=frozenset({"Qualifier"}),
        remade=True,
    ),
    "AWS::Lambda::Function": Function(),
    "AWS::Lambda::Permission": Permission(service="lambda", create_by="AddPermission", delete_by=("", "")),
    "AWS::Logs::LogGroup": LogGroup(
        service="logs",
        name_property="LogGroupName",
        create_by="CreateLogGroup",
        attributes={"Arn": ":log-group:{name}:*"},
        delete_by=("DeleteLogGroup", "LogGroupName"),
        left_out=frozenset({"RetentionInDays"}),
        tagging=("TagResource", "UntagResource", "ResourceArn"),
    ),
    "AWS::Logs::MetricFilter": MetricFilter(
        service="logs", name_property="FilterName", create_by="PutMetricFilter", delete_by=("", ""), remade=True
    ),
    "AWS::SNS::Subscription": Subscription(),
    "AWS::SNS::Topic": Topic(),
    "AWS::SNS::TopicPolicy": TopicPolicy(),
    "AWS::SQS::Queue": Queue(
        service="sqs",
        name_property="QueueName",
        create_by="CreateQueue",
        delete_by=("DeleteQueue", "QueueUrl"),
        tagging=("TagQueue", "UntagQueue", "QueueUrl"),
    ),
    "AWS::SQS::QueuePolicy": QueuePolicy(),
}
