"""The budgets of a stage and its teams, and the function that stops new work on a used-up budget."""

import json
from collections.abc import Mapping, Sequence

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
    """The budgets of a stage, and the function that keeps new jobs from starting on a used-up budget.

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
        deployments: Sequence[str],
    ) -> None:
        """Create the budgets. `deployments`: names of other stacks whose deployment may undo a stop."""
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
        self._allow()
        self._allow_stopping_members()
        self._admit_topics()
        if stage.monthly_budget_usd is not None:
            self._budget("Stage", STAGE_BUDGET, stage.monthly_budget_usd)
        for team in stage.teams:
            if team.monthly_budget_usd is not None:
                tags = {"trainyard:team": team.name}
                self._budget(f"Team-{team.name}", TEAM_BUDGETS + team.name, team.monthly_budget_usd, **tags)
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

    def _budget(self, name: str, parameter: str, limit_usd: float, **tags: str) -> None:
        """Create a budget, and a topic for reaching its limit. The function identifies the budget by the topic."""
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

    def _allow(self) -> None:
        role, stack, path = self._function.execution_role, self._stack, parameter_path(self._stage.name)
        environments = stack.format_arn(service="batch", resource="compute-environment", resource_name="*")
        waiting = stack.format_arn(service="batch", resource="job", resource_name="*")
        # GetParametersByPath needs permission on the path itself.
        at, below, *stops = (
            stack.format_arn(service="ssm", resource="parameter", resource_name=name.strip("/"))
            for name in (path, f"{path}*", path + stop_parameter(None), path + stop_parameter("*"))
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
            *("*", environments, waiting, below, stops[1]),
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
    """A monthly budget for the costs of resources with certain tags.

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
        budget = budgets.CfnBudget(
            self,
            "Resource",
            # No name: CloudFormation replaces a budget whose notifications change, and two cannot have the same name.
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
