"""An account of the emulator into which the real CDK CLI deploys stages, and snapshots of it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from infra.emulator import ACCOUNT_ID, REGION
from infra.emulator.deploy import APP, ROOT
from infra.settings import STAGES
from jobs.core.queues import SPOT
from jobs.core.stage import (
    DeployedStage,
    job_definition_parameter,
    parameter_path,
    share_identifier,
)
from jobs.spec.catalog import CATALOG
from tests.support.emulator.batch_calls import until
from tests.support.infra.synthesis import synthesise_for_cli
from tests.support.running_emulator import Emulator

KIND = next(iter(CATALOG))


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of the account."""

    environments: Mapping[str, Mapping[str, Any]]
    """Compute resources by ARN."""
    queues: frozenset[str]
    definitions: frozenset[str]
    """ARNs of ACTIVE job definitions, with revision."""
    parameters: Mapping[str, str]
    """SSM parameters under the stage's path."""
    stacks: Mapping[str, str]
    """Status by name."""
    others: Mapping[str, frozenset[str]]
    """All other resources, by kind."""


@dataclass
class Account:
    """An account of the emulator, and the CDK CLI for it."""

    aws: Emulator
    folder: Path
    jobs: dict[str, str] = field(default_factory=dict)
    """Ids of jobs by purpose."""

    def cdk(self, *arguments: str, app: str = APP) -> tuple[int, str]:
        """Run the CLI; return exit code and output."""
        output = ["--output", str(self.folder / "cdk.out"), "--no-version-reporting"]
        return self.aws.cdk(*arguments, "--app", app, *output, scratch=self.folder, cwd=ROOT)

    def bootstrap(self) -> tuple[int, str]:
        # Outside the folder of cdk.json, where the CLI would synthesise the app only to bootstrap.
        return self.aws.cdk("bootstrap", f"aws://{ACCOUNT_ID}/{REGION}", scratch=self.folder)

    def changed_app(self, **changes: Any) -> str:
        """Synthesise the stage `dev` with changed settings; return the value for `--app`."""
        return synthesise_for_cli(replace(STAGES["dev"], **changes), Path(mkdtemp(dir=self.folder)))

    def deploy(self, *selected: str, app: str = APP) -> tuple[int, str]:
        return self.cdk("deploy", *(selected or ("dev/*",)), "--method=direct", "--require-approval=never", app=app)

    def parameters(self, stage: str = "dev") -> dict[str, str]:
        path = parameter_path(stage)
        pages = self.aws.client("ssm").get_paginator("get_parameters_by_path").paginate(Path=path, Recursive=True)
        return {item["Name"].removeprefix(path): item["Value"] for page in pages for item in page["Parameters"]}

    def states(self) -> set[str]:
        """Return the states of the stage's compute environments."""
        found = self.aws.client("batch").describe_compute_environments()["computeEnvironments"]
        return {one["state"] for one in found if "prod" not in one["computeEnvironmentArn"]}

    def snapshot(self) -> Snapshot:
        def named(service: str, operation: str, key: str, name: str, **request: Any) -> frozenset[str]:
            answer = getattr(self.aws.client(service), operation)(**request)
            return frozenset(item[name] for item in answer.get(key, []) if "prod" not in item[name])

        batch = self.aws.client("batch")
        stacks = self.aws.client("cloudformation").describe_stacks()["Stacks"]
        environments = batch.describe_compute_environments()["computeEnvironments"]
        definitions = batch.get_paginator("describe_job_definitions").paginate(status="ACTIVE")
        vpcs = self.aws.client("ec2").describe_vpcs()["Vpcs"]
        roles = self.aws.client("iam").get_paginator("list_roles").paginate()
        return Snapshot(
            environments={one["computeEnvironmentArn"]: one["computeResources"] for one in environments},
            queues=frozenset(one["jobQueueArn"] for one in batch.describe_job_queues()["jobQueues"]),
            definitions=frozenset(one["jobDefinitionArn"] for page in definitions for one in page["jobDefinitions"]),
            parameters=self.parameters(),
            stacks={one["StackName"]: one["StackStatus"] for one in stacks},
            others={
                "alarms": named("cloudwatch", "describe_alarms", "MetricAlarms", "AlarmName"),
                "buckets": named("s3", "list_buckets", "Buckets", "Name"),
                "budgets": named("budgets", "describe_budgets", "Budgets", "BudgetName", AccountId=ACCOUNT_ID),
                "functions": named("lambda", "list_functions", "Functions", "FunctionName"),
                "log groups": named("logs", "describe_log_groups", "logGroups", "logGroupName"),
                "repositories": named("ecr", "describe_repositories", "repositories", "repositoryName"),
                "roles": frozenset(role["RoleName"] for page in roles for role in page["Roles"]),
                "rules": named("events", "list_rules", "Rules", "Name"),
                "secrets": named("secretsmanager", "list_secrets", "SecretList", "Name"),
                "templates": frozenset(
                    one["LaunchTemplateId"]
                    for one in self.aws.client("ec2").describe_launch_templates()["LaunchTemplates"]
                    if not any("prod" in tag["Value"] for tag in one.get("Tags", []))
                ),
                "topics": named("sns", "list_topics", "Topics", "TopicArn"),
                "VPCs": frozenset(vpc["VpcId"] for vpc in vpcs if not vpc["IsDefault"]),
            },
        )

    def stage(self, name: str = "dev") -> DeployedStage:
        """Return a stage as the command line reads it."""
        return DeployedStage.from_parameters(name, self.parameters(name), emulated_processes=1, runs_containers=False)

    def physical(self, stage: str) -> Callable[[str, str, str], str]:
        """Return a function from a stack, the beginning of a logical id, and part of a type to the physical id."""

        def find(stack: str, logical_id: str, kind: str) -> str:
            described = self.aws.client("cloudformation").describe_stack_resources(
                StackName=f"trainyard-{stage}-{stack}"
            )["StackResources"]
            [found] = [
                str(each["PhysicalResourceId"])
                for each in described
                if each["LogicalResourceId"][:-8] == logical_id and kind in each["ResourceType"]
            ]
            return found

        return find

    def alerts(self, stage: str) -> Callable[[], list[str]]:
        """Subscribe to a stage's alerts. Return a function that returns those since its last call."""
        sns, sqs = self.aws.client("sns"), self.aws.client("sqs")
        [topic] = [
            each["TopicArn"]
            for each in sns.list_topics()["Topics"]
            if f"trainyard-{stage}-observability-Alerts" in each["TopicArn"]
        ]
        queue = sqs.create_queue(QueueName=f"alerts-of-{stage}")["QueueUrl"]
        arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=arn)

        def read() -> list[str]:
            messages = sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10).get("Messages", [])
            for message in messages:
                sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
            return [str(json.loads(message["Body"])["Message"]) for message in messages]

        return read

    def submit(self, purpose: str, *, team: str, command: str, kind: str = KIND, queue: str = SPOT) -> str:
        """Submit a job that runs a shell command; return its id, and keep it under `purpose`."""
        values, stage = self.parameters(), self.stage()
        container = {"name": "main", "command": ["sh", "-c", command]}
        job_id: str = self.aws.client("batch").submit_job(
            jobName=purpose.replace(" ", "-"),
            jobQueue=stage.queue(stage.queue_of(team, queue)),
            jobDefinition=values[job_definition_parameter(team, kind)],
            shareIdentifier=share_identifier(team),
            ecsPropertiesOverride={"taskProperties": [{"containers": [container]}]},
        )["jobId"]
        self.jobs[purpose] = job_id
        return job_id

    def job(self, purpose: str) -> dict[str, Any]:
        (job,) = self.aws.client("batch").describe_jobs(jobs=[self.jobs[purpose]])["jobs"]
        return dict(job)

    def wait_for(self, purpose: str, *states: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            job = self.job(purpose)
            return job if job["status"] in states else None

        return until(look, f"{purpose} is {' or '.join(states)}: {self.job(purpose)}")

    def gated(self, purpose: str, **more: Any) -> Callable[[], None]:
        """Submit a job that runs until the returned function is called."""
        gate = self.folder / f"{purpose.replace(' ', '-')}.open"
        self.submit(purpose, command=f"while [ ! -e {gate} ]; do sleep 0.05; done", **more)
        return gate.touch
