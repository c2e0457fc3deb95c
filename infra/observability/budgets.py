"""The budgets of a stage and its teams, and the function that stops what they pay for."""

import json
from collections.abc import Mapping, Sequence

import aws_cdk as cdk
from aws_cdk import aws_budgets as budgets
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
from infra.observability.functions.stop_at_budget import STAGE_BUDGET, STOP_TAG, TEAM_BUDGETS, stop_parameter
from jobs.core.stage import parameter_path

_WARN_PERCENT = 80


class BudgetStop(Construct):
    """The budgets of a stage, and the function by which nothing new starts on one that is used up.

    A budget's own action (AWS::Budgets::BudgetsAction) can set an IAM policy, but it is Batch's service-linked role,
    which no policy reaches, that launches instances; and each action is paid for by the day. So a function does it.
    """

    def __init__(
        self,
        stack: StageStack,
        name: str,
        *,
        alerts: Alerts,
        key: kms.IKey | None,
        dead_letters: sqs.IQueue,
        deployments: Sequence[str],
    ) -> None:
        """`deployments`: names of the other stacks that may undo a stop when they are deployed."""
        super().__init__(stack, name)
        stage = self._stage = stack.stage_row
        self._stack = stack
        self._alerts = alerts
        self._key = key
        self._dead_letters = dead_letters
        teams = [team for team in stage.teams if team.monthly_budget_usd is not None]
        path = parameter_path(stage.name)
        self._function = EventFunction(
            self,
            "Function",
            file="stop_at_budget",
            description="Nothing new starts on a budget that is used up",
            environment={
                "STAGE": stage.name,
                "TOPIC_ARN": alerts.topic.topic_arn,
                "PARAMETER_PATH": path,
            },
            dead_letters=dead_letters,
            log_retention_days=stage.log_retention_days,
        )
        self._function.may_publish(alerts.topic, key)
        self._allow(stack, path)
        self._allow_stopping_members()
        self._let_topics_call()
        if stage.monthly_budget_usd is not None:
            self._budget("Stage", STAGE_BUDGET, stage.monthly_budget_usd)
        for team in teams:
            assert team.monthly_budget_usd is not None  # noqa: S101 - narrows the type; chosen so above
            tags = {"trainyard:team": team.name}
            self._budget(f"Team-{team.name}", TEAM_BUDGETS + team.name, team.monthly_budget_usd, **tags)
        self._review_when_a_month_begins_and_after(deployments)

    def _review_when_a_month_begins_and_after(self, deployments: Sequence[str]) -> None:
        target = targets.LambdaFunction(self._function, dead_letter_queue=self._dead_letters)
        events.Rule(
            self,
            "NewMonth",
            description="Budgets start over, in UTC as AWS counts them",
            schedule=events.Schedule.cron(minute="5", hour="0", day="1"),
            targets=[target],
        )
        # An update of a compute environment says ENABLED again, one of a role may take its tag, and another role may
        # come in its place; and a budget may have been raised.
        events.Rule(
            self,
            "Deployed",
            description="A deployment may have let go on what a budget has stopped, or raised the budget",
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
                    # What is made anew starts without the stop that was written before it was destroyed.
                    "status-details": {"status": ["CREATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE"]},
                },
            ),
            targets=[target],
        )

    def _let_topics_call(self) -> None:
        """Let all topics of the stack call, by one statement: a queue's policy holds twenty, a function's 20 KB."""
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

    def _budget(self, name: str, parameter: str, limit_usd: float, **tags: str) -> None:
        """Make a budget with a topic that hears of its end: by it the function knows whose it is."""
        topic = Topic(self, f"{name}UsedUp", key=self._key, publishers=["budgets.amazonaws.com"])
        sns.CfnSubscription(
            self,
            f"{name}Stops",
            topic_arn=topic.topic_arn,
            protocol="lambda",
            endpoint=self._function.function_arn,
            redrive_policy={"deadLetterTargetArn": self._dead_letters.queue_arn},
        )
        self._stack.publish(parameter, json.dumps({"limit_usd": limit_usd, "topic": topic.topic_arn}))
        _MonthlyBudget(
            self,
            f"{name}Budget",
            limit_usd=limit_usd,
            tags={"trainyard:stage": self._stage.name, **tags},
            alerts=self._alerts.topic,
            used_up=topic,
        )

    def _allow(self, stack: cdk.Stack, path: str) -> None:
        function = self._function
        environments = stack.format_arn(service="batch", resource="compute-environment", resource_name="*")
        waiting = stack.format_arn(service="batch", resource="job", resource_name="*")
        # Asked for all below a path, Systems Manager looks for a permission on the path itself.
        at, below, *stops = (
            stack.format_arn(service="ssm", resource="parameter", resource_name=name.strip("/"))
            for name in (path, f"{path}*", path + stop_parameter(None), path + stop_parameter("*"))
        )
        function.execution_role.allow(
            "Look",
            ["batch:DescribeComputeEnvironments", "batch:DescribeJobQueues", "batch:DescribeJobs", "batch:ListJobs"],
            "*",
        )
        function.execution_role.allow(
            "StopAndStartEnvironments",
            ["batch:UpdateComputeEnvironment"],
            environments,
            conditions={"StringEquals": {"aws:ResourceTag/trainyard:stage": self._stage.name}},
        )
        function.execution_role.allow(
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
        function.execution_role.allow("ReadStage", ["ssm:GetParametersByPath"], at, below)
        function.execution_role.allow("RecordStops", ["ssm:PutParameter", "ssm:DeleteParameter"], *stops)
        function.execution_role.explain(
            "Batch knows no resources for reading; environments and jobs come and go under names of Batch's own, and "
            "are told by their tags; of the parameters one is written for each team.",
            *("*", environments, waiting, below, stops[1]),
        )

    def _allow_stopping_members(self) -> None:
        """Let the function put one tag on the roles of teams' people, which takes a right away and can give none."""
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
            "CloudFormation names roles; by their tags only those of the stage's teams' people are meant", roles
        )


class _MonthlyBudget(Construct):
    """A month's budget of what carries certain tags.

    It warns `alerts` at 80 % (spent, or forecast for the month's end) and at 100 %; at 100 % `used_up` hears as well.
    AWS knows what was spent up to a day late, and by tag only once the tags are activated as cost allocation tags in
    the account that pays the bill.
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
        budget = budgets.CfnBudget(
            self,
            "Resource",
            # No name: CloudFormation replaces a budget whose notifications change, and two cannot have the same.
            budget=budgets.CfnBudget.BudgetDataProperty(
                budget_type="COST",
                time_unit="MONTHLY",
                budget_limit=budgets.CfnBudget.SpendProperty(amount=limit_usd, unit="USD"),
                filter_expression=by_tag[0] if len(by_tag) == 1 else budgets.CfnBudget.ExpressionProperty(and_=by_tag),
                metrics=["UnblendedCost"],
            ),
            notifications_with_subscribers=[
                _notification("ACTUAL", _WARN_PERCENT, alerts),
                _notification("FORECASTED", _WARN_PERCENT, alerts),
                # A notification takes one topic; the function that hears this one tells the people.
                _notification("ACTUAL", 100, used_up),
            ],
        )
        # AWS Budgets looks, when it is made, whether it may publish: that is said by the topics' policies.
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
