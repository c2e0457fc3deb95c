"""The roles of a team: of its people (MemberRole), of its jobs (TeamRole), and of the agent that starts them.

People use the member role through a profile in ~/.aws/config, with the ARN in the SSM parameter
/trainyard/<stage>/member-role/<team>:

    [profile research]
    role_arn = arn:aws:iam::…
    source_profile = default
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import aws_cdk as cdk
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.constructs.inline_role import InlineRole
from infra.constructs.stage_stack import RetainedLogGroup, StageStack
from infra.observability.functions.stop_at_budget import STOP_TAG
from infra.stages import Stage, Team
from infra.stages.checks import fallback_of
from infra.storage import homes
from infra.storage.team_secret import PublishedSecret
from jobs.core.retries import CLAIMS
from jobs.core.run import ARGUMENTS, SPEC
from jobs.core.stage import SHARED_PREFIX, parameter_path, share_identifier
from jobs.spec.code import CODE, CODE_RECORD
from jobs.spec.submit_job import JOB_TAGS
from jobs.spec.sweep import MEMBER_OF, SWEEP

MEMBER_TAG = ("trainyard:role", "member")
"""Tag of the members' roles. The function that stops a team at its budget finds them by it."""

PORT_DOCUMENT = "AWS-StartPortForwardingSession"
"""AWS's session document for forwarding a port of an instance; `jobs.runs.connect` uses it."""

_Conditions = dict[str, dict[str, str]]

_STAGE = "aws:ResourceTag/trainyard:stage"
_TEAM = "aws:ResourceTag/trainyard:team"
_TASK_STAGE = "ecs:ResourceTag/trainyard:stage"
_TASK_TEAM = "ecs:ResourceTag/trainyard:team"
_REQUESTED_STAGE = "aws:RequestTag/trainyard:stage"
_REQUESTED_TEAM = "aws:RequestTag/trainyard:team"

_WRITE = (
    "s3:PutObject",
    "s3:PutObjectTagging",  # checkpoints and caches expire by tag
    "s3:DeleteObject",  # keeps the version, which the lifecycle rule deletes later
    "s3:AbortMultipartUpload",
)


@dataclass(frozen=True, kw_only=True)
class TeamFiles:
    """A team's prefixes in the data bucket and the run bucket, and statements that grant access to them."""

    team: str
    data_arn: str
    """ARN of the data bucket."""
    runs_arn: str
    """ARN of the run bucket."""
    key_arn: str | None
    """ARN of the stage's own key, which encrypts both buckets, or None if the stage has no key."""

    def grant_read_data(self, role: InlineRole) -> None:
        """Let `role` list and read `shared/` and `<team>/` in the data bucket."""
        _list(role, "ListData", self.data_arn, SHARED_PREFIX, self.team)
        _on_objects(role, "ReadData", ["s3:GetObject"], self.data_arn, f"{SHARED_PREFIX}/*", f"{self.team}/*")

    def grant_write_data(self, role: InlineRole) -> None:
        """Let `role` write `<team>/` in the data bucket, which no other team reads."""
        _on_objects(role, "WriteData", _WRITE, self.data_arn, f"{self.team}/*")

    def grant_read_runs(self, role: InlineRole) -> None:
        """Let `role` list and read `<team>/` in the run bucket."""
        _list(role, "ListRuns", self.runs_arn, self.team)
        _on_objects(role, "ReadRuns", ["s3:GetObject"], self.runs_arn, f"{self.team}/*")

    def grant_list_versions(self, role: InlineRole) -> None:
        """Let `role` list, but not read, deleted and replaced files of `<team>/` in the run bucket: they cost money."""
        _list(role, "ListVersions", self.runs_arn, self.team, action="s3:ListBucketVersions")

    def grant_write_runs(self, role: InlineRole, *names: str) -> None:
        """Let `role` write objects with one of `names` below `<team>/` in the run bucket."""
        _on_objects(role, "WriteRuns", _WRITE, self.runs_arn, *(f"{self.team}/{name}" for name in names))

    def grant_key(self, role: InlineRole) -> None:
        """Let `role` encrypt and decrypt data in the two buckets, through S3 only.

        With a bucket key, S3 puts the bucket, not the object, into the encryption context. So only the role's S3
        statements limit the prefixes.
        """
        if self.key_arn is not None:
            role.allow(
                "UseKeyThroughS3",
                ["kms:Decrypt", "kms:GenerateDataKey"],
                self.key_arn,
                conditions={
                    "StringEquals": {
                        "kms:ViaService": f"s3.{cdk.Stack.of(role).region}.amazonaws.com",
                        "kms:EncryptionContext:aws:s3:arn": [self.data_arn, self.runs_arn],
                    }
                },
            )


def _list(role: InlineRole, sid: str, bucket: str, *prefixes: str, action: str = "s3:ListBucket") -> None:
    below = [f"{prefix}/*" for prefix in prefixes]
    role.allow(sid, [action], bucket, conditions={"StringLike": {"s3:prefix": below}})


def _on_objects(role: InlineRole, sid: str, actions: Sequence[str], bucket: str, *keys: str) -> None:
    resources = [f"{bucket}/{key}" for key in keys]
    role.allow(sid, actions, *resources)
    role.explain(
        "A team's prefix, or the shared prefix of the data bucket: object keys are not known in advance",
        *resources,
    )


class MemberRole(InlineRole):
    """A role that submits, watches and stops one team's jobs, reads its runs, and reads and writes its data.

    Batch resources are identified by tags instead of names, so the queues of a new release and new revisions of a
    definition belong to the team from the start. Only job descriptions cannot be limited to a team, because Batch
    defines no resource for reading them.
    """

    def __init__(
        self,
        stack: StageStack,
        name: str,
        *,
        team: Team,
        files: TeamFiles,
        logs: RetainedLogGroup,
        allows_exec: bool,
    ) -> None:
        """Create the role. `allows_exec`: whether members may run commands in the containers of running jobs."""
        super().__init__(
            stack,
            name,
            description=f"People of team {team.name}: submit its jobs, read its results",
            assumed_by=iam.CompositePrincipal(*(iam.ArnPrincipal(arn) for arn in team.member_principals)),
            team=team.name,
            # AWS limits a role that assumes this one to an hour ("role chaining", IAM User Guide), and refuses longer
            # requests. Only users can have more.
            max_session_duration=cdk.Duration.hours(
                12 if any(":user/" in arn for arn in team.member_principals) else 1
            ),
        )
        key, value = MEMBER_TAG
        cdk.Tags.of(self).add(key, value)
        self._stage = stack.stage_row.name
        self._fallback = fallback_of(stack.stage_row)
        self._stages: str | list[str] = [self._stage, self._fallback.name] if self._fallback else self._stage
        self._team = team.name
        self._shares = team.shares_instances
        self._read_stage()
        self._submit()
        self._deny_submissions_over_budget()
        self._watch_and_stop()
        self._connect()
        if allows_exec:
            self._exec()
        streams = [self.log_streams(logs.log_group_name, f"{team.name}/*")]
        if self._fallback:
            groups = f"trainyard-{self._fallback.name}-jobs-*"
            streams.append(self.log_streams(groups, f"{team.name}/*", region=self._fallback.region))
        self.allow("ReadLogs", ["logs:GetLogEvents"], *streams)
        self.explain("Each attempt logs to its own stream; the streams of a team start with the team's name", *streams)
        files.grant_read_data(self)
        files.grant_write_data(self)
        files.grant_read_runs(self)
        files.grant_list_versions(self)
        # Files that submitting and resuming write; jobs write the rest of a run.
        written = (SPEC, f"{ARGUMENTS}*.json", f"{CLAIMS}*.json", CODE_RECORD, SWEEP, MEMBER_OF)
        files.grant_write_runs(self, *(f"*/{name}" for name in written), f"{CODE}*")
        files.grant_key(self)

    def _read_stage(self) -> None:
        path = parameter_path(self._stage).strip("/")
        # GetParametersByPath needs permission on the path itself.
        at, below = (self._arn("ssm", "parameter", name) for name in (path, f"{path}/*"))
        self.allow("ReadStage", ["ssm:GetParametersByPath", "ssm:GetParameter", "ssm:GetParameters"], at, below)
        self.explain("Everyone who submits needs the stage's parameters: queues, buckets, definitions", below)
        if self._fallback:
            path = parameter_path(self._fallback.name).strip("/")
            at, below = (self._arns("ssm", "parameter", name)[1] for name in (path, f"{path}/*"))
            self.allow("ReadFallback", ["ssm:GetParametersByPath"], at, below)
            self.explain("Everyone who follows a run there needs its parameters: queues, log group", below)

    def _submit(self) -> None:
        queues, definitions, jobs = self._arn("batch", "job-queue"), self._arn("batch", "job-definition"), self._jobs
        share = {"batch:ShareIdentifier": share_identifier(self._team)}
        submit = ["batch:SubmitJob"]
        # Submitting to a queue means using its instances: allow only the team's own, or those that teams share.
        own = {_STAGE: self._stage, _TEAM: self._team}
        requested = {_REQUESTED_STAGE: self._stage, _REQUESTED_TEAM: self._team}
        # Queues with the stage's tag but no team are those that teams share.
        own_or_shared = {"StringEqualsIfExists": {_TEAM: self._team}, "StringEquals": {_STAGE: self._stage}}
        for_queues = own_or_shared if self._shares else {"StringEquals": own}

        def and_equal(conditions: _Conditions, equal: Mapping[str, str]) -> _Conditions:
            return {**conditions, "StringEquals": {**conditions["StringEquals"], **equal}}

        self.allow("SubmitToQueues", submit, queues, conditions=and_equal(for_queues, share))
        self.allow("SubmitOwnDefinitions", submit, definitions, conditions={"StringEquals": own})
        self.allow("SubmitOwnJobs", submit, jobs, conditions={"StringEquals": {**requested, **share}})
        # Batch checks batch:TagResource on the queue and the definition of a submission: its refusals name the
        # definition (GitHub, wri/gfw-data-api #175). AWS documents no resource, and this has not been tested on AWS. No
        # condition key distinguishes new jobs from existing ones, so allowing it on jobs would let people tag, and then
        # end, any untagged job of the account.
        tag, keys = ["batch:TagResource"], {"ForAllValues:StringEquals": {"aws:TagKeys": list(JOB_TAGS)}}
        self.allow("TagSubmissionsToQueues", tag, queues, conditions={**and_equal(for_queues, requested), **keys})
        self.allow(
            "TagSubmissionsOfDefinitions", tag, definitions, conditions={"StringEquals": {**own, **requested}, **keys}
        )
        self.explain(
            "Conditions limit these to resources with the stage's and the team's tags", queues, definitions, jobs
        )

    def _deny_submissions_over_budget(self) -> None:
        """Deny submissions while the role has the tag of a budget stop.

        The statement is always present, so that a stop need not attach a policy, which would block deleting the role.
        """
        self.add_to_policy(
            iam.PolicyStatement(
                sid="BudgetUsedUp",
                effect=iam.Effect.DENY,
                actions=["batch:SubmitJob"],
                resources=[self._arn("batch", "job-queue")],
                conditions={"Null": {f"aws:PrincipalTag/{STOP_TAG}": "false"}},
            )
        )

    def _watch_and_stop(self) -> None:
        self.allow(
            "SeeJobs",
            [
                "batch:DescribeComputeEnvironments",
                "batch:DescribeJobQueues",
                "batch:DescribeJobs",
                "batch:ListJobs",
                # Why a run does not start (`trainyard why`)
                "ec2:DescribeInstanceTypeOfferings",
                "ec2:DescribeSubnets",
                # Current prices, for plans
                "ec2:DescribeSpotPriceHistory",
                "ec2:GetSpotPlacementScores",
                "pricing:GetProducts",
                "servicequotas:GetServiceQuota",
            ],
            "*",
        )
        self.explain(
            "These calls only read, or open a session's channel with the token from the session's start. They support "
            "no resources",
            "*",
        )
        self.allow(
            "SeeQueues",
            ["batch:GetJobQueueSnapshot"],
            *self._arns("batch", "job-queue"),
            conditions={"StringEquals": {_STAGE: self._stages}},
        )
        self.allow(
            "StopOwnJobs",
            ["batch:CancelJob", "batch:TerminateJob"],
            *self._arns("batch", "job"),
            conditions={"StringEquals": {_STAGE: self._stages, _TEAM: self._team}},
        )
        self.explain(
            "Conditions limit these to the two stages' queues, and to the team's jobs in them",
            *self._arns("batch", "job-queue")[1:],
            *self._arns("batch", "job")[1:],
        )

    def _connect(self) -> None:
        """Allow `trainyard connect`: forwarding a port of an instance that runs the team's job, without a shell.

        An instance's tag names the team of its latest job, and is set some seconds after the job starts (see
        observability/functions/tag_instances.py). IAM does not check open sessions again, and cannot limit which port
        is forwarded. So a team may briefly reach an instance after another team's job has started there, but never that
        job's notebook, whose token is stored with the run's files.
        """
        instances = self._arns("ec2", "instance")
        documents = self._arns("ssm", "document", PORT_DOCUMENT, account="")
        # Refuses all other documents, even the default one, which opens a shell.
        checked = {"BoolIfExists": {"ssm:SessionDocumentAccessCheck": "true"}}
        start = ["ssm:StartSession"]
        self.allow("ForwardPorts", start, *documents, conditions=checked)
        self.allow(
            "ForwardPortsOfOwnInstances",
            start,
            *instances,
            conditions={**checked, "StringEquals": {_STAGE: self._stages, _TEAM: self._team}},
        )
        sessions, members = self._arns("ssm", "session"), self._arns("ecs", "container-instance")
        # The tag identifies a session's owner. The session's id starts with the role session's name, not `aws:userid`.
        own_sessions = {"StringLike": {"ssm:resourceTag/aws:ssmmessages:session-id": "${aws:userid}*"}}
        self.allow("EndOwnSessions", ["ssm:ResumeSession", "ssm:TerminateSession"], *sessions, conditions=own_sessions)
        self.allow("OpenChannels", ["ssmmessages:OpenDataChannel"], "*")
        self.allow("FindInstances", ["ecs:DescribeContainerInstances"], *members)
        self.explain(
            "Conditions limit these to the team's instances and the person's own sessions", *instances, *sessions
        )
        self.explain("Batch names its clusters and does not tag them with the stage; the call only reads", *members)

    def _exec(self) -> None:
        """Allow `trainyard exec`: commands in the containers of the team's tasks, which have their jobs' tags.

        The statement follows the Amazon ECS developer guide, "Using IAM policies to limit access to ECS Exec": one
        condition on the task's tags, for both task and cluster. Batch's clusters lack the stage's tags. If ECS also
        checks the cluster's tags, which has not been tested on AWS, every call is refused.
        """
        tasks, clusters = self._arns("ecs", "task"), self._arns("ecs", "cluster")
        self.allow(
            "EnterOwnJobs",
            ["ecs:ExecuteCommand"],
            *tasks,
            *clusters,
            conditions={"StringEquals": {_TASK_STAGE: self._stages, _TASK_TEAM: self._team}},
        )
        self.explain("A condition limits this to the tasks of the team's own jobs", *tasks, *clusters)

    @property
    def _jobs(self) -> str:
        return self._arn("batch", "job")

    def _arn(self, service: str, resource: str, name: str = "*") -> str:
        return self._arns(service, resource, name)[0]

    def _arns(self, service: str, resource: str, name: str = "*", account: str | None = None) -> list[str]:
        """Return the ARN in the stage's region, followed by that in the fallback's region if there is one."""
        stack = cdk.Stack.of(self)
        regions = [None, *([self._fallback.region] if self._fallback else [])]
        return [
            stack.format_arn(service=service, region=region, account=account, resource=resource, resource_name=name)
            for region in regions
        ]


class TeamRole(InlineRole):
    """The role of a team's jobs: access to the team's files and to what all teams share, and nothing else.

    It reads `shared/` and `<team>/` in the data bucket, and reads and writes `<team>/` in the run bucket. If people may
    run commands in the containers, the SSM agent that ECS starts for them there uses this role too.
    """

    def __init__(
        self, scope: Construct, name: str, *, files: TeamFiles, logs: RetainedLogGroup | None, others: Sequence[Stage]
    ) -> None:
        """Create the role.

        `logs`: log group of commands that people run in containers, or None if they may not. `others`: stages of the
        team whose jobs also run here, and whose files they then read and write.
        """
        super().__init__(
            scope,
            name,
            description=f"Jobs of team {files.team}",
            assumed_by=_task_principal(scope),
            team=files.team,
        )
        files.grant_read_data(self)
        files.grant_read_runs(self)
        files.grant_write_runs(self, "*")
        files.grant_key(self)
        if others:
            self._grant_files_of(others, files.team)
        if logs is not None:
            self._grant_exec_agent(logs)

    def _grant_files_of(self, others: Sequence[Stage], team: str) -> None:
        data, runs = [homes.data_of(home) for home in others], [homes.runs_of(home) for home in others]
        prefixes = [f"{SHARED_PREFIX}/*", f"{team}/*"]
        homes.allow_files(self, "ListFilesOfHomes", ["s3:ListBucket"], *data, *runs, prefixes=prefixes)
        of_runs = [f"{arn}/{team}/*" for arn in runs]
        inputs = [f"{arn}/{prefix}" for arn in data for prefix in prefixes]
        homes.allow_files(self, "ReadFilesOfHomes", ["s3:GetObject"], *inputs, *of_runs)
        homes.allow_files(self, "WriteRunsOfHomes", _WRITE, *of_runs)
        homes.allow_keys(self, others)

    def _grant_exec_agent(self, logs: RetainedLogGroup) -> None:
        """Allow the ECS Exec agent its channels and its session log; a session's log stream has the session's name.

        The permissions follow the Amazon ECS developer guide, "ECS Exec permissions" and "Logging using ECS Exec".
        """
        channels = ("CreateControlChannel", "CreateDataChannel", "OpenControlChannel", "OpenDataChannel")
        self.allow("OpenChannels", [f"ssmmessages:{channel}" for channel in channels], "*")
        self.allow("FindLogGroup", ["logs:DescribeLogGroups"], "*")
        self.explain("Session Manager's channels have no ARN, and log groups can only be described together", "*")
        streams = self.log_streams(logs.log_group_name, "ecs-execute-command-*")
        self.allow("LogCommands", ["logs:CreateLogStream", "logs:PutLogEvents"], streams)
        self.explain("Each session logs to its own stream, named after the session", streams)
        self.allow("FindLogStreams", ["logs:DescribeLogStreams"], logs.log_group_arn)


class ExecutionRole(InlineRole):
    """The role of the ECS agent while it starts a team's job: pull the image, read secrets, write the log.

    Each team has its own, because the role can read the team's secrets. The container's code never has it.
    """

    def __init__(
        self,
        scope: Construct,
        name: str,
        *,
        team: Team,
        repositories: Iterable[ecr.IRepository],
        logs: RetainedLogGroup,
        secrets: Iterable[PublishedSecret],
    ) -> None:
        super().__init__(
            scope,
            name,
            description=f"The ECS agent, for jobs of team {team.name}: image, secret, log",
            assumed_by=_task_principal(scope),
            team=team.name,
        )
        for repository in repositories:
            repository.grant_pull(self)
        self.explain("ecr:GetAuthorizationToken supports no resources: it can only be allowed on all of them", "*")
        streams = self.log_streams(logs.log_group_name, f"{team.name}/*")
        self.allow("WriteLog", ["logs:CreateLogStream", "logs:PutLogEvents"], streams)
        self.explain("Each attempt logs to its own stream; the streams of a team start with the team's name", streams)
        for secret in secrets:
            secret.grant_read(self)


def _task_principal(scope: Construct) -> iam.PrincipalBase:
    """Return ECS as a principal, limited by conditions to tasks of this account."""
    stack = cdk.Stack.of(scope)
    return iam.ServicePrincipal(
        "ecs-tasks.amazonaws.com",
        conditions={
            "StringEquals": {"aws:SourceAccount": stack.account},
            "ArnLike": {"aws:SourceArn": stack.format_arn(service="ecs", resource="*")},
        },
    )
