"""A port of a job's instance on this machine, through Session Manager: nothing listens to the network, no key, no SSH.

The AWS CLI and its Session Manager plugin do the forwarding, as a child process.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from urllib.request import ProxyHandler, build_opener

from jobs.aws.connection import Aws
from jobs.core.errors import ConfigurationError, NotFoundError, TrainyardError
from jobs.runs.job import Job

DOCUMENT = "AWS-StartPortForwardingSession"
"""AWS's session document for a port of the instance itself; a team's people may use no other one."""

PLUGIN = "session-manager-plugin"
PROGRAMS = {
    "aws": "install the AWS CLI, version 2: "
    "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html",
    PLUGIN: "install the AWS CLI's Session Manager plugin: "
    "https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html",
    "docker": "install Docker's command: https://docs.docker.com/engine/install/",
}

START_SECONDS = 60.0
STOP_SECONDS = 5.0
_POLL_SECONDS = 0.2
_REQUEST_SECONDS = 10.0


def check_programs(*names: str) -> None:
    """Raise ConfigurationError, with what to install, where one of the programs is missing."""
    for name in names:
        if shutil.which(name) is None:
            raise ConfigurationError(
                f"'{name}' is not on the PATH: the connection to the job goes through it", next_step=PROGRAMS[name]
            )


def instance_of(aws: Aws, job: Job) -> str:
    """Return the id of the EC2 instance under a job of one node. Raises NotFoundError where it has none by now."""
    arn = _container_instance(aws, job)
    if arn is not None:
        # ECS is asked by cluster, which the ARN names: …:container-instance/<cluster>/<id>.
        found = aws.ecs.describe_container_instances(cluster=arn.split("/")[1], containerInstances=[arn])
        for instance in found["containerInstances"]:
            return instance["ec2InstanceId"]
    raise NotFoundError(
        f"{job.run_id} has no instance: it was lost, or has just been given back",
        next_step=f"trainyard status {job.run_id}",
    )


def _container_instance(aws: Aws, job: Job) -> str | None:
    for detail in aws.batch.describe_jobs(jobs=[job.id])["jobs"]:
        for task in detail.get("ecsProperties", {}).get("taskProperties", []):
            return task.get("containerInstanceArn")
    return None


def free_port() -> int:
    """One of this machine's that nobody has taken."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def forwarded(aws: Aws, *, instance: str, port: int, local_port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """The instance's `port` answers at `local_port` inside the block.

    Raises TrainyardError with what the AWS CLI said where it does not come to that.
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
        # A group of its own: Ctrl-C is for us, who then end the plugin too. It is the CLI's child, holds the port, and
        # outlives a CLI that is killed.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not answers(process, local_port):
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise _failed(instance, output.read().decode(errors="replace"))
                time.sleep(_POLL_SECONDS)
            yield process
        finally:
            _end(process)


def answers(process: "subprocess.Popen[bytes]", local_port: int) -> bool:
    """Return whether a JupyterLab answers there. The plugin itself may stay for ever when its instance is gone."""
    if process.poll() is not None:
        return False
    try:
        # The one address of JupyterLab's that asks for no token: it tells the version.
        with build_opener(ProxyHandler({})).open(
            f"http://127.0.0.1:{local_port}/api", timeout=_REQUEST_SECONDS
        ) as answer:
            return "version" in json.loads(answer.read())
    except (OSError, HTTPException, ValueError):
        return False


def _failed(instance: str, output: str) -> TrainyardError:
    said = " ".join(line.strip() for line in output.splitlines() if line.strip()) or "nothing"
    return TrainyardError(
        f"no port of {instance} is forwarded; the AWS CLI said: {said}",
        next_step="'TargetNotConnected': wait a minute for the instance's SSM agent, or give it a way to AWS (NAT, or "
        "interface_endpoints in infra/settings.py); 'AccessDenied': assume the team's role (--profile)",
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGINT, signal.SIGKILL):  # with the first, the plugin ends its session
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
