"""The functions that events of Batch call: what each is told, what it may do, and when it is called."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import aws_cdk as cdk
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_kms as kms
from aws_cdk import aws_sns_subscriptions as subscriptions
from aws_cdk import aws_sqs as sqs

from infra.constructs.stage_stack import StageStack
from infra.observability.alerts import Alerts
from infra.observability.function import Function
from jobs.contract.errors import INTERRUPTED_EXIT_CODE
from jobs.contract.instance_types import InstanceType
from jobs.contract.queues import SPOT_WAITED_TOO_LONG, Queue
from jobs.contract.retries import DUPLICATE_REASON, EXITED_REASON, MOVED_REASON, MOVED_TAG, RECLAIM_REASON

_STATE_CHANGE = "Batch Job State Change"


@dataclass(frozen=True, kw_only=True)
class StageQueue:
    """A queue that the compute stack has made."""

    queue: Queue
    retiring: str | None
    row: InstanceType
    arn: str

    @property
    def label(self) -> str:
        """Return what the dashboard calls it."""
        return f"{self.queue.name} ({self.retiring})" if self.retiring else self.queue.name

    @property
    def usd_per_hour(self) -> float:
        return self.row.spot_usd_per_hour if self.queue.capacity == "spot" else self.row.on_demand_usd_per_hour


class EventFunctions:
    """Makes the functions of a stage, in the stack that it is given."""

    def __init__(
        self,
        stack: StageStack,
        *,
        queues: Sequence[StageQueue],
        successors: Sequence[tuple[str, str]],
        alerts: Alerts,
        key: kms.IKey | None,
        dead_letters: sqs.IQueue,
    ) -> None:
        """`successors`: ARNs of Spot queues, each with the On-Demand queue that its jobs may move to."""
        self._stack = stack
        self._stage = stack.stage_row
        self._queues = queues
        self._successors = successors
        self._alerts = alerts
        self._key = key
        self._dead_letters = dead_letters

    def report(self, namespace: str) -> None:
        """Make the function that says what became of each job, in words and as metrics of `namespace`."""
        function = self._function(
            "ReportJob",
            "report_job",
            "Failed jobs and reclaims in words, queues and nodes in numbers",
            STAGE=self._stage.name,
            TOPIC_ARN=self._alerts.topic.topic_arn,
            METRIC_NAMESPACE=namespace,
            QUEUES=json.dumps(
                [
                    {
                        "arn": queue.arn,
                        "name": queue.label,
                        "capacity": queue.queue.capacity,
                        "usd_per_hour": queue.usd_per_hour,
                    }
                    for queue in self._queues
                ]
            ),
            ON_DEMAND_QUEUES=json.dumps(self._successors),
            ON_DEMAND_NODES=str(self._stage.max_on_demand_nodes),
            RECLAIMS_BEFORE_ON_DEMAND=str(self._stage.reclaims_before_on_demand),
            RECLAIM_REASON=RECLAIM_REASON,
            EXITED_REASON=EXITED_REASON,
            INTERRUPTED_EXIT_CODE=str(INTERRUPTED_EXIT_CODE),
            NO_FAILURES=json.dumps([MOVED_REASON, DUPLICATE_REASON]),
            NO_CAPACITY_REASON=SPOT_WAITED_TOO_LONG,
        )
        self._read_jobs(function)
        function.may_publish(self._alerts.topic, self._key)
        self._on_state_change("Jobs", function, [queue.arn for queue in self._queues])

    def tag_instances(self) -> None:
        """Make the function that tags instances with the team and run that they work for."""
        function = self._function(
            "TagInstances", "tag_instances", "Instances carry the team and run that they work for"
        )
        self._read_jobs(function)
        members = self._stack.format_arn(service="ecs", resource="container-instance", resource_name="*")
        instances = self._stack.format_arn(service="ec2", resource="instance", resource_name="*")
        function.execution_role.allow("FindInstances", ["ecs:DescribeContainerInstances"], members)
        function.execution_role.allow(
            "TagInstancesOfStage",
            ["ec2:CreateTags"],
            instances,
            conditions={
                "StringEquals": {"aws:ResourceTag/trainyard:stage": self._stage.name},
                "ForAllValues:StringEquals": {"aws:TagKeys": ["trainyard:team", "trainyard:run"]},
            },
        )
        function.execution_role.explain(
            "Batch starts instances and clusters under names of its own: which are the stage's, their tag says.",
            members,
            instances,
        )
        self._on_state_change("RunningJobs", function, [queue.arn for queue in self._queues], status=["RUNNING"])

    def move_to_on_demand(self, run_bucket: str, runs_arn: str) -> None:
        """Make the function that moves jobs to On-Demand; `runs_arn` is the ARN of `run_bucket`."""
        function = self._function(
            "MoveToOnDemand",
            "move_to_on_demand",
            "Jobs that Spot takes away too often go on On-Demand",
            RUN_BUCKET=run_bucket,
            RECLAIMS_BEFORE_ON_DEMAND=str(self._stage.reclaims_before_on_demand),
            ON_DEMAND_QUEUES=json.dumps(self._successors),
            ON_DEMAND_NODES=str(self._stage.max_on_demand_nodes),
            RECLAIM_REASON=RECLAIM_REASON,
            EXITED_REASON=EXITED_REASON,
            INTERRUPTED_EXIT_CODE=str(INTERRUPTED_EXIT_CODE),
            MOVED_REASON=MOVED_REASON,
            MOVED_TAG=MOVED_TAG,
            NO_CAPACITY_REASON=SPOT_WAITED_TOO_LONG,
        )
        self._read_jobs(function)
        self._allow_moves(function, runs_arn)
        self._on_state_change("SpotJobs", function, [arn for arn, _ in self._successors])

    def _allow_moves(self, function: Function, runs_arn: str) -> None:
        """Let it end jobs of the stage, submit them again to On-Demand, and claim each move in the run bucket."""
        all_jobs = self._stack.format_arn(service="batch", resource="job", resource_name="*")
        definitions = self._stack.format_arn(service="batch", resource="job-definition", resource_name="*")
        claims = f"{runs_arn}/*/moves/*"
        of_the_stage = {"StringEquals": {"aws:ResourceTag/trainyard:stage": self._stage.name}}
        function.execution_role.allow(
            "EndJob",
            ["batch:TerminateJob"],
            all_jobs,
            conditions=of_the_stage,
        )
        function.execution_role.allow("SubmitToOnDemand", ["batch:SubmitJob"], *(arn for _, arn in self._successors))
        function.execution_role.allow(
            "SubmitDefinitionsOfStage",
            ["batch:SubmitJob"],
            definitions,
            conditions=of_the_stage,
        )
        function.execution_role.allow(
            "TagJob",
            ["batch:TagResource"],
            all_jobs,
            conditions={
                "StringEquals": {"aws:RequestTag/trainyard:stage": self._stage.name},
                # A job that is there already must be the stage's; one that is being submitted has no tags yet.
                "StringEqualsIfExists": {"aws:ResourceTag/trainyard:stage": self._stage.name},
            },
        )
        function.execution_role.allow("ClaimMoves", ["s3:GetObject", "s3:PutObject"], claims)
        if self._key:
            function.may_use(self._key)
        function.execution_role.explain(
            "Jobs, definitions and runs are not known beforehand: any job of the stage may be ended (by its tag), "
            "any definition of the stage (by its tag) submitted, any run's moves recorded, and nothing else.",
            all_jobs,
            definitions,
            claims,
        )

    def post_to_webhook(self, secret_name: str) -> None:
        """Make the function that posts alerts to the URL which the secret holds."""
        function = self._function(
            "PostToWebhook", "post_to_webhook", "Alerts to a chat's incoming webhook", WEBHOOK_SECRET=secret_name
        )
        # Secrets Manager adds six characters to a secret's name.
        secret = self._stack.format_arn(
            service="secretsmanager",
            resource="secret",
            resource_name=f"{secret_name}-??????",
            arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
        )
        function.execution_role.allow("ReadWebhook", ["secretsmanager:GetSecretValue"], secret)
        self._alerts.topic.add_subscription(
            subscriptions.LambdaSubscription(function, dead_letter_queue=self._dead_letters)
        )

    def _function(self, name: str, file: str, description: str, **environment: str) -> Function:
        return Function(
            self._stack,
            name,
            file=file,
            description=description,
            environment=environment,
            dead_letters=self._dead_letters,
            log_retention_days=self._stage.log_retention_days,
        )

    def _read_jobs(self, function: Function) -> None:
        function.execution_role.allow("ReadJobs", ["batch:DescribeJobs", "batch:ListJobs"], "*")
        function.execution_role.explain(
            "Batch knows no resources for reading jobs: DescribeJobs and ListJobs can only be allowed on all of them.",
            "*",
        )

    def _on_state_change(self, name: str, function: Function, queues: list[str], **detail: list[str]) -> None:
        rule = events.Rule(
            self._stack,
            name,
            event_pattern=events.EventPattern(
                source=["aws.batch"], detail_type=[_STATE_CHANGE], detail={"jobQueue": queues, **detail}
            ),
        )
        rule.add_target(targets.LambdaFunction(function, dead_letter_queue=self._dead_letters))
