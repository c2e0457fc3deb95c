"""Alerts to people: a topic, its subscribers, and one call for each thing to be told of."""

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

_QUEUES_OF_A_RULE = 10
"""A pattern has 2,048 characters (EventBridge's quotas, "Event pattern size"), some 140 of which are not of queues. An
ARN has up to 190 with quotes and comma: 59 where partition and region are longest, and 128 of the queue's name."""


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
    """Make the rules by which `target` gets Batch's events of a type; `detail`: what they say besides their queue.

    `dead_letters`: where events go that the target does not take; see `admit_dead_letters`.
    """
    rules = []
    for number, start in enumerate(range(0, len(queues), _QUEUES_OF_A_RULE), start=1):
        rule = events.Rule(
            scope,
            # The first one keeps its name, however many queues there are.
            name if number == 1 else f"{name}{number}",
            description=description,
            event_pattern=events.EventPattern(
                source=["aws.batch"],
                detail_type=[detail_type],
                detail={"jobQueue": list(queues[start : start + _QUEUES_OF_A_RULE]), **(detail or {})},
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
    """Let the stage's rules send to `dead_letters`, all by one statement.

    A queue's policy has 20 of them at most (SQS's quotas, "Policies"), and CDK would add one for each rule.
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
    """A topic that takes messages over TLS only, encrypted with the stage's own key where it has one."""

    def __init__(self, scope: Construct, name: str, *, key: kms.IKey | None, publishers: Sequence[str]) -> None:
        """`publishers`: AWS services that publish to it, on behalf of this account only."""
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
                "AWS's own key for SNS admits no service that publishes here, and a key of one's own is paid for each "
                "month: own_kms_key of the settings makes it. Messages name runs and reasons, never data or secrets.",
                "NIST.800.53.R5-SNSEncryptedKMS",
            )


class Alerts(Construct):
    """The stage's alerts. A new one is a call of `on_event` or `alarm`."""

    def __init__(self, scope: Construct, name: str, *, key: kms.IKey | None, emails: Sequence[str]) -> None:
        super().__init__(scope, name)
        # EventBridge is admitted by its targets, without a condition: it supports none in a topic's policy.
        self.topic = Topic(self, "Topic", key=key, publishers=["cloudwatch.amazonaws.com", "budgets.amazonaws.com"])
        for address in emails:
            self.topic.add_subscription(subscriptions.EmailSubscription(address))

    def on_event(
        self, name: str, *, detail_type: str, queues: Sequence[str], text: str, description: str
    ) -> list[events.Rule]:
        """Publish `text` at each such event of Batch's; in it events.EventField stands for what the event says."""
        target = targets.SnsTopic(self.topic, message=events.RuleTargetInput.from_text(text))
        return queue_rules(self, name, detail_type=detail_type, queues=queues, target=target, description=description)

    def alarm(self, name: str, metric: cloudwatch.IMetric, *, at_least: float, text: str) -> cloudwatch.Alarm:
        """Make an alarm that is raised once the metric's one period reaches `at_least`; no value means all is well."""
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
