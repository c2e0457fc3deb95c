"""`trainyard canary` runs a job on another AMI, in a temporary queue."""

from jobs.aws.connection import Aws
from jobs.core.queues import SPOT, team_queue_name
from jobs.core.stage import DEFAULT_TEAM, DeployedStage
from jobs.runs.canary import temporary_queue
from tests.jobs.cli.conftest import Trainyard

AMI = "ami-0123456789abcdef0"


def names(aws: Aws) -> set[str]:
    queues = [item["jobQueueName"] for item in aws.batch.describe_job_queues()["jobQueues"]]
    found = aws.batch.describe_compute_environments()["computeEnvironments"]
    return {*queues, *(item["computeEnvironmentName"] for item in found)}


def test_the_queue_differs_only_by_its_ami_and_size(emulated: Aws, stage: DeployedStage) -> None:
    def resources(queue: str) -> dict[str, object]:
        [found] = emulated.batch.describe_job_queues(jobQueues=[queue])["jobQueues"]
        environment = found["computeEnvironmentOrder"][0]["computeEnvironment"]
        [made] = emulated.batch.describe_compute_environments(computeEnvironments=[environment])["computeEnvironments"]
        return {**made["computeResources"]}

    model, before = stage.queue(team_queue_name(SPOT, DEFAULT_TEAM)), names(emulated)
    with temporary_queue(emulated, model, stage.instance_type, AMI, name="canary-test") as queue:
        changed = {key: value for key, value in resources(queue).items() if resources(model)[key] != value}
    images = [{"imageType": "ECS_AL2023", "imageIdOverride": AMI}]
    assert changed == {"maxvCpus": 96, "ec2Configuration": images}
    assert names(emulated) == before


def test_a_canary_runs_a_job_and_leaves_nothing(emulated: Aws, aws_trainyard: Trainyard) -> None:
    before = names(emulated)
    done = aws_trainyard("canary", AMI, "--cpu", expect=0)
    assert "SUCCEEDED" in done.stderr + done.stdout
    assert "if this command is killed, disable and delete the job queue" in done.stderr
    assert names(emulated) == before
    refused = aws_trainyard("canary", "gaudi", expect=2)
    assert "'gaudi' is not an AMI's id" in refused.stderr
    several = aws_trainyard("canary", AMI, "--set", "resources.nnodes=2", "--set", "resources.capacity=spot", expect=2)
    assert "a canary is one run on one node" in several.stderr
