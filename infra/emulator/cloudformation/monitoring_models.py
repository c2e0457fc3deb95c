"""Log groups, alarms, dashboards, metric filters and budgets.

A log group keeps its streams when its template changes; moto's model can only make a new group. The others are kept as
they are: nothing here measures, so no alarm ever goes off.
"""

from typing import Any

from moto.logs.models import logs_backends

from infra.emulator.cloudformation.api_model import Api, ApiModel, ApiResource, document, without
from infra.emulator.resource_model import AccountRegion, ChangeableModel, Properties


class Alarm(ApiModel):
    """AWS::CloudWatch::Alarm."""

    resource_type = "AWS::CloudWatch::Alarm"
    name_property = "AlarmName"
    service = "cloudwatch"

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        api("PutMetricAlarm", **{**properties, "AlarmName": name})
        (alarm,) = api("DescribeAlarms", AlarmNames=[name])["MetricAlarms"]
        return ApiResource(name, properties, Arn=alarm["AlarmArn"])

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        api("PutMetricAlarm", **{**properties, "AlarmName": resource.name})

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        api("DeleteAlarms", AlarmNames=[resource.name])


class Dashboard(ApiModel):
    """AWS::CloudWatch::Dashboard."""

    resource_type = "AWS::CloudWatch::Dashboard"
    name_property = "DashboardName"
    service = "cloudwatch"

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        api("PutDashboard", DashboardName=name, DashboardBody=document(properties["DashboardBody"]))
        return ApiResource(name, properties)

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        api("PutDashboard", DashboardName=resource.name, DashboardBody=document(properties["DashboardBody"]))

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        api("DeleteDashboards", DashboardNames=[resource.physical_resource_id])


class MetricFilter(ApiModel):
    """AWS::Logs::MetricFilter."""

    resource_type = "AWS::Logs::MetricFilter"
    name_property = "FilterName"
    service = "logs"
    replaced_by = frozenset({"LogGroupName"})

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        api("PutMetricFilter", **{**properties, "FilterName": name})
        return ApiResource(name, properties)

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        cls.remove(api, resource)  # moto would keep both
        api("PutMetricFilter", **{**properties, "FilterName": resource.name})

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        api(
            "DeleteMetricFilter",
            FilterName=resource.physical_resource_id,
            LogGroupName=resource.properties["LogGroupName"],
        )


class Budget(ApiModel):
    """AWS::Budgets::Budget; moto can create and delete one, so a change does both."""

    resource_type = "AWS::Budgets::Budget"
    service = "budgets"

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        budget = {**properties["Budget"], "BudgetName": properties["Budget"].get("BudgetName", name)}
        request = without(properties, "Budget", "ResourceTags")
        api("CreateBudget", **request, AccountId=api.place.account_id, Budget=budget)
        return ApiResource(budget["BudgetName"], properties)

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        cls.remove(api, resource)
        cls.make(api, resource.name, properties)

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        api("DeleteBudget", AccountId=api.place.account_id, BudgetName=resource.physical_resource_id)


class LogGroup(ChangeableModel):
    """AWS::Logs::LogGroup."""

    resource_type = "AWS::Logs::LogGroup"
    name_property = "LogGroupName"

    @classmethod
    def create(cls, name: str, properties: Properties, place: AccountRegion) -> Any:
        group = _logs(place).create_log_group(name, _tags(properties), kmsKeyId=properties.get("KmsKeyId"))
        _set_retention(group, properties)
        return group

    @classmethod
    def update(cls, resource: Any, name: str, properties: Properties, place: AccountRegion) -> Any:
        if name != resource.name:
            group = cls.create(name, properties, place)
            cls.delete(resource.name, place)
            return group
        resource.kms_key_id = properties.get("KmsKeyId")
        _set_retention(resource, properties)
        logs = _logs(place)
        logs.tagger.delete_all_tags_for_resource(resource.arn)
        logs.tag_log_group(resource.name, _tags(properties))
        return resource

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        _logs(place).delete_log_group(name)


def _logs(place: AccountRegion) -> Any:
    return logs_backends[place.account_id][place.region]


def _set_retention(group: Any, properties: Properties) -> None:
    group.retention_in_days = properties.get("RetentionInDays")


def _tags(properties: Properties) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in properties.get("Tags", [])}
