"""The permissions boundary: the outer limit for every role of a stage, regardless of its policies.

A boundary grants nothing. It admits the actions that the stacks' roles need, in the stage's region, and only on the
stage's own resources: by name prefix for S3 and SSM, by the tag `trainyard:stage` elsewhere. So no policy, not even
one attached later, can reach another stage, other people's permissions or the rest of the account.
"""

from collections.abc import Mapping, Sequence

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.constructs.stage_stack import StageStack, acknowledge, finding
from infra.observability.functions.stop_at_budget import STOP_TAG
from infra.stages import Stage
from infra.stages.checks import fallback_of, homes_of
from jobs.core.stage import parameter_path

DEPLOYER_TAG = ("trainyard:role", "deployer")
"""Tag of the only role that may assume the CDK bootstrap's roles, because these roles can change everything."""

DRIFT_TAG = ("trainyard:role", "drift")
"""Tag of the only role that may read the configuration of all of the stage's resources."""

DIFF_ACTIONS = ("cloudformation:DescribeStacks", "cloudformation:GetTemplate")
"""Actions of `cdk diff --method=template`. A template contains no secret."""

BUILD_ACTIONS = ("codebuild:BatchGetBuilds", "codebuild:StartBuild")
"""Actions that only the deployer may use: anyone who starts a build can change its commands, and so acts with the
project's role."""

_REGIONAL_ACTIONS = (
    "batch:CancelJob",
    "batch:Describe*",
    "batch:GetJobQueueSnapshot",
    "batch:List*",
    "batch:SubmitJob",
    "batch:TagResource",
    "batch:TerminateJob",
    "batch:UpdateComputeEnvironment",
    "batch:UpdateJobQueue",
    "cloudwatch:DescribeAlarms",
    "cloudwatch:GetMetricData",
    "cloudwatch:PutMetricData",
    "ec2:AuthorizeSecurityGroup*",  # the CDK's function that empties the VPC's default security group
    "ec2:CreateSnapshot",  # Image Builder, when it creates an AMI
    "ec2:CreateTags",
    "ec2:Describe*",
    "ec2:GetSpotPlacementScores",
    "ec2:RevokeSecurityGroup*",
    "ec2messages:*",
    "ecr:BatchCheckLayerAvailability",
    "ecr:BatchGetImage",
    "ecr:CompleteLayerUpload",
    "ecr:Describe*",
    "ecr:GetAuthorizationToken",
    "ecr:GetDownloadUrlForLayer",
    "ecr:InitiateLayerUpload",
    "ecr:PutImage",
    "ecr:UploadLayerPart",
    "ecs:ExecuteCommand",  # people, in the containers of their jobs
    # The ECS agent, as in AWS's policy for container instances
    "ecs:CreateCluster",
    "ecs:DeregisterContainerInstance",
    "ecs:DescribeContainerInstances",
    "ecs:DiscoverPollEndpoint",
    "ecs:ListTagsForResource",
    "ecs:Poll",
    "ecs:RegisterContainerInstance",
    "ecs:StartTelemetrySession",
    "ecs:Submit*",
    "ecs:TagResource",
    "ecs:UpdateContainerInstancesState",
    "imagebuilder:DeleteImage",
    "imagebuilder:GetComponent",
    "imagebuilder:GetMarketplaceResource",
    "imagebuilder:StartImagePipelineExecution",
    "kms:Decrypt",
    "kms:DescribeKey",
    "kms:Encrypt",
    "kms:GenerateDataKey*",
    "kms:ReEncrypt*",
    "lambda:InvokeFunction",
    "logs:CreateLogGroup",
    "logs:CreateLogStream",
    "logs:Describe*",
    "logs:GetLogEvents",
    "logs:PutLogEvents",
    "secretsmanager:GetSecretValue",
    "servicequotas:GetServiceQuota",
    "sns:Publish",
    "sqs:SendMessage",
    # The SSM agent, as in AWS's policy for managed instances
    "ssm:DescribeAssociation",
    "ssm:DescribeDocument",
    "ssm:GetDeployablePatchSnapshotForInstance",
    "ssm:GetDocument",
    "ssm:GetManifest",
    "ssm:List*Associations",
    "ssm:PutComplianceItems",
    "ssm:PutConfigurePackageResult",
    "ssm:PutInventory",
    "ssm:Update*",
    # People who reach a notebook through Session Manager
    "ssm:ResumeSession",
    "ssm:StartSession",
    "ssm:TerminateSession",
    "ssmmessages:*",
    "tag:GetResources",
)

_BUILT_IMAGE_ACTIONS = (
    "ec2:DeleteSnapshot",
    "ec2:DeleteTags",
    "ec2:DeregisterImage",
    "ec2:DisableImage*",
    "ec2:EnableImage*",
)

_DRIFT_ACTIONS = (
    "budgets:List* cloudformation:*Drift* cloudformation:BatchDescribeTypeConfigurations cloudwatch:GetDashboard",
    "cloudwatch:List* ecr:Get*Policy ecr:List* events:Describe* events:List* fsx:Describe* iam:Get* iam:List*",
    "imagebuilder:Get* kms:GetKey* kms:List* lambda:Get* logs:GetData* logs:List* secretsmanager:DescribeSecret",
    "sns:Get* sns:List* sqs:Get* sqs:List* ssm:GetParameters ssm:List*",
)

_GLOBAL_ACTIONS = ("ce:GetCostAndUsage", "budgets:ViewBudget", "pricing:GetProducts")


class PermissionsBoundary(iam.ManagedPolicy):
    """The boundary that a stage creates, unless its settings name an existing boundary of the account."""

    def __init__(self, stack: StageStack, name: str) -> None:
        # Keep the description: changing it replaces the policy, which IAM refuses while other stacks use it.
        super().__init__(stack, name, description="What no role of the stage may exceed; it grants nothing by itself")
        self._stage = stack.stage_row.name
        row = stack.stage_row
        homes, fallback = homes_of(row), fallback_of(row)
        self._homes, self._fallback = homes, fallback
        others = [other for other in (*homes, fallback) if other]
        regions = [stack.region, *dict.fromkeys(other.region for other in others)]
        region = {"StringEquals": {"aws:RequestedRegion": regions if others else stack.region}}
        self._admit("InTheRegion", _REGIONAL_ACTIONS, "*", conditions=region)
        self._admit("WithoutARegion", _GLOBAL_ACTIONS, "*")
        built = {"StringEquals": {"aws:ResourceTag/CreatedBy": "EC2 Image Builder", **region["StringEquals"]}}
        self._admit("BuiltImages", _BUILT_IMAGE_ACTIONS, "*", conditions=built)
        self._admit_buckets(stack)
        self._admit_parameters(stack)
        self._admit_budget_stops(stack)
        self._admit_terminations(stack)
        self._admit_deployer(stack)
        self.add_statements(_other_stages(row))

    def _admit_parameters(self, stack: StageStack) -> None:
        def parameter(path: str, account: str | None = None, region: str | None = None) -> str:
            return stack.format_arn(
                service="ssm", region=region, account=account, resource="parameter", resource_name=path
            )

        own = parameter_path(self._stage).strip("/")
        actions = ["ssm:*Parameter", "ssm:*Parameters", "ssm:GetParametersByPath"]
        self._admit("OwnParameters", actions, parameter(own), parameter(f"{own}/*"))
        if self._fallback:
            path = parameter_path(self._fallback.name).strip("/")
            there = [parameter(name, region=self._fallback.region) for name in (path, f"{path}/*")]
            self._admit("FallbackParameters", ["ssm:GetParametersByPath"], *there)
        self._admit("PublicParameters", ["ssm:GetParameter", "ssm:GetParameters"], parameter("aws/service/*", ""))

    def _admit_buckets(self, stack: StageStack) -> None:
        def bucket(name: str) -> str:
            return stack.format_arn(service="s3", region="", account="", resource=name)

        own = [bucket(f"{name_prefix(name)}*") for name in (self._stage, *(home.name for home in self._homes))]
        self._admit("OwnBuckets", ["s3:AbortMultipartUpload", "s3:Delete*", "s3:Get*", "s3:List*", "s3:Put*"], *own)
        assets = bucket(f"cdk-{stack.stage_row.bootstrap_qualifier}-assets-{stack.account}-{stack.region}")
        self._admit("ImageBuilder", ["s3:GetObject"], bucket("ec2imagebuilder*"))
        self._admit("DeployedSources", ["s3:GetBucket*", "s3:GetObject*", "s3:List*"], assets, f"{assets}/*")

    def _admit_budget_stops(self, stack: StageStack) -> None:
        """Admit only the tag for a used-up budget, because other tags could give a role more permissions."""
        roles = stack.format_arn(
            service="iam", region="", resource="role", resource_name=f"{name_prefix(self._stage)}*"
        )
        conditions = {"ForAllValues:StringEquals": {"aws:TagKeys": [STOP_TAG]}}
        self._admit("BudgetStops", ["iam:TagRole", "iam:UntagRole"], roles, conditions=conditions)

    def _admit_terminations(self, stack: StageStack) -> None:
        """Let the stage terminate its own instances, such as those that boot and never join their cluster."""
        instances = stack.format_arn(service="ec2", resource="instance", resource_name="*")
        conditions = {"StringEquals": {"aws:ResourceTag/trainyard:stage": self._stage}}
        self._admit("TerminateInstances", ["ec2:TerminateInstances"], instances, conditions=conditions)

    def _admit_deployer(self, stack: StageStack) -> None:
        key, value = DEPLOYER_TAG
        deployer = {"StringEquals": {f"aws:PrincipalTag/{key}": value}}
        self._admit("Deployer", ["sts:AssumeRole"], *bootstrap_roles(stack), conditions=deployer)
        self._admit("Builds", BUILD_ACTIONS, build_projects(stack), conditions=deployer)
        key, value = DRIFT_TAG
        self._admit(
            "Drift",
            " ".join(_DRIFT_ACTIONS).split(),
            "*",
            conditions={"StringEquals": {f"aws:PrincipalTag/{key}": value}},
        )
        self._admit("Templates", DIFF_ACTIONS, stack_arn(stack, "*"))

    def _admit(
        self,
        sid: str,
        actions: Sequence[str],
        *resources: str,
        conditions: Mapping[str, object] | None = None,
    ) -> None:
        self.add_statements(
            iam.PolicyStatement(
                sid=sid, actions=list(actions), resources=list(resources), conditions=dict(conditions or {})
            )
        )
        acknowledge(
            self,
            "A boundary grants nothing: it is the outer limit of roles whose own statements allow less",
            *(f"AwsSolutions-IAM5[Action::{action}]" for action in actions if "*" in action),
            *(f"AwsSolutions-IAM5[Resource::{finding(self, arn)}]" for arn in resources if "*" in arn),
            "NIST.800.53.R5-IAMPolicyNoStatementsWithFullAccess",
        )


def deny_other_stages(scope: Construct, stage: Stage) -> None:
    """Deny every role below `scope` access to resources tagged with another stage, regardless of its boundary.

    Other stages do not include those that jobs move to or from.

    This matters if the account's own boundary replaces the stage's, because that boundary does not distinguish stages.
    """
    name, document = "OtherStages", iam.PolicyDocument(statements=[_other_stages(stage)])
    for node in scope.node.find_all():
        if isinstance(node, iam.CfnRole):
            node.policies = [iam.CfnRole.PolicyProperty(policy_name=name, policy_document=document)]
            acknowledge(
                node,
                "A deny that must stay on the role; as a managed policy it could be detached",
                "NIST.800.53.R5-IAMNoInlinePolicy",
            )
        # The CDK creates its own functions' roles as bare resources with one inline policy.
        elif type(node) is cdk.CfnResource and node.cfn_resource_type == "AWS::IAM::Role":
            node.add_property_override("Policies.1", {"PolicyName": name, "PolicyDocument": document})


def _other_stages(stage: Stage) -> iam.PolicyStatement:
    others = [other.name for other in (*homes_of(stage), fallback_of(stage)) if other]
    own = list(dict.fromkeys([stage.name, *others])) if others else stage.name
    return iam.PolicyStatement(
        sid="OtherStages",
        effect=iam.Effect.DENY,
        actions=["*"],
        resources=["*"],
        conditions={
            "StringNotEquals": {"aws:ResourceTag/trainyard:stage": own},
            "Null": {"aws:ResourceTag/trainyard:stage": "false"},
        },
    )


def name_prefix(stage: str) -> str:
    """Return the prefix of the names that CloudFormation generates for a stage's resources.

    CloudFormation shortens the stack name to 24 characters if a name would be too long for a service.
    """
    return f"trainyard-{stage}-"[:24]


def stack_arn(stack: StageStack, name: str) -> str:
    """Return the ARN pattern of one of the stage's stacks, which ends in a random id."""
    full_name = f"trainyard-{stack.stage_row.name}-{name}"
    return stack.format_arn(service="cloudformation", resource="stack", resource_name=f"{full_name}/*")


def build_projects(stack: cdk.Stack) -> str:
    """Return the ARN pattern of all CodeBuild projects in the stack's account and region."""
    return stack.format_arn(service="codebuild", resource="project", resource_name="*")


def bootstrap_roles(stack: StageStack) -> list[str]:
    """Return the ARNs of the roles with which the CDK CLI deploys to the stack's account and region."""
    qualifier = stack.stage_row.bootstrap_qualifier
    return [
        stack.format_arn(
            service="iam",
            region="",
            resource="role",
            resource_name=f"cdk-{qualifier}-{role}-role-{stack.account}-{stack.region}",
        )
        for role in ("deploy", "file-publishing", "image-publishing", "lookup")
    ]
