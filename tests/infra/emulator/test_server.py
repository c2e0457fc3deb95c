"""The server as a process: where it says it is, how it ends, what it does when something breaks inside."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from botocore.exceptions import ClientError

from tests.support.embedded_aws import EmbeddedAws, run_embedded_aws

SERVE = [sys.executable, "-m", "infra.emulator", "serve"]


@pytest.fixture(scope="module")
def untouched_aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedAws]:
    """A server that its tests only look at."""
    with run_embedded_aws(tmp_path_factory.mktemp("untouched")) as aws:
        yield aws


@pytest.fixture(scope="module")
def failing_aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedAws]:
    """A server that its tests make fail inside."""
    with run_embedded_aws(tmp_path_factory.mktemp("failing")) as aws:
        yield aws


def test_state_file_says_where_it_is(untouched_aws: EmbeddedAws) -> None:
    state = json.loads(untouched_aws.state_file.read_text())

    assert stat.S_IMODE(untouched_aws.state_file.stat().st_mode) == 0o600
    assert state == {
        "endpoint": f"http://localhost:{state['port']}",
        "port": state["port"],
        "pid": untouched_aws.process.pid,
        "executor": "process",
        "registry": None,
        "keep": None,
        "access_key_id": untouched_aws.credentials.access_key_id,
        "secret_access_key": untouched_aws.credentials.secret_access_key,
    }
    health = untouched_aws.health()
    assert (health["pid"], health["executor"], health["jobs"]) == (untouched_aws.process.pid, "process", {})
    assert (health["server_errors"], health["unproven"]) == ([], [])


def test_listens_on_loopback_only(untouched_aws: EmbeddedAws) -> None:
    listening = [
        connection.laddr
        for connection in psutil.Process(untouched_aws.process.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]

    assert {address.ip for address in listening} == {"127.0.0.1"}
    assert len(listening) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ends_on_a_signal(fresh_aws: Any, number: signal.Signals) -> None:
    fresh_aws.process.send_signal(number)

    assert fresh_aws.process.wait(30) == 0
    assert not fresh_aws.state_file.exists()


def test_ends_with_the_process_it_was_given(tmp_path: Path) -> None:
    state_file = tmp_path / "emulator.json"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as parent:
        command = [*SERVE, "--state-file", str(state_file), "--exit-with-pid", str(parent.pid)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            try:
                assert server.stderr is not None
                assert "embedded AWS at http://localhost:" in server.stderr.readline()
                assert state_file.exists()
                parent.kill()
                parent.wait(30)
                assert server.wait(30) == 0
                assert f"process {parent.pid} is gone" in server.stderr.read()
            finally:
                server.kill()
    assert not state_file.exists()


@pytest.mark.parametrize(
    ("name", "reason"), [("file/state.json", "file: File exists"), ("folder", "folder: Is a directory")]
)
def test_a_state_file_that_cannot_be_written_is_an_error_with_a_way_out(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()

    assert _refusal("--state-file", str(tmp_path / name)) == (
        3,
        [
            f"error: the state file {tmp_path / name} cannot be written: {tmp_path}/{reason}",
            "Next: name another with --state-file",
        ],
    )
    assert {path.name for path in tmp_path.rglob("*")} == {"file", "folder"}


def test_a_taken_port_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refusal = _refusal("--port", str(port), "--state-file", str(tmp_path / "state.json"))

    assert refusal == (
        3,
        [
            f"error: port {port} is taken by another process",
            "Next: choose another with --port, or --port 0 for any that is free",
        ],
    )
    assert not (tmp_path / "state.json").exists()


def test_leaves_the_state_file_of_its_successor_alone(fresh_aws: Any) -> None:
    successor = {"endpoint": "http://localhost:1", "port": 1, "pid": os.getpid(), "executor": "process"}
    fresh_aws.state_file.write_text(json.dumps(successor))
    fresh_aws.process.terminate()

    assert fresh_aws.process.wait(30) == 0
    assert json.loads(fresh_aws.state_file.read_text()) == successor


def test_what_moto_cannot_do_is_an_answer_and_on_record(failing_aws: EmbeddedAws) -> None:
    before = len(failing_aws.health()["server_errors"])
    with pytest.raises(ClientError) as failure:
        failing_aws.client("cloudformation").detect_stack_drift(StackName="any")

    assert failure.value.response["ResponseMetadata"]["HTTPStatusCode"] == 500
    assert "cloudformation:DetectStackDrift" in failure.value.response["Error"]["Message"]
    (error,) = failing_aws.health()["server_errors"][before:]
    assert error["operation"] == "cloudformation:DetectStackDrift"
    assert error["path"] == "/"
    log = failing_aws.log.read_text()
    assert "Traceback" in log
    assert "NotImplementedError" in log


def test_a_model_that_breaks_fails_the_stack_and_is_on_record(failing_aws: EmbeddedAws) -> None:
    before = len(failing_aws.health()["server_errors"])
    cloudformation = failing_aws.client("cloudformation")
    broken = {"Resources": {"Policy": {"Type": "AWS::SNS::TopicPolicy", "Properties": {}}}}
    cloudformation.create_stack(StackName="broken", TemplateBody=json.dumps(broken))

    (stack,) = cloudformation.describe_stacks(StackName="broken")["Stacks"]
    assert stack["StackStatus"] == "ROLLBACK_COMPLETE"
    assert "KeyError: 'Topics'" in stack["StackStatusReason"]
    (error,) = failing_aws.health()["server_errors"][before:]
    assert error["operation"] == "creating Policy (AWS::SNS::TopicPolicy)"
    assert "Traceback" in failing_aws.log.read_text()


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/trainyard/unknown"), ("POST", "/trainyard/health"), ("POST", "/trainyard/jobs/none/reclaim")],
)
def test_what_is_not_there_is_not_found(embedded_aws: Any, method: str, path: str) -> None:
    token = {"Authorization": f"Bearer {embedded_aws.credentials.secret_access_key}"}
    request = urllib.request.Request(f"{embedded_aws.endpoint}{path}", headers=token, method=method)
    with pytest.raises(urllib.error.HTTPError) as failure:
        urllib.request.urlopen(request, timeout=30)

    with failure.value as answer:
        assert answer.code == 404
        assert json.load(answer)["message"]


def _refusal(*arguments: str) -> tuple[int, list[str]]:
    """Exit code and words of a server that does not start."""
    result = subprocess.run([*SERVE, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == ""
    return result.returncode, result.stderr.splitlines()
