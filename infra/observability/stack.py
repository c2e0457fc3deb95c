"""Observability: who hears of what, the move from Spot to On-Demand, the dashboard, and budgets that stop new jobs.

Everything here is called by events: where nothing runs, nothing of it runs. Queues, roles and the log group are read
from what the other stacks publish, since those come and go with pools and teams.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import aws_cdk as cdk
from aws_cdk import Duration
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk import aws_sns_subscriptions as subscriptions
from aws_cdk import aws_sqs as sqs
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from infra.compute.stack import ComputeStack
from infra.constructs.stage_stack import StageStack, acknowledge
from infra.job.stack import JobStack
from infra.observability.alerts import Alerts
from infra.observability.budgets import BudgetStop
from infra.observability.dashboard import UTILIZATION, StageDashboard
from infra.observability.function import Function
from infra.stages import Stage
from infra.storage.stack import StorageStack
from jobs.contract.errors import INTERRUPTED_EXIT_CODE
from jobs.contract.instance_types import InstanceType
from jobs.contract.moves import DUPLICATE_REASON, EXITED_REASON, MOVED_REASON, MOVED_TAG, RECLAIM_REASON
from jobs.contract.queues import GAUDI_ON_DEMAND, GAUDI_SPOT, QUEUES, SPOT_WAITED_TOO_LONG, Queue
from jobs.contract.runs import UTILIZATION_KEY
from jobs.contract.stage import LOG_GROUP, RUN_BUCKET, parameter_path, queue_parameter

_STATE_CHANGE = "Batch Job State Change"


@dataclass(frozen=True, kw_only=True)
class _StageQueue:
    """A queue that the compute stack has made."""

    queue: Queue
    retiring: str | None
    row: InstanceType
    arn: str

    @property
    def label(self) -> str:
        """What the dashboard calls it."""
        return f"{self.queue.name} ({self.retiring})" if self.retiring else self.queue.name

    @property
    def usd_per_hour(self) -> float:
        return self.row.spot_usd_per_hour if self.queue.capacity == "spot" else self.row.on_demand_usd_per_hour


class ObservabilityStack(StageStack):
    """Alerts, metrics, the functions behind them, and budgets."""

    def __init__(
        self,
        scope: Construct,
        *,
        stage: Stage,
        storage: StorageStack,
        compute: ComputeStack,
        jobs: JobStack,
        queues: Mapping[str, Queue] = QUEUES,
    ) -> None:
        super().__init__(scope, "observability", stage=stage, description="alerts, metrics, dashboard and budgets")
        self.add_stack_dependency(compute, "the queues' ARNs")
        self.add_stack_dependency(jobs, "the log group's name and the members' roles")
        self._others = (compute, jobs)
        self._key = self._own_key(storage)
        self._namespace = f"trainyard/{stage.name}"
        self._queues = list(self._stage_queues(queues))
        self._on_demand_queues = self._successors()
        self._dead_letters = sqs.Queue(self, "DeadLetters", enforce_ssl=True, retention_period=Duration.days(14))
        acknowledge(
            self._dead_letters,
            "This is the dead-letter queue: what lies here is looked at by people, and has nowhere to go on to.",
            "AwsSolutions-SQS3",
        )
        self._alerts = Alerts(self, "Alerts", key=self._key, emails=stage.alerts.emails)
        self._report()
        self._tag_instances()
        if self._on_demand_queues:
            self._move_to_on_demand(storage)
        if stage.alerts.webhook_secret:
            self._webhook(stage.alerts.webhook_secret)
        self._utilization()
        self._dashboard(self._alarms())
        self._budgets()

    def _stage_queues(self, queues: Mapping[str, Queue]) -> list[_StageQueue]:
        stage = self.stage_row
        pools = [(stage.pool.row, None), *((pool.row, pool.id) for pool in stage.retiring)]
        return [
            _StageQueue(
                queue=queue,
                retiring=retiring,
                row=row,
                arn=self._published(queue_parameter(queue.name, retiring=retiring)),
            )
            for queue in queues.values()
            if _has(stage, queue)
            for row, retiring in (pools if queue.accelerated else [(stage.cpu_row, None)])
        ]

    def _successors(self) -> list[tuple[str, str]]:
        """ARNs of each pool's Spot queue and of its On-Demand queue; nothing where the stage has no such capacity."""
        by_pool = {(queue.queue.name, queue.retiring): queue.arn for queue in self._queues}
        return [
            (arn, by_pool[GAUDI_ON_DEMAND, pool])
            for (name, pool), arn in by_pool.items()
            if name == GAUDI_SPOT and (GAUDI_ON_DEMAND, pool) in by_pool
        ]

    def _published(self, name: str) -> str:
        """Read at each deployment, so that what it names may be replaced."""
        return ssm.StringParameter.value_for_string_parameter(self, parameter_path(self.stage_row.name) + name)

    def _own_key(self, storage: StorageStack) -> kms.IKey | None:
        key_arn = storage.key_arn(self)
        return kms.Key.from_key_arn(self, "StageKey", key_arn) if key_arn else None

    def _function(self, name: str, file: str, description: str, **environment: str) -> Function:
        return Function(
            self,
            name,
            file=file,
            description=description,
            environment=environment,
            dead_letters=self._dead_letters,
            log_retention_days=self.stage_row.log_retention_days,
        )

    def _read_jobs(self, function: Function) -> None:
        function.execution_role.allow("ReadJobs", ["batch:DescribeJobs", "batch:ListJobs"], "*")
        function.execution_role.explain(
            "Batch knows no resources for reading jobs: DescribeJobs and ListJobs can only be allowed on all of them.",
            "*",
        )

    def _on_state_change(self, name: str, function: Function, queues: list[str], **detail: list[str]) -> None:
        rule = events.Rule(
            self,
            name,
            event_pattern=events.EventPattern(
                source=["aws.batch"], detail_type=[_STATE_CHANGE], detail={"jobQueue": queues, **detail}
            ),
        )
        rule.add_target(targets.LambdaFunction(function, dead_letter_queue=self._dead_letters))

    def _move_to_on_demand(self, storage: StorageStack) -> None:
        function = self._function(
            "MoveToOnDemand",
            "move_to_on_demand",
            "Jobs that Spot takes away too often go on On-Demand",
            RUN_BUCKET=self._published(RUN_BUCKET),
            RECLAIMS_BEFORE_ON_DEMAND=str(self.stage_row.reclaims_before_on_demand),
            ON_DEMAND_QUEUES=json.dumps(self._on_demand_queues),
            ON_DEMAND_NODES=str(self.stage_row.max_on_demand_nodes),
            RECLAIM_REASON=RECLAIM_REASON,
            EXITED_REASON=EXITED_REASON,
            INTERRUPTED_EXIT_CODE=str(INTERRUPTED_EXIT_CODE),
            MOVED_REASON=MOVED_REASON,
            MOVED_TAG=MOVED_TAG,
            NO_CAPACITY_REASON=SPOT_WAITED_TOO_LONG,
        )
        self._read_jobs(function)
        all_jobs = self.format_arn(service="batch", resource="job", resource_name="*")
        definitions = self.format_arn(service="batch", resource="job-definition", resource_name="*")
        runs = storage.export_value(storage.run_bucket.bucket_arn)
        claims = f"{runs}/*/moves/*"
        function.execution_role.allow(
            "EndJob",
            ["batch:TerminateJob"],
            all_jobs,
            conditions={"StringEquals": {"aws:ResourceTag/trainyard:stage": self.stage_row.name}},
        )
        function.execution_role.allow(
            "SubmitToOnDemand", ["batch:SubmitJob"], *(arn for _, arn in self._on_demand_queues)
        )
        function.execution_role.allow(
            "SubmitDefinitionsOfStage",
            ["batch:SubmitJob"],
            definitions,
            conditions={"StringEquals": {"aws:ResourceTag/trainyard:stage": self.stage_row.name}},
        )
        function.execution_role.allow(
            "TagJob",
            ["batch:TagResource"],
            all_jobs,
            conditions={
                "StringEquals": {"aws:RequestTag/trainyard:stage": self.stage_row.name},
                # A job that is there already must be the stage's; one that is being submitted has no tags yet.
                "StringEqualsIfExists": {"aws:ResourceTag/trainyard:stage": self.stage_row.name},
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
        self._on_state_change("SpotJobs", function, [arn for arn, _ in self._on_demand_queues])

    def _report(self) -> None:
        function = self._function(
            "ReportJob",
            "report_job",
            "Failed jobs and reclaims in words, queues and nodes in numbers",
            STAGE=self.stage_row.name,
            TOPIC_ARN=self._alerts.topic.topic_arn,
            METRIC_NAMESPACE=self._namespace,
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
            ON_DEMAND_QUEUES=json.dumps(self._on_demand_queues),
            ON_DEMAND_NODES=str(self.stage_row.max_on_demand_nodes),
            RECLAIMS_BEFORE_ON_DEMAND=str(self.stage_row.reclaims_before_on_demand),
            RECLAIM_REASON=RECLAIM_REASON,
            EXITED_REASON=EXITED_REASON,
            INTERRUPTED_EXIT_CODE=str(INTERRUPTED_EXIT_CODE),
            NO_FAILURES=json.dumps([MOVED_REASON, DUPLICATE_REASON]),
            NO_CAPACITY_REASON=SPOT_WAITED_TOO_LONG,
        )
        self._read_jobs(function)
        function.may_publish(self._alerts.topic, self._key)
        self._on_state_change("Jobs", function, self._queue_arns)

    def _tag_instances(self) -> None:
        function = self._function(
            "TagInstances", "tag_instances", "Instances carry the team and run that they work for"
        )
        self._read_jobs(function)
        members = self.format_arn(service="ecs", resource="container-instance", resource_name="*")
        instances = self.format_arn(service="ec2", resource="instance", resource_name="*")
        function.execution_role.allow("FindInstances", ["ecs:DescribeContainerInstances"], members)
        function.execution_role.allow(
            "TagInstancesOfStage",
            ["ec2:CreateTags"],
            instances,
            conditions={
                "StringEquals": {"aws:ResourceTag/trainyard:stage": self.stage_row.name},
                "ForAllValues:StringEquals": {"aws:TagKeys": ["trainyard:team", "trainyard:run"]},
            },
        )
        function.execution_role.explain(
            "Batch starts instances and clusters under names of its own: which are the stage's, their tag says.",
            members,
            instances,
        )
        self._on_state_change("RunningJobs", function, self._queue_arns, status=["RUNNING"])

    def _webhook(self, secret_name: str) -> None:
        function = self._function(
            "PostToWebhook", "post_to_webhook", "Alerts to a chat's incoming webhook", WEBHOOK_SECRET=secret_name
        )
        # Secrets Manager adds six characters to a secret's name.
        secret = self.format_arn(
            service="secretsmanager",
            resource="secret",
            resource_name=f"{secret_name}-??????",
            arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
        )
        function.execution_role.allow("ReadWebhook", ["secretsmanager:GetSecretValue"], secret)
        self._alerts.topic.add_subscription(
            subscriptions.LambdaSubscription(function, dead_letter_queue=self._dead_letters)
        )

    def _alarms(self) -> list[cloudwatch.Alarm]:
        stage = self.stage_row
        run = events.EventField.from_path("$.detail.jobName")
        blocked = self._alerts.on_event(
            "QueueBlocked",
            source="aws.batch",
            detail_type="Batch Job Queue Blocked",
            detail={"jobQueue": self._queue_arns},
            text=f"A queue of stage {stage.name} is blocked by {run} at its head: "
            f"{events.EventField.from_path('$.detail.statusReason')}. Look: trainyard why {run} --stage {stage.name}",
            description="A job at a queue's head cannot start, and those behind it wait",
        )
        return [
            self._alerts.alarm(
                "FailedJobs",
                cloudwatch.Metric(
                    namespace=self._namespace, metric_name="FailedJobs", statistic="Sum", period=Duration.hours(1)
                ),
                at_least=stage.alerts.failed_jobs_an_hour,
                text=f"{stage.alerts.failed_jobs_an_hour} or more jobs of stage {stage.name} failed within an hour. "
                f"Look: trainyard list --stage {stage.name}",
            ),
            self._alerts.alarm(
                "BlockedQueue",
                cloudwatch.Metric(
                    namespace="AWS/Events",
                    metric_name="MatchedEvents",
                    dimensions_map={"RuleName": blocked.rule_name},
                    statistic="Sum",
                    period=Duration.hours(1),
                ),
                at_least=1,
                text=f"A queue of stage {stage.name} was blocked within an hour; a message of its own says why.",
            ),
            self._alerts.alarm(
                "FailedCalls",
                self._dead_letters.metric_approximate_number_of_messages_visible(
                    statistic="Maximum", period=Duration.minutes(5)
                ),
                at_least=1,
                text=f"A function of stage {stage.name} failed three times at an event, which lies in the queue "
                f"{self._dead_letters.queue_name}; a run may be waiting for it. Its log group says why.",
            ),
        ]

    def _utilization(self) -> None:
        logs.CfnMetricFilter(
            self,
            "Utilization",
            log_group_name=self._published(LOG_GROUP),
            filter_pattern=f"{{ $.{UTILIZATION_KEY} >= 0 }}",
            metric_transformations=[
                logs.CfnMetricFilter.MetricTransformationProperty(
                    metric_namespace=self._namespace,
                    metric_name=UTILIZATION,
                    metric_value=f"$.{UTILIZATION_KEY}",
                    unit="Percent",
                )
            ],
        )

    def _dashboard(self, alarms: list[cloudwatch.Alarm]) -> None:
        row = self.stage_row.row
        StageDashboard(
            self,
            "Dashboard",
            namespace=self._namespace,
            queues=[queue.label for queue in self._queues],
            alarms=alarms,
            price_note=f"Spend is an estimate: nodes times the price recorded on {row.price_date} "
            f"({row.price_source}); it leaves out storage and transfer, and Spot prices change.",
        )

    def _budgets(self) -> None:
        stage = self.stage_row
        if stage.monthly_budget_usd is None and not any(team.monthly_budget_usd for team in stage.teams):
            return
        BudgetStop(
            self,
            "Budgets",
            alerts=self._alerts,
            key=self._key,
            dead_letters=self._dead_letters,
            deployments=[stack.stack_name for stack in self._others],
        )

    @property
    def _queue_arns(self) -> list[str]:
        return [queue.arn for queue in self._queues]


def _has(stage: Stage, queue: Queue) -> bool:
    """Whether the stage allows capacity for it."""
    if not queue.accelerated or queue.capacity == "spot":
        return True
    return (stage.max_multinode_nodes if queue.several_nodes else stage.max_on_demand_nodes) > 0
