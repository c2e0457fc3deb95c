"""A month's budget of what carries certain tags: it warns, and at its end tells a function to stop."""

from collections.abc import Mapping

from aws_cdk import aws_budgets as budgets
from aws_cdk import aws_sns as sns
from constructs import Construct

from infra.observability.alerts import Topic

WARN_PERCENT = 80


class MonthlyBudget(Construct):
    """Warns `alerts` at 80 % (spent, or forecast for the month's end) and at 100 %; at 100 % `used_up` hears as well.

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
                _notification("ACTUAL", WARN_PERCENT, alerts),
                _notification("FORECASTED", WARN_PERCENT, alerts),
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
