"""The stages of settings.py from the first deployment to the destruction, with the real CDK CLI, through the AWS API.

Each step is a fixture that changes the stage, runs the CLI, and returns the account before and after it. The tests
compare the two.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from infra.settings import STAGES
from infra.stages import Team
from jobs.core.queues import CPU_SPOT, SPOT, owner_of_queue
from jobs.core.stage import DeployedStage, queue_parameter
from jobs.spec.catalog import CATALOG
from jobs.spec.plan import plan
from jobs.spec.spec import parse_spec
from tests.support.emulator.batch_calls import ENDED, until
from tests.support.emulator.staged_account import KIND, Account, Snapshot
from tests.support.jobs import in_process
from tests.support.running_emulator import environment_of, run_emulator

pytestmark = pytest.mark.timeout(900)  # the first test waits for all steps before it

TEAM = Team(name="evaluation", huggingface_token=True, monthly_budget_usd=50)
GROWN: dict[str, Any] = {
    "max_nodes": 3,
    "max_on_demand_nodes": 1,
    "monthly_budget_usd": 1000,
    "max_usd_per_hour": 500,
    "teams": (*STAGES["dev"].teams, TEAM),
}
UPGRADED = {**GROWN, "instance_types": ("p4d.24xlarge",)}
SETTLED = {**UPGRADED, "monthly_budget_usd": 2000}


@pytest.fixture(scope="module")
def _a_new_kind() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CATALOG, "evaluate", replace(CATALOG[KIND], name="evaluate", accelerated=False))
        yield


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    folder = tmp_path_factory.mktemp("life")
    with run_emulator(folder) as aws:
        yield Account(aws, folder)
        health = aws.health()
        assert not health["server_errors"], f"{health['server_errors']}\n{aws.log.read_text()}"
        assert not health["undelivered"]


@pytest.fixture(scope="module")
def deployed(account: Account) -> Snapshot:
    """All stages of settings.py, in a bootstrapped account."""
    code, output = account.bootstrap()
    assert code == 0, output
    code, output = account.deploy(*(f"{name}/*" for name in STAGES))
    assert code == 0, output
    return account.snapshot()


@dataclass(frozen=True)
class Step:
    """One change of the stage."""

    before: Snapshot
    after: Snapshot


@pytest.fixture(scope="module")
def grown(account: Account, deployed: Snapshot, _a_new_kind: None) -> Step:
    """Add nodes, On-Demand nodes, a team with secret and budget, and a job kind, all in place.

    Two jobs use all nodes of their team, so a third one has to wait.
    """
    open_gates = [account.gated(f"running {number}", team="research") for number in (1, 2)]
    for number in (1, 2):
        account.wait_for(f"running {number}", "RUNNING")
    account.submit("waiting", team="research", command="true")
    account.wait_for("waiting", "RUNNABLE")

    code, output = account.deploy(app=account.changed_app(**GROWN))
    assert code == 0, output
    after = account.snapshot()
    account.wait_for("waiting", "SUCCEEDED")  # it runs on the third node while the other two are busy
    assert [account.job(f"running {number}")["status"] for number in (1, 2)] == ["RUNNING", "RUNNING"]
    for open_gate in open_gates:
        open_gate()
    for number in (1, 2):
        job = account.wait_for(f"running {number}", *ENDED)
        assert (job["status"], len(job["attempts"])) == ("SUCCEEDED", 1)
    return Step(deployed, after)


@pytest.fixture(scope="module")
def upgraded(account: Account, grown: Step) -> Step:
    """A new release next to the one on which a job still runs."""
    open_gate = account.gated("on the old release", team="research")
    account.wait_for("on the old release", "RUNNING")
    before = account.snapshot()
    app = account.changed_app(**UPGRADED, retiring=(STAGES["dev"].pool,))
    code, output = account.deploy(app=app)
    assert code == 0, output
    after = account.snapshot()
    assert account.job("on the old release")["status"] == "RUNNING"
    open_gate()
    account.wait_for("on the old release", "SUCCEEDED")
    account.submit("on the new release", team="research", command="true")
    account.wait_for("on the new release", "SUCCEEDED")
    return Step(before, after)


def _has_states(account: Account, wanted: set[str]) -> bool | None:
    return account.states() == wanted or None


@pytest.fixture(scope="module")
def stopped(account: Account, upgraded: Step) -> Step:
    """The alarm of the hourly limit comes and goes; then the stage's budget is spent, as reported by AWS Budgets."""
    assert account.states() == {"ENABLED"}
    alarm = json.loads(upgraded.after.parameters["stage-hourly-limit"])["alarm"]
    for state, wanted in (("ALARM", {"DISABLED"}), ("OK", {"ENABLED"})):
        account.aws.client("cloudwatch").set_alarm_state(AlarmName=alarm, StateValue=state, StateReason="test")
        until(partial(_has_states, account, wanted), f"the alarm is {state}")
    topic = json.loads(upgraded.after.parameters["stage-budget"])["topic"]
    account.aws.client("sns").publish(TopicArn=topic, Message="AWS Budget Notification")
    until(partial(_has_states, account, {"DISABLED"}), "the stage is stopped")
    return upgraded


@pytest.fixture(scope="module")
def settled(account: Account, stopped: Step) -> Step:
    """The old release is removed, and the budget is raised."""
    code, output = account.deploy(app=account.changed_app(**SETTLED))
    assert code == 0, output
    return Step(stopped.after, account.snapshot())


@pytest.fixture(scope="module")
def destroyed(account: Account, settled: Step) -> Step:
    # With the retired pool, because its AMI has a separate stack: the app must name all deployed stacks.
    app = account.changed_app(**SETTLED, retiring=(STAGES["dev"].pool,))
    code, output = account.cdk("destroy", "dev/*", "--force", app=app)
    assert code == 0, output
    return Step(settled.after, account.snapshot())


def test_all_stages_deploy(account: Account, deployed: Snapshot) -> None:
    assert {name.split("-")[1] for name in deployed.stacks if name.startswith("trainyard-")} == STAGES.keys()
    assert {state for name, state in deployed.stacks.items() if name.startswith("trainyard-")} == {"CREATE_COMPLETE"}
    health = account.aws.health()
    assert health["server_errors"] == []
    # The emulator builds no AMIs and does not run the CDK's functions.
    assert [name for name in health["unproven"] if not name.startswith(("AWS::ImageBuilder::", "Custom::"))] == [
        "AWS::EC2::PlacementGroup"
    ]


@pytest.mark.usefixtures("deployed")
def test_changes_by_hand_are_reported_and_those_of_the_stage_are_not(account: Account) -> None:
    aws, physical = account.aws, account.physical("prod")
    batch, ec2, ssm = (aws.client(service) for service in ("batch", "ec2", "ssm"))
    alerts = account.alerts("prod")

    def report() -> str:
        answer = aws.client("lambda").invoke(FunctionName=physical("observability", "ReportDrift", "Lambda::Function"))
        assert "FunctionError" not in answer, answer["Payload"].read()
        return "\n".join(alerts())

    # WHEN the stage disables an environment, and a push records an image
    environment = physical("compute", "dl124xlarge1210ofresearchspot", "ComputeEnvironment")
    batch.update_compute_environment(computeEnvironment=environment, state="DISABLED")
    [image] = [name for name in account.parameters("prod") if name.startswith("image/gaudi/")]
    ssm.put_parameter(Name=f"/trainyard/prod/{image}", Value="repository@sha256:0f", Overwrite=True)
    # THEN nothing is reported
    assert report() == ""
    # WHEN people change a limit, a queue, a parameter, and a security group, which another stack also changes
    queue = physical("compute", "dl124xlarge1210ofresearchQueuespot", "JobQueue")
    limit = batch.describe_compute_environments(computeEnvironments=[environment])["computeEnvironments"][0]
    batch.update_compute_environment(computeEnvironment=environment, state="ENABLED", computeResources={"maxvCpus": 7})
    batch.update_job_queue(jobQueue=queue, state="DISABLED")
    release = ssm.get_parameter(Name="/trainyard/prod/release/gaudi")["Parameter"]["Value"]
    ssm.delete_parameter(Name="/trainyard/prod/release/gaudi")
    group = physical("network", "JobSecurityGroup", "SecurityGroup")
    port = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22}
    rules = [{**port, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}, {**port, "UserIdGroupPairs": [{"GroupId": group}]}]
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=rules)
    # THEN the alert names stack, resource and property
    compute = "trainyard-prod-compute: dl124xlarge1210ofresearch"
    first, *lines, last = report().splitlines()
    assert first == "Stage prod, compared with its templates:"
    assert last.startswith("Next: cdk drift 'prod/*' -c stage=prod")
    assert [re.sub(r"(?<=[a-z])[0-9A-F]{8} ", " ", line) for line in lines] == [
        "trainyard-prod-network: JobSecurityGroup (AWS::EC2::SecurityGroup) differs: /SecurityGroupIngress/0",
        "trainyard-prod-image: Parameterreleasegaudi (AWS::SSM::Parameter) was deleted",
        f"{compute}spot (AWS::Batch::ComputeEnvironment) differs: /ComputeResources/MaxvCpus",
        f"{compute}Queuespot (AWS::Batch::JobQueue) differs: /State",
    ]
    # WHEN they undo it
    resources = {"maxvCpus": limit["computeResources"]["maxvCpus"]}
    batch.update_compute_environment(computeEnvironment=environment, computeResources=resources)
    batch.update_job_queue(jobQueue=queue, state="ENABLED")
    ssm.put_parameter(Name="/trainyard/prod/release/gaudi", Value=release, Type="String")
    ec2.revoke_security_group_ingress(GroupId=group, IpPermissions=rules)
    # THEN there is no alert
    assert report() == ""


@pytest.mark.parametrize(
    ("resources", "nodes"),
    [({"nnodes": 2}, 2), ({"nnodes": 4, "capacity": "spot"}, 4), ({"capacity": "on-demand"}, 1)],
    ids=str,
)
@pytest.mark.usefixtures("deployed")
def test_planned_jobs_run_on_a_stage_with_all_queues(
    account: Account, resources: dict[str, Any], nodes: int, tmp_path: Path
) -> None:
    # The job ends with its main node, so each node waits for all.
    script = (
        f'cd "{tmp_path}"; touch "${{AWS_BATCH_JOB_NODE_INDEX:-${{AWS_BATCH_JOB_ARRAY_INDEX:-0}}}}"; '
        f"until [ $(ls | wc -l) = {nodes} ]; do sleep 0.05; done"
    )
    request = planned(account.stage("prod"), resources=resources)
    overrides = request.get("nodeOverrides", {}).get("nodePropertyOverrides", [request])[0]["ecsPropertiesOverride"]
    overrides["taskProperties"][0]["containers"][0]["command"] = ["sh", "-c", script]
    account.jobs["planned"] = account.aws.client("batch").submit_job(**request)["jobId"]
    assert account.wait_for("planned", *ENDED)["status"] == "SUCCEEDED"
    assert {path.name for path in tmp_path.iterdir()} == {str(index) for index in range(nodes)}


def planned(stage: DeployedStage, **more: Any) -> dict[str, Any]:
    """Return the SubmitJob request that the command line would send."""
    arguments = {"model": "data://shared/m", "train_data": "data://shared/t.jsonl"}
    spec = {"name": "probe", "job": "finetune-classification", "arguments": arguments, **more}
    return plan(parse_spec(spec, origin="the test"), stage, run_id="probe-20261121-120005-00ab").request


def test_changed_limit_keeps_queues_and_environments(grown: Step) -> None:
    before, after = grown.before, grown.after
    assert before.environments.keys() < after.environments.keys()  # plus those of On-Demand nodes and of the new team
    assert before.queues <= after.queues
    teams = [team.name for team in STAGES["dev"].teams]
    for parameter in (queue_parameter(name, team=team) for name in (SPOT, CPU_SPOT) for team in teams):
        assert after.parameters[parameter] == before.parameters[parameter]
    grew = {arn for arn, one in before.environments.items() if after.environments[arn]["maxvCpus"] > one["maxvCpus"]}
    assert len(grew) == len(teams)
    vcpus = STAGES["dev"].row.vcpus
    assert before.definitions <= after.definitions  # old revisions are kept
    assert len(after.others["budgets"] - before.others["budgets"]) >= 2
    for arn in grew:
        assert (before.environments[arn]["maxvCpus"], after.environments[arn]["maxvCpus"]) == (2 * vcpus, 3 * vcpus)


def test_new_team_and_new_kind_are_usable_at_once(account: Account, grown: Step) -> None:
    (secret,) = grown.after.others["secrets"] - grown.before.others["secrets"]
    command = "test -z $HF_TOKEN || echo it is there"
    account.submit("without a token", team="evaluation", kind="evaluate", queue=CPU_SPOT, command=command)
    failed = account.wait_for("without a token", *ENDED)
    assert failed["statusReason"].startswith(
        "Fetching secret data from AWS Secrets Manager in region us-east-1: secret"
    )
    assert len(failed["attempts"]) == 1  # an empty secret does not fill itself

    account.aws.client("secretsmanager").put_secret_value(SecretId=secret, SecretString="hf_of-the-team")
    account.submit("with a token", team="evaluation", kind="evaluate", queue=CPU_SPOT, command=command)
    job = account.wait_for("with a token", *ENDED)
    assert job["status"] == "SUCCEEDED"
    (container,) = job["attempts"][0]["taskProperties"][0]["containers"]
    events = account.aws.client("logs").get_log_events(
        logGroupName=grown.after.parameters["log-group"], logStreamName=container["logStreamName"]
    )["events"]
    assert [event["message"] for event in events] == ["it is there"]


@pytest.mark.usefixtures("grown")
def test_each_team_has_its_instances_and_security_group(account: Account) -> None:
    stage = account.stage()
    request = planned(stage, team="evaluation")
    request["ecsPropertiesOverride"]["taskProperties"][0]["containers"][0]["command"] = ["true"]
    client = account.aws.client("batch")
    account.aws.client("secretsmanager").put_secret_value(
        SecretId=account.parameters()["huggingface-secret/evaluation"], SecretString="hf_of-the-team"
    )
    account.jobs["of a team"] = client.submit_job(**request)["jobId"]
    assert account.wait_for("of a team", *ENDED)["status"] == "SUCCEEDED"
    # A team's queues have no other team's environments.
    environments: dict[str, set[str]] = {}
    for name, arn in stage.queues.items():
        [queue] = client.describe_job_queues(jobQueues=[arn])["jobQueues"]
        its = {item["computeEnvironment"] for item in queue["computeEnvironmentOrder"]}
        environments.setdefault(str(owner_of_queue(name)), set()).update(its)
    assert environments.keys() == {"research", "product", "evaluation"}
    assert sum(map(len, environments.values())) == len(set().union(*environments.values()))
    seen = account.snapshot().environments
    groups = {
        team: {group for arn in its for group in seen[arn]["securityGroupIds"]} for team, its in environments.items()
    }
    assert [len(its) for its in groups.values()] == [1, 1, 1]
    assert len(set().union(*groups.values())) == 3


def test_new_release_runs_next_to_the_old_one(upgraded: Step) -> None:
    before, after = upgraded.before, upgraded.after
    pool = STAGES["dev"].pool
    assert before.environments.keys() < after.environments.keys()
    assert before.queues < after.queues
    spot, cpu_spot = (queue_parameter(name, team="research") for name in (SPOT, CPU_SPOT))
    assert after.parameters[spot] not in before.queues
    assert after.parameters[queue_parameter(SPOT, team="research", retiring=pool.id)] == before.parameters[spot]
    assert after.parameters[cpu_spot] == before.parameters[cpu_spot]


def test_only_the_old_release_is_removed(settled: Step, grown: Step) -> None:
    assert grown.after.definitions <= settled.after.definitions
    old = grown.after.parameters[queue_parameter(SPOT, team="research")]
    assert old not in settled.after.queues
    assert settled.after.queues < settled.before.queues
    assert settled.after.environments.keys() < settled.before.environments.keys()
    assert len(settled.after.environments) == len(grown.after.environments)
    assert len(settled.after.others["templates"]) == len(grown.after.others["templates"])
    for what in ("buckets", "secrets", "VPCs"):
        assert settled.after.others[what] == grown.after.others[what]


@pytest.mark.usefixtures("settled")
def test_raised_budget_lifts_the_stop_of_the_stage(account: Account) -> None:
    until(lambda: account.states() == {"ENABLED"} or None, "the stage may start jobs again")


def test_destroying_a_stage_keeps_its_data(destroyed: Step, account: Account) -> None:
    before, after = destroyed.before, destroyed.after
    assert not [name for name in after.stacks if name.startswith("trainyard-dev-")]
    assert after.parameters == {}
    assert not {arn for arn in after.environments if "prod" not in arn}
    assert not {arn for arn in after.queues if "prod" not in arn}
    # The current revisions of job definitions are deleted. Older ones stay, as on AWS, and cost nothing.
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


def test_leftovers_are_only_the_stages_own_and_can_be_deleted(
    account: Account, destroyed: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**environment_of(account.aws.endpoint), "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    kms = account.aws.client("kms")
    for stage in ("dev", "prod"):  # keys as `own_kms_key` makes them; repositories and AMIs that no stack deletes
        tags = {"trainyard:project": "trainyard", "trainyard:stage": stage}
        kms.create_key(Tags=[{"TagKey": key, "TagValue": value} for key, value in tags.items()])
        put_image(account, f"trainyard-{stage}-replaced", tags)
        register_ami(account, tags)
    data = destroyed.before.parameters["bucket/data"]
    s3 = account.aws.client("s3")
    for content in (b"old", b"newer"):
        s3.put_object(Bucket=data, Key="shared/x", Body=content)
    s3.delete_object(Bucket=data, Key="shared/x")

    def leftovers(*arguments: str, expect: int = 0) -> Any:
        done = in_process.run(["leftovers", *arguments], folder=tmp_path, environment=environment, stdin="")
        assert done.returncode == expect, done.stderr
        return done

    def found(*arguments: str) -> dict[str, list[dict[str, Any]]]:
        items = json.loads(leftovers("-o", "json", *arguments).stdout)["found"]
        return {kind: [*group] for kind, group in groupby(items, key=lambda item: item["kind"])}

    left = found()
    images = {"repository", "machine-image", "snapshot"}
    assert left.keys() == {"bucket", "secret", "log-group", "job-definition", "key"} | images
    [[repository], [ami], [snapshot]] = (left[kind] for kind in ("repository", "machine-image", "snapshot"))
    assert (repository["name"], repository["size_bytes"]) == ("trainyard-dev-replaced", IMAGE_BYTES)
    assert (ami["usd_a_month"], snapshot["usd_a_month"]) == (0, 0.05 * snapshot["size_bytes"] / 2**30)
    assert {each["name"]: each["size_bytes"] for each in left["bucket"]}[data] >= len(b"oldnewer")
    assert [each["usd_a_month"] for each in left["key"]] == [1.0]
    assert not any("trainyard-prod-" in each["arn"] for group in left.values() for each in group)
    assert found("--stage", "prod") == {}  # what belongs to a stack is not left
    with monkeypatch.context() as patch:
        patch.setattr("jobs.money.leftovers._bucket_size", denied)
        listing = leftovers("--kind", "bucket")
    assert "could not ask about each bucket: AWS denied GetMetricStatistics: no\n" in listing.stderr
    assert re.search(rf"{data} +bucket +unknown\n", listing.stdout)

    # Nothing is deleted without a confirmation, and no key before what it decrypts.
    unasked = leftovers("--kind", "job-definition", "--delete", expect=2).stderr
    assert f"nothing was deleted: {len(left['job-definition'])} leftovers of stage 'dev'\nnext: add --yes" in unasked
    assert "without its key, bucket" in leftovers("--kind", "key", "--delete", "--yes", expect=2).stderr
    assert {kind: len(group) for kind, group in found().items()} == {kind: len(group) for kind, group in left.items()}
    # Nor an AMI before its snapshot, which has no tags.
    unfound = leftovers("--kind", "machine-image", "--delete", "--yes", expect=2).stderr
    assert f"without its machine-image, snapshot {snapshot['name']} could not be found again" in unfound
    leftovers("--kind", "machine-image", "--kind", "snapshot", "--delete", "--yes")
    assert found().keys() == left.keys() - {"machine-image", "snapshot"}
    leftovers("--delete", "--yes")
    assert found() == {}
    assert "nothing is left" in leftovers("--delete", "--yes").stderr
    ec2 = account.aws.client("ec2")
    stages = [tag["Value"] for image in ec2.describe_images(Owners=["self"])["Images"] for tag in image["Tags"]]
    assert ("dev" in stages, "prod" in stages) == (False, True)
    with pytest.raises(ClientError, match=r"InvalidSnapshot\.NotFound"):
        ec2.describe_snapshots(SnapshotIds=[snapshot["name"]])
    assert account.snapshot().others["repositories"] == destroyed.after.others["repositories"]
    buckets = [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]
    assert len([name for name in buckets if name.startswith("trainyard-prod-")]) == 3
    assert not [name for name in buckets if name.startswith("trainyard-dev-")]
    states = [kms.describe_key(KeyId=key["KeyId"])["KeyMetadata"]["KeyState"] for key in kms.list_keys()["Keys"]]
    assert states.count("PendingDeletion") == 1


IMAGE_BYTES = 7023


def put_image(account: Account, repository: str, tags: dict[str, str]) -> None:
    """Create a repository with an image."""
    ecr = account.aws.client("ecr")
    ecr.create_repository(repositoryName=repository, tags=[{"Key": key, "Value": tags[key]} for key in tags])
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    manifest = {"schemaVersion": 2, "mediaType": kind, "config": {"size": IMAGE_BYTES}, "layers": []}
    ecr.put_image(repositoryName=repository, imageManifest=json.dumps(manifest), imageTag="1")


def register_ami(account: Account, tags: dict[str, str]) -> None:
    """Register an AMI, for which the emulator creates a snapshot without tags."""
    ami = account.aws.client("ec2").register_image(Name=f"trainyard-{tags['trainyard:stage']}")["ImageId"]
    account.aws.client("ec2").create_tags(Resources=[ami], Tags=[{"Key": key, "Value": tags[key]} for key in tags])


def denied(*_: object) -> None:
    raise ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "GetMetricStatistics")
