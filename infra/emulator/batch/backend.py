"""Hold the state of Batch in one account and region, in memory, and perform its operations.

moto provides routes, tags and scheduling policies. This package provides compute environments, queues, job definitions
and jobs.
"""

import uuid
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import moto.batch.urls
from moto.batch.exceptions import ClientException
from moto.batch.models import BatchBackend as MotoBatchBackend
from moto.batch.utils import make_arn_for_job
from moto.ec2.exceptions import InvalidSubnetIdError

from infra.emulator import events
from infra.emulator.batch.attempt import Services
from infra.emulator.batch.compute import ComputeEnvironment, JobQueue
from infra.emulator.batch.describe import describe_job, select_jobs
from infra.emulator.batch.job import ArrayPosition, Job
from infra.emulator.batch.job_definition import JobDefinition, check_request
from infra.emulator.batch.scheduler import Scheduler
from infra.emulator.batch.submission import Submission, parse_submission
from infra.emulator.containers import Executor
from infra.emulator.credentials import Credentials

QUEUE_DELETED = "The job queue was deleted"


class BatchBackend(MotoBatchBackend):
    """Batch in one account and region."""

    executor: Executor
    """Runs the containers of all accounts and regions; set by `install`."""
    credentials: Credentials
    """Credentials with which jobs access the server; set by `install`."""

    def __init__(self, region_name: str, account_id: str) -> None:
        super().__init__(region_name, account_id)
        self.environments: dict[str, ComputeEnvironment] = {}
        self.queues: dict[str, JobQueue] = {}
        self.definitions: dict[str, JobDefinition] = {}
        self.scheduler = Scheduler(
            services=self._services,
            queues=lambda: list(self.queues.values()),
            policy=self._fair_share_policy,
            on_blocked=self._note_blocked,
        )
        self._sequence = 0

    def reset(self) -> None:
        self.scheduler.shutdown()
        super().reset()

    @property
    def _url_module(self) -> Any:
        return moto.batch.urls

    # Compute environments

    def create_environment(self, request: Mapping[str, Any]) -> ComputeEnvironment:
        """Create a compute environment. Raises ClientException if Batch refuses it."""
        environment = ComputeEnvironment(request, account_id=self.account_id, region=self.region_name)
        with self.scheduler.lock:
            if environment.arn in self.environments:
                raise ClientException("Object already exists")
            self._check_network(environment.resources)
            environment.ecs_arn = self.ecs_backend.create_cluster(environment.ecs_name).arn
            # Without this entry, moto fails to list the cluster's instances.
            self.ecs_backend.container_instances.setdefault(environment.ecs_name, {})
            self.environments = {**self.environments, environment.arn: environment}
        self._tag(environment.arn, request)
        return environment

    def update_environment(self, request: Mapping[str, Any]) -> ComputeEnvironment:
        """Update a compute environment. Raises ClientException if Batch refuses."""
        with self.scheduler.lock:
            environment = self.environment(request["computeEnvironment"])
            self._check_network(request.get("computeResources") or {})
            environment.update(request)
            self.scheduler.dispatch()
        return environment

    def delete_environment(self, identifier: str) -> None:
        """Delete a compute environment. Raises ClientException if it is enabled or a queue uses it."""
        with self.scheduler.lock:
            environment = _find(self.environments, identifier)
            if environment is None:
                return
            if environment.status == "UPDATING":
                raise ClientException("Cannot delete, resource is being modified.")
            if environment.enabled:
                raise ClientException("Cannot delete, compute environment must be in DISABLED state")
            if any(environment in queue.environments for queue in self.queues.values()):
                raise ClientException("Cannot delete, found existing JobQueue relationship")
            self.ecs_backend.delete_cluster(environment.ecs_name)
            self.environments = {arn: other for arn, other in self.environments.items() if other is not environment}

    def environment(self, identifier: str) -> ComputeEnvironment:
        """Find a compute environment by name or ARN. Raises ClientException if it does not exist."""
        return _find_or_refuse(self.environments, identifier, f"Compute environment {identifier} does not exist")

    # Job queues

    def create_queue(self, request: Mapping[str, Any]) -> JobQueue:
        """Create a job queue. Raises ClientException if Batch refuses it."""
        with self.scheduler.lock:
            queue = JobQueue(
                request, self._ordered_environments(request), account_id=self.account_id, region=self.region_name
            )
            if queue.arn in self.queues:
                raise ClientException("Object already exists")
            self._check_policy(request)
            self.queues = {**self.queues, queue.arn: queue}
        self._tag(queue.arn, request)
        return queue

    def update_queue(self, request: Mapping[str, Any]) -> JobQueue:
        """Update a job queue. Raises ClientException if Batch refuses."""
        with self.scheduler.lock:
            queue = self.queue(request["jobQueue"])
            environments = (
                self._ordered_environments(request) if request.get("computeEnvironmentOrder") else queue.environments
            )
            self._check_policy(request)
            queue.update(request, environments)
            self.scheduler.dispatch()
        return queue

    def delete_queue(self, identifier: str) -> None:
        """Delete a job queue and terminate its jobs. Raises ClientException if it is enabled."""
        with self.scheduler.lock:
            queue = _find(self.queues, identifier)
            if queue is None:
                return
            if queue.enabled:
                raise ClientException("Cannot delete, job queue must be in DISABLED state")
            for job in self._jobs_of(queue):
                self.scheduler.terminate(job, QUEUE_DELETED)
            self.queues = {arn: other for arn, other in self.queues.items() if other is not queue}

    def queue(self, identifier: str) -> JobQueue:
        """Find a job queue by name or ARN. Raises ClientException if it does not exist."""
        return _find_or_refuse(self.queues, identifier, f"JobQueue {identifier} not found.")

    # Job definitions

    def register_definition(self, request: Mapping[str, Any]) -> JobDefinition:
        """Register a revision of a job definition. Raises ClientException if Batch refuses it."""
        check_request(request)
        with self.scheduler.lock:
            revisions = self.revisions(request["jobDefinitionName"])
            definition = JobDefinition(
                request,
                revision=1 + max((other.revision for other in revisions), default=0),
                account_id=self.account_id,
                region=self.region_name,
            )
            self.definitions = {**self.definitions, definition.arn: definition}
        self._tag(definition.arn, request)
        return definition

    def deregister_definition(self, identifier: str) -> None:
        """Deactivate one revision. Raises ClientException if it does not exist."""
        definition = self._definition_of_revision(identifier)
        if definition is None:
            raise ClientException(f"JobDefinition {identifier} not found.")
        definition.status = "INACTIVE"

    def revisions(self, name: str) -> list[JobDefinition]:
        """Return all revisions of a definition, newest first."""
        found = [definition for definition in self.definitions.values() if definition.name == name]
        return sorted(found, key=lambda definition: -definition.revision)

    def find_definitions(self, identifiers: Iterable[str]) -> list[JobDefinition]:
        """Find job definitions by `name:revision` or ARN. Missing ones are left out."""
        found = (self._definition_of_revision(identifier) for identifier in identifiers)
        return [definition for definition in found if definition is not None]

    def active_definition(self, identifier: str) -> JobDefinition:
        """Find an active job definition by ARN, `name:revision` or name (newest revision). Raises ClientException."""
        definition = self._definition_of_revision(identifier)
        if definition is None:
            name = identifier.rsplit("/", 1)[-1]
            definition = next((other for other in self.revisions(name) if other.status == "ACTIVE"), None)
        if definition is None or definition.status != "ACTIVE":
            what = identifier if identifier.startswith("arn:") else f"name {identifier}"
            raise ClientException(f"JobDefinition {what} does not exist or is not in ACTIVE status")
        return definition

    def _definition_of_revision(self, identifier: str) -> JobDefinition | None:
        short = identifier.rsplit("/", 1)[-1]
        found = (other for other in self.definitions.values() if f"{other.name}:{other.revision}" == short)
        return next(found, None)

    # Jobs

    def submit(self, request: Mapping[str, Any], *, endpoint: str) -> Job:
        """Accept a job. Raises ClientException if Batch refuses it."""
        with self.scheduler.lock:
            jobs = self.scheduler.jobs
            submission = parse_submission(
                request,
                definition=self.active_definition(request["jobDefinition"]),
                queue=self.queue(request["jobQueue"]),
                endpoint=endpoint,
                job_exists=jobs.__contains__,
            )
            self._sequence += 1
            job = self._new_job(str(uuid.uuid4()), submission)
            self._tag(job.arn, request)
            self._add_children(job)
            self._note_change(job)
            self.scheduler.submit(job)
        return job

    def job(self, job_id: str) -> Job:
        """Find a job by id. Raises ClientException if it does not exist."""
        try:
            return self.scheduler.jobs[job_id]
        except KeyError:
            raise ClientException(f"Job {job_id} does not exist") from None

    def describe(self, job: Job) -> dict[str, Any]:
        """Return a job as DescribeJobs does. Children and nodes have the tags of their parent."""
        return describe_job(job, self.list_tags_for_resource((job.parent or job).arn))

    def find_jobs(self, identifiers: Iterable[str]) -> list[Job]:
        """Find jobs by id or ARN. Missing ones are left out, as in DescribeJobs."""
        found = (self.scheduler.jobs.get(identifier.rsplit("/", 1)[-1]) for identifier in identifiers)
        return [job for job in found if job is not None]

    def list_selected(self, request: Mapping[str, Any]) -> list[Job]:
        """Return the jobs that ListJobs selects: a queue's newest first, others by index. Raises ClientException."""
        given = [name for name in ("jobQueue", "arrayJobId", "multiNodeJobId") if request.get(name)]
        if len(given) != 1:
            raise ClientException("Exactly one of jobQueue, arrayJobId and multiNodeJobId must be specified")
        with self.scheduler.lock:
            if given == ["jobQueue"]:
                jobs = self._jobs_of(self.queue(request["jobQueue"]))
            elif given == ["arrayJobId"]:
                jobs = self.job(request["arrayJobId"]).children
            else:
                jobs = self.job(request["multiNodeJobId"]).nodes
            return select_jobs(jobs, request)

    def _jobs_of(self, queue: JobQueue) -> list[Job]:
        """Return a queue's jobs, newest first, without children of arrays and nodes of multi-node jobs."""
        return [
            job
            for job in reversed(list(self.scheduler.jobs.values()))
            if job.parent is None and job.submission.queue is queue
        ]

    def _new_job(self, job_id: str, submission: Submission, **child: Any) -> Job:
        arn = make_arn_for_job(self.account_id, job_id, self.region_name)
        return Job(job_id, submission, arn=arn, sequence=self._sequence, on_change=self._note_change, **child)

    def _add_children(self, job: Job) -> None:
        submission = job.submission
        job.nodes = [
            self._new_job(f"{job.id}#{index}", submission, parent=job, node=index)
            for index in range(submission.nodes or 0)
        ]
        if submission.array_size is not None:
            job.children = [
                self._new_job(
                    f"{job.id}:{index}",
                    submission,
                    parent=job,
                    array=ArrayPosition(index=index, size=submission.array_size),
                )
                for index in range(submission.array_size)
            ]
            job.unfinished_children = submission.array_size
        for each in job.children or [job]:
            each.outstanding = {dependency["jobId"] for dependency in submission.depends_on}

    # Events: their detail is the job as DescribeJobs shows it at that moment. Source: AWS Batch user guide, "Job state
    # change events" and "Job queue blocked events".

    def _note_change(self, job: Job) -> None:
        if job.node is None:  # nodes emit no events
            self._emit("Batch Job State Change", job, job.arn)

    def _note_blocked(self, job: Job) -> None:
        self._emit("Batch Job Queue Blocked", job, job.arn, job.submission.queue.arn)

    def _emit(self, detail_type: str, job: Job, *resources: str) -> None:
        if events.has_rules(self.account_id, self.region_name):
            events.emit(
                account_id=self.account_id,
                region=self.region_name,
                source="aws.batch",
                detail_type=detail_type,
                detail=self.describe(job),
                resources=resources,
            )

    # Shared by the operations above

    def _services(self) -> Services:
        return Services(
            executor=self.executor,
            credentials=self.credentials,
            logs=self.logs_backend,
            account_id=self.account_id,
            region=self.region_name,
        )

    def _fair_share_policy(self, arn: str) -> Mapping[str, Any]:
        policy = self._scheduling_policies.get(arn)
        return policy.fairshare_policy if policy is not None else {}

    def _check_policy(self, request: Mapping[str, Any]) -> None:
        arn = request.get("schedulingPolicyArn")
        if arn is not None and arn not in self._scheduling_policies:
            raise ClientException(f"Scheduling policy {arn} does not exist")

    def _ordered_environments(self, request: Mapping[str, Any]) -> list[ComputeEnvironment]:
        order = sorted(request.get("computeEnvironmentOrder") or (), key=lambda item: item["order"])
        return [self.environment(item["computeEnvironment"]) for item in order]

    def _check_network(self, resources: Mapping[str, Any]) -> None:
        try:
            for subnet in resources.get("subnets") or ():
                self.ec2_backend.get_subnet(subnet)
        except InvalidSubnetIdError as error:
            raise ClientException(error.message) from None
        for group in resources.get("securityGroupIds") or ():
            if self.ec2_backend.get_security_group_from_id(group) is None:
                raise ClientException(f"security group {group} does not exist")
        role = resources.get("instanceRole")
        profiles = self.iam_backend.get_instance_profiles() if role else ()
        if role and not any(role in (profile.arn, profile.name) for profile in profiles):
            raise ClientException(f"instance profile {role} does not exist")

    def _tag(self, arn: str, request: Mapping[str, Any]) -> None:
        if request.get("tags"):
            self.tag_resource(arn, dict(request["tags"]))


ThingT = TypeVar("ThingT", ComputeEnvironment, JobQueue)


def _find(things: Mapping[str, ThingT], identifier: str) -> ThingT | None:
    return things.get(identifier) or next((thing for thing in things.values() if thing.name == identifier), None)


def _find_or_refuse(things: Mapping[str, ThingT], identifier: str, refusal: str) -> ThingT:
    found = _find(things, identifier)
    if found is None:
        raise ClientException(refusal)
    return found
