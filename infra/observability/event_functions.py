"""The functions that events of Batch call: what each is told, what it may do, and when it is called."""

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

from infra.constructs.function import Function
from infra.constructs.stage_stack import StageStack
from infra.observability import functions
from infra.observability.alerts import Alerts, admit_dead_letters, queue_rules
from infra.observability.functions.tag_instances import TAGS
from infra.observability.functions.watch_instances import JOINED_TAG, NEVER_JOINED
from jobs.core.errors import INTERRUPTED_EXIT_CODE, SWEEP_OVER_EXIT_CODE
from jobs.core.instance_types import InstanceType
from jobs.core.queues import SPOT_WAITED_TOO_LONG, Queue, team_queue_name
from jobs.core.retries import DUPLICATE_REASON, EXITED_REASON, MOVED_REASON, MOVED_TAG, RECLAIM_REASON
from jobs.core.stage import parameter_path
from jobs.spec.sweep import NO_POINT_LEFT_REASON

_FOLDER = Path(__file__).parent / "functions"


class EventFunction(Function):
    """A function made of a module of functions/ that has a `handler`."""

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
            )


def _pack(file: str, package: Path) -> None:
    """Put the function's file where Lambda looks for its handler, and all of functions/ where its imports look."""
    shutil.copy(_FOLDER / f"{file}.py", package)
    shutil.copytree(
        _FOLDER, package.joinpath(*functions.__name__.split(".")), ignore=shutil.ignore_patterns("__pycache__")
    )


_STATE_CHANGE = "Batch Job State Change"


@dataclass(frozen=True, kw_only=True)
class StageQueue:
    """A queue that the compute stack has made."""

    queue: Queue
    team: str | None
    """Whose own it is; None: teams share it."""
    retiring: str | None
    row: InstanceType
    arn: str

    @property
    def label(self) -> str:
        """Return what the dashboard calls it."""
        name = team_queue_name(self.queue.name, self.team) if self.team else self.queue.name
        return f"{name} ({self.retiring})" if self.retiring else name


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
        admit_dead_letters(dead_letters, stage=self._stage.name)

    def report(self, namespace: str) -> None:
        """Make the function that says what became of each job, in words and as metrics of `namespace`."""
        function = self._function(
            "ReportJob",
            "report_job",
            "Failed jobs and reclaims in words, queues and nodes in numbers",
            STAGE=self._stage.name,
            TOPIC_ARN=self._alerts.topic.topic_arn,
            METRIC_NAMESPACE=namespace,
            PARAMETER_PATH=parameter_path(self._stage.name),
            SPOT_QUEUES=json.dumps(
                sorted({queue.queue.name for queue in self._queues if queue.queue.capacity == "spot"})
            ),
            NO_FAILURES=json.dumps([MOVED_REASON, DUPLICATE_REASON, NO_POINT_LEFT_REASON]),
            **self._of_reclaims(),
        )
        self._read_jobs(function)
        self._read_queues(function)
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
        self._tag_instances(function, *TAGS)
        function.execution_role.explain(
            "Batch starts instances and clusters under names of its own: which are the stage's, their tag says.",
            members,
            instances,
        )
        self._on_state_change("RunningJobs", function, [queue.arn for queue in self._queues], status=["RUNNING"])

    def watch_instances(self, namespace: str, log_group_name: str) -> None:
        """Make the function that counts instances, and disables environments whose instances never join.

        `log_group_name`: where instances send the logs of their boot.
        """
        path = parameter_path(self._stage.name)
        rows = {queue.row.name: queue.row for queue in self._queues}
        function = self._function(
            "WatchInstances",
            "watch_instances",
            "Instances in numbers, and an end to those that never join",
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
        )
        function.may_publish(self._alerts.topic, self._key)
        self._allow_watching(function, path)
        target = targets.LambdaFunction(function, dead_letter_queue=self._dead_letters)
        states = events.EventPattern(source=["aws.ec2"], detail_type=["EC2 Instance State-change Notification"])
        joined = events.EventPattern(
            source=["aws.ecs"], detail_type=["ECS Container Instance State Change"], detail={"status": ["ACTIVE"]}
        )
        for name, pattern, description in (
            ("InstanceStates", states, "An instance of the account has changed its state; the event has no tags"),
            ("InstancesJoined", joined, "A container instance is there, or has changed"),
        ):
            events.Rule(self._stack, name, description=description, event_pattern=pattern, targets=[target])
        # What does not happen has no event: an instance that has not joined is found by looking.
        events.Rule(
            self._stack,
            "InstancesSeen",
            description="Finds instances that boot and never join",
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
        allow("Look", ["batch:DescribeComputeEnvironments", "ec2:DescribeInstances"], "*")
        allow(
            "DisableEnvironments",
            ["batch:UpdateComputeEnvironment"],
            environments,
            conditions={"StringEquals": of_stage},
        )
        allow("EndInstances", ["ec2:TerminateInstances"], instances, conditions={"StringEquals": of_stage})
        self._tag_instances(function, JOINED_TAG)
        allow("RecordWhy", ["ssm:DeleteParameter", "ssm:GetParameter", "ssm:PutParameter"], records)
        function.execution_role.explain(
            "EC2 and Batch know no resources for reading; instances and environments come and go under names of their "
            "own and are told by their tags, and each environment has a record of its own.",
            *("*", instances, environments, records),
        )

    def end_sweeps(self) -> None:
        """Make the function that cancels the workers of a sweep for which no point is left."""
        function = self._function(
            "EndSweep",
            "end_sweep",
            "No instance starts for a sweep that has no point left",
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
            # Batch does not support tags on the ARNs of an array's children (API reference, "ListTagsForResource"):
            # the function looks at the parent's.
            conditions={"StringEqualsIfExists": {"aws:ResourceTag/trainyard:stage": self._stage.name}},
        )
        function.execution_role.explain(
            "Workers are children of array jobs that are not known beforehand. CancelJob ends none that has started.",
            workers,
        )
        queues = [queue.arn for queue in self._queues]
        self._on_state_change("EndedJobs", function, queues, status=["SUCCEEDED", "FAILED"])

    def move_to_on_demand(self, run_bucket: str, runs_arn: str) -> None:
        """Make the function that moves jobs to On-Demand; `runs_arn` is the ARN of `run_bucket`."""
        function = self._function(
            "MoveToOnDemand",
            "move_to_on_demand",
            "Jobs that Spot takes away too often go on On-Demand",
            RUN_BUCKET=run_bucket,
            PARAMETER_PATH=parameter_path(self._stage.name),
            MOVED_REASON=MOVED_REASON,
            MOVED_TAG=MOVED_TAG,
            **self._of_reclaims(),
        )
        self._read_jobs(function)
        self._read_queues(function)
        self._allow_moves(function, runs_arn)
        self._on_state_change("SpotJobs", function, [arn for arn, _ in self._successors])

    def _allow_moves(self, function: EventFunction, runs_arn: str) -> None:
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
        successors = [arn for _, arn in self._successors]
        function.execution_role.allow("SubmitToOnDemand", ["batch:SubmitJob"], *successors)
        function.execution_role.allow(
            "SubmitDefinitionsOfStage", ["batch:SubmitJob"], definitions, conditions=of_the_stage
        )
        # On what a job is submitted with, and not on jobs: see infra/job/roles.py.
        tagged = {"StringEquals": {**of_the_stage["StringEquals"], "aws:RequestTag/trainyard:stage": self._stage.name}}
        function.execution_role.allow(
            "TagSubmissions", ["batch:TagResource"], *successors, definitions, conditions=tagged
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

    def _of_reclaims(self) -> dict[str, str]:
        """Return what functions are told by which a reclaim is known, and when a job moves to On-Demand."""
        return {
            "ON_DEMAND_NODES": str(self._stage.max_on_demand_nodes),
            "RECLAIMS_BEFORE_ON_DEMAND": str(self._stage.reclaims_before_on_demand),
            "RECLAIM_REASON": RECLAIM_REASON,
            "EXITED_REASON": EXITED_REASON,
            "INTERRUPTED_EXIT_CODE": str(INTERRUPTED_EXIT_CODE),
            "NO_CAPACITY_REASON": SPOT_WAITED_TOO_LONG,
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
        """Let it give the stage's instances these tags, and no others."""
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
            "Batch knows no resources for reading jobs: DescribeJobs and ListJobs can only be allowed on all of them.",
            "*",
        )

    def _read_queues(self, function: EventFunction) -> None:
        path = parameter_path(self._stage.name).strip("/")
        # Asked for all below a path, Systems Manager looks for a permission on the path itself.
        paths = [
            self._stack.format_arn(service="ssm", resource="parameter", resource_name=f"{path}/{kind}{below}")
            for kind in ("queue", "team-queue")
            for below in ("", "/*")
        ]
        function.execution_role.allow("ReadQueues", ["ssm:GetParametersByPath"], *paths)
        function.execution_role.explain("Queues come and go with teams and pools.", *paths[1::2])

    def _on_state_change(self, name: str, function: EventFunction, queues: list[str], **detail: list[str]) -> None:
        queue_rules(
            self._stack,
            name,
            detail_type=_STATE_CHANGE,
            queues=queues,
            target=targets.LambdaFunction(function),
            dead_letters=self._dead_letters,
            detail=detail,
        )
