"""One job: what it sees, what DescribeJobs shows, how it can end."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.emulator.batch_calls import Batch, main, overrides, until


def test_a_job_that_succeeds(batch: Batch) -> None:
    queue = batch.queue()
    definition = batch.definition("sh", "-c", "echo out; echo err >&2")
    job = batch.ended(batch.submit(definition, queue, tags={"team": "research"}))
    assert job["status"] == "SUCCEEDED"
    assert job["statusReason"] == "Essential container in task exited"
    assert job["createdAt"] <= job["startedAt"] <= job["stoppedAt"]
    assert job["jobQueue"].endswith(f":job-queue/{queue}")
    assert job["jobDefinition"].endswith(f":job-definition/{definition}:1")
    assert (job["tags"], job["retryStrategy"]) == ({"team": "research"}, {"attempts": 1})
    (attempt,) = job["attempts"]
    assert attempt["statusReason"] == "Essential container in task exited"
    assert job["createdAt"] <= attempt["startedAt"] <= attempt["stoppedAt"]
    assert main(attempt)["exitCode"] == 0
    (task,) = attempt["taskProperties"]
    assert task["taskArn"] == job["ecsProperties"]["taskProperties"][0]["taskArn"]
    assert main(attempt)["logStreamName"] == f"{definition}/main/{task['taskArn'].rsplit('/', 1)[-1]}"
    assert batch.output(attempt) == ["out", "err"]


@pytest.mark.parametrize(("script", "exit_code"), [("exit 3", 3), ("kill -KILL $$", 137)])
def test_a_job_that_fails(batch: Batch, script: str, exit_code: int) -> None:
    job = batch.shell(script)
    assert job["status"] == "FAILED"
    assert main(job)["exitCode"] == exit_code
    assert "reason" not in main(job)


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
    assert (job["status"], job["statusReason"]) == ("FAILED", "Task failed to start")
    assert "startedAt" not in job
    assert main(job)["reason"].startswith("CannotStartContainerError: Error response from daemon: ")
    assert words in main(job)["reason"]
    assert main(job)["exitCode"] == exit_code


def test_the_environment_of_a_job(batch: Batch) -> None:
    queue = batch.queue(environment := batch.environment())
    definition = batch.definition(
        "python", "-c", "import json, os, sys; print(json.dumps([sys.prefix, *[dict(os.environ)]]))"
    )
    job_id = batch.submit(definition, queue, ecsPropertiesOverride=overrides(environment={"FROM_SUBMIT": "a b=c"}))
    prefix, variables = json.loads(batch.output(batch.ended(job_id))[0])
    assert prefix == sys.prefix  # the server's own Python, started by this process
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
    assert variables["AWS_ACCESS_KEY_ID"] == batch.aws.credentials.access_key_id
    assert variables["OMP_NUM_THREADS"] == "1"  # as in this process: several jobs share the machine's cores
    # The server's own variables are not a job's, whatever they are called.
    assert not [name for name in variables if name.startswith("TRAINYARD_")]


def test_overrides_and_what_runs_is_shown(batch: Batch) -> None:
    definition = batch.definition("false", container={"environment": [{"name": "A", "value": "1"}]})
    given = overrides(
        command=["sh", "-c", "echo $A$B; sleep 30"],
        environment={"B": "2"},
        resourceRequirements=[{"type": "VCPU", "value": "2"}],
    )
    job_id = batch.submit(definition, batch.queue(), ecsPropertiesOverride=given)
    running = batch.reached(job_id, "RUNNING")
    assert (running["container"], running["attempts"]) == ({}, [])
    shown = main(running)
    assert shown["environment"] == [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    assert {one["type"]: one["value"] for one in shown["resourceRequirements"]} == {"VCPU": "2", "MEMORY": "128"}
    until(lambda: batch.lines(shown["logStreamName"]) or None, "the container has written")
    batch.client.terminate_job(jobId=job_id, reason="enough")
    ended = batch.ended(job_id)
    assert main(ended["attempts"][0])["exitCode"] == 143
    assert batch.output(ended) == ["12"]


def test_overrides_that_ecs_finds_too_long_fail_the_job(batch: Batch) -> None:
    job = batch.run("true", ecsPropertiesOverride=overrides(command=["echo", "x" * 8200]))
    assert (job["status"], main(job)["reason"]) == ("FAILED", "Container Overrides length must be at most 8192")


def test_every_attempt_has_a_fresh_working_directory_at_the_same_path(batch: Batch) -> None:
    """As in a container. Another job has another."""
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
    for job in map(batch.ended, jobs):
        first, second = (batch.output(attempt) for attempt in job["attempts"])
        assert first == second == ["tmp", first[1]]
        assert main(job)["exitCode"] == 1
        paths.append(first[1])
    assert paths[0] != paths[1]
    assert not any(Path(path).exists() for path in paths)
