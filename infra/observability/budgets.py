"""The budgets and hourly limits of a stage and its teams, and the function that stops new work at one."""

import json
from collections.abc import Mapping, Sequence

import aws_cdk as cdk
from aws_cdk import aws_budgets as budgets
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from infra.access.permissions_boundary import name_prefix
from infra.constructs.stage_stack import StageStack
from infra.job.roles import MEMBER_TAG
from infra.observability.alerts import Alerts, Topic
from infra.observability.event_functions import EventFunction
from infra.observability.functions.stop_at_budget import (
    STAGE_BUDGET,
    STAGE_LIMIT,
    STOP_TAG,
    TEAM_BUDGETS,
    TEAM_LIMITS,
    hourly_stop_parameter,
    stop_parameter,
)
from infra.observability.functions.watch_instances import SPEND
from jobs.core.stage import parameter_path

_WARN_PERCENT = 80


class BudgetStop(Construct):
    """The budgets and hourly limits of a stage, and the function that keeps new jobs from starting at one.

    AWS's budget actions (AWS::Budgets::BudgetsAction) can set an IAM policy, but instances are launched by Batch's
    service-linked role, which no policy reaches. Each action also costs money by the day. So a function stops new jobs.
    """

    def __init__(
        self,
        stack: StageStack,
        name: str,
        *,
        alerts: Alerts,
        key: kms.IKey | None,
        dead_letters: sqs.IQueue,
        namespace: str,
        deployments: Sequence[str],
    ) -> None:
        """Create the budgets, and alarms on metrics in `namespace`.

        `deployments`: names of other stacks whose deployment may undo a stop.
        """
        super().__init__(stack, name)
        stage = self._stage = stack.stage_row
        self._stack = stack
        self._alerts = alerts
        self._key = key
        self._dead_letters = dead_letters
        self._function = EventFunction(
            self,
            "Function",
            file="stop_at_budget",
            description="Stops new work on a used-up budget",
            environment={
                "STAGE": stage.name,
                "TOPIC_ARN": alerts.topic.topic_arn,
                "PARAMETER_PATH": parameter_path(stage.name),
            },
            dead_letters=dead_letters,
            log_retention_days=stage.log_retention_days,
        )
        self._function.may_publish(alerts.topic, key)
        self.alarms: list[cloudwatch.Alarm] = []
        """The alarms of hourly limits."""
        self._allow()
        self._allow_stopping_members()
        self._admit_topics()
        if stage.monthly_budget_usd is not None:
            tags = {} if stage.dedicated_account else {"trainyard:stage": stage.name}
            self._budget("Stage", STAGE_BUDGET, stage.monthly_budget_usd, **tags)
        for team in stage.teams:
            if team.monthly_budget_usd is not None:
                tags = {"trainyard:stage": stage.name, "trainyard:team": team.name}
                self._budget(f"Team-{team.name}", TEAM_BUDGETS + team.name, team.monthly_budget_usd, **tags)
        if stage.hourly_limits:
            self._limit_hourly_cost(namespace)
        self._review_after(deployments)

    def _review_after(self, deployments: Sequence[str]) -> None:
        """Call the function at the start of each month, and after deployments of these stacks and this one."""
        target = targets.LambdaFunction(self._function, dead_letter_queue=self._dead_letters)
        events.Rule(
            self,
            "NewMonth",
            description="Budgets start over, in UTC like AWS's months",
            schedule=events.Schedule.cron(minute="5", hour="0", day="1"),
            targets=[target],
        )
        # Updating a compute environment enables it again, updating a role may drop its tag, and roles may be replaced;
        # or the budget may have been raised.
        events.Rule(
            self,
            "Deployed",
            description="A deployment may have undone a budget stop, or raised the budget",
            event_pattern=events.EventPattern(
                source=["aws.cloudformation"],
                detail_type=["CloudFormation Stack Status Change"],
                detail={
                    "stack-id": [
                        {
                            "prefix": self._stack.format_arn(
                                service="cloudformation", resource="stack", resource_name=f"{name}/"
                            )
                        }
                        for name in (*deployments, self._stack.stack_name)
                    ],
                    # Recreated resources do not have the stop that was written before they were destroyed.
                    "status-details": {"status": ["CREATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE"]},
                },
            ),
            targets=[target],
        )

    def _admit_topics(self) -> None:
        """Let the stack's topics call the function, with one statement, because policies have limited size."""
        topics = self._stack.format_arn(service="sns", resource=f"{self._stack.stack_name}-*")
        service = iam.ServicePrincipal("sns.amazonaws.com")
        self._function.add_permission("Budgets", principal=service, source_arn=topics)
        self._dead_letters.add_to_resource_policy(
            iam.PolicyStatement(
                sid="FromBudgets",
                principals=[service],
                actions=["sqs:SendMessage"],
                resources=[self._dead_letters.queue_arn],
                conditions={"ArnLike": {"aws:SourceArn": topics}},
            )
        )

    def _topic(self, name: str, subscription: str, publisher: str) -> Topic:
        """Create a topic that calls the function."""
        topic = Topic(self, name, key=self._key, publishers=[publisher])
        sns.CfnSubscription(
            self,
            subscription,
            topic_arn=topic.topic_arn,
            protocol="lambda",
            endpoint=self._function.function_arn,
            redrive_policy={"deadLetterTargetArn": self._dead_letters.queue_arn},
        )
        return topic

    def _limit_hourly_cost(self, namespace: str) -> None:
        """Create an alarm for each hourly limit. Each change of its state calls the function, which reads all states.

        The metric arrives every five minutes. If it does not, the alarm keeps its state: a stop must not end because
        the cost is unknown.
        """
        action = actions.SnsAction(self._topic("HourlyLimits", "HourlyLimitsStop", "cloudwatch.amazonaws.com"))
        for team, limit in self._stage.hourly_limits.items():
            owner = f"team {team} (stage {self._stage.name})" if team else f"stage {self._stage.name}"
            alarm = cloudwatch.Alarm(
                self,
                f"Team-{team}HourlyLimit" if team else "StageHourlyLimit",
                alarm_description=f"The instances of {owner} cost more than max_usd_per_hour, {limit:g} USD an hour. "
                "No other instance starts until they cost less.",
                metric=cloudwatch.Metric(
                    namespace=namespace,
                    metric_name=SPEND,
                    dimensions_map={"Team": team} if team else {"Stage": self._stage.name},
                    statistic="Maximum",
                    period=cdk.Duration.minutes(5),
                ),
                threshold=limit,
                evaluation_periods=1,
                comparison_operator=cloudwatch.ComparisonOperator.GREATER_THAN_THRESHOLD,
                treat_missing_data=cloudwatch.TreatMissingData.IGNORE,
            )
            alarm.add_alarm_action(action)
            alarm.add_ok_action(action)
            self.alarms.append(alarm)
            value = json.dumps({"usd_per_hour": limit, "alarm": alarm.alarm_name})
            self._stack.publish(TEAM_LIMITS + team if team else STAGE_LIMIT, value)
        role = self._function.execution_role
        # Narrower than all alarms, which DescribeAlarms admits for alarms on metrics (API reference, DescribeAlarms).
        alarms = self._stack.format_arn(
            service="cloudwatch",
            resource="alarm",
            resource_name=f"{self._stack.stack_name}-*",
            arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
        )
        role.allow("ReadAlarms", ["cloudwatch:DescribeAlarms"], alarms)
        role.explain("CloudFormation generates the alarms' names, which begin with the name of this stack", alarms)

    def _budget(self, name: str, parameter: str, limit_usd: float, **tags: str) -> None:
        """Create a budget of what has `tags`, or of the whole account, and a topic for reaching its limit.

        The function identifies the budget by the topic.
        """
        topic = self._topic(f"{name}UsedUp", f"{name}Stops", "budgets.amazonaws.com")
        self._stack.publish(parameter, json.dumps({"limit_usd": limit_usd, "topic": topic.topic_arn}))
        _MonthlyBudget(
            self,
            f"{name}Budget",
            limit_usd=limit_usd,
            tags=tags,
            alerts=self._alerts.topic,
            used_up=topic,
        )

    def _allow(self) -> None:
        role, stack, path = self._function.execution_role, self._stack, parameter_path(self._stage.name)
        environments = stack.format_arn(service="batch", resource="compute-environment", resource_name="*")
        waiting = stack.format_arn(service="batch", resource="job", resource_name="*")
        # GetParametersByPath needs permission on the path itself.
        at, below, *stops = (
            stack.format_arn(service="ssm", resource="parameter", resource_name=name.strip("/"))
            for name in (
                *(path, f"{path}*"),
                *(path + stop(team) for stop in (stop_parameter, hourly_stop_parameter) for team in (None, "*")),
            )
        )
        role.allow(
            "ReadJobs",
            ["batch:DescribeComputeEnvironments", "batch:DescribeJobQueues", "batch:DescribeJobs", "batch:ListJobs"],
            "*",
        )
        role.allow(
            "StopAndStartEnvironments",
            ["batch:UpdateComputeEnvironment"],
            environments,
            conditions={"StringEquals": {"aws:ResourceTag/trainyard:stage": self._stage.name}},
        )
        role.allow(
            "CancelWaitingJobs",
            ["batch:CancelJob"],
            waiting,
            conditions={
                "StringEquals": {
                    "aws:ResourceTag/trainyard:stage": self._stage.name,
                    "aws:ResourceTag/trainyard:team": [team.name for team in self._stage.teams],
                }
            },
        )
        role.allow("ReadStage", ["ssm:GetParametersByPath"], at, below)
        role.allow("RecordStops", ["ssm:PutParameter", "ssm:DeleteParameter"], *stops)
        role.explain(
            "Batch supports no resources for reading; names of environments and jobs are generated, and tags identify "
            "those of the stage; each team has its own parameter for a stop.",
            *("*", environments, waiting, below, stops[1], stops[3]),
        )

    def _allow_stopping_members(self) -> None:
        """Let the function set one tag on the members' roles. The tag can only take a permission away."""
        stage = self._stage.name
        roles = self._stack.format_arn(
            service="iam", region="", resource="role", resource_name=f"{name_prefix(stage)}*"
        )
        key, value = MEMBER_TAG
        self._function.execution_role.allow(
            "StopMembers",
            ["iam:TagRole", "iam:UntagRole"],
            roles,
            conditions={
                "StringEquals": {"aws:ResourceTag/trainyard:stage": stage, f"aws:ResourceTag/{key}": value},
                "ForAllValues:StringEquals": {"aws:TagKeys": [STOP_TAG]},
            },
        )
        self._function.execution_role.explain(
            "CloudFormation generates the roles' names; their tags limit this to the members of the stage's teams",
            roles,
        )


class _MonthlyBudget(Construct):
    """A monthly budget for the costs of resources with certain tags, or without tags for all of the account.

    It notifies `alerts` at 80 % (spent, or forecast for the end of the month) and at 100 %, and `used_up` at 100 %. AWS
    reports spending up to a day late, and by tag only after the tags are activated as cost allocation tags in the
    paying account.
    """

    def __init__(
        self,
        scope: Construct,
        name: str,
        *,
        limit_usd: float,
        tags: Mapping[str, str],
        alerts: Topic,
        used_up: Topic,
    ) -> None:
        super().__init__(scope, name)
        by_tag = [
            budgets.CfnBudget.ExpressionProperty(
                tags=budgets.CfnBudget.TagValuesProperty(key=key, values=[value], match_options=["EQUALS"])
            )
            for key, value in tags.items()
        ]
        expression = budgets.CfnBudget.ExpressionProperty(and_=by_tag) if len(by_tag) > 1 else next(iter(by_tag), None)
        budget = budgets.CfnBudget(
            self,
            "Resource",
            # No name: CloudFormation replaces a budget whose notifications change, and two cannot have the same name.
            budget=budgets.CfnBudget.BudgetDataProperty(
                budget_type="COST",
                time_unit="MONTHLY",
                budget_limit=budgets.CfnBudget.SpendProperty(amount=limit_usd, unit="USD"),
                filter_expression=expression,
                metrics=["UnblendedCost"],
            ),
            notifications_with_subscribers=[
                _notification("ACTUAL", _WARN_PERCENT, alerts),
                _notification("FORECASTED", _WARN_PERCENT, alerts),
                # A notification has one topic. The function that this topic calls alerts people.
                _notification("ACTUAL", 100, used_up),
            ],
        )
        # When created, AWS Budgets checks the topics' policies for its permission to publish.
        for topic in (alerts, used_up):
            budget.node.add_dependency(topic.node.find_child("Policy"))


def _notification(
    kind: str, percent: float, topic: sns.ITopic
) -> budgets.CfnBudget.NotificationWithSubscribersProperty:
    return budgets.CfnBudget.NotificationWithSubscribersProperty(
        notification=budgets.CfnBudget.NotificationProperty(
            notification_type=kind,
            comparison_operator="GREATER_THAN",
            threshold=percent,
            threshold_type="PERCENTAGE",
        ),
        subscribers=[budgets.CfnBudget.SubscriberProperty(subscription_type="SNS", address=topic.topic_arn)],
    )
