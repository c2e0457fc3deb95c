"""A single job: its environment, its details in DescribeJobs, and how it can end."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.emulator.batch_calls import Batch, container_of, overrides, until


def test_job_succeeds(batch: Batch) -> None:
    queue = batch.queue()
    definition = batch.definition("sh", "-c", "echo out; echo err >&2")
    job = batch.wait_for_end(batch.submit(definition, queue, tags={"team": "research"}))
    assert job["status"] == "SUCCEEDED"
    assert job["statusReason"] == "Essential container in task exited"
    assert job["createdAt"] <= job["startedAt"] <= job["stoppedAt"]
    assert job["jobQueue"].endswith(f":job-queue/{queue}")
    assert job["jobDefinition"].endswith(f":job-definition/{definition}:1")
    assert (job["tags"], job["retryStrategy"]) == ({"team": "research"}, {"attempts": 1})
    (attempt,) = job["attempts"]
    assert attempt["statusReason"] == "Essential container in task exited"
    assert job["createdAt"] <= attempt["startedAt"] <= attempt["stoppedAt"]
    assert container_of(attempt)["exitCode"] == 0
    (task,) = attempt["taskProperties"]
    assert task["taskArn"] == job["ecsProperties"]["taskProperties"][0]["taskArn"]
    assert container_of(attempt)["logStreamName"] == f"{definition}/main/{task['taskArn'].rsplit('/', 1)[-1]}"
    assert batch.output(attempt) == ["out", "err"]


@pytest.mark.parametrize(("script", "exit_code"), [("exit 3", 3), ("kill -KILL $$", 137)])
def test_job_fails_with_its_exit_code(batch: Batch, script: str, exit_code: int) -> None:
    job = batch.shell(script)
    assert job["status"] == "FAILED"
    assert container_of(job)["exitCode"] == exit_code
    assert "reason" not in container_of(job)


@pytest.mark.parametrize(
    ("command", "words", "exit_code"),
    [
        (["no-such-program"], "executable file not found in $PATH", 127),
        (["/no/such/program"], "no such file or directory", 127),
        (["/etc/passwd"], "permission denied", 126),
    ],
)
def test_job_fails_if_its_command_cannot_start(batch: Batch, command: list[str], words: str, exit_code: int) -> None:
    job = batch.run(*command)
    assert (job["status"], job["statusReason"]) == ("FAILED", "Task failed to start")
    assert "startedAt" not in job
    assert container_of(job)["reason"].startswith("CannotStartContainerError: Error response from daemon: ")
    assert words in container_of(job)["reason"]
    assert container_of(job)["exitCode"] == exit_code


def test_environment_of_a_job(batch: Batch) -> None:
    queue = batch.queue(environment := batch.environment())
    definition = batch.definition(
        "python", "-c", "import json, os, sys; print(json.dumps([sys.prefix, *[dict(os.environ)]]))"
    )
    job_id = batch.submit(definition, queue, ecsPropertiesOverride=overrides(environment={"FROM_SUBMIT": "a b=c"}))
    prefix, variables = json.loads(batch.output(batch.wait_for_end(job_id))[0])
    assert prefix == sys.prefix  # the server's Python, started by this process
    assert {name: value for name, value in variables.items() if name.startswith("AWS_BATCH_")} == {
        "AWS_BATCH_JOB_ID": job_id,
        "AWS_BATCH_JOB_ATTEMPT": "1",
        "AWS_BATCH_JQ_NAME": queue,
        "AWS_BATCH_CE_NAME": environment,
    }
    assert variables["FROM_SUBMIT"] == "a b=c"
    assert variables["AWS_ENDPOINT_URL"] == batch.aws.endpoint
    assert variables["AWS_REGION"] == variables["AWS_DEFAULT_REGION"] == "us-east-1"
    assert "AWS_EC2_METADATA_DISABLED" not in variables
    assert variables["AWS_ACCESS_KEY_ID"] == batch.aws.credentials.access_key_id
    assert variables["OMP_NUM_THREADS"] == "1"  # as in this process, because jobs share the machine's cores
    # A job does not get the server's variables.
    assert not [name for name in variables if name.startswith("TRAINYARD_")]


_READ_METADATA = """
import os, urllib.error, urllib.request
for path in ("instance-type", "instance-life-cycle", "placement/availability-zone", "spot/instance-action"):
    try:
        print(urllib.request.urlopen(f"{os.environ['AWS_EC2_METADATA_SERVICE_ENDPOINT']}/latest/meta-data/{path}").read().decode())
    except urllib.error.HTTPError as error:
        print(error.code)
"""


def test_a_job_reads_the_type_life_cycle_and_zone_of_its_instance(batch: Batch) -> None:
    queue = batch.queue(batch.environment(kind="SPOT"))
    job_id = batch.submit(batch.definition("python", "-c", _READ_METADATA), queue)
    # No Spot notice: a reclaim happens on request.
    assert batch.output(batch.wait_for_end(job_id)) == ["dl1.24xlarge", "spot", "us-east-1a", "404"]


def test_running_job_shows_its_overrides(batch: Batch) -> None:
    definition = batch.definition("false", container={"environment": [{"name": "A", "value": "1"}]})
    given = overrides(
        command=["sh", "-c", "echo $A$B; sleep 30"],
        environment={"B": "2"},
        resourceRequirements=[{"type": "VCPU", "value": "2"}],
    )
    job_id = batch.submit(definition, batch.queue(), ecsPropertiesOverride=given)
    running = batch.wait_for(job_id, "RUNNING")
    assert (running["container"], running["attempts"]) == ({}, [])
    shown = container_of(running)
    assert shown["environment"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    assert {one["type"]: one["value"] for one in shown["resourceRequirements"]} == {"VCPU": "2", "MEMORY": "128"}
    until(lambda: batch.lines(shown["logStreamName"]) or None, "the container has written")
    batch.client.terminate_job(jobId=job_id, reason="enough")
    ended = batch.wait_for_end(job_id)
    assert container_of(ended["attempts"][0])["exitCode"] == 143
    assert batch.output(ended) == ["12"]


def test_job_fails_if_ecs_finds_its_overrides_too_long(batch: Batch) -> None:
    job = batch.run("true", ecsPropertiesOverride=overrides(command=["echo", "x" * 8200]))
    assert (job["status"], container_of(job)["reason"]) == ("FAILED", "Container Overrides length must be at most 8192")


def test_each_attempt_gets_a_fresh_folder_at_the_same_path(batch: Batch) -> None:
    """The path is the same in each attempt, as in a container; another job has another path."""
    script = """
        ls -A; pwd
        [ "$HOME" = "$PWD" ]
        case "$TMPDIR" in "$PWD"/*) touch "$TMPDIR/left" here ;; *) exit 9 ;; esac
        exit 1
    """
    definition, queue = batch.definition("sh", "-ec", script), batch.queue()
    jobs = [
        batch.submit(
            definition,
            queue,
            ecsPropertiesOverride=overrides(environment={"NAME": name}),
            retryStrategy={"attempts": 2},
        )
        for name in ("one", "other")
    ]
    paths = []
    for job in map(batch.wait_for_end, jobs):
        first, second = (batch.output(attempt) for attempt in job["attempts"])
        assert first == second == ["tmp", first[1]]
        assert container_of(job)["exitCode"] == 1
        paths.append(first[1])
    assert paths[0] != paths[1]
    assert not any(Path(path).exists() for path in paths)
