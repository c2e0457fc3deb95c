"""A command in a container of a job that runs: through ECS Exec on AWS, and directly on the emulator.

On AWS the Session Manager plugin carries the session, as a child process that gets what ExecuteCommand answers. The
emulator tells where the container is on this machine, and records who asked.
"""

import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jobs.aws.connection import Aws
from jobs.aws.errors import error_code, is_denied
from jobs.core.errors import ConfigurationError, NotFoundError, TrainyardError, UsageError
from jobs.runs.job import Job, part_ids
from jobs.runs.port_forwarding import PLUGIN, check_programs

SHELL = ("/bin/bash",)
"""What is run where no command is given; every image here has it."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The ECS task of one node of a job that runs, as DescribeJobs tells of it."""

    job_id: str
    """Batch's id of the job, or of the node or child that the task is of."""
    arn: str
    container: str
    lets_commands_in: bool
    """True where the job was submitted to a definition that lets people in."""

    @property
    def cluster(self) -> str:
        """Return the name of the task's cluster, which its ARN has: …:task/<cluster>/<id>."""
        return self.arn.split("/")[1]


def task_of(aws: Aws, job: Job, node: int) -> Task:
    """Return the task of a node. Raises UsageError where the job has no such node, NotFoundError where none runs."""
    [detail] = aws.batch.describe_jobs(jobs=[job.id])["jobs"]
    ids = part_ids(detail) or [job.id]
    if node not in range(len(ids)):
        raise UsageError(f"{job.run_id} has no node {node}: its nodes are 0 to {len(ids) - 1}")
    [part] = aws.batch.describe_jobs(jobs=[ids[node]])["jobs"]
    for task in part.get("ecsProperties", {}).get("taskProperties", []):
        if "taskArn" in task and part["status"] == "RUNNING":
            return Task(
                job_id=ids[node],
                arn=task["taskArn"],
                container=task["containers"][0]["name"],
                lets_commands_in=bool(task.get("enableExecuteCommand")),
            )
    raise NotFoundError(
        f"node {node} of {job.run_id} does not run: it is {part['status']}", next_step=f"trainyard status {job.run_id}"
    )


def enter(aws: Aws, job: Job, task: Task, command: Sequence[str]) -> None:
    """Run a command in the task's container, on this terminal, to its end.

    How the command ended is not told: ECS Exec does not know it. Raises ConfigurationError where a program is missing
    or the caller is not allowed in, TrainyardError where no session comes about.
    """
    if aws.emulated:
        _enter_here(aws, job, task, command)
    else:
        _enter_on_aws(aws, job, task, command)


def _enter_on_aws(aws: Aws, job: Job, task: Task, command: Sequence[str]) -> None:
    check_programs(PLUGIN)
    try:
        answer = aws.ecs.execute_command(
            cluster=task.cluster,
            task=task.arn,
            container=task.container,
            command=shlex.join(command),
            interactive=True,  # the API knows no other way
        )
    except Exception as error:
        raise _explained(error, job) or error from error
    # What it expects, as the AWS CLI and AWS Copilot start it: the answer, the region, the operation.
    plugin = [PLUGIN, json.dumps(answer["session"]), aws.ecs.meta.region_name, "StartSession"]
    with _leaving_ctrl_c_to_the_command():
        # It ends at once where its input is no terminal and has ended: it then gets a terminal of its own.
        status = subprocess.call(plugin) if sys.stdin.isatty() else os.waitstatus_to_exitcode(pty.spawn(plugin))
    if status != 0:
        raise TrainyardError(
            f"the session in {job.run_id} broke off: {PLUGIN} ended with exit code {status}",
            next_step=f"trainyard status {job.run_id}; the same command again, if it still runs",
        )


def _explained(error: Exception, job: Job) -> TrainyardError | None:
    """Return what a user should read in place of a refusal of ExecuteCommand; None where it is none of those known."""
    if is_denied(error):
        return ConfigurationError(
            f"these credentials may not run commands in {job.run_id}: only people of team '{job.team}' may",
            next_step=f"assume the role of team '{job.team}' (--profile), or ask somebody of the team",
        )
    if error_code(error) in ("InvalidParameterException", "TargetNotConnectedException"):
        said = getattr(error, "response", {}).get("Error", {}).get("Message", "")
        return TrainyardError(
            f"ECS does not let anybody into {job.run_id}: {said}",
            next_step="again in a minute, as its agent starts after the job; if it stays so, the instance has no way "
            "to Session Manager: NAT, or interface_endpoints in infra/settings.py",
        )
    return None


def _enter_here(aws: Aws, job: Job, task: Task, command: Sequence[str]) -> None:
    asked = {"user": aws.caller, "command": shlex.join(command)}
    place = aws.post_to_emulator(f"/trainyard/jobs/{task.job_id}/enter", asked)
    if place is None:
        raise NotFoundError(f"{job.run_id} has just ended", next_step=f"trainyard status {job.run_id}")
    if "container" in place:
        _enter_container(place["container"], place["docker_host"], command)
    else:
        _enter_process(job, place["pid"], command)


def _enter_container(container: str, docker_host: str, command: Sequence[str]) -> None:
    check_programs("docker")
    # As root, whoever the image's user is, and on a terminal where there is one: as ECS Exec has it.
    terminal = ["--tty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    environment = {**os.environ, **({"DOCKER_HOST": docker_host} if docker_host else {})}
    with _leaving_ctrl_c_to_the_command():
        subprocess.call(
            ["docker", "exec", "--interactive", *terminal, "--user", "root", container, *command], env=environment
        )


def _enter_process(job: Job, pid: int, command: Sequence[str]) -> None:
    """Run a command with the environment and in the folder of a job that is a process, and end it with the job."""
    try:
        environment = _environment(Path(f"/proc/{pid}/environ").read_bytes())
        watched = os.pidfd_open(pid)
    except (FileNotFoundError, ProcessLookupError):
        raise NotFoundError(f"{job.run_id} has just ended", next_step=f"trainyard status {job.run_id}") from None
    except PermissionError:
        raise ConfigurationError(
            f"{job.run_id} runs as another user of this machine", next_step="sign in as the one who started it"
        ) from None
    environment.update({name: os.environ[name] for name in ("TERM",) if name in os.environ})
    try:
        with _leaving_ctrl_c_to_the_command():
            try:
                process = subprocess.Popen(command, cwd=f"/proc/{pid}/cwd", env=environment)
            except OSError as error:
                raise TrainyardError(
                    f"{command[0]} does not run in {job.run_id}: {error.strerror}",
                    next_step="name a program that its image, or its environment, has",
                ) from None
            ended = os.pidfd_open(process.pid)
            try:
                ready, _, _ = select.select([ended, watched], [], [])
                if ended not in ready:  # the container is gone, and what is in it goes with it
                    process.send_signal(signal.SIGHUP)
                    process.kill()
                    print(f"{job.run_id} has ended", file=sys.stderr)
            finally:
                os.close(ended)
                process.wait()
    finally:
        os.close(watched)


def _environment(block: bytes) -> dict[str, str]:
    """Return the environment that the kernel shows of a process: NAME=VALUE, each ended by a NUL."""
    pairs = (os.fsdecode(entry).partition("=") for entry in block.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs}


@contextmanager
def _leaving_ctrl_c_to_the_command() -> Iterator[None]:
    """Take no notice of Ctrl-C: it is for the command, which shares the terminal."""
    # A handler, since a signal that is ignored would be so in the command too.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
