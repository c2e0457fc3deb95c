"""EventBridge's rules for events of a stage's queues: as many as the length of an event pattern asks for.

The name of a queue is CloudFormation's, and nothing of it is the stage's alone: a pattern that asks for a prefix would
take in another stage's events, so the rules name every queue.
"""

from collections.abc import Mapping, Sequence

import aws_cdk as cdk
from aws_cdk import aws_events as events
from aws_cdk import aws_iam as iam
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from infra.access.permissions_boundary import name_prefix

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
