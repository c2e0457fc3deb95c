"""Connect to a running job: run commands in its container, or forward a port of its instance.

Commands go through ECS Exec and ports through Session Manager, so nothing listens on the network and no SSH key is
needed. The AWS CLI and its Session Manager plugin run as child processes. The emulator instead returns the container or
process of a job on this machine, and records who entered it.
"""

import json
import os
import pty
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

from jobs.aws.connection import Aws
from jobs.aws.errors import error_code, is_denied
from jobs.core.errors import ConfigurationError, NotFoundError, TrainyardError, UsageError
from jobs.runs.job import Job, part_ids
from jobs.spec.code import ENVIRONMENT_FILE, OUTPUT_VARIABLE
from jobs.spec.kinds.script import KIND

DOCUMENT = "AWS-StartPortForwardingSession"
"""AWS's session document for a port of the instance itself, the only document that a team's members may use."""

PLUGIN = "session-manager-plugin"
PROGRAMS = {
    "aws": "install the AWS CLI, version 2: "
    "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html",
    PLUGIN: "install the AWS CLI's Session Manager plugin: "
    "https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html",
    "docker": "install Docker's command: https://docs.docker.com/engine/install/",
}

SHELL = ("/bin/bash",)
"""The command to run if none is given; all of our images have it."""

IN_SCRIPT = (
    f'f=$(ls -t /scratch/*/{ENVIRONMENT_FILE} "${{TMPDIR:-/tmp}}"/*/{ENVIRONMENT_FILE} 2>/dev/null | head -n 1); '
    '[ -z "$f" ] || . "$f"; exec "$@"'
)
"""Runs a command in a container with the environment and in the folder of the script, once it is prepared."""

START_SECONDS = 60.0
STOP_SECONDS = 5.0
_POLL_SECONDS = 0.2
_REQUEST_SECONDS = 10.0


def check_programs(*names: str) -> None:
    """Raise ConfigurationError, with what to install, if one of the programs is missing."""
    for name in names:
        if shutil.which(name) is None:
            raise ConfigurationError(
                f"'{name}' is not on the PATH, but the connection to the job needs it", next_step=PROGRAMS[name]
            )


def instance_of(aws: Aws, job: Job) -> str:
    """Return the id of the EC2 instance that runs a single-node job. Raises NotFoundError if the instance is gone."""
    arn = _container_instance(aws, job)
    if arn is not None:
        # ECS needs the cluster, which is part of the ARN: …:container-instance/<cluster>/<id>.
        found = aws.ecs.describe_container_instances(cluster=arn.split("/")[1], containerInstances=[arn])
        for instance in found["containerInstances"]:
            return instance["ec2InstanceId"]
    raise NotFoundError(
        f"{job.run_id} has no instance: the instance was lost, or has just been returned",
        next_step=f"trainyard status {job.run_id}",
    )


def _container_instance(aws: Aws, job: Job) -> str | None:
    for detail in aws.batch.describe_jobs(jobs=[job.id])["jobs"]:
        for task in detail.get("ecsProperties", {}).get("taskProperties", []):
            return task.get("containerInstanceArn")
    return None


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def forward_port(aws: Aws, *, instance: str, port: int, local_port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Forward the instance's `port` to `local_port` inside the block.

    Raises TrainyardError with the AWS CLI's output if JupyterLab does not answer at the port.
    """
    check_programs("aws", PLUGIN)
    options = [("--profile", aws.profile), ("--region", aws.region)]
    parameters = {"portNumber": [str(port)], "localPortNumber": [str(local_port)]}
    command = [
        *("aws", "ssm", "start-session", "--target", instance, "--document-name", DOCUMENT),
        *("--parameters", json.dumps(parameters)),
        *(word for name, value in options if value for word in (name, value)),
    ]
    with tempfile.TemporaryFile() as output:
        # A separate process group: this process handles Ctrl-C and then ends the plugin too. The plugin is a child of
        # the CLI, holds the port, and would survive if only the CLI were killed.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not answers(process, local_port):
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise _forwarding_error(instance, output.read().decode(errors="replace"))
                time.sleep(_POLL_SECONDS)
            yield process
        finally:
            _stop(process)


def answers(process: "subprocess.Popen[bytes]", local_port: int) -> bool:
    """Return whether JupyterLab answers at the port. The plugin may keep running after its instance is gone."""
    if process.poll() is not None:
        return False
    try:
        # The only address of JupyterLab that needs no token: it returns the version.
        with build_opener(ProxyHandler({})).open(
            f"http://127.0.0.1:{local_port}/api", timeout=_REQUEST_SECONDS
        ) as answer:
            return "version" in json.loads(answer.read())
    except (OSError, HTTPException, ValueError):
        return False


def _forwarding_error(instance: str, output: str) -> TrainyardError:
    printed = " ".join(line.strip() for line in output.splitlines() if line.strip()) or "nothing"
    return TrainyardError(
        f"could not forward a port of {instance}; the AWS CLI printed: {printed}",
        next_step="'TargetNotConnected': wait a minute for the instance's SSM agent, or give it a way to AWS (NAT, or "
        "interface_endpoints in infra/settings.py); 'AccessDenied': assume the team's role (--profile)",
    )


def _stop(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGINT, signal.SIGKILL):  # on SIGINT the plugin ends its session
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


@dataclass(frozen=True, kw_only=True)
class Task:
    """The ECS task of one node of a running job."""

    job_id: str
    """Batch's id of the job, or of the node or child that the task belongs to."""
    arn: str
    container: str
    allows_commands: bool
    """Whether the job definition allowed ECS Exec when the job was submitted."""

    @property
    def cluster(self) -> str:
        """Return the name of the task's cluster, taken from its ARN: …:task/<cluster>/<id>."""
        return self.arn.split("/")[1]


def task_of(aws: Aws, job: Job, node: int) -> Task:
    """Return the task of a node. Raises UsageError if the job has no such node, NotFoundError if it is not running."""
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
                allows_commands=bool(task.get("enableExecuteCommand")),
            )
    raise NotFoundError(
        f"node {node} of {job.run_id} is not running: it is {part['status']}",
        next_step=f"trainyard status {job.run_id}",
    )


def enter(aws: Aws, job: Job, task: Task, command: Sequence[str]) -> None:
    """Run a command in the task's container, on this terminal, until the command ends.

    The command's exit code is not returned, because ECS Exec reports none. Raises ConfigurationError if a program is
    missing or the caller may not enter, TrainyardError if no session can be opened.
    """
    if aws.emulated:
        _enter_on_emulator(aws, job, task, command)
    else:
        _enter_on_aws(aws, job, task, command)


def _in_container(job: Job, command: Sequence[str]) -> Sequence[str]:
    return ("sh", "-c", IN_SCRIPT, "trainyard", *command) if job.kind == KIND.name else command


def _enter_on_aws(aws: Aws, job: Job, task: Task, command: Sequence[str]) -> None:
    check_programs(PLUGIN)
    try:
        answer = aws.ecs.execute_command(
            cluster=task.cluster,
            task=task.arn,
            container=task.container,
            command=shlex.join(_in_container(job, command)),
            interactive=True,  # the API supports nothing else
        )
    except Exception as error:
        raise _exec_error(error, job) or error from error
    # The plugin's arguments, as the AWS CLI and AWS Copilot pass them: the answer, the region, the operation.
    plugin = [PLUGIN, json.dumps(answer["session"]), aws.ecs.meta.region_name, "StartSession"]
    with _ignoring_ctrl_c():
        # The plugin exits at the end of its input unless that is a terminal, so give it a pseudo-terminal.
        status = subprocess.call(plugin) if sys.stdin.isatty() else os.waitstatus_to_exitcode(pty.spawn(plugin))
    if status != 0:
        raise TrainyardError(
            f"the session in {job.run_id} was interrupted: {PLUGIN} ended with exit code {status}",
            next_step=f"trainyard status {job.run_id}; the same command again, if it still runs",
        )


def _exec_error(error: Exception, job: Job) -> TrainyardError | None:
    """Return a clearer error for a refusal of ExecuteCommand, or None if the refusal is unknown."""
    if is_denied(error):
        return ConfigurationError(
            f"these credentials may not run commands in {job.run_id}: only members of team '{job.team}' may",
            next_step=f"assume the role of team '{job.team}' (--profile), or ask a member of the team",
        )
    if error_code(error) in ("InvalidParameterException", "TargetNotConnectedException"):
        message = getattr(error, "response", {}).get("Error", {}).get("Message", "")
        return TrainyardError(
            f"ECS cannot open a session in {job.run_id}: {message}",
            next_step="try again in a minute, because its agent starts after the job; if that fails, the instance "
            "cannot reach Session Manager: it needs NAT, or interface_endpoints in infra/settings.py",
        )
    return None


def _enter_on_emulator(aws: Aws, job: Job, task: Task, command: Sequence[str]) -> None:
    request = {"user": aws.caller, "command": shlex.join(command)}
    place = aws.post_to_emulator(f"/trainyard/jobs/{task.job_id}/enter", request)
    if place is None:
        raise NotFoundError(f"{job.run_id} has just ended", next_step=f"trainyard status {job.run_id}")
    if "container" in place:
        _enter_container(place["container"], place["docker_host"], _in_container(job, command))
    else:
        _enter_process(job, task, place["pid"], command)


def _enter_container(container: str, docker_host: str, command: Sequence[str]) -> None:
    check_programs("docker")
    # Like ECS Exec: as root, whatever the image's user, and with a terminal if there is one.
    terminal = ["--tty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    environment = {**os.environ, **({"DOCKER_HOST": docker_host} if docker_host else {})}
    with _ignoring_ctrl_c():
        subprocess.call(
            ["docker", "exec", "--interactive", *terminal, "--user", "root", container, *command], env=environment
        )


def _enter_process(job: Job, task: Task, pid: int, command: Sequence[str]) -> None:
    """Run a command with the environment and in the folder of a job's process, and end the command with the job."""
    folder = f"/proc/{pid}/cwd"
    try:
        environment = _environment(Path(f"/proc/{pid}/environ").read_bytes())
        watched = os.pidfd_open(pid)
    except (FileNotFoundError, ProcessLookupError):
        raise NotFoundError(f"{job.run_id} has just ended", next_step=f"trainyard status {job.run_id}") from None
    except PermissionError:
        raise ConfigurationError(
            f"{job.run_id} runs as another user of this machine", next_step="sign in as the user who started it"
        ) from None
    if (lines := _lines_of_script(task.job_id)) is not None:
        *exported, folder = [word for word in shlex.split(lines) if word not in ("export", "cd")]
        environment.update((name, value) for name, _, value in (word.partition("=") for word in exported))
    environment.update({name: os.environ[name] for name in ("TERM",) if name in os.environ})
    try:
        with _ignoring_ctrl_c():
            try:
                process = subprocess.Popen(command, cwd=folder, env=environment)
            except OSError as error:
                raise TrainyardError(
                    f"{command[0]} does not run in {job.run_id}: {error.strerror}",
                    next_step=f"use a program of the job, or a shell: trainyard exec {job.run_id} -- sh -c 'LINE'",
                ) from None
            ended = os.pidfd_open(process.pid)
            try:
                ready, _, _ = select.select([ended, watched], [], [])
                if ended not in ready:  # the job has ended, and on AWS its container would take the command with it
                    process.send_signal(signal.SIGHUP)
                    process.kill()
                    print(f"{job.run_id} has ended", file=sys.stderr)
            finally:
                os.close(ended)
                process.wait()
    finally:
        os.close(watched)


def _lines_of_script(job_id: str) -> str | None:
    """Return the content of the file with the environment of a job's script; None if no rank of a script runs."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's process, or one that has ended
            found = _environment((process / "environ").read_bytes())
            if found.get("AWS_BATCH_JOB_ID") == job_id and OUTPUT_VARIABLE in found:
                # The output is in a folder of the scratch folder.
                return (Path(found[OUTPUT_VARIABLE]).parents[1] / ENVIRONMENT_FILE).read_text()
    return None


def _environment(block: bytes) -> dict[str, str]:
    """Parse the environment of a process from /proc: NAME=VALUE entries, each ended by a NUL."""
    pairs = (os.fsdecode(entry).partition("=") for entry in block.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs}


@contextmanager
def _ignoring_ctrl_c() -> Iterator[None]:
    """Ignore Ctrl-C in this process, because it is meant for the command, which shares the terminal."""
    # A handler rather than SIG_IGN, which the command would inherit.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
