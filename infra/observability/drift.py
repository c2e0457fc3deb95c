"""The weekly report of what was changed by hand, and the rights that CloudFormation needs to read the resources.

AWS Config's rule `cloudformation-stack-drift-detection-check` would need a configuration recorder, which is paid by the
item, and a role with ReadOnlyAccess, which can read the files of all buckets.
"""

import json
from itertools import groupby
from operator import itemgetter

import aws_cdk as cdk
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_kms as kms
from aws_cdk import aws_sqs as sqs

from infra.access.permissions_boundary import DRIFT_TAG, name_prefix, stack_arn
from infra.access.stack import ISSUER
from infra.constructs.inline_role import InlineRole
from infra.constructs.stage_stack import StageStack
from infra.observability.alerts import Alerts
from infra.observability.event_functions import EventFunction
from jobs.core.stage import parameter_path

_COMPARE = "DescribeStackResourceDrifts DetectStackDrift DetectStackResourceDrift"

READS = (
    ("batch", "*", "DescribeComputeEnvironments DescribeJobDefinitions DescribeJobQueues DescribeSchedulingPolicies"),
    ("budgets", ":{account}:budget/*", "ListTagsForResource ViewBudget"),
    ("cloudformation", "*", "BatchDescribeTypeConfigurations DescribeStackDriftDetectionStatus"),
    ("cloudwatch", "{here}:alarm:{own}*", "DescribeAlarms ListTagsForResource"),
    ("cloudwatch", ":{account}:dashboard/*", "GetDashboard"),
    ("ec2", "*", "DescribeAddresses DescribeFlowLogs DescribeInternetGateways DescribeLaunchTemplates"),
    ("ec2", "*", "DescribeNatGateways DescribeNetworkAcls DescribePlacementGroups DescribeRouteTables"),
    ("ec2", "*", "DescribeSecurityGroupRules DescribeSecurityGroups DescribeSubnets DescribeVpcEncryptionControls"),
    ("ec2", "*", "DescribeVpcEndpoints DescribeVpcs DescribeVpnGateways"),
    ("ec2", "{here}:vpc/*", "DescribeVpcAttribute"),
    ("ecr", "{here}:repository/{own}*", "DescribeRepositories GetLifecyclePolicy GetRepositoryPolicy"),
    ("ecr", "{here}:repository/{own}*", "ListTagsForResource"),
    ("events", "{here}:rule/{own}*", "DescribeRule ListTagsForResource ListTargetsByRule"),
    ("fsx", "*", "DescribeDataRepositoryAssociations"),
    ("iam", ":{account}:instance-profile/{own}*", "GetInstanceProfile"),
    ("iam", f":{{account}}:oidc-provider/{ISSUER}", "GetOpenIDConnectProvider"),
    ("iam", ":{account}:policy/{own}*", "GetPolicy GetPolicyVersion ListEntitiesForPolicy"),
    ("iam", ":{account}:role/{own}*", "GetRole GetRolePolicy ListAttachedRolePolicies ListRolePolicies"),
    ("imagebuilder", "{here}:*/{own}*", "GetComponent GetDistributionConfiguration GetImage GetImagePipeline"),
    ("imagebuilder", "{here}:*/{own}*", "GetImageRecipe GetInfrastructureConfiguration GetLifecyclePolicy"),
    ("kms", "{key}", "DescribeKey GetKeyPolicy GetKeyRotationStatus ListResourceTags"),
    ("lambda", "{here}:function:{own}*", "GetFunction GetFunctionCodeSigningConfig GetFunctionEventInvokeConfig"),
    ("lambda", "{here}:function:{own}*", "GetFunctionRecursionConfig GetFunctionScalingConfig GetPolicy"),
    ("lambda", "{here}:function:{own}*", "GetRuntimeManagementConfig"),
    ("logs", "*", "DescribeIndexPolicies DescribeLogGroups DescribeResourcePolicies"),
    ("logs", "{here}:log-group:*{own}*", "DescribeMetricFilters GetDataProtectionPolicy ListTagsForResource"),
    ("s3", "::{own}*", "GetAccelerateConfiguration GetAnalyticsConfiguration GetBucketAbac GetBucketCORS"),
    ("s3", "::{own}*", "GetBucketLogging GetBucketMetadataTableConfiguration GetBucketNotification GetBucketPolicy"),
    ("s3", "::{own}*", "GetBucketObjectLockConfiguration GetBucketOwnershipControls GetBucketPublicAccessBlock"),
    ("s3", "::{own}*", "GetBucketTagging GetBucketVersioning GetBucketWebsite GetEncryptionConfiguration"),
    ("s3", "::{own}*", "GetIntelligentTieringConfiguration GetInventoryConfiguration GetLifecycleConfiguration"),
    ("s3", "::{own}*", "GetMetricsConfiguration GetReplicationConfiguration ListBucket ListTagsForResource"),
    ("secretsmanager", "{here}:secret:*", "DescribeSecret"),
    ("sns", "*", "GetSubscriptionAttributes"),
    ("sns", "{here}:{own}*", "GetDataProtectionPolicy GetTopicAttributes ListSubscriptionsByTopic ListTagsForResource"),
    ("sqs", "{here}:{own}*", "GetQueueAttributes ListQueueTags"),
    ("ssm", "{here}:parameter/trainyard/{stage}/*", "GetParameters ListTagsForResource"),
    ("ssm", "{here}:parameter/imagebuilder/{own}*", "GetParameters ListTagsForResource"),
)
"""Service, resources and actions: what the registry's schemas of the stage's types list for reading, as far as AWS's
policy ReadOnlyAccess has it, which AWS calls sufficient (AWS Config developer guide, the rule above). So no secret's
value and no file can be read. `*`: the actions support no resource (service authorization reference)."""


def report_drift(stack: StageStack, *, alerts: Alerts, key: kms.IKey | None, dead_letters: sqs.IQueue) -> None:
    """Create the function that reports drift of all stacks of the stage, and the rule that calls it once a week.

    Create it last, because its rights depend on the stage's types.
    """
    stage, scope = stack.stage_row, stack.node.scope
    assert scope is not None  # noqa: S101 - narrows the type; a stack is in its stage
    function = EventFunction(
        stack,
        "ReportDrift",
        file="report_drift",
        description="Reports what was changed by hand",
        environment={
            "STAGE": stage.name,
            "TOPIC_ARN": alerts.topic.topic_arn,
            "STACKS": json.dumps([each.stack_name for each in scope.node.children if isinstance(each, cdk.Stack)]),
            "WRITTEN": json.dumps(
                [f"{parameter_path(stage.name)}image/", f"/imagebuilder/trainyard-{stage.name}/machine-image/"]
            ),
        },
        dead_letters=dead_letters,
        log_retention_days=stage.log_retention_days,
        timeout=cdk.Duration.minutes(15),
    )
    function.may_publish(alerts.topic, key)
    types = {node.cfn_resource_type for node in scope.node.find_all() if isinstance(node, cdk.CfnResource)}
    _allow(function.execution_role, stack, {name.split("::")[1].lower() for name in types if "::" in name}, key)
    events.Rule(
        stack,
        "EveryWeek",
        description="Looks for what was changed by hand, on Mondays",
        schedule=events.Schedule.cron(minute="0", hour="6", week_day="MON"),
        targets=[targets.LambdaFunction(function, dead_letter_queue=dead_letters)],
    )


def _allow(role: InlineRole, stack: StageStack, services: set[str], key: kms.IKey | None) -> None:
    """Let `role` compare the stage's stacks, and read resources of these services."""
    cdk.Tags.of(role).add(*DRIFT_TAG)
    stage = stack.stage_row.name
    here = f"{stack.region}:{stack.account}"
    names = {"account": stack.account, "here": here, "own": name_prefix(stage), "stage": stage, "key": ""}
    stacks = stack_arn(stack, "*")
    role.allow("CompareStacks", [f"cloudformation:{name}" for name in _COMPARE.split()], stacks)
    wildcards = [stacks]
    for (service, end), rows in groupby(READS, key=itemgetter(0, 1)):
        if service not in (*services, "cloudformation"):
            continue
        arn = end if end == "*" else f"arn:{stack.partition}:{service}:{end.format(**names)}"
        resource = key.key_arn if key and service == "kms" else arn
        actions = [f"{service}:{name}" for _, _, listed in rows for name in listed.split()]
        # The generated names of secrets do not begin with the stage's.
        of_stage = {"StringEquals": {"aws:ResourceTag/trainyard:stage": stage}} if service == "secretsmanager" else None
        role.allow(f"Read{len(wildcards)}", actions, resource, conditions=of_stage)
        wildcards.append(resource)
    role.explain(
        "CloudFormation reads all resources with these rights, and generates their names; * is for what has no name",
        *dict.fromkeys(resource for resource in wildcards if "*" in resource),
    )
