"""The stages of settings.py from their first deployment to the last, by the real CDK CLI, seen through the AWS API.

Each step is a fixture that changes the stage, runs the CLI and keeps what was there before and after; the tests look at
what they kept.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from infra.emulator import ACCOUNT_ID, REGION, cdk_cli
from infra.settings import STAGES
from jobs.contract.catalog import CATALOG
from jobs.contract.plan import plan
from jobs.contract.queues import CPU_SPOT, SPOT
from jobs.contract.spec import parse_spec
from jobs.contract.stage import (
    DeployedStage,
    job_definition_parameter,
    parameter_path,
    queue_parameter,
    share_identifier,
)
from tests.support.embedded_aws import EmbeddedAws, run_embedded_aws
from tests.support.emulator.batch_calls import ENDED, until

pytestmark = pytest.mark.timeout(900)  # whichever test is first waits for all the steps before it

KIND = next(iter(CATALOG))
OTHER_RELEASE = "1.20.0"

TEAM = "Team(name='evaluation', huggingface_token=True, monthly_budget_usd=50, isolated=True)"
GROWN = f"max_nodes=3, max_on_demand_nodes=1, monthly_budget_usd=1000, teams=(*STAGES['dev'].teams, {TEAM})"
NEW_KIND = f"CATALOG['evaluate'] = dataclasses.replace(CATALOG[{KIND!r}], name='evaluate', accelerated=False)"
UPGRADED = f"{GROWN}, release={OTHER_RELEASE!r}"
SETTLED = UPGRADED.replace("monthly_budget_usd=1000", "monthly_budget_usd=2000", 1)
CLASH = """
for node in app.node.find_child("dev").node.find_child("compute").node.find_all():
    if isinstance(node, batch.CfnJobQueue):
        queue = node
clash = ssm.CfnParameter(cdk.Stack.of(queue), "Clash", name="/in/use", type="String", value="mine")
clash.add_dependency(queue)
"""

APP = """
import dataclasses
import sys

sys.path.insert(0, {root!r})

import aws_cdk as cdk
from aws_cdk import aws_batch as batch, aws_ssm as ssm
from infra.app import build
from infra.settings import STAGES
from infra.stages import Team
from jobs.contract.catalog import CATALOG

{before}
app = cdk.App()
build(app, [dataclasses.replace(STAGES["dev"], {changes})])
{after}
app.synth()
"""


@dataclass(frozen=True)
class Seen:
    """The account at one moment."""

    environments: Mapping[str, Mapping[str, Any]]
    """Compute resources by ARN."""
    queues: frozenset[str]
    definitions: frozenset[str]
    """ARNs with revision, of those that are ACTIVE."""
    parameters: Mapping[str, str]
    """Below the stage's path."""
    stacks: Mapping[str, str]
    """State by name."""
    others: Mapping[str, frozenset[str]]
    """Everything else, by what it is."""


@dataclass
class Account:
    """The embedded AWS and the CLI aimed at it."""

    aws: EmbeddedAws
    folder: Path
    jobs: dict[str, str] = field(default_factory=dict)
    """Ids of jobs by what they are for."""

    def cdk(self, *arguments: str, app: str = cdk_cli.APP) -> tuple[int, str]:
        """Run the CLI; its exit code and all it said."""
        output = ["--output", str(self.folder / "cdk.out"), "--no-version-reporting"]
        return self.aws.cdk(*arguments, "--app", app, *output, scratch=self.folder, cwd=cdk_cli.ROOT)

    def bootstrap(self) -> tuple[int, str]:
        # Away from cdk.json: finding an app there, the CLI would synthesise it once for this alone.
        return self.aws.cdk("bootstrap", f"aws://{ACCOUNT_ID}/{REGION}", scratch=self.folder)

    def changed_app(self, changes: str, *, before: str = "", after: str = "") -> str:
        """The command of an app whose stage `dev` has other settings."""
        script = self.folder / "changed_app.py"
        script.write_text(APP.format(root=str(cdk_cli.ROOT), changes=changes, before=before, after=after))
        return f"{cdk_cli.APP.split(' -m ')[0]} {script}"

    def deploy(self, *selected: str, app: str = cdk_cli.APP) -> tuple[int, str]:
        return self.cdk("deploy", *(selected or ("dev/*",)), "--method=direct", "--require-approval=never", app=app)

    def parameters(self) -> dict[str, str]:
        path = parameter_path("dev")
        pages = self.aws.client("ssm").get_paginator("get_parameters_by_path").paginate(Path=path, Recursive=True)
        return {item["Name"].removeprefix(path): item["Value"] for page in pages for item in page["Parameters"]}

    def states(self) -> set[str]:
        """Return the states of the stage's compute environments."""
        found = self.aws.client("batch").describe_compute_environments()["computeEnvironments"]
        return {one["state"] for one in found if "prod" not in one["computeEnvironmentArn"]}

    def see(self) -> Seen:
        def named(service: str, operation: str, key: str, name: str, **request: Any) -> frozenset[str]:
            answer = getattr(self.aws.client(service), operation)(**request)
            return frozenset(item[name] for item in answer.get(key, []) if "prod" not in item[name])

        batch = self.aws.client("batch")
        stacks = self.aws.client("cloudformation").describe_stacks()["Stacks"]
        environments = batch.describe_compute_environments()["computeEnvironments"]
        definitions = batch.get_paginator("describe_job_definitions").paginate(status="ACTIVE")
        vpcs = self.aws.client("ec2").describe_vpcs()["Vpcs"]
        roles = self.aws.client("iam").get_paginator("list_roles").paginate()
        return Seen(
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

    def stage(self) -> DeployedStage:
        """Return the stage as the command line sees it."""
        return DeployedStage.from_parameters("dev", self.parameters(), embedded_processes=1, runs_containers=False)

    def submit(self, what_for: str, *, team: str, command: str, kind: str = KIND, queue: str = SPOT) -> str:
        """A job whose container runs a shell command; its id, kept under `what_for` too."""
        values, stage = self.parameters(), self.stage()
        container = {"name": "main", "command": ["sh", "-c", command]}
        job_id: str = self.aws.client("batch").submit_job(
            jobName=what_for.replace(" ", "-"),
            jobQueue=stage.queue(stage.queue_of(team, queue)),
            jobDefinition=values[job_definition_parameter(team, kind)],
            shareIdentifier=share_identifier(team),
            ecsPropertiesOverride={"taskProperties": [{"containers": [container]}]},
        )["jobId"]
        self.jobs[what_for] = job_id
        return job_id

    def job(self, what_for: str) -> dict[str, Any]:
        (job,) = self.aws.client("batch").describe_jobs(jobs=[self.jobs[what_for]])["jobs"]
        return dict(job)

    def reached(self, what_for: str, *states: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            job = self.job(what_for)
            return job if job["status"] in states else None

        return until(look, f"{what_for} is {' or '.join(states)}: {self.job(what_for)}")

    def gated(self, what_for: str, **more: Any) -> Callable[[], None]:
        """Submit a job that runs until the returned function is called."""
        gate = self.folder / f"{what_for.replace(' ', '-')}.open"
        self.submit(what_for, command=f"while [ ! -e {gate} ]; do sleep 0.05; done", **more)
        return gate.touch


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    folder = tmp_path_factory.mktemp("life")
    with run_embedded_aws(folder) as aws:
        yield Account(aws, folder)
        health = aws.health()
        assert not health["server_errors"], f"{health['server_errors']}\n{aws.log.read_text()}"
        assert not health["undelivered"]


@pytest.fixture(scope="module")
def deployed(account: Account) -> Seen:
    """All stages of settings.py, in an account that the CDK knows."""
    code, said = account.bootstrap()
    assert code == 0, said
    code, said = account.deploy(*(f"{name}/*" for name in STAGES))
    assert code == 0, said
    return account.see()


@dataclass(frozen=True)
class Step:
    """One change of the stage."""

    before: Seen
    after: Seen


@pytest.fixture(scope="module")
def grown(account: Account, deployed: Seen) -> Step:
    """More nodes, On-Demand ones too, another, isolated team with a secret and a budget, another job kind: in place.

    Two jobs hold all nodes, so a third has to wait.
    """
    open_gates = [account.gated(f"running {number}", team="research") for number in (1, 2)]
    for number in (1, 2):
        account.reached(f"running {number}", "RUNNING")
    account.submit("waiting", team="product", command="true")
    account.reached("waiting", "RUNNABLE")

    code, said = account.deploy(app=account.changed_app(GROWN, before=NEW_KIND))
    assert code == 0, said
    after = account.see()
    account.reached("waiting", "SUCCEEDED")  # the third node takes it, while the other two are at work
    assert [account.job(f"running {number}")["status"] for number in (1, 2)] == ["RUNNING", "RUNNING"]
    for open_gate in open_gates:
        open_gate()
    return Step(deployed, after)


@pytest.fixture(scope="module")
def refused(account: Account, grown: Step) -> tuple[Step, str]:
    """A change that fails in its middle, and what the CLI says of it."""
    account.aws.client("ssm").put_parameter(Name="/in/use", Value="another's", Type="String")
    before = account.see()
    app = account.changed_app(GROWN.replace("max_nodes=3", "max_nodes=9", 1), before=NEW_KIND, after=CLASH)
    code, said = account.deploy("dev/compute", "--exclusively", app=app)
    assert code != 0, said
    return Step(before, account.see()), said


@pytest.fixture(scope="module")
def upgraded(account: Account, refused: tuple[Step, str]) -> Step:
    """Another release beside the one that a job still runs on."""
    open_gate = account.gated("on the old release", team="research")
    account.reached("on the old release", "RUNNING")
    before = account.see()
    app = account.changed_app(f"{UPGRADED}, retiring=(STAGES['dev'].pool,)", before=NEW_KIND)
    code, said = account.deploy(app=app)
    assert code == 0, said
    after = account.see()
    assert account.job("on the old release")["status"] == "RUNNING"
    open_gate()
    account.reached("on the old release", "SUCCEEDED")
    account.submit("on the new release", team="research", command="true")
    account.reached("on the new release", "SUCCEEDED")
    return Step(before, after)


@pytest.fixture(scope="module")
def stopped(account: Account, upgraded: Step) -> Step:
    """The stage's budget is spent, as AWS Budgets tells."""
    assert account.states() == {"ENABLED"}
    topic = json.loads(upgraded.after.parameters["stage-budget"])["topic"]
    account.aws.client("sns").publish(TopicArn=topic, Message="AWS Budget Notification")
    until(lambda: account.states() == {"DISABLED"} or None, "the stage is stopped")
    return upgraded


@pytest.fixture(scope="module")
def settled(account: Account, stopped: Step) -> Step:
    """The old release is no longer wanted, and the budget is raised."""
    code, said = account.deploy(app=account.changed_app(SETTLED, before=NEW_KIND))
    assert code == 0, said
    return Step(stopped.after, account.see())


@pytest.fixture(scope="module")
def destroyed(account: Account, settled: Step) -> Step:
    code, said = account.cdk("destroy", "dev/*", "--force", app=account.changed_app(SETTLED, before=NEW_KIND))
    assert code == 0, said
    return Step(settled.after, account.see())


def test_all_stages_deploy(account: Account, deployed: Seen) -> None:
    assert {name.split("-")[1] for name in deployed.stacks if name.startswith("trainyard-")} == STAGES.keys()
    assert {state for name, state in deployed.stacks.items() if name.startswith("trainyard-")} == {"CREATE_COMPLETE"}
    assert account.aws.health()["server_errors"] == []


def test_a_changed_limit_keeps_queues_and_environments(grown: Step) -> None:
    before, after = grown.before, grown.after
    assert before.environments.keys() < after.environments.keys()  # and one more, of On-Demand nodes
    assert before.queues <= after.queues
    for name in (SPOT, CPU_SPOT):
        assert after.parameters[queue_parameter(name)] == before.parameters[queue_parameter(name)]
    grew = {arn for arn, one in before.environments.items() if after.environments[arn]["maxvCpus"] > one["maxvCpus"]}
    assert len(grew) == 1
    vcpus = STAGES["dev"].row.vcpus
    (arn,) = grew
    assert (before.environments[arn]["maxvCpus"], after.environments[arn]["maxvCpus"]) == (2 * vcpus, 3 * vcpus)


def test_what_ran_ran_on_and_ended_well(account: Account, grown: Step) -> None:
    for number in (1, 2):
        job = account.reached(f"running {number}", *ENDED)
        assert (job["status"], len(job["attempts"])) == ("SUCCEEDED", 1)


def test_old_revisions_of_job_definitions_stay(grown: Step, settled: Step) -> None:
    assert grown.before.definitions <= grown.after.definitions <= settled.after.definitions


def test_a_new_team_and_a_new_kind_are_usable_at_once(account: Account, grown: Step) -> None:
    (secret,) = grown.after.others["secrets"] - grown.before.others["secrets"]
    command = "test -z $HF_TOKEN || echo it is there"
    account.submit("without a token", team="evaluation", kind="evaluate", queue=CPU_SPOT, command=command)
    failed = account.reached("without a token", *ENDED)
    assert failed["statusReason"].startswith("ResourceInitializationError: unable to pull secrets")

    account.aws.client("secretsmanager").put_secret_value(SecretId=secret, SecretString="hf_of-the-team")
    account.submit("with a token", team="evaluation", kind="evaluate", queue=CPU_SPOT, command=command)
    job = account.reached("with a token", *ENDED)
    assert job["status"] == "SUCCEEDED"
    (container,) = job["attempts"][0]["taskProperties"][0]["containers"]
    events = account.aws.client("logs").get_log_events(
        logGroupName=grown.after.parameters["log-group"], logStreamName=container["logStreamName"]
    )["events"]
    assert [event["message"] for event in events] == ["it is there"]


@pytest.mark.usefixtures("grown")
def test_an_isolated_team_runs_on_instances_and_in_a_network_of_its_own(account: Account) -> None:
    spec = {
        "name": "probe",
        "job": "finetune-classification",
        "team": "evaluation",
        "arguments": {"model": "data://shared/m", "train_data": "data://shared/t.jsonl"},
    }
    stage = account.stage()
    request = plan(parse_spec(spec, origin="the test"), stage, run_id="probe-20261121-120005-00ab").request
    request["ecsPropertiesOverride"]["taskProperties"][0]["containers"][0]["command"] = ["true"]
    batch = account.aws.client("batch")
    account.aws.client("secretsmanager").put_secret_value(
        SecretId=account.parameters()["huggingface-secret/evaluation"], SecretString="hf_of-the-team"
    )
    account.jobs["isolated"] = batch.submit_job(**request)["jobId"]
    assert account.reached("isolated", *ENDED)["status"] == "SUCCEEDED"
    # Nobody else's jobs are in its queue, whose environments no other queue has.
    own, shared = (
        {item["computeEnvironment"] for queue in found["jobQueues"] for item in queue["computeEnvironmentOrder"]}
        for found in (
            batch.describe_job_queues(jobQueues=[arn for name, arn in stage.queues.items() if ("@" in name) is mine])
            for mine in (True, False)
        )
    )
    assert own
    assert not own & shared
    seen = account.see().environments
    groups = {arn: set(seen[arn]["securityGroupIds"]) for arn in own | shared}
    assert len(set().union(*(groups[arn] for arn in own))) == 1
    assert not set().union(*(groups[arn] for arn in own)) & set().union(*(groups[arn] for arn in shared))


def test_budgets_come_with_their_settings(grown: Step) -> None:
    assert len(grown.after.others["budgets"] - grown.before.others["budgets"]) >= 2


def test_a_refused_change_says_why_and_leaves_everything_as_it_was(refused: tuple[Step, str]) -> None:
    step, said = refused
    assert "parameter already exists" in said.lower().replace("the parameter", "parameter")
    assert step.after.stacks["trainyard-dev-compute"] == "UPDATE_ROLLBACK_COMPLETE"
    for what in ("environments", "queues", "parameters"):
        assert getattr(step.after, what) == getattr(step.before, what)
    assert step.after.others == step.before.others


def test_another_release_stands_beside_the_old_one(upgraded: Step) -> None:
    before, after = upgraded.before, upgraded.after
    pool = STAGES["dev"].pool
    assert before.environments.keys() < after.environments.keys()
    assert before.queues < after.queues
    old = before.parameters[queue_parameter(SPOT)]
    assert after.parameters[queue_parameter(SPOT)] not in before.queues
    assert after.parameters[queue_parameter(SPOT, retiring=pool.id)] == old
    assert after.parameters[queue_parameter(CPU_SPOT)] == before.parameters[queue_parameter(CPU_SPOT)]


def test_the_old_release_goes_and_nothing_else(settled: Step, grown: Step) -> None:
    old = grown.after.parameters[queue_parameter(SPOT)]
    assert old not in settled.after.queues
    assert settled.after.queues < settled.before.queues
    assert settled.after.environments.keys() < settled.before.environments.keys()
    assert len(settled.after.environments) == len(grown.after.environments)
    assert len(settled.after.others["templates"]) == len(grown.after.others["templates"])
    for what in ("buckets", "secrets", "VPCs"):
        assert settled.after.others[what] == grown.after.others[what]


@pytest.mark.usefixtures("settled")
def test_a_raised_budget_lifts_the_stop_of_the_stage(account: Account) -> None:
    until(lambda: account.states() == {"ENABLED"} or None, "the stage may start jobs again")


def test_destroying_a_stage_leaves_what_it_must_not_lose(destroyed: Step, account: Account) -> None:
    before, after = destroyed.before, destroyed.after
    assert not [name for name in after.stacks if name.startswith("trainyard-dev-")]
    assert after.parameters == {}
    assert not {arn for arn in after.environments if "prod" not in arn}
    assert not {arn for arn in after.queues if "prod" not in arn}
    # Of job definitions the current revisions go; those before them stay, as on AWS, and cost nothing.
    published = {value for name, value in before.parameters.items() if name.startswith("job-definition")}
    assert published
    assert not published & after.definitions
    assert after.others["buckets"] == before.others["buckets"]
    assert before.parameters["log-group"] in after.others["log groups"]
    assert len(after.others["VPCs"]) == len(before.others["VPCs"]) - 1
    for what in ("alarms", "budgets", "functions", "rules", "templates", "topics"):
        assert not after.others[what], what
    assert not {role for role in after.others["roles"] if role.startswith("trainyard-dev-")}
    described = account.aws.client("secretsmanager").list_secrets(IncludePlannedDeletion=True)["SecretList"]
    assert {one["Name"] for one in described} >= before.others["secrets"]
    assert json.dumps(account.aws.health()["server_errors"]) == "[]"
