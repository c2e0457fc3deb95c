"""Alerts: a topic with its subscribers, alarms, and rules that forward Batch's events.

Queue names are generated, and no prefix of them belongs to the stage alone, so the rules list the queues' ARNs.
"""

from collections.abc import Mapping, Sequence

import aws_cdk as cdk
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from infra.access.permissions_boundary import name_prefix
from infra.constructs.stage_stack import acknowledge

_QUEUES_PER_RULE = 10
"""A pattern has at most 2,048 characters (EventBridge quotas, "Event pattern size"), of which about 140 are not ARNs.
An ARN with quotes and comma has at most 190: 59 with the longest partition and region, and 128 for the queue's name."""


def queue_rules(
    scope: Construct,
    name: str,
    *,
    detail_type: str,
    queues: Sequence[str],
    target: events.IRuleTarget,
    description: str | None = None,
    dead_letters: sqs.IQueue | None = None,
    detail: Mapping[str, list[str]] | None = None,
) -> list[events.Rule]:
    """Create the rules that send Batch's events of a type to `target`; `detail` adds conditions besides the queue.

    `dead_letters` receives events that the target does not accept; see `admit_dead_letters`.
    """
    rules = []
    for number, start in enumerate(range(0, len(queues), _QUEUES_PER_RULE), start=1):
        rule = events.Rule(
            scope,
            # The first rule keeps its id, however many queues there are.
            name if number == 1 else f"{name}{number}",
            description=description,
            event_pattern=events.EventPattern(
                source=["aws.batch"],
                detail_type=[detail_type],
                detail={"jobQueue": list(queues[start : start + _QUEUES_PER_RULE]), **(detail or {})},
            ),
            targets=[target],
        )
        if dead_letters:
            resource = rule.node.default_child
            assert isinstance(resource, events.CfnRule)  # noqa: S101 - narrows the type
            resource.add_property_override("Targets.0.DeadLetterConfig.Arn", dead_letters.queue_arn)
        rules.append(rule)
    return rules


def admit_dead_letters(dead_letters: sqs.IQueue, *, stage: str) -> None:
    """Let all of the stage's rules send to `dead_letters`, with one statement.

    A queue's policy has at most 20 statements (SQS quotas, "Policies"), and the CDK would add one per rule.
    """
    rules = cdk.Stack.of(dead_letters).format_arn(
        service="events", resource="rule", resource_name=f"{name_prefix(stage)}*"
    )
    dead_letters.add_to_resource_policy(
        iam.PolicyStatement(
            sid="RulesOfQueues",
            principals=[iam.ServicePrincipal("events.amazonaws.com")],
            actions=["sqs:SendMessage"],
            resources=[dead_letters.queue_arn],
            conditions={"ArnLike": {"aws:SourceArn": rules}},
        )
    )


class Topic(sns.Topic):
    """A topic that only accepts messages over TLS, encrypted with the stage's own key if there is one."""

    def __init__(self, scope: Construct, name: str, *, key: kms.IKey | None, publishers: Sequence[str]) -> None:
        """Create the topic. `publishers`: AWS services that may publish to it, only for this account."""
        super().__init__(scope, name, master_key=key, enforce_ssl=True)
        account = cdk.Stack.of(self).account
        for service in publishers:
            self.add_to_resource_policy(
                iam.PolicyStatement(
                    sid=f"From{service.split('.', maxsplit=1)[0].capitalize()}",
                    principals=[iam.ServicePrincipal(service)],
                    actions=["sns:Publish"],
                    resources=[self.topic_arn],
                    conditions={"StringEquals": {"aws:SourceAccount": account}},
                )
            )
        if key is None:
            acknowledge(
                self,
                "AWS's key for SNS admits none of the services that publish here, and the stage's own key, which "
                "own_kms_key creates, costs money. Messages contain runs and reasons, never data or secrets.",
                "NIST.800.53.R5-SNSEncryptedKMS",
            )


class Alerts(Construct):
    """The stage's alerts, which `on_event` and `alarm` add."""

    def __init__(self, scope: Construct, name: str, *, key: kms.IKey | None, emails: Sequence[str]) -> None:
        super().__init__(scope, name)
        # The targets admit EventBridge, without a condition, because a topic's policy supports none for it.
        self.topic = Topic(self, "Topic", key=key, publishers=["cloudwatch.amazonaws.com", "budgets.amazonaws.com"])
        for address in emails:
            self.topic.add_subscription(subscriptions.EmailSubscription(address))

    def on_event(
        self, name: str, *, detail_type: str, queues: Sequence[str], text: str, description: str
    ) -> list[events.Rule]:
        """Publish `text` for each Batch event of this type. events.EventField inserts values of the event."""
        target = targets.SnsTopic(self.topic, message=events.RuleTargetInput.from_text(text))
        return queue_rules(self, name, detail_type=detail_type, queues=queues, target=target, description=description)

    def alarm(self, name: str, metric: cloudwatch.IMetric, *, at_least: float, text: str) -> cloudwatch.Alarm:
        """Create an alarm that is raised if the metric reaches `at_least` in one period. Missing values do not."""
        alarm = cloudwatch.Alarm(
            self,
            name,
            alarm_description=text,
            metric=metric,
            threshold=at_least,
            evaluation_periods=1,
            comparison_operator=cloudwatch.ComparisonOperator.GREATER_THAN_OR_EQUAL_TO_THRESHOLD,
            treat_missing_data=cloudwatch.TreatMissingData.NOT_BREACHING,
        )
        alarm.add_alarm_action(actions.SnsAction(self.topic))
        return alarm
