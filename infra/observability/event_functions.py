"""The Lambda functions that events call: their environment, their permissions and their rules."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import aws_cdk as cdk
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_kms as kms
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sqs as sqs
from constructs import Construct

from infra.constructs.function import TIMEOUT, Function
from infra.constructs.stage_stack import StageStack
from infra.observability import functions
from infra.observability.alerts import Alerts, admit_dead_letters, queue_rules
from infra.observability.functions.tag_instances import TAGS
from infra.observability.functions.watch_instances import JOINED_TAG, NEVER_JOINED
from infra.stages import Stage
from infra.stages.checks import fallback_of, homes_of
from infra.storage import homes
from jobs.core.errors import INTERRUPTED_EXIT_CODE, SWEEP_OVER_EXIT_CODE
from jobs.core.instance_types import InstanceType
from jobs.core.queues import SPOT, SPOT_WAITED_TOO_LONG, Queue, team_queue_name
from jobs.core.retries import DUPLICATE_REASON, EXITED_REASON, MOVED_REASON, MOVED_TAG, RECLAIM_REASON
from jobs.core.stage import parameter_path
from jobs.spec.sweep import NO_POINT_LEFT_REASON

_FOLDER = Path(__file__).parent / "functions"


class EventFunction(Function):
    """A function from a module of functions/ that defines `handler`."""

    def __init__(
        self,
        scope: Construct,
        name: str,
        *,
        file: str,
        description: str,
        environment: Mapping[str, str],
        dead_letters: sqs.IQueue,
        log_retention_days: int,
        timeout: cdk.Duration = TIMEOUT,
    ) -> None:
        with TemporaryDirectory() as package:
            _pack(file, Path(package))
            super().__init__(
                scope,
                name,
                handler=f"{file}.handler",
                code=lambda_.Code.from_asset(package),
                description=description,
                environment=environment,
                dead_letters=dead_letters,
                log_retention_days=log_retention_days,
                timeout=timeout,
            )


def _pack(file: str, package: Path) -> None:
    """Copy the function's file to where Lambda looks for the handler, and functions/ to where Python finds imports."""
    shutil.copy(_FOLDER / f"{file}.py", package)
    shutil.copytree(
        _FOLDER, package.joinpath(*functions.__name__.split(".")), ignore=shutil.ignore_patterns("__pycache__")
    )


@dataclass(frozen=True, kw_only=True)
class StageQueue:
    """A queue that the compute stack creates."""

    queue: Queue
    team: str | None
    """The team whose jobs the queue takes, or None if teams share the queue."""
    retiring: str | None
    """Id of the pool if it is retiring."""
    types: Sequence[InstanceType]
    """Types of its instances."""
    arn: str

    @property
    def label(self) -> str:
        """Return the queue's name on the dashboard."""
        name = team_queue_name(self.queue.name, self.team) if self.team else self.queue.name
        return f"{name} ({self.retiring})" if self.retiring else name


class EventFunctions:
    """Creates the functions of a stage in `stack`."""

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
        """Let the stage's rules use `dead_letters`. `successors`: ARNs of Spot queues and of their On-Demand queues."""
        self._stack = stack
        self._stage = stack.stage_row
        self._queues = queues
        self._successors = successors
        self._alerts = alerts
        self._key = key
        self._dead_letters = dead_letters
        admit_dead_letters(dead_letters, stage=self._stage.name)

    def report(self, namespace: str) -> None:
        """Create the function that reports the end of each job, as alerts and as metrics in `namespace`."""
        function = self._function(
            "ReportJob",
            "report_job",
            "Reports failed jobs and reclaims, and counts queues and nodes",
            STAGE=self._stage.name,
            TOPIC_ARN=self._alerts.topic.topic_arn,
            METRIC_NAMESPACE=namespace,
            PARAMETER_PATH=parameter_path(self._stage.name),
            SPOT_QUEUES=json.dumps(
                sorted({queue.queue.name for queue in self._queues if queue.queue.capacity == "spot"})
            ),
            NO_FAILURES=json.dumps([MOVED_REASON, DUPLICATE_REASON, NO_POINT_LEFT_REASON]),
            **self._reclaim_rules(),
        )
        self._read_jobs(function)
        self._read_queues(function)
        function.may_publish(self._alerts.topic, self._key)
        self._on_state_change("Jobs", function, [queue.arn for queue in self._queues])

    def tag_instances(self) -> None:
        """Create the function that tags instances with the team and run of their job."""
        function = self._function("TagInstances", "tag_instances", "Tags instances with the team and run of their job")
        self._read_jobs(function)
        members = self._stack.format_arn(service="ecs", resource="container-instance", resource_name="*")
        instances = self._stack.format_arn(service="ec2", resource="instance", resource_name="*")
        function.execution_role.allow("FindInstances", ["ecs:DescribeContainerInstances"], members)
        self._tag_instances(function, *TAGS)
        function.execution_role.explain(
            "Batch generates the names of instances and clusters; tags identify those of the stage.",
            members,
            instances,
        )
        self._on_state_change("RunningJobs", function, [queue.arn for queue in self._queues], status=["RUNNING"])

    def watch_instances(self, namespace: str, log_group_name: str) -> None:
        """Create the function that counts instances and disables compute environments whose instances never join.

        `log_group_name`: log group of boot logs.
        """
        path = parameter_path(self._stage.name)
        rows = {row.name: row for queue in self._queues for row in queue.types}
        function = self._function(
            "WatchInstances",
            "watch_instances",
            "Counts instances, and terminates those that never join",
            STAGE=self._stage.name,
            TOPIC_ARN=self._alerts.topic.topic_arn,
            METRIC_NAMESPACE=namespace,
            PARAMETER_PATH=path,
            LOG_GROUP=log_group_name,
            PRICES=json.dumps(
                {
                    name: {"spot": row.spot_usd_per_hour, "on-demand": row.on_demand_usd_per_hour}
                    for name, row in rows.items()
                }
            ),
            LIMITED=json.dumps(list(self._stage.hourly_limits)),
        )
        function.may_publish(self._alerts.topic, self._key)
        self._allow_watching(function, path)
        target = targets.LambdaFunction(function, dead_letter_queue=self._dead_letters)
        # Batch generates the rest of the name, so the function ignores clusters of other stages. Source of the prefix:
        # BatchServiceRolePolicy, the policy of Batch's service-linked role.
        clusters = self._stack.format_arn(service="ecs", resource="cluster", resource_name="AWSBatch")
        events.Rule(
            self._stack,
            "InstancesJoined",
            description="A container instance of Batch joined or changed",
            event_pattern=events.EventPattern(
                source=["aws.ecs"],
                detail_type=["ECS Container Instance State Change"],
                detail={"status": ["ACTIVE"], "clusterArn": [{"prefix": clusters}]},
            ),
            targets=[target],
        )
        # No event reports an instance that does not join, and EC2's events, which have no tags, would call the function
        # for every instance of the account. So the function polls.
        events.Rule(
            self._stack,
            "InstancesSeen",
            description="Counts instances, and finds those that boot and never join",
            schedule=events.Schedule.rate(cdk.Duration.minutes(5)),
            targets=[target],
        )

    def _allow_watching(self, function: EventFunction, path: str) -> None:
        of_stage = {"aws:ResourceTag/trainyard:stage": self._stage.name}
        instances = self._stack.format_arn(service="ec2", resource="instance", resource_name="*")
        environments = self._stack.format_arn(service="batch", resource="compute-environment", resource_name="*")
        records = self._stack.format_arn(
            service="ssm", resource="parameter", resource_name=f"{path}{NEVER_JOINED}*".strip("/")
        )
        allow = function.execution_role.allow
        allow("ReadInstances", ["batch:DescribeComputeEnvironments", "ec2:DescribeInstances"], "*")
        allow(
            "DisableEnvironments",
            ["batch:UpdateComputeEnvironment"],
            environments,
            conditions={"StringEquals": of_stage},
        )
        allow("TerminateInstances", ["ec2:TerminateInstances"], instances, conditions={"StringEquals": of_stage})
        self._tag_instances(function, JOINED_TAG)
        allow("RecordReasons", ["ssm:DeleteParameter", "ssm:GetParameter", "ssm:PutParameter"], records)
        function.execution_role.explain(
            "EC2 and Batch support no resources for reading; names of instances and environments are generated, tags "
            "identify those of the stage, and each environment has its own record.",
            *("*", instances, environments, records),
        )

    def end_sweeps(self) -> None:
        """Create the function that cancels the workers of a sweep once no point is left."""
        function = self._function(
            "EndSweep",
            "end_sweep",
            "Cancels waiting workers of a sweep without points left",
            STAGE=self._stage.name,
            SWEEP_OVER_EXIT_CODE=str(SWEEP_OVER_EXIT_CODE),
            NO_POINT_LEFT_REASON=NO_POINT_LEFT_REASON,
        )
        self._read_jobs(function)
        workers = self._stack.format_arn(service="batch", resource="job", resource_name="*:*")
        function.execution_role.allow(
            "CancelWaitingWorkers",
            ["batch:CancelJob"],
            workers,
            # Batch does not support tags on children of an array (API reference, "ListTagsForResource"), so the
            # function checks the parent's tags.
            conditions={"StringEqualsIfExists": {"aws:ResourceTag/trainyard:stage": self._stage.name}},
        )
        function.execution_role.explain(
            "Workers are children of array jobs that are not known in advance. CancelJob does not end started jobs.",
            workers,
        )
        queues = [queue.arn for queue in self._queues]
        self._on_state_change("EndedJobs", function, queues, status=["SUCCEEDED", "FAILED"])

    def move_to_on_demand(self, run_bucket: str, runs_arn: str) -> None:
        """Create the function that moves jobs to On-Demand; `runs_arn` is the ARN of `run_bucket`."""
        function = self._function(
            "MoveToOnDemand",
            "move_to_on_demand",
            "Moves jobs that Spot reclaims too often to On-Demand",
            STAGE=self._stage.name,
            RUN_BUCKET=run_bucket,
            PARAMETER_PATH=parameter_path(self._stage.name),
            MOVED_REASON=MOVED_REASON,
            MOVED_TAG=MOVED_TAG,
            **self._reclaim_rules(),
        )
        self._read_jobs(function)
        self._read_queues(function)
        self._allow_moves(function, runs_arn)
        fallback = fallback_of(self._stage)
        if fallback:
            self._allow_fallback(function, fallback)
        with_successors = [arn for arn, _ in self._successors]
        falling_back = [queue.arn for queue in self._queues if queue.queue.name == SPOT and not queue.retiring]
        queues = [*with_successors, *(falling_back if fallback else [])]
        self._on_state_change("SpotJobs", function, list(dict.fromkeys(queues)))

    def _allow_moves(self, function: EventFunction, runs_arn: str) -> None:
        """Let `function` end jobs of the stage, resubmit them to On-Demand, and claim each move in the run bucket."""
        all_jobs = self._stack.format_arn(service="batch", resource="job", resource_name="*")
        definitions = self._stack.format_arn(service="batch", resource="job-definition", resource_name="*")
        claims = f"{runs_arn}/*/moves/*"
        of_stage = {"StringEquals": {"aws:ResourceTag/trainyard:stage": self._stage.name}}
        function.execution_role.allow(
            "EndJob",
            ["batch:TerminateJob"],
            all_jobs,
            conditions=of_stage,
        )
        successors = [arn for _, arn in self._successors]
        if successors:
            function.execution_role.allow("SubmitToOnDemand", ["batch:SubmitJob"], *successors)
        function.execution_role.allow("SubmitDefinitionsOfStage", ["batch:SubmitJob"], definitions, conditions=of_stage)
        # On queues and definitions, not on jobs: see infra/job/roles.py.
        tagged = {"StringEquals": {**of_stage["StringEquals"], "aws:RequestTag/trainyard:stage": self._stage.name}}
        function.execution_role.allow(
            "TagSubmissions", ["batch:TagResource"], *successors, definitions, conditions=tagged
        )
        function.execution_role.allow("ClaimMoves", ["s3:GetObject", "s3:PutObject"], claims)
        if self._key:
            function.may_use(self._key)
        if rows := homes_of(self._stage):
            there = [f"{homes.runs_of(row)}/*/moves/*" for row in rows]
            homes.allow_files(function.execution_role, "ClaimMovesOfHomes", ["s3:GetObject", "s3:PutObject"], *there)
            homes.allow_keys(function.execution_role, rows)
        function.execution_role.explain(
            "Jobs, definitions and runs are not known in advance. The stage's tag limits which jobs may be ended and "
            "which definitions submitted; in runs, only moves may be written.",
            all_jobs,
            definitions,
            claims,
        )

    def _allow_fallback(self, function: EventFunction, fallback: Stage) -> None:
        """Let `function` read the fallback stage's parameters and prices, and submit jobs to it."""
        role, region = function.execution_role, fallback.region
        path = parameter_path(fallback.name).strip("/")
        parameters = [
            self._stack.format_arn(service="ssm", region=region, resource="parameter", resource_name=name)
            for name in (path, f"{path}/*")
        ]
        role.allow("ReadFallback", ["ssm:GetParametersByPath"], *parameters)
        role.allow("ReadSpotPrices", ["ec2:DescribeSpotPriceHistory"], "*")
        targets = [
            self._stack.format_arn(service="batch", region=region, resource=resource, resource_name="*")
            for resource in ("job-queue", "job-definition")
        ]
        there = {"aws:ResourceTag/trainyard:stage": fallback.name}
        role.allow("SubmitToFallback", ["batch:SubmitJob"], *targets, conditions={"StringEquals": there})
        tagged = {**there, "aws:RequestTag/trainyard:stage": fallback.name}
        role.allow("TagInFallback", ["batch:TagResource"], *targets, conditions={"StringEquals": tagged})
        role.explain(
            "Names in the other region are generated and not known here. The tag limits queues and definitions to the "
            "fallback stage, the path its parameters.",
            parameters[1],
            *targets,
        )

    def _reclaim_rules(self) -> dict[str, str]:
        """Return the environment of functions that recognise reclaims and moves to On-Demand."""
        fallback = fallback_of(self._stage)
        return {
            "ON_DEMAND_NODES": str(self._stage.max_on_demand_nodes),
            "RECLAIMS_BEFORE_ON_DEMAND": str(self._stage.reclaims_before_on_demand),
            "RECLAIM_REASON": RECLAIM_REASON,
            "EXITED_REASON": EXITED_REASON,
            "INTERRUPTED_EXIT_CODE": str(INTERRUPTED_EXIT_CODE),
            "NO_CAPACITY_REASON": SPOT_WAITED_TOO_LONG,
            **({"FALLBACK_STAGE": f"{fallback.name} {fallback.region}"} if fallback else {}),
        }

    def _function(self, name: str, file: str, description: str, **environment: str) -> EventFunction:
        return EventFunction(
            self._stack,
            name,
            file=file,
            description=description,
            environment=environment,
            dead_letters=self._dead_letters,
            log_retention_days=self._stage.log_retention_days,
        )

    def _tag_instances(self, function: EventFunction, *keys: str) -> None:
        """Let `function` set these tags, and no others, on the stage's instances."""
        function.execution_role.allow(
            "TagInstancesOfStage",
            ["ec2:CreateTags"],
            self._stack.format_arn(service="ec2", resource="instance", resource_name="*"),
            conditions={
                "StringEquals": {"aws:ResourceTag/trainyard:stage": self._stage.name},
                "ForAllValues:StringEquals": {"aws:TagKeys": list(keys)},
            },
        )

    def _read_jobs(self, function: EventFunction) -> None:
        function.execution_role.allow("ReadJobs", ["batch:DescribeJobs", "batch:ListJobs"], "*")
        function.execution_role.explain(
            "Batch supports no resources for reading jobs: DescribeJobs and ListJobs must be allowed on all of them.",
            "*",
        )

    def _read_queues(self, function: EventFunction) -> None:
        path = parameter_path(self._stage.name).strip("/")
        # GetParametersByPath needs permission on the path itself.
        paths = [
            self._stack.format_arn(service="ssm", resource="parameter", resource_name=f"{path}/{kind}{below}")
            for kind in ("queue", "team-queue")
            for below in ("", "/*")
        ]
        function.execution_role.allow("ReadQueues", ["ssm:GetParametersByPath"], *paths)
        function.execution_role.explain("Queues are added and removed with teams and pools.", *paths[1::2])

    def _on_state_change(self, name: str, function: EventFunction, queues: list[str], **detail: list[str]) -> None:
        queue_rules(
            self._stack,
            name,
            detail_type="Batch Job State Change",
            queues=queues,
            target=targets.LambdaFunction(function),
            dead_letters=self._dead_letters,
            detail=detail,
        )
