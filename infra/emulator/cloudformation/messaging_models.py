"""Topics with their subscriptions and policies, policies of queues, rules for events, and schedules."""

from collections.abc import Iterator
from typing import Any

from infra.emulator.cloudformation.api_model import Api, ApiModel, ApiResource, document, tag_changes, without
from infra.emulator.resource_model import Properties

_NO_STATEMENTS = '{"Version": "2012-10-17", "Statement": []}'


class Topic(ApiModel):
    """AWS::SNS::Topic; moto's model loses the subscriptions at each change."""

    resource_type = "AWS::SNS::Topic"
    name_property = "TopicName"
    service = "sns"
    replaced_by = frozenset({"FifoTopic"})

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        attributes = dict(_topic_attributes(properties))
        arn = api("CreateTopic", Name=name, Attributes=attributes, Tags=properties.get("Tags"))["TopicArn"]
        for subscription in properties.get("Subscription", []):
            api("Subscribe", TopicArn=arn, **subscription)
        return ApiResource(name, properties, ref=arn, TopicArn=arn, TopicName=name)

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        arn = resource.physical_resource_id
        old, new = dict(_topic_attributes(resource.properties)), dict(_topic_attributes(properties))
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                api("SetTopicAttributes", TopicArn=arn, AttributeName=name, AttributeValue=new.get(name, ""))
        added, gone = tag_changes(resource.properties, properties)
        if gone:
            api("UntagResource", ResourceArn=arn, TagKeys=gone)
        if added:
            api("TagResource", ResourceArn=arn, Tags=added)

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        api("DeleteTopic", TopicArn=resource.physical_resource_id)


class Subscription(ApiModel):
    """AWS::SNS::Subscription."""

    resource_type = "AWS::SNS::Subscription"
    service = "sns"
    replaced_by = frozenset({"Endpoint", "Protocol", "TopicArn"})

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        where = {key: properties[key] for key in ("TopicArn", "Protocol", "Endpoint") if key in properties}
        attributes = dict(_subscription_attributes(properties))
        answer = api("Subscribe", **where, Attributes=attributes, ReturnSubscriptionArn=True)
        return ApiResource(name, properties, ref=answer["SubscriptionArn"], Arn=answer["SubscriptionArn"])

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        for name, value in _subscription_attributes(properties):
            api(
                "SetSubscriptionAttributes",
                SubscriptionArn=resource.physical_resource_id,
                AttributeName=name,
                AttributeValue=value,
            )

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        api("Unsubscribe", SubscriptionArn=resource.physical_resource_id)


class TopicPolicy(ApiModel):
    """AWS::SNS::TopicPolicy."""

    resource_type = "AWS::SNS::TopicPolicy"
    service = "sns"

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        _set_topic_policies(api, properties, document(properties["PolicyDocument"]))
        return ApiResource(name, properties, Id=name)

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        cls.remove(api, resource)
        _set_topic_policies(api, properties, document(properties["PolicyDocument"]))

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        _set_topic_policies(api, resource.properties, _NO_STATEMENTS)


class QueuePolicy(ApiModel):
    """AWS::SQS::QueuePolicy."""

    resource_type = "AWS::SQS::QueuePolicy"
    service = "sqs"

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        _set_queue_policies(api, properties, document(properties["PolicyDocument"]))
        return ApiResource(name, properties, Id=name)

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        cls.remove(api, resource)
        _set_queue_policies(api, properties, document(properties["PolicyDocument"]))

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        _set_queue_policies(api, resource.properties, _NO_STATEMENTS)


class Rule(ApiModel):
    """AWS::Events::Rule."""

    resource_type = "AWS::Events::Rule"
    name_property = "Name"
    service = "events"
    replaced_by = frozenset({"EventBusName"})

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        arn = _put_rule(api, name, properties)
        return ApiResource(name, properties, Arn=arn)

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        kept = {target["Id"] for target in properties.get("Targets", [])}
        gone = [target["Id"] for target in resource.properties.get("Targets", []) if target["Id"] not in kept]
        if gone:
            api("RemoveTargets", Rule=resource.name, EventBusName=properties.get("EventBusName"), Ids=gone)
        _put_rule(api, resource.name, properties)

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        bus, targets = resource.properties.get("EventBusName"), resource.properties.get("Targets", [])
        if targets:
            api(
                "RemoveTargets",
                Rule=resource.physical_resource_id,
                EventBusName=bus,
                Ids=[target["Id"] for target in targets],
            )
        api("DeleteRule", Name=resource.physical_resource_id, EventBusName=bus)


class ScheduleGroup(ApiModel):
    """AWS::Scheduler::ScheduleGroup."""

    resource_type = "AWS::Scheduler::ScheduleGroup"
    name_property = "Name"
    service = "scheduler"

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        answer = api("CreateScheduleGroup", **{**properties, "Name": name})
        return ApiResource(name, properties, Arn=answer["ScheduleGroupArn"])

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        added, gone = tag_changes(resource.properties, properties)
        if gone:
            api("UntagResource", ResourceArn=resource.attributes["Arn"], TagKeys=gone)
        if added:
            api("TagResource", ResourceArn=resource.attributes["Arn"], Tags=added)

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        api("DeleteScheduleGroup", Name=resource.physical_resource_id)


class Schedule(ApiModel):
    """AWS::Scheduler::Schedule; kept, and never run."""

    resource_type = "AWS::Scheduler::Schedule"
    name_property = "Name"
    service = "scheduler"
    replaced_by = frozenset({"GroupName"})

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        answer = api("CreateSchedule", **{**properties, "Name": name})
        return ApiResource(name, properties, Arn=answer["ScheduleArn"])

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        api("UpdateSchedule", **{**properties, "Name": resource.name})

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        api("DeleteSchedule", Name=resource.physical_resource_id, GroupName=resource.properties.get("GroupName"))


def _topic_attributes(properties: Properties) -> Iterator[tuple[str, str]]:
    for name, value in without(properties, "Subscription", "Tags", "TopicName").items():
        yield name, str(value).lower() if isinstance(value, bool) else document(value) or ""


def _subscription_attributes(properties: Properties) -> Iterator[tuple[str, str]]:
    for name, value in without(properties, "Endpoint", "Protocol", "Region", "TopicArn").items():
        yield name, str(value).lower() if isinstance(value, bool) else document(value) or ""


def _set_topic_policies(api: Api, properties: Properties, policy: str | None) -> None:
    for topic in properties["Topics"]:
        api("SetTopicAttributes", TopicArn=topic, AttributeName="Policy", AttributeValue=policy)


def _set_queue_policies(api: Api, properties: Properties, policy: str | None) -> None:
    for url in properties["Queues"]:
        api("SetQueueAttributes", QueueUrl=url, Attributes={"Policy": policy})


def _put_rule(api: Api, name: str, properties: Properties) -> Any:
    """Make a rule or change it; return its ARN."""
    bus = properties.get("EventBusName")
    request = without(properties, "EventPattern", "Name", "Targets")
    answer = api("PutRule", **request, Name=name, EventPattern=document(properties.get("EventPattern")))
    if properties.get("Targets"):
        api("PutTargets", Rule=name, EventBusName=bus, Targets=properties["Targets"])
    return answer["RuleArn"]
