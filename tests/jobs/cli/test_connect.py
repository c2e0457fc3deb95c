"""`trainyard connect`: the address of a notebook, and the way to its port through Session Manager."""

import copy
import json
import os
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from jobs.aws.connection import Aws
from jobs.cli.spec_file import read_spec
from jobs.cli.submit import plan_run, send
from jobs.client import batch
from jobs.client.job import Job
from jobs.contract.stage import DeployedStage
from tests.jobs.cli.conftest import Trainyard
from tests.support.embedded_aws import EmbeddedAws, environment_of
from tests.support.infra.synthesis import ROOT
from tests.support.jobs.faulty_proxy import FaultyProxy
from tests.support.jobs.notebooks import wait_until
from tests.support.jobs.submitting import planned_to_run, wait_for
from tests.support.jobs.terminal import TRAINYARD

DETACHED = 130

SERVER = """
import json, os, boto3
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"version": "2.0.0"}' if self.path == "/api" else b"JupyterLab of the job")

    def log_message(self, *_):
        pass

server = HTTPServer(("127.0.0.1", 0), Handler)
bucket, _, run = os.environ["TRAINYARD_RUN_URI"].removeprefix("s3://").partition("/")
said = {
    "job_id": os.environ["AWS_BATCH_JOB_ID"],
    "attempt": int(os.environ["AWS_BATCH_JOB_ATTEMPT"]),
    "port": server.server_port,
    "token": "t0ken",
}
boto3.client("s3").put_object(Bucket=bucket, Key=run + "notebook.json", Body=json.dumps(said).encode())
server.serve_forever()
"""
"""A job's command in place of JupyterLab, whose own life test_notebook.py shows: it answers at once."""

FORWARDER = """
#!{python}
# The AWS CLI and its plugin as far as they are used: notes what it is asked for, and forwards the port on this machine.
import json, os, socket, sys, threading

with open({calls!r}, "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
open({calls!r} + ".pid", "w").write(str(os.getpid()))
ports = json.loads(sys.argv[sys.argv.index("--parameters") + 1])
listener = socket.create_server(("127.0.0.1", int(ports["localPortNumber"][0])))
print("Port opened for sessionId somebody-0f0f", flush=True)

def pump(source, target):
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)

while True:
    near, _ = listener.accept()
    far = socket.create_connection(("127.0.0.1", int(ports["portNumber"][0])))
    for pair in ((near, far), (far, near)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""


Submit = Callable[..., Job]


@pytest.fixture
def submit(embedded: Aws, stage: DeployedStage) -> Iterator[Submit]:
    """Submits a job and returns it once it is in `state`; without a `command`, it answers as a notebook does."""
    submitted: list[str] = []

    def submit_one(*, state: str | None = "RUNNING", command: str = SERVER, depends_on: Job | None = None) -> Job:
        plan = plan_run(embedded, stage, read_spec(ROOT / "jobs/specs/notebook.yaml"))
        request = copy.deepcopy(plan.request)
        [container] = request["ecsPropertiesOverride"]["taskProperties"][0]["containers"]
        container["command"] = ["python", "-c", command]
        if depends_on is not None:
            request["dependsOn"] = [{"jobId": depends_on.id}]
        submitted.append(send(embedded, replace(plan, request=request)))
        return wait_for(embedded, stage, submitted[-1], state=state)

    yield submit_one
    for job in batch.describe(embedded, stage, submitted[::-1]):
        batch.terminate(embedded, job, reason="the test is over")
    for job_id in submitted:
        wait_for(embedded, stage, job_id)


@pytest.fixture
def connect(trainyard: Trainyard, deployed_environment: Mapping[str, str]) -> Trainyard:
    """`trainyard connect …`, pointed at the embedded AWS."""
    return lambda *arguments: trainyard("connect", *arguments, environment=deployed_environment)


def test_on_the_embedded_aws_it_prints_the_address_once_the_notebook_answers(
    submit: Submit, connect: Trainyard
) -> None:
    run_id = submit().run_id
    finished = connect(run_id, "-o", "json")
    assert finished.returncode == 0, finished.stderr
    shown = json.loads(finished.stdout)
    port = shown["port"]
    assert shown == {
        "run_id": run_id,
        "url": f"http://127.0.0.1:{port}/lab?token=t0ken",
        "tensorboard_url": f"http://127.0.0.1:{port}/tensorboard/?token=t0ken",
        "port": port,
        "instance": None,
    }
    assert ask(shown["url"]) == "JupyterLab of the job"
    # AND for eyes, the address alone on stdout
    finished = connect(run_id)
    assert finished.stdout == shown["url"] + "\n"
    assert shown["tensorboard_url"] in finished.stderr


def test_what_an_earlier_attempt_has_said_is_not_believed(
    submit: Submit, deployed_environment: Mapping[str, str], tmp_path: Path
) -> None:
    # GIVEN a job whose notebook.json is that of an attempt that was lost
    job = submit(command=SERVER.replace('["AWS_BATCH_JOB_ATTEMPT"])', '["AWS_BATCH_JOB_ATTEMPT"]) - 1'))
    errors = tmp_path / "errors"
    with started(errors, deployed_environment, job.run_id) as process:
        # THEN it is waited for another, until Ctrl-C
        wait_until_said(errors, "JupyterLab does not answer yet")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == DETACHED
    assert "Traceback" not in errors.read_text()


def test_what_is_no_notebook_that_runs_is_refused(
    submit: Submit, connect: Trainyard, embedded: Aws, stage: DeployedStage
) -> None:
    assert connect("no-such-run").returncode == 4
    training = planned_to_run(embedded, stage, ["true"], name="no-notebook")
    wait_for(embedded, stage, send(embedded, training))
    finished = connect(training.run_id)
    assert finished.returncode == 2
    assert f"error: {training.run_id} is a 'finetune-classification', no 'notebook'" in finished.stderr
    ended = submit(command="pass", state=None)
    finished = connect(ended.run_id)
    assert finished.returncode == 1
    assert f"error: {ended.run_id} has ended" in finished.stderr
    folder = f"s3://{stage.run_bucket}/research/{ended.run_id}/notebook/"
    assert (
        f"next: a new run goes on with its files: trainyard submit SPEC --set arguments.files={folder}\n"
        in finished.stderr
    )


class InstanceProxy(FaultyProxy):
    """Names an instance that the test has started as that of a job: on the embedded AWS there is none behind it."""

    member: str = ""
    theirs: str = ""

    def _pass_on(self, *message: Any) -> tuple[int, dict[str, str], bytes]:
        status, headers, content = super()._pass_on(*message)
        content = content.replace(self.theirs.encode(), self.member.encode()) if self.theirs else content
        return status, {**headers, "Content-Length": str(len(content))}, content


@pytest.fixture
def network(embedded: Aws, deployed_aws: EmbeddedAws) -> Iterator[InstanceProxy]:
    """The embedded AWS behind an address that is not the usual loopback: as on AWS, the notebook runs elsewhere."""
    with InstanceProxy(deployed_aws.endpoint, host="127.0.0.2") as proxy:
        yield proxy


def start_instance(network: InstanceProxy, aws: EmbeddedAws, job: Job) -> str:
    """Id of an instance that is in a cluster, and that the job is on, as Batch then says."""
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


@pytest.fixture
def programs(tmp_path: Path) -> Callable[..., Path]:
    """Puts stand-ins of the AWS CLI and of its plugin into a folder; the first notes its arguments in `calls`."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def make(*names: str) -> Path:
        for name in names:
            program = folder / name
            calls = str(tmp_path / "calls")
            program.write_text(FORWARDER.format(python=sys.executable, calls=calls).lstrip())
            program.chmod(0o755)
        return folder

    return make


def test_on_aws_the_instances_port_is_forwarded_until_ctrl_c(
    submit: Submit, network: InstanceProxy, deployed_aws: EmbeddedAws, programs: Callable[..., Path], tmp_path: Path
) -> None:
    # GIVEN a notebook that runs on an instance
    job = submit()
    instance = start_instance(network, deployed_aws, job)
    folder = programs("aws", "session-manager-plugin")
    environment = {**environment_of(network.url), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    errors, calls = tmp_path / "errors", tmp_path / "calls"
    with started(errors, environment, "--region", "us-east-1", job.run_id) as process:
        # WHEN it is connected to, THEN the address that it prints leads to it
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert ask(url) == "JupyterLab of the job", errors.read_text()
        # AND all that was asked of the AWS CLI is a port of that instance, and the region
        first = json.loads(calls.read_text())
        ports = json.loads(first.pop(first.index("--parameters") + 1))
        assert first == [
            *("ssm", "start-session", "--target", instance, "--document-name", "AWS-StartPortForwardingSession"),
            *("--parameters", "--region", "us-east-1"),
        ]
        [local], [remote] = ports.pop("localPortNumber"), ports.pop("portNumber")
        assert ports == {}
        assert url == f"http://127.0.0.1:{local}/lab?token=t0ken"
        assert remote != local

        # WHEN the connection is lost, THEN it is made again at the same address
        forwarder = psutil.Process(int((tmp_path / "calls.pid").read_text()))
        forwarder.kill()
        assert process.stdout.readline().strip() == url
        assert ask(url) == "JupyterLab of the job"
        assert len(calls.read_text().splitlines()) == 2

        # WHEN it is left, THEN nothing is forwarded any more, and it says how to come back
        forwarder = psutil.Process(int((tmp_path / "calls.pid").read_text()))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == DETACHED
        psutil.wait_procs([forwarder], timeout=10)
        assert not forwarder.is_running()
    said = errors.read_text()
    assert "Traceback" not in said
    assert (
        f"disconnected from {job.run_id}; it goes on, and is paid for\nnext: trainyard connect {job.run_id}; " in said
    )
    assert "is connected until Ctrl-C" in said


def test_a_program_that_is_missing_is_named_with_where_to_get_it(
    submit: Submit, network: InstanceProxy, programs: Callable[..., Path], trainyard: Trainyard
) -> None:
    environment = {**environment_of(network.url), "PATH": str(programs("aws"))}
    finished = trainyard("connect", submit().run_id, environment=environment)
    assert finished.returncode == 3
    assert "error: 'session-manager-plugin' is not on the PATH" in finished.stderr
    assert "Session Manager plugin: https://" in finished.stderr


@contextmanager
def started(errors: Path, environment: Mapping[str, str], *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """`trainyard connect …` while it runs; what it says is in `errors`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "TRAINYARD_"))}
    with errors.open("wb") as said:
        process = subprocess.Popen(
            [TRAINYARD, "connect", *arguments],
            env={**kept, "AWS_EC2_METADATA_DISABLED": "true", **environment},
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def wait_until_said(errors: Path, text: str) -> None:
    wait_until(lambda: text in errors.read_text(), what=f"said {text!r}")


def ask(url: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as answer:
        content: bytes = answer.read()
        return content.decode()
