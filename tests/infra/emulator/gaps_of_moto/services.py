"""Types of resources that stacks make through the API of their service: each is made, changed in place, and deleted."""

import io
import json
import zipfile
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.emulator.stack_requests import LAMBDA_ROLE, Clients, attribute, stack, update


def topic_with_subscribers(clients: Clients) -> None:
    def resources(display_name: str) -> dict[str, Any]:
        statement = {
            "Effect": "Allow",
            "Principal": {"Service": "events.amazonaws.com"},
            "Action": "sns:Publish",
            "Resource": {"Ref": "It"},
        }
        subscription = {"TopicArn": {"Ref": "It"}, "Protocol": "email", "Endpoint": "someone@example.org"}
        policy = {"Topics": [{"Ref": "It"}], "PolicyDocument": {"Version": "2012-10-17", "Statement": [statement]}}
        return {
            "It": {"Type": "AWS::SNS::Topic", "Properties": {"DisplayName": display_name}},
            "Mail": {"Type": "AWS::SNS::Subscription", "Properties": subscription},
            "Policy": {"Type": "AWS::SNS::TopicPolicy", "Properties": policy},
        }

    sns = clients("sns")
    with stack(clients, "gap-topic", resources("first"), Arn={"Ref": "It"}, Name=attribute("TopicName")) as outputs:
        update(clients, "gap-topic", resources("second"), Arn={"Ref": "It"}, Name=attribute("TopicName"))
        shown = sns.get_topic_attributes(TopicArn=outputs["Arn"])["Attributes"]
        assert shown["DisplayName"] == "second"
        assert json.loads(shown["Policy"])["Statement"][0]["Principal"] == {"Service": "events.amazonaws.com"}
        (mail,) = sns.list_subscriptions_by_topic(TopicArn=outputs["Arn"])["Subscriptions"]
        assert mail["Endpoint"] == "someone@example.org"
    assert outputs["Arn"] not in {topic["TopicArn"] for topic in sns.list_topics()["Topics"]}


def queue_and_its_policy(clients: Clients) -> None:
    statement = {"Effect": "Allow", "Principal": "*", "Action": "sqs:SendMessage", "Resource": "*"}
    policy = {"Queues": [{"Ref": "It"}], "PolicyDocument": {"Version": "2012-10-17", "Statement": [statement]}}
    resources = {
        "It": {"Type": "AWS::SQS::Queue", "Properties": {"MessageRetentionPeriod": 1209600}},
        "Policy": {"Type": "AWS::SQS::QueuePolicy", "Properties": policy},
    }
    with stack(clients, "gap-queue", resources, Url={"Ref": "It"}) as outputs:
        shown = clients("sqs").get_queue_attributes(QueueUrl=outputs["Url"], AttributeNames=["All"])["Attributes"]
        assert shown["MessageRetentionPeriod"] == "1209600"
        assert json.loads(shown["Policy"])["Statement"][0]["Action"] == "sqs:SendMessage"


def rule_keeps_its_name_and_swaps_targets(clients: Clients) -> None:
    def resources(target: str, status: str) -> dict[str, Any]:
        properties = {
            "EventPattern": {"source": ["aws.batch"], "detail": {"status": [status]}},
            "State": "ENABLED",
            "Targets": [{"Id": target, "Arn": f"arn:aws:sqs:us-east-1:123456789012:{target}"}],
        }
        return {"It": {"Type": "AWS::Events::Rule", "Properties": properties}}

    events = clients("events")
    with stack(clients, "gap-rule", resources("one", "FAILED"), Name={"Ref": "It"}, Arn=attribute("Arn")) as outputs:
        events.put_targets(Rule=outputs["Name"], Targets=[{"Id": "mine", "Arn": "arn:aws:sqs:us-east-1:1:mine"}])
        changed = update(clients, "gap-rule", resources("two", "SUCCEEDED"), Name={"Ref": "It"}, Arn=attribute("Arn"))
        assert changed == outputs
        targets = events.list_targets_by_rule(Rule=outputs["Name"])["Targets"]
        assert sorted(target["Id"] for target in targets) == ["mine", "two"]  # that of another stays
        shown = events.describe_rule(Name=outputs["Name"])
        assert json.loads(shown["EventPattern"])["detail"] == {"status": ["SUCCEEDED"]}
        events.remove_targets(Rule=outputs["Name"], Ids=["mine"])
    assert outputs["Name"] not in {rule["Name"] for rule in events.list_rules()["Rules"]}


def alarms_and_dashboard(clients: Clients) -> None:
    def resources(threshold: int) -> dict[str, Any]:
        alarm = {
            "MetricName": "Failed",
            "Namespace": "Jobs",
            "Statistic": "Sum",
            "Period": 300,
            "EvaluationPeriods": 1,
            "Threshold": threshold,
            "ComparisonOperator": "GreaterThanThreshold",
            "Dimensions": [{"Name": "Queue", "Value": "spot"}],
            "TreatMissingData": "notBreaching",
        }
        dashboard = {"DashboardName": "gap", "DashboardBody": json.dumps({"widgets": [{"threshold": threshold}]})}
        return {
            "It": {"Type": "AWS::CloudWatch::Alarm", "Properties": alarm},
            "Board": {"Type": "AWS::CloudWatch::Dashboard", "Properties": dashboard},
        }

    cloudwatch = clients("cloudwatch")
    with stack(clients, "gap-alarm", resources(1), Name={"Ref": "It"}, Arn=attribute("Arn")) as outputs:
        assert update(clients, "gap-alarm", resources(2), Name={"Ref": "It"}, Arn=attribute("Arn")) == outputs
        (alarm,) = cloudwatch.describe_alarms(AlarmNames=[outputs["Name"]])["MetricAlarms"]
        assert (alarm["Threshold"], alarm["AlarmArn"]) == (2.0, outputs["Arn"])
        assert alarm["Dimensions"] == [{"Name": "Queue", "Value": "spot"}]
        assert '"threshold": 2' in cloudwatch.get_dashboard(DashboardName="gap")["DashboardBody"]
    assert not cloudwatch.describe_alarms(AlarmNames=[outputs["Name"]])["MetricAlarms"]


def metric_filter(clients: Clients) -> None:
    def resources(pattern: str) -> dict[str, Any]:
        transformation = {"MetricNamespace": "Jobs", "MetricName": "HpuUtilization", "MetricValue": "$.hpu"}
        properties = {
            "LogGroupName": {"Ref": "Group"},
            "FilterPattern": pattern,
            "MetricTransformations": [transformation],
        }
        return {
            "Group": {"Type": "AWS::Logs::LogGroup", "Properties": {"LogGroupName": "gap-metrics"}},
            "It": {"Type": "AWS::Logs::MetricFilter", "Properties": properties},
        }

    logs = clients("logs")
    with stack(clients, "gap-filter", resources("{ $.hpu = * }"), Name={"Ref": "It"}) as outputs:
        assert update(clients, "gap-filter", resources("{ $.hpu > 0 }"), Name={"Ref": "It"}) == outputs
        found = logs.describe_metric_filters(logGroupName="gap-metrics")["metricFilters"]
        assert [(one["filterName"], one["filterPattern"]) for one in found] == [(outputs["Name"], "{ $.hpu > 0 }")]
        assert found[0]["metricTransformations"][0]["metricValue"] == "$.hpu"
    assert not logs.describe_metric_filters(filterNamePrefix=outputs["Name"])["metricFilters"]


def budget(clients: Clients) -> None:
    def resources(amount: int) -> dict[str, Any]:
        limit = {"Amount": amount, "Unit": "USD"}
        properties = {
            "Budget": {"BudgetType": "COST", "TimeUnit": "MONTHLY", "BudgetName": "gap", "BudgetLimit": limit},
            "NotificationsWithSubscribers": [
                {
                    "Notification": {
                        "NotificationType": "ACTUAL",
                        "ComparisonOperator": "GREATER_THAN",
                        "Threshold": 80,
                    },
                    "Subscribers": [{"SubscriptionType": "SNS", "Address": "arn:aws:sns:us-east-1:123456789012:t"}],
                }
            ],
        }
        return {"It": {"Type": "AWS::Budgets::Budget", "Properties": properties}}

    budgets, account = clients("budgets"), "123456789012"
    with stack(clients, "gap-budget", resources(100), Name={"Ref": "It"}):
        assert update(clients, "gap-budget", resources(200), Name={"Ref": "It"}) == {"Name": "gap"}
        shown = budgets.describe_budget(AccountId=account, BudgetName="gap")["Budget"]
        assert float(shown["BudgetLimit"]["Amount"]) == 200
        (notice,) = budgets.describe_notifications_for_budget(AccountId=account, BudgetName="gap")["Notifications"]
        assert notice["Threshold"] == 80
    assert not budgets.describe_budgets(AccountId=account)["Budgets"]


def repository_with_lifecycle(clients: Clients) -> None:
    def resources(days: int) -> dict[str, Any]:
        rule = {
            "rulePriority": 1,
            "selection": {
                "tagStatus": "untagged",
                "countType": "sinceImagePushed",
                "countUnit": "days",
                "countNumber": days,
            },
            "action": {"type": "expire"},
        }
        properties = {
            "RepositoryName": "gap/images",
            "ImageTagMutability": "IMMUTABLE",
            "ImageScanningConfiguration": {"ScanOnPush": True},
            "LifecyclePolicy": {"LifecyclePolicyText": json.dumps({"rules": [rule]})},
        }
        return {"It": {"Type": "AWS::ECR::Repository", "Properties": properties}}

    ecr = clients("ecr")
    with stack(clients, "gap-ecr", resources(7), Uri=attribute("RepositoryUri")) as outputs:
        assert update(clients, "gap-ecr", resources(14), Uri=attribute("RepositoryUri")) == outputs
        (shown,) = ecr.describe_repositories(repositoryNames=["gap/images"])["repositories"]
        assert shown["imageTagMutability"] == "IMMUTABLE"
        assert shown["imageScanningConfiguration"] == {"scanOnPush": True}
        assert shown["repositoryUri"] == outputs["Uri"]
        policy = json.loads(ecr.get_lifecycle_policy(repositoryName="gap/images")["lifecyclePolicyText"])
        assert policy["rules"][0]["selection"]["countNumber"] == 14
    left = {repository["repositoryName"] for repository in ecr.describe_repositories()["repositories"]}
    assert "gap/images" not in left


def build_project(clients: Clients) -> None:
    def resources(minutes: int) -> dict[str, Any]:
        properties = {
            "Name": "gap-build",
            "ServiceRole": attribute("Arn", "Role"),
            "Source": {"Type": "S3", "Location": "assets/source.zip", "BuildSpec": "version: 0.2"},
            "Artifacts": {"Type": "NO_ARTIFACTS"},
            "Environment": {
                "Type": "LINUX_CONTAINER",
                "ComputeType": "BUILD_GENERAL1_LARGE",
                "Image": "aws/codebuild/standard:7.0",
                "PrivilegedMode": True,
                "EnvironmentVariables": [{"Name": "RELEASE", "Value": "1.21.0", "Type": "PLAINTEXT"}],
            },
            "TimeoutInMinutes": minutes,
        }
        return {"Role": LAMBDA_ROLE, "It": {"Type": "AWS::CodeBuild::Project", "Properties": properties}}

    codebuild = clients("codebuild")
    with stack(clients, "gap-codebuild", resources(60), Arn=attribute("Arn")) as outputs:
        assert update(clients, "gap-codebuild", resources(90), Arn=attribute("Arn")) == outputs
        (project,) = codebuild.batch_get_projects(names=["gap-build"])["projects"]
        assert project["timeoutInMinutes"] == 90
        assert project["environment"]["environmentVariables"][0]["value"] == "1.21.0"
    assert "gap-build" not in codebuild.list_projects()["projects"]


def file_system(clients: Clients) -> None:
    properties = {
        "FileSystemType": "LUSTRE",
        "StorageCapacity": 1200,
        "SubnetIds": ["subnet-12345678"],
        "LustreConfiguration": {"DeploymentType": "SCRATCH_2"},
        "Tags": [{"Key": "team", "Value": "all"}],
    }
    resources = {"It": {"Type": "AWS::FSx::FileSystem", "Properties": properties}}
    outputs = {"Id": {"Ref": "It"}, "Dns": attribute("DNSName"), "Mount": attribute("LustreMountName")}
    fsx = clients("fsx")
    with stack(clients, "gap-fsx", resources, **outputs) as shown:
        (found,) = fsx.describe_file_systems(FileSystemIds=[shown["Id"]])["FileSystems"]
        assert (found["StorageCapacity"], found["DNSName"]) == (1200, shown["Dns"])
        assert shown["Mount"]
    assert not fsx.describe_file_systems()["FileSystems"]


def schedule(clients: Clients) -> None:
    def resources(expression: str) -> dict[str, Any]:
        target = {"Arn": "arn:aws:lambda:us-east-1:123456789012:function:f", "RoleArn": attribute("Arn", "Role")}
        properties = {
            "Name": "gap",
            "GroupName": {"Ref": "Group"},
            "ScheduleExpression": expression,
            "FlexibleTimeWindow": {"Mode": "OFF"},
            "Target": target,
        }
        return {
            "Role": LAMBDA_ROLE,
            "Group": {"Type": "AWS::Scheduler::ScheduleGroup", "Properties": {"Name": "gap-group"}},
            "It": {"Type": "AWS::Scheduler::Schedule", "Properties": properties},
        }

    scheduler = clients("scheduler")
    with stack(clients, "gap-schedule", resources("rate(1 hour)")):
        update(clients, "gap-schedule", resources("rate(2 hours)"))
        shown = scheduler.get_schedule(Name="gap", GroupName="gap-group")
        assert shown["ScheduleExpression"] == "rate(2 hours)"
    assert not scheduler.list_schedules()["Schedules"]


def function_with_all_about_it(clients: Clients) -> None:
    s3 = clients("s3")
    s3.create_bucket(Bucket="gap-code")
    for key, greeting in (("one.zip", "one"), ("two.zip", "two")):
        whole = io.BytesIO()
        with zipfile.ZipFile(whole, "w") as archive:
            archive.writestr("index.py", f"def handler(event, context): return '{greeting}'")
        s3.put_object(Bucket="gap-code", Key=key, Body=whole.getvalue())

    def resources(code: str, source: str) -> dict[str, Any]:
        properties = {
            "FunctionName": "gap-function",
            "Runtime": "python3.13",
            "Handler": "index.handler",
            "Role": attribute("Arn", "Role"),
            "Code": {"S3Bucket": "gap-code", "S3Key": code},
            "Timeout": 20,
            "LoggingConfig": {"LogGroup": {"Ref": "Group"}},
            "DeadLetterConfig": {"TargetArn": attribute("Arn", "Dead")},
            "Environment": {"Variables": {"CODE": code}},
            "Tags": [{"Key": "stage", "Value": "dev"}],
        }
        permission = {
            "FunctionName": {"Ref": "It"},
            "Action": "lambda:InvokeFunction",
            "Principal": "events.amazonaws.com",
            "SourceArn": source,
        }
        config = {"FunctionName": {"Ref": "It"}, "Qualifier": "$LATEST", "MaximumRetryAttempts": 1}
        return {
            "Role": LAMBDA_ROLE,
            "Dead": {"Type": "AWS::SQS::Queue"},
            "Group": {"Type": "AWS::Logs::LogGroup", "Properties": {"LogGroupName": "gap-function-logs"}},
            "It": {"Type": "AWS::Lambda::Function", "Properties": properties},
            "Permission": {"Type": "AWS::Lambda::Permission", "Properties": permission},
            "Async": {"Type": "AWS::Lambda::EventInvokeConfig", "Properties": config},
        }

    functions = clients("lambda")
    with stack(clients, "gap-function", resources("one.zip", "arn:one"), Arn=attribute("Arn")) as outputs:
        assert update(clients, "gap-function", resources("two.zip", "arn:two"), Arn=attribute("Arn")) == outputs
        shown = functions.get_function(FunctionName="gap-function")
        assert shown["Configuration"]["LoggingConfig"]["LogGroup"] == "gap-function-logs"
        assert shown["Configuration"]["DeadLetterConfig"]["TargetArn"].startswith("arn:aws:sqs:")
        assert shown["Configuration"]["Environment"] == {"Variables": {"CODE": "two.zip"}}
        assert shown["Tags"] == {"stage": "dev"}
        (statement,) = json.loads(functions.get_policy(FunctionName="gap-function")["Policy"])["Statement"]
        assert statement["Condition"] == {"ArnLike": {"AWS:SourceArn": "arn:two"}}
        config = functions.get_function_event_invoke_config(FunctionName="gap-function")
        assert config["MaximumRetryAttempts"] == 1
        answer = functions.invoke(FunctionName="gap-function")
        assert json.loads(answer["Payload"].read()) == "two"
    with pytest.raises(ClientError, match="ResourceNotFoundException"):
        functions.get_function(FunctionName="gap-function")


GAPS = (
    topic_with_subscribers,
    queue_and_its_policy,
    rule_keeps_its_name_and_swaps_targets,
    alarms_and_dashboard,
    metric_filter,
    budget,
    repository_with_lifecycle,
    build_project,
    file_system,
    schedule,
    function_with_all_about_it,
)
