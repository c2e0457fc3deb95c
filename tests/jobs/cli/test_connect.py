"""`trainyard connect`: prints the address of a notebook, and forwards its port through Session Manager."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from jobs.aws.connection import Aws
from jobs.core.stage import DeployedStage
from jobs.runs.job import Job
from jobs.runs.planning import plan_run
from jobs.runs.spec_file import READY_SPECS, read_spec
from jobs.runs.submit import send
from tests.jobs.cli.conftest import Trainyard
from tests.support.jobs.proxies import FaultyProxy
from tests.support.jobs.submitting import Begin, planned_to_run, wait_for
from tests.support.jobs.terminal import TRAINYARD
from tests.support.running_emulator import Emulator, environment_of
from tests.support.waiting import wait_until

DETACHED = 130
PORT = 8901
"""Port of the notebook on its instance."""

FORWARDER = """
# Replaces the AWS CLI and its plugin: records its arguments, and serves the local port.
import http.server, json, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"version": "2.0.0"}' if self.path == "/api" else b"JupyterLab of the job")

ports = json.loads(sys.argv[sys.argv.index("--parameters") + 1])
server = http.server.HTTPServer(("127.0.0.1", int(ports["localPortNumber"][0])), Handler)
with open(CALLS, "a") as calls:
    calls.write(json.dumps([os.getpid(), *sys.argv[1:]]) + "\\n")
print("Port opened for sessionId somebody-0f0f", flush=True)
server.serve_forever()
"""

Submit = Callable[..., Job]


@pytest.fixture
def submit(emulated: Aws, stage: DeployedStage, begin: Begin) -> Submit:
    """Return a function that submits a notebook whose container runs `command` and which answers in one attempt."""

    def submit_one(*command: str, attempt: int = 1, state: str | None = "RUNNING") -> Job:
        plan = plan_run(emulated, stage, read_spec(READY_SPECS / "notebook.yaml"))
        [container] = plan.request["ecsPropertiesOverride"]["taskProperties"][0]["containers"]
        container["command"] = [*command]
        job = begin(plan, state=state)
        answers = {"job_id": job.id, "attempt": attempt, "port": PORT, "token": "t0ken"}
        place = plan.run_location / "notebook.json"
        emulated.s3.put_object(Bucket=place.bucket, Key=place.key, Body=json.dumps(answers).encode())
        return job

    return submit_one


def test_the_address_is_printed_once_the_notebook_answers(submit: Submit, aws_trainyard: Trainyard) -> None:
    run_id = submit("sleep", "60").run_id
    shown = json.loads(aws_trainyard("connect", run_id, "-o", "json", expect=0).stdout)
    assert shown == {
        "run_id": run_id,
        "url": f"http://127.0.0.1:{PORT}/lab?token=t0ken",
        "tensorboard_url": f"http://127.0.0.1:{PORT}/tensorboard/?token=t0ken",
        "port": PORT,
        "instance": None,
    }
    # AND without -o json, only the address is on stdout
    finished = aws_trainyard("connect", run_id)
    assert finished.stdout == shown["url"] + "\n"
    assert shown["tensorboard_url"] in finished.stderr


def test_only_a_running_notebook_of_this_attempt_is_connected(
    *,
    submit: Submit,
    aws_trainyard: Trainyard,
    emulated: Aws,
    stage: DeployedStage,
    aws_environment: dict[str, str],
    tmp_path: Path,
) -> None:
    aws_trainyard("connect", "no-such-run", expect=4)
    training = planned_to_run(emulated, stage, ["true"], name="no-notebook")
    wait_for(emulated, stage, send(emulated, training))
    refused = aws_trainyard("connect", training.run_id, expect=2).stderr
    assert f"error: {training.run_id} is a 'finetune-classification' job, not a 'notebook'" in refused
    ended = submit("true", state=None)
    refused = aws_trainyard("connect", ended.run_id, expect=1).stderr
    assert f"error: {ended.run_id} has ended" in refused
    folder = f"s3://{stage.run_bucket}/research/{ended.run_id}/notebook/"
    again = "start a new run with its files: trainyard submit SPEC"
    assert f"next: {again} --set arguments.files={folder}\n" in refused

    # GIVEN a job whose notebook.json is of an attempt that was lost
    job = submit("sleep", "60", attempt=0)
    errors = tmp_path / "errors"
    with started(errors, aws_environment, job.run_id) as process:
        # THEN the command waits for a new one, until Ctrl-C
        wait_until(errors.read_text, lambda text: "JupyterLab does not answer yet" in text)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == DETACHED


class InstanceProxy(FaultyProxy):
    """Reports an instance that the test has started as the instance of a job, because the emulator starts none."""

    member: str = ""
    theirs: str = ""

    def _pass_on(self, *message: Any) -> tuple[int, dict[str, str], bytes]:
        status, headers, content = super()._pass_on(*message)
        content = content.replace(self.theirs.encode(), self.member.encode()) if self.theirs else content
        return status, {**headers, "Content-Length": str(len(content))}, content


def start_instance(network: InstanceProxy, aws: Emulator, job: Job) -> str:
    """Start an instance in a cluster, make Batch report it as the job's instance, and return its id."""
    [detail] = aws.client("batch").describe_jobs(jobs=[job.id])["jobs"]
    ec2, ecs, cluster = aws.client("ec2"), aws.client("ecs"), f"AWSBatch-{uuid.uuid4().hex}"
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    instance: str = ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1)["Instances"][0]["InstanceId"]
    ecs.create_cluster(clusterName=cluster)
    document = {"instanceId": instance, "region": "us-east-1", "accountId": "1", "availabilityZone": "us-east-1a"}
    member = ecs.register_container_instance(
        cluster=cluster, instanceIdentityDocument=json.dumps({**document, "instanceType": "dl1.24xlarge"})
    )["containerInstance"]
    network.theirs = detail["ecsProperties"]["taskProperties"][0]["containerInstanceArn"]
    network.member = member["containerInstanceArn"]
    return instance


def test_the_port_is_forwarded_from_aws_until_ctrl_c(
    submit: Submit, deployed_aws: Emulator, clean_environment: dict[str, str], trainyard: Trainyard, tmp_path: Path
) -> None:
    # GIVEN a notebook on an instance, behind an address that is not localhost
    job = submit("sleep", "60")
    errors, calls, programs = tmp_path / "errors", tmp_path / "calls", tmp_path / "bin"
    programs.mkdir()
    with InstanceProxy(deployed_aws.endpoint, host="127.0.0.2") as network:
        instance = start_instance(network, deployed_aws, job)
        environment = {**clean_environment, **environment_of(network.url), "PATH": str(programs)}
        for name in ("aws", "session-manager-plugin"):
            missing = trainyard("connect", job.run_id, environment=environment)
            assert missing.returncode == 3
            assert f"error: '{name}' is not on the PATH" in missing.stderr
            (programs / name).write_text(f"#!{sys.executable}{FORWARDER.replace('CALLS', repr(str(calls)))}")
            (programs / name).chmod(0o755)
        environment["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
        with started(errors, environment, "--region", "us-east-1", job.run_id) as process:
            # WHEN the command connects, THEN the printed address leads to the notebook
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert ask(url) == "JupyterLab of the job", errors.read_text()
            # AND the AWS CLI was only asked for a port of that instance, and got the region
            pid, *asked = json.loads(calls.read_text())
            ports = json.loads(asked.pop(asked.index("--parameters") + 1))
            assert asked == [
                *("ssm", "start-session", "--target", instance, "--document-name", "AWS-StartPortForwardingSession"),
                *("--parameters", "--region", "us-east-1"),
            ]
            assert ports == {"portNumber": [str(PORT)], "localPortNumber": [url.split(":")[2].partition("/")[0]]}

            # WHEN the connection is lost, THEN it is restored at the same address
            psutil.Process(pid).kill()
            assert process.stdout.readline().strip() == url
            assert ask(url) == "JupyterLab of the job"

            # WHEN the user presses Ctrl-C, THEN forwarding ends, and the message says how to reconnect
            pid = json.loads(calls.read_text().splitlines()[1])[0]
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == DETACHED
            wait_until(lambda: psutil.pid_exists(pid), lambda is_there: not is_there)
    left = f"disconnected from {job.run_id}, which continues and keeps costing money\n"
    assert f"{left}next: trainyard connect {job.run_id}; " in errors.read_text()
    assert f"connected to {instance} until Ctrl-C" in errors.read_text()
    assert "Traceback" not in errors.read_text()


@contextmanager
def started(errors: Path, environment: Mapping[str, str], *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Run `trainyard connect …` during the block, with its stderr in `errors`."""
    command = [str(TRAINYARD), "connect", *arguments]
    with errors.open("wb") as stderr:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def ask(url: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as answer:
        content: bytes = answer.read()
        return content.decode()
