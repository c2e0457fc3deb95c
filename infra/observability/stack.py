"""Observability: alerts, the move from Spot to On-Demand, the dashboard, budgets and limits that stop new jobs.

Events trigger everything here, except for checks of instances every five minutes and of drift every week. Names of
queues and the log group are read from what other stacks publish, because they change with pools and teams.
"""

from collections.abc import Sequence

from aws_cdk import Duration
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_events as events
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from infra.compute.stack import INSTANCE_LOG_GROUP, ComputeStack
from infra.constructs.stage_stack import StageStack, acknowledge
from infra.job.stack import JobStack
from infra.observability.alerts import Alerts
from infra.observability.budgets import BudgetStop
from infra.observability.dashboard import UTILIZATION, StageDashboard
from infra.observability.drift import report_drift
from infra.observability.event_functions import EventFunctions, StageQueue
from infra.stages import Stage
from infra.storage.stack import StorageStack
from jobs.core.output import UTILIZATION_KEY
from jobs.core.queues import ON_DEMAND, SPOT
from jobs.core.stage import LOG_GROUP, RUN_BUCKET, queue_parameter


class ObservabilityStack(StageStack):
    """The stack of alerts, metrics, the functions behind them, and budgets."""

    def __init__(
        self, scope: Construct, *, stage: Stage, storage: StorageStack, compute: ComputeStack, jobs: JobStack
    ) -> None:
        super().__init__(scope, "observability", stage=stage, description="alerts, metrics, dashboard and budgets")
        self._compute, self._jobs = compute, jobs
        self._key = self._own_key(storage)
        self._namespace = f"trainyard/{stage.name}"
        self._queues = self._stage_queues()
        self._dead_letters = sqs.Queue(self, "DeadLetters", enforce_ssl=True, retention_period=Duration.days(14))
        acknowledge(
            self._dead_letters,
            "This is the dead-letter queue: people look at its messages, so it needs no dead-letter queue itself.",
            "AwsSolutions-SQS3",
        )
        self._alerts = Alerts(self, "Alerts", key=self._key, emails=stage.alerts.emails)
        self._functions(storage)
        self._utilization()
        self._dashboard([*self._alarms(), *self._budgets()])
        report_drift(self, alerts=self._alerts, key=self._key, dead_letters=self._dead_letters)

    def _stage_queues(self) -> list[StageQueue]:
        return [
            StageQueue(
                queue=queue,
                team=pool.instances.team,
                retiring=pool.retiring,
                types=types,
                arn=self._compute.published(
                    queue_parameter(queue.name, team=pool.instances.team, retiring=pool.retiring), reader=self
                ),
            )
            for queue, pool, types in self._compute.queues
        ]

    def _successors(self) -> list[tuple[str, str]]:
        """Return pairs of ARNs: a Spot queue, and the On-Demand queue of the same team and pool, if there is one."""
        by_owner = {(queue.queue.name, queue.team, queue.retiring): queue.arn for queue in self._queues}
        return [
            (arn, by_owner[ON_DEMAND, team, pool])
            for (name, team, pool), arn in by_owner.items()
            if name == SPOT and (ON_DEMAND, team, pool) in by_owner
        ]

    def _own_key(self, storage: StorageStack) -> kms.IKey | None:
        key_arn = storage.key_arn(self)
        return kms.Key.from_key_arn(self, "StageKey", key_arn) if key_arn else None

    def _functions(self, storage: StorageStack) -> None:
        successors = self._successors()
        functions = EventFunctions(
            self,
            queues=self._queues,
            successors=successors,
            alerts=self._alerts,
            key=self._key,
            dead_letters=self._dead_letters,
        )
        functions.report(self._namespace)
        functions.tag_instances()
        functions.end_sweeps()
        functions.watch_instances(self._namespace, self._compute.published(INSTANCE_LOG_GROUP, reader=self))
        if successors or self.stage_row.fallback_stage:
            functions.move_to_on_demand(
                run_bucket=storage.published(RUN_BUCKET, reader=self),
                runs_arn=storage.export_value(storage.run_bucket.bucket_arn),
            )

    def _alarms(self) -> list[cloudwatch.Alarm]:
        stage = self.stage_row
        run = events.EventField.from_path("$.detail.jobName")
        blocked = self._alerts.on_event(
            "QueueBlocked",
            detail_type="Batch Job Queue Blocked",
            queues=[queue.arn for queue in self._queues],
            text=f"A queue of stage {stage.name} is blocked by {run} at its head: "
            f"{events.EventField.from_path('$.detail.statusReason')}. Next: trainyard why {run} --stage {stage.name}",
            description="The job at the head of a queue cannot start and blocks the jobs behind it",
        )
        return [
            self._alerts.alarm(
                "FailedJobs",
                cloudwatch.Metric(
                    namespace=self._namespace, metric_name="FailedJobs", statistic="Sum", period=Duration.hours(1)
                ),
                at_least=stage.alerts.failed_jobs_an_hour,
                text=f"{stage.alerts.failed_jobs_an_hour} or more jobs of stage {stage.name} failed within an hour. "
                f"Next: trainyard list --stage {stage.name}",
            ),
            self._alerts.alarm(
                "BlockedQueue",
                _matched(blocked),
                at_least=1,
                text=f"A queue of stage {stage.name} was blocked within the last hour; another message has the reason.",
            ),
            self._alerts.alarm(
                "FailedCalls",
                self._dead_letters.metric_approximate_number_of_messages_visible(
                    statistic="Maximum", period=Duration.minutes(5)
                ),
                at_least=1,
                text=f"A function of stage {stage.name} failed three times on an event, which is now in the queue "
                f"{self._dead_letters.queue_name}; a run may depend on it. The function's log group has the reason.",
            ),
        ]

    def _utilization(self) -> None:
        logs.CfnMetricFilter(
            self,
            "Utilization",
            log_group_name=self._jobs.published(LOG_GROUP, reader=self),
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
            instances=[
                f"{name} {capacity}"
                for name in dict.fromkeys(row.name for queue in self._queues for row in queue.types)
                for capacity in ("spot", "on-demand")
            ],
            alarms=alarms,
            price_note=f"Spend is estimated: nodes times the price recorded on {row.price_date} "
            f"({row.price_source}). It excludes storage and transfer, and Spot prices change.",
        )

    def _budgets(self) -> list[cloudwatch.Alarm]:
        """Create the budgets and hourly limits, if there are any. Return the limits' alarms."""
        stage = self.stage_row
        budgets = (stage.monthly_budget_usd, *(team.monthly_budget_usd for team in stage.teams))
        if not stage.hourly_limits and not any(budgets):
            return []
        return BudgetStop(
            self,
            "Budgets",
            alerts=self._alerts,
            key=self._key,
            dead_letters=self._dead_letters,
            namespace=self._namespace,
            deployments=[stack.stack_name for stack in (self._compute, self._jobs)],
        ).alarms


def _matched(rules: Sequence[events.Rule]) -> cloudwatch.IMetric:
    """Return the number of events that the rules matched within an hour."""
    metrics = [
        cloudwatch.Metric(
            namespace="AWS/Events",
            metric_name="MatchedEvents",
            dimensions_map={"RuleName": rule.rule_name},
            statistic="Sum",
            period=Duration.hours(1),
        )
        for rule in rules
    ]
    if len(metrics) == 1:
        return metrics[0]
    return cloudwatch.MathExpression(
        # A rule without matches has no values.
        expression="SUM(FILL(METRICS(), 0))",
        using_metrics={f"rule{number}": metric for number, metric in enumerate(metrics, start=1)},
        period=Duration.hours(1),
    )
