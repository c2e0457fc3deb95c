"""The role that a team's people assume: whatever a `trainyard` command asks of AWS, for their own team only.

In ~/.aws/config, with the ARN that SSM has under /trainyard/<stage>/member-role/<team>:

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
from infra.stages import Team
from infra.storage.team_secret import PublishedSecret
from jobs.core.retries import CLAIMS
from jobs.core.run import ARGUMENTS, SPEC
from jobs.core.stage import SHARED_PREFIX, parameter_path, share_identifier
from jobs.spec.code import CODE, CODE_RECORD
from jobs.spec.submit_job import JOB_TAGS
from jobs.spec.sweep import MEMBER_OF, SWEEP

_WRITE = (
    "s3:PutObject",
    "s3:PutObjectTagging",  # checkpoints and caches carry the tag by which they expire
    "s3:DeleteObject",  # leaves the version, which the lifecycle keeps for its time
    "s3:AbortMultipartUpload",
)


@dataclass(frozen=True, kw_only=True)
class TeamFiles:
    """One team's prefixes in the data bucket and the run bucket, which roles of the team may be given."""

    team: str
    data_arn: str
    """ARN of the data bucket."""
    runs_arn: str
    """ARN of the run bucket."""
    key_arn: str | None
    """ARN of the stage's own key, which encrypts both; None: it has none."""

    def let_read_data(self, role: InlineRole) -> None:
        """Let `role` list and read `shared/` and `<team>/` of the data bucket."""
        _list(role, "ListData", self.data_arn, SHARED_PREFIX, self.team)
        _on_objects(role, "ReadData", ["s3:GetObject"], self.data_arn, f"{SHARED_PREFIX}/*", f"{self.team}/*")

    def let_write_data(self, role: InlineRole) -> None:
        """Let `role` write `<team>/` of the data bucket, and nothing that other teams read."""
        _on_objects(role, "WriteData", _WRITE, self.data_arn, f"{self.team}/*")

    def let_read_runs(self, role: InlineRole) -> None:
        """Let `role` list and read `<team>/` of the run bucket."""
        _list(role, "ListRuns", self.runs_arn, self.team)
        _on_objects(role, "ReadRuns", ["s3:GetObject"], self.runs_arn, f"{self.team}/*")

    def let_write_runs(self, role: InlineRole, *names: str) -> None:
        """Let `role` write what is called one of `names` below `<team>/` of the run bucket."""
        _on_objects(role, "WriteRuns", _WRITE, self.runs_arn, *(f"{self.team}/{name}" for name in names))

    def let_use_key(self, role: InlineRole) -> None:
        """Let `role` encrypt and decrypt what lies in the two buckets, through S3 only.

        With a bucket key, S3 names the bucket and not the object in the encryption context: which prefixes the role
        gets at is for the statements on S3 to say.
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


def _list(role: InlineRole, sid: str, bucket: str, *prefixes: str) -> None:
    below = [f"{prefix}/*" for prefix in prefixes]
    role.allow(sid, ["s3:ListBucket"], bucket, conditions={"StringLike": {"s3:prefix": below}})


def _on_objects(role: InlineRole, sid: str, actions: Sequence[str], bucket: str, *keys: str) -> None:
    resources = [f"{bucket}/{key}" for key in keys]
    role.allow(sid, actions, *resources)
    role.explain(
        "A team's prefix, or in the data bucket the one that all teams share: keys are not known beforehand",
        *resources,
    )


MEMBER_TAG = ("trainyard:role", "member")
"""Tag of these roles, by which the function that stops a team at its budget's end finds them."""

PORT_DOCUMENT = "AWS-StartPortForwardingSession"
"""AWS's session document that forwards a port of the instance itself: what `jobs.runs.port_forwarding` names."""

_Conditions = dict[str, dict[str, str]]

_STAGE = "aws:ResourceTag/trainyard:stage"
_TEAM = "aws:ResourceTag/trainyard:team"
_TASK_STAGE = "ecs:ResourceTag/trainyard:stage"
_TASK_TEAM = "ecs:ResourceTag/trainyard:team"
_STAGE_ASKED_FOR = "aws:RequestTag/trainyard:stage"
_TEAM_ASKED_FOR = "aws:RequestTag/trainyard:team"


class MemberRole(InlineRole):
    """A role that submits, watches and stops one team's jobs, reads its runs, and reads and writes its data.

    Batch's resources are told apart by their tags and not by their names: a queue that another release brings, and each
    new revision of a definition, are the team's from the start. Only what Batch tells of jobs cannot be kept apart: it
    knows no resource for that.
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
        """`allows_exec`: whether they may run commands in the containers of jobs that run."""
        super().__init__(
            stack,
            name,
            description=f"People of team {team.name}: submit its jobs, read its results",
            assumed_by=iam.CompositePrincipal(*(iam.ArnPrincipal(arn) for arn in team.member_principals)),
            team=team.name,
            max_session_duration=cdk.Duration.hours(12),
        )
        key, value = MEMBER_TAG
        cdk.Tags.of(self).add(key, value)
        self._stage = stack.stage_row.name
        self._team = team.name
        self._shares = team.shares_instances
        self._read_stage()
        self._submit()
        self._submit_nothing_beyond_the_budget()
        self._watch_and_stop()
        self._connect()
        if allows_exec:
            self._enter_jobs()
        streams = self.log_streams(logs.log_group_name, f"{team.name}/*")
        self.allow("ReadLogs", ["logs:GetLogEvents"], streams)
        self.explain("Each attempt logs to a stream of its own; those of a team begin with its name", streams)
        files.let_read_data(self)
        files.let_write_data(self)
        files.let_read_runs(self)
        # What a submission writes beside the job, and what resumes a run; everything else in a run is the job's own.
        written = (SPEC, f"{ARGUMENTS}*.json", f"{CLAIMS}*.json", CODE_RECORD, SWEEP, MEMBER_OF)
        files.let_write_runs(self, *(f"*/{name}" for name in written), f"{CODE}*")
        files.let_use_key(self)

    def _read_stage(self) -> None:
        path = parameter_path(self._stage).strip("/")
        # Asked for all below a path, Systems Manager looks for a permission on the path itself.
        at, below = (self._arn("ssm", "parameter", name) for name in (path, f"{path}/*"))
        self.allow("ReadStage", ["ssm:GetParametersByPath", "ssm:GetParameter", "ssm:GetParameters"], at, below)
        self.explain("All of the stage's parameters are for whoever submits: queues, buckets, definitions", below)

    def _submit(self) -> None:
        queues, definitions, jobs = self._arn("batch", "job-queue"), self._arn("batch", "job-definition"), self._jobs
        share = {"batch:ShareIdentifier": share_identifier(self._team)}
        submit = ["batch:SubmitJob"]
        # Whoever submits to a queue shares its instances: to the team's own only, or to those that are no team's own.
        own = {_STAGE: self._stage, _TEAM: self._team}
        asked_for = {_STAGE_ASKED_FOR: self._stage, _TEAM_ASKED_FOR: self._team}
        # A queue without a team is one that the stage made for those that share: no other carries the stage's tag.
        own_or_shared = {"StringEqualsIfExists": {_TEAM: self._team}, "StringEquals": {_STAGE: self._stage}}
        of_queues = own_or_shared if self._shares else {"StringEquals": own}

        def also(conditions: _Conditions, equal: Mapping[str, str]) -> _Conditions:
            return {**conditions, "StringEquals": {**conditions["StringEquals"], **equal}}

        self.allow("SubmitToQueues", submit, queues, conditions=also(of_queues, share))
        self.allow("SubmitOwnDefinitions", submit, definitions, conditions={"StringEquals": own})
        self.allow("SubmitOwnJobs", submit, jobs, conditions={"StringEquals": {**asked_for, **share}})
        # Batch checks this permission on what a job is submitted with: its refusals name the definition (GitHub,
        # wri/gfw-data-api #175; AWS documents no resource, and nobody has tried it here [?]). It has no key that tells
        # a new job from an existing one: allowed on jobs, it would let people take any untagged job of the account and
        # end it.
        tag, keys = ["batch:TagResource"], {"ForAllValues:StringEquals": {"aws:TagKeys": list(JOB_TAGS)}}
        self.allow("TagSubmissionsToQueues", tag, queues, conditions={**also(of_queues, asked_for), **keys})
        self.allow(
            "TagSubmissionsOfDefinitions", tag, definitions, conditions={"StringEquals": {**own, **asked_for}, **keys}
        )
        self.explain("A condition admits only what is tagged as the stage's and the team's", queues, definitions, jobs)

    def _submit_nothing_beyond_the_budget(self) -> None:
        """Deny submissions while the role has the tag of a stop.

        The statement is always there, so that a stop need not attach a policy, which would keep the role from being
        deleted.
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
                # What keeps a run from starting, as `trainyard why` asks.
                "ec2:DescribeInstanceTypeOfferings",
                "ec2:DescribeSubnets",
                # What it costs today, as plans say it.
                "ec2:DescribeSpotPriceHistory",
                "pricing:GetProducts",
                "servicequotas:GetServiceQuota",
            ],
            "*",
        )
        self.explain(
            "These look something up, or open the channel of a session with the token that its start answered: they "
            "know no resources",
            "*",
        )
        self.allow(
            "SeeQueues",
            ["batch:GetJobQueueSnapshot"],
            self._arn("batch", "job-queue"),
            conditions={"StringEquals": {_STAGE: self._stage}},
        )
        self.allow(
            "StopOwnJobs",
            ["batch:CancelJob", "batch:TerminateJob"],
            self._jobs,
            conditions={"StringEquals": {_STAGE: self._stage, _TEAM: self._team}},
        )

    def _connect(self) -> None:
        """Allow `trainyard connect`: a port of an instance that runs the team's job, and no shell on it.

        The tag of an instance names the team whose job came last, some seconds after that has begun (see
        observability/functions/tag_instances.py), and a session that is open is not looked at again. So the tag keeps
        teams off each other's instances but for such moments. What always keeps them off each other's notebooks is the
        token, which lies with the run's files. IAM cannot limit which of the instance's ports is forwarded.
        """
        instances = self._arn("ec2", "instance")
        stack = cdk.Stack.of(self)
        document = stack.format_arn(service="ssm", account="", resource="document", resource_name=PORT_DOCUMENT)
        # With it, a document that is not allowed here is refused, the default one included, which gives a shell.
        checked = {"BoolIfExists": {"ssm:SessionDocumentAccessCheck": "true"}}
        start = ["ssm:StartSession"]
        self.allow("ForwardPorts", start, document, conditions=checked)
        self.allow(
            "ForwardPortsOfOwnInstances",
            start,
            instances,
            conditions={**checked, "StringEquals": {_STAGE: self._stage, _TEAM: self._team}},
        )
        sessions, members = self._arn("ssm", "session"), self._arn("ecs", "container-instance")
        # Its tag says whose a session is; its id begins with the name of the role's session, not with `aws:userid`.
        own_sessions = {"StringLike": {"ssm:resourceTag/aws:ssmmessages:session-id": "${aws:userid}*"}}
        self.allow("EndOwnSessions", ["ssm:ResumeSession", "ssm:TerminateSession"], sessions, conditions=own_sessions)
        self.allow("OpenChannels", ["ssmmessages:OpenDataChannel"], "*")
        self.allow("FindInstances", ["ecs:DescribeContainerInstances"], members)
        self.explain("A condition admits the team's instances and one's own sessions only", instances, sessions)
        self.explain("Batch's clusters have names of their own, and no tag of the stage's; this only looks up", members)

    def _enter_jobs(self) -> None:
        """Allow `trainyard exec`: commands in the containers of the team's tasks, which have the tags of their jobs.

        The statement has the form of the one in the developer guide of Amazon ECS, "Using IAM policies to limit access
        to ECS Exec": one condition on the task's tags, for task and cluster. Batch's clusters have no tag of
        the stage's; should ECS ask for theirs as well, nobody is let in [?].
        """
        tasks, clusters = self._arn("ecs", "task"), self._arn("ecs", "cluster")
        self.allow(
            "EnterOwnJobs",
            ["ecs:ExecuteCommand"],
            tasks,
            clusters,
            conditions={"StringEquals": {_TASK_STAGE: self._stage, _TASK_TEAM: self._team}},
        )
        self.explain("A condition admits the tasks of the team's own jobs only", tasks, clusters)

    @property
    def _jobs(self) -> str:
        return self._arn("batch", "job")

    def _arn(self, service: str, resource: str, name: str = "*") -> str:
        return cdk.Stack.of(self).format_arn(service=service, resource=resource, resource_name=name)


class TeamRole(InlineRole):
    """The role that a team's jobs run under: its own files, what all teams share, and nothing else.

    It reads `shared/` and `<team>/` of the data bucket, and reads and writes `<team>/` of the run bucket. Where people
    may run commands in its containers, it also is the role of the SSM agent that ECS starts there for them.
    """

    def __init__(self, scope: Construct, name: str, *, files: TeamFiles, logs: RetainedLogGroup | None) -> None:
        """`logs`: the jobs' log group, into which what people do in containers goes; None: they do nothing there."""
        super().__init__(
            scope,
            name,
            description=f"Jobs of team {files.team}",
            assumed_by=_task_principal(scope),
            team=files.team,
        )
        files.let_read_data(self)
        files.let_read_runs(self)
        files.let_write_runs(self, "*")
        files.let_use_key(self)
        if logs is not None:
            self._let_people_in(logs)

    def _let_people_in(self, logs: RetainedLogGroup) -> None:
        """Allow the agent of ECS Exec its channels, and the log of its sessions.

        As the developer guide of Amazon ECS has it, "ECS Exec permissions" and "Logging using ECS Exec"; a session's
        stream has the session's name.
        """
        channels = ("CreateControlChannel", "CreateDataChannel", "OpenControlChannel", "OpenDataChannel")
        self.allow("OpenChannels", [f"ssmmessages:{channel}" for channel in channels], "*")
        self.allow("FindLogGroup", ["logs:DescribeLogGroups"], "*")
        self.explain("Session Manager's channels have no ARN, and log groups are described all at once", "*")
        streams = self.log_streams(logs.log_group_name, "ecs-execute-command-*")
        self.allow("LogCommands", ["logs:CreateLogStream", "logs:PutLogEvents"], streams)
        self.explain("Each session logs to a stream of its own", streams)
        self.allow("FindLogStreams", ["logs:DescribeLogStreams"], logs.log_group_arn)


class ExecutionRole(InlineRole):
    """The role of the ECS agent while it starts a team's job: pull its image, fetch its secrets, write its log.

    There is one for each team, since whoever has it can read the team's secret. The container's code never has it.
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
        self.explain("ecr:GetAuthorizationToken knows no resources: it can only be allowed on all of them", "*")
        streams = self.log_streams(logs.log_group_name, f"{team.name}/*")
        self.allow("WriteLog", ["logs:CreateLogStream", "logs:PutLogEvents"], streams)
        self.explain("Each attempt logs to a stream of its own; those of a team begin with its name", streams)
        for secret in secrets:
            secret.let_read(self)


def _task_principal(scope: Construct) -> iam.PrincipalBase:
    """Return ECS on behalf of tasks in this account; the conditions keep it from using the role for anyone else's."""
    stack = cdk.Stack.of(scope)
    return iam.ServicePrincipal(
        "ecs-tasks.amazonaws.com",
        conditions={
            "StringEquals": {"aws:SourceAccount": stack.account},
            "ArnLike": {"aws:SourceArn": stack.format_arn(service="ecs", resource="*")},
        },
    )
