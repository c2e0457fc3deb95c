"""The stage's dashboard: waiting jobs, running instances, hourly cost, and Spot reclaims."""

from collections.abc import Sequence

from aws_cdk import Duration
from aws_cdk import aws_cloudwatch as cloudwatch
from constructs import Construct

from infra.observability.functions.watch_instances import SPEND

UTILIZATION = "AcceleratorUtilization"
"""Metric that a filter extracts from log lines of jobs."""


class StageDashboard(cloudwatch.Dashboard):
    """The dashboard of the metrics in `namespace`. An account's first three dashboards are free."""

    def __init__(
        self,
        scope: Construct,
        name: str,
        *,
        namespace: str,
        queues: Sequence[str],
        instances: Sequence[str],
        alarms: Sequence[cloudwatch.IAlarm],
        price_note: str,
    ) -> None:
        super().__init__(scope, name, default_interval=Duration.days(7))
        self._namespace = namespace
        self._queues = queues
        self.add_widgets(
            self._graph("Waiting jobs", "QueueDepth", "jobs", "Queue", queues),
            self._graph("Running instances, with and without jobs", "RunningNodes", "nodes", "Instances", instances),
        )
        self.add_widgets(
            self._graph("Estimated spend", SPEND, "USD per hour", "Instances", instances),
            self._bars("Spot reclaims and failed jobs per hour", "Reclaims", "FailedJobs"),
        )
        self.add_widgets(
            cloudwatch.GraphWidget(
                title="Accelerator utilisation, as reported by jobs",
                width=12,
                left=[
                    cloudwatch.Metric(
                        namespace=namespace, metric_name=UTILIZATION, statistic=statistic, period=Duration.minutes(5)
                    )
                    for statistic in ("Average", "Minimum")
                ],
                left_y_axis=cloudwatch.YAxisProps(min=0, max=100, label="%", show_units=False),
            ),
            cloudwatch.AlarmStatusWidget(title="Alarms", width=12, alarms=list(alarms)),
        )
        self.add_widgets(
            cloudwatch.TextWidget(
                width=24,
                height=2,
                markdown="Jobs are counted whenever a job changes state, instances whenever an instance does and "
                "every five minutes. "
                f"{price_note}",
            )
        )

    def _graph(
        self, title: str, metric: str, label: str, dimension: str, values: Sequence[str]
    ) -> cloudwatch.GraphWidget:
        """Return a graph of a level, which persists between events, with a line per value of `dimension`."""
        return cloudwatch.GraphWidget(
            title=title,
            width=12,
            left=[
                cloudwatch.MathExpression(
                    expression=f"FILL({metric.lower()}{index}, REPEAT)",
                    using_metrics={f"{metric.lower()}{index}": self._metric(metric, value, "Maximum", dimension)},
                    label=value,
                    period=Duration.minutes(5),
                )
                for index, value in enumerate(values)
            ],
            left_y_axis=cloudwatch.YAxisProps(min=0, label=label, show_units=False),
            stacked=True,
        )

    def _bars(self, title: str, *metrics: str) -> cloudwatch.GraphWidget:
        return cloudwatch.GraphWidget(
            title=title,
            width=12,
            view=cloudwatch.GraphWidgetView.BAR,
            left=[
                self._metric(metric, queue, "Sum", hours=1, label=f"{metric} {queue}")
                for metric in metrics
                for queue in self._queues
            ],
        )

    def _metric(
        self,
        name: str,
        value: str,
        statistic: str,
        dimension: str = "Queue",
        *,
        hours: float = 1 / 12,
        label: str | None = None,
    ) -> cloudwatch.Metric:
        return cloudwatch.Metric(
            namespace=self._namespace,
            metric_name=name,
            dimensions_map={dimension: value},
            statistic=statistic,
            period=Duration.minutes(round(hours * 60)),
            label=label,
        )
