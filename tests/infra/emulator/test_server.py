"""The server as a process: state file, shutdown, errors at the start and while running."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from botocore.exceptions import ClientError

from tests.support.running_emulator import Emulator, run_emulator

SERVE = [sys.executable, "-m", "infra.emulator", "serve"]


@pytest.fixture(scope="module")
def untouched_aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """A server that its tests only read from."""
    with run_emulator(tmp_path_factory.mktemp("untouched")) as aws:
        yield aws


@pytest.fixture(scope="module")
def failing_aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """A server for tests that cause errors."""
    with run_emulator(tmp_path_factory.mktemp("failing")) as aws:
        yield aws


def test_state_file_has_address_and_credentials(untouched_aws: Emulator) -> None:
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
    listening = [
        connection.laddr.ip
        for connection in psutil.Process(untouched_aws.process.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening == ["127.0.0.1"]
    health = untouched_aws.health()
    assert (health["pid"], health["executor"], health["jobs"]) == (untouched_aws.process.pid, "process", {})
    assert (health["server_errors"], health["unproven"]) == ([], [])
    # Without --registry, ECR's sign-in names AWS's registry.
    (data,) = untouched_aws.client("ecr").get_authorization_token()["authorizationData"]
    assert ".dkr.ecr.us-east-1.amazonaws.com" in data["proxyEndpoint"]


@pytest.mark.parametrize("replaced", [False, True])
def test_exits_on_a_signal(fresh_aws: Emulator, replaced: bool) -> None:
    if replaced:  # another server's state file is kept
        fresh_aws.state_file.write_text(json.dumps({"pid": os.getpid()}))
    fresh_aws.process.send_signal(signal.SIGTERM)

    assert fresh_aws.process.wait(30) == 0
    assert fresh_aws.state_file.exists() is replaced


def test_exits_with_the_given_process(tmp_path: Path) -> None:
    state_file = tmp_path / "emulator.json"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as parent:
        command = [*SERVE, "--state-file", str(state_file), "--exit-with-pid", str(parent.pid)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            try:
                assert server.stderr is not None
                assert "emulator at http://localhost:" in server.stderr.readline()
                assert state_file.exists()
                parent.kill()
                parent.wait(30)
                assert server.wait(30) == 0
                assert f"process {parent.pid} has exited" in server.stderr.read()
            finally:
                server.kill()
    assert not state_file.exists()


def test_failed_start_is_an_error_with_a_next_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refusal = _refusal("--port", str(port), "--state-file", str(tmp_path / "state.json"))
    assert refusal == (
        3,
        [
            f"error: port {port} is in use by another process",
            "Next: choose another port with --port, or --port 0 for any free one",
        ],
    )
    unwritable = tmp_path / "file" / "state.json"
    assert _refusal("--state-file", str(unwritable)) == (
        3,
        [
            f"error: the state file {unwritable} cannot be written: {tmp_path}/file: File exists",
            "Next: choose another with --state-file",
        ],
    )
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


def test_error_in_moto_is_returned_and_recorded(failing_aws: Emulator) -> None:
    before = len(failing_aws.health()["server_errors"])
    with pytest.raises(ClientError) as failure:
        failing_aws.client("cloudformation").detect_stack_resource_drift(StackName="any", LogicalResourceId="any")

    assert failure.value.response["ResponseMetadata"]["HTTPStatusCode"] == 500
    assert "cloudformation:DetectStackResourceDrift" in failure.value.response["Error"]["Message"]
    (error,) = failing_aws.health()["server_errors"][before:]
    assert error["operation"] == "cloudformation:DetectStackResourceDrift"
    assert error["path"] == "/"
    log = failing_aws.log.read_text()
    assert "Traceback" in log
    assert "NotImplementedError" in log


def _refusal(*arguments: str) -> tuple[int, list[str]]:
    """Return exit code and stderr of a server that does not start."""
    result = subprocess.run([*SERVE, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == ""
    return result.returncode, result.stderr.splitlines()
