"""One job: what it sees, what DescribeJobs shows, how it can end."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.emulator.batch_calls import Batch, container, until


def test_a_job_that_succeeds(batch: Batch) -> None:
    queue = batch.queue()
    definition = batch.definition("sh", "-c", "echo out; echo err >&2")
    job = batch.ended(batch.submit(definition, queue, tags={"team": "research"}))
    assert job["status"] == "SUCCEEDED"
    assert job["statusReason"] == "Essential container in task exited"
    assert job["createdAt"] <= job["startedAt"] <= job["stoppedAt"]
    assert job["jobQueue"].endswith(f":job-queue/{queue}")
    assert job["jobDefinition"].endswith(f":job-definition/{definition}:1")
    assert job["tags"] == {"team": "research"}
    assert job["retryStrategy"] == {"attempts": 1}
    (attempt,) = job["attempts"]
    assert attempt["statusReason"] == "Essential container in task exited"
    assert job["createdAt"] <= attempt["startedAt"] <= attempt["stoppedAt"]
    assert attempt["container"]["exitCode"] == 0
    assert attempt["container"]["taskArn"] == job["container"]["taskArn"]
    stream = attempt["container"]["logStreamName"]
    assert stream == f"{definition}/default/{attempt['container']['taskArn'].rsplit('/', 1)[-1]}"
    assert batch.lines(stream) == ["out", "err"]


def test_a_job_that_fails(batch: Batch) -> None:
    job = batch.shell("exit 3")
    assert job["status"] == "FAILED"
    assert job["container"]["exitCode"] == 3
    assert "reason" not in job["container"]
    assert job["attempts"][0]["container"]["exitCode"] == 3


@pytest.mark.parametrize(("signal", "exit_code"), [("KILL", 137), ("TERM", 143), ("SEGV", 139)])
def test_a_job_that_a_signal_ends(batch: Batch, signal: str, exit_code: int) -> None:
    assert batch.shell(f"kill -{signal} $$")["container"]["exitCode"] == exit_code


@pytest.mark.parametrize(
    ("command", "words", "exit_code"),
    [
        (["no-such-program"], "executable file not found in $PATH", 127),
        (["/no/such/program"], "no such file or directory", 127),
        (["/etc/passwd"], "permission denied", 126),
    ],
)
def test_a_command_that_cannot_start(batch: Batch, command: list[str], words: str, exit_code: int) -> None:
    job = batch.run(*command)
    assert job["status"] == "FAILED"
    assert job["statusReason"] == "Task failed to start"
    assert "startedAt" not in job
    assert job["container"]["reason"].startswith("CannotStartContainerError: Error response from daemon: ")
    assert words in job["container"]["reason"]
    assert job["container"]["exitCode"] == exit_code


def test_the_environment_of_a_job(batch: Batch) -> None:
    queue = batch.queue(environment := batch.environment())
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    job_id = batch.submit(
        batch.definition("python", "-c", script),
        queue,
        containerOverrides={"environment": [{"name": "FROM_SUBMIT", "value": "a b=c"}]},
    )
    variables = json.loads(batch.output(batch.ended(job_id))[0])
    assert {name: value for name, value in variables.items() if name.startswith("AWS_BATCH_")} == {
        "AWS_BATCH_JOB_ID": job_id,
        "AWS_BATCH_JOB_ATTEMPT": "1",
        "AWS_BATCH_JQ_NAME": queue,
        "AWS_BATCH_CE_NAME": environment,
    }
    assert variables["FROM_SUBMIT"] == "a b=c"
    assert variables["AWS_ENDPOINT_URL"] == batch.aws.endpoint
    assert variables["AWS_REGION"] == variables["AWS_DEFAULT_REGION"] == "us-east-1"
    assert variables["AWS_EC2_METADATA_DISABLED"] == "true"
    assert variables["AWS_ACCESS_KEY_ID"]
    assert variables["AWS_SECRET_ACCESS_KEY"]
    assert variables["OMP_NUM_THREADS"] == "1"  # as in this process: several jobs share the machine's cores
    # The server's own variables are not a job's, whatever they are called.
    assert not [name for name in variables if name.startswith("TRAINYARD_")]


def test_a_job_reaches_the_embedded_aws(batch: Batch) -> None:
    bucket = f"bucket-{batch.environment()[-8:]}"
    job = batch.run("python", "-c", f"import boto3; boto3.client('s3').create_bucket(Bucket='{bucket}')")
    assert job["status"] == "SUCCEEDED"
    assert bucket in [one["Name"] for one in batch.aws.client("s3").list_buckets()["Buckets"]]


def test_python_is_the_servers_own(batch: Batch) -> None:
    # Started by this process, from the same environment.
    assert batch.output(batch.run("python", "-c", "import sys; print(sys.prefix)")) == [sys.prefix]


def test_every_attempt_has_a_fresh_working_directory(batch: Batch) -> None:
    script = """
        ls -A; pwd
        [ "$HOME" = "$PWD" ]
        case "$TMPDIR" in "$PWD"/*) touch "$TMPDIR/left" here ;; *) exit 9 ;; esac
        exit 1
    """
    job = batch.ended(batch.submit(batch.definition("sh", "-ec", script), batch.queue(), retryStrategy={"attempts": 2}))
    listings = [batch.lines(attempt["container"]["logStreamName"]) for attempt in job["attempts"]]
    (first_content, first), (second_content, second) = listings
    assert first_content == second_content == "tmp"
    assert not Path(first).exists()
    assert not Path(second).exists()


def test_overrides_and_parameters(batch: Batch) -> None:
    definition = batch.definition("echo", "Ref::greeting, Ref::name", "Ref::greeting", parameters={"greeting": "hello"})
    queue = batch.queue()
    job = batch.ended(batch.submit(definition, queue, parameters={"name": "batch"}))
    assert batch.output(job) == ["hello, batch hello"]
    job = batch.ended(batch.submit(definition, queue, parameters={"name": "x", "greeting": "bye"}))
    assert batch.output(job) == ["bye, x bye"]
    overrides = {
        "command": ["sh", "-c", "echo $WORD Ref::name"],
        "environment": [{"name": "WORD", "value": "overridden"}],
        "resourceRequirements": [{"type": "VCPU", "value": "2"}],
    }
    job = batch.ended(batch.submit(definition, queue, parameters={"name": "too"}, containerOverrides=overrides))
    assert batch.output(job) == ["overridden too"]
    assert job["container"]["environment"] == overrides["environment"]
    assert {one["type"]: one["value"] for one in job["container"]["resourceRequirements"]} == {
        "VCPU": "2",
        "MEMORY": "128",
    }


def test_an_ecs_job_shows_its_containers_in_task_properties(batch: Batch) -> None:
    definition = batch.ecs_definition([container("false", name="main", environment=[{"name": "A", "value": "1"}])])
    override = {
        "taskProperties": [
            {
                "containers": [
                    {
                        "name": "main",
                        "command": ["sh", "-c", "echo $A$B; sleep 30"],
                        "environment": [{"name": "B", "value": "2"}],
                    }
                ]
            }
        ]
    }
    job_id = batch.submit(definition, batch.queue(), ecsPropertiesOverride=override)
    running = batch.reached(job_id, "RUNNING")
    assert running["container"] == {}
    assert running["attempts"] == []
    (shown,) = running["ecsProperties"]["taskProperties"][0]["containers"]
    assert shown["environment"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    assert shown["logStreamName"].startswith(f"{definition}/main/")
    until(lambda: batch.lines(shown["logStreamName"]) or None, "the container has written")
    batch.client.terminate_job(jobId=job_id, reason="enough")
    ended = batch.ended(job_id)
    (task,) = ended["attempts"][0]["taskProperties"]
    assert task["taskArn"] == running["ecsProperties"]["taskProperties"][0]["taskArn"]
    assert [(one["name"], one["exitCode"]) for one in task["containers"]] == [("main", 143)]
    assert batch.lines(task["containers"][0]["logStreamName"]) == ["12"]


def test_overrides_that_ecs_finds_too_long_fail_the_job(batch: Batch) -> None:
    job = batch.run("true", containerOverrides={"command": ["echo", "x" * 8200]})
    assert job["status"] == "FAILED"
    assert job["container"]["reason"] == "Container Overrides length must be at most 8192"


def test_a_job_that_kills_its_init_process_fails_and_leaves_nothing(batch: Batch) -> None:
    script = "import os, signal; print(os.getcwd()); os.kill(os.getppid(), signal.SIGKILL); signal.pause()"
    job = batch.run("python", "-c", script)
    assert (job["status"], job["container"]["exitCode"]) == ("FAILED", 137)
    assert not Path(batch.output(job)[0]).exists()
    assert batch.shell("true")["status"] == "SUCCEEDED"
