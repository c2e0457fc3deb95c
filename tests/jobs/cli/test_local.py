"""`trainyard local`: the embedded AWS as a process of its own. Nothing is deployed here; the demo's test does that."""

import json
import os
import signal
import socket
import stat
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from jobs.aws.connection import Aws
from jobs.cli import embedded as embedded_server
from jobs.cli.local import commands as local
from jobs.cli.submit import send
from jobs.client import batch
from jobs.contract.errors import ConfigurationError, UsageError
from jobs.contract.stage import DeployedStage
from tests.jobs.cli.conftest import Trainyard
from tests.support.embedded_aws import EmbeddedAws
from tests.support.jobs.submitting import RunCommand, planned_to_run, wait_for
from tests.support.train.scripts import write_files


@pytest.fixture
def up(trainyard: Trainyard, tmp_path: Path) -> Iterator[dict[str, object]]:
    """A server brought up without a deployment, as its state file describes it.

    In a folder that somebody else has filled: modules of our own and of Python's names, which must not be run.
    """
    hostile = "raise SystemExit('a module of the working directory was imported')"
    write_files(tmp_path, dict.fromkeys(("infra/__init__.py", "random.py"), hostile))
    finished = trainyard("local", "up", "--no-deploy")
    try:
        assert finished.returncode == 0, finished.stderr
        state: dict[str, object] = json.loads((tmp_path / ".trainyard/emulator.json").read_text())
        assert f"export AWS_ENDPOINT_URL={state['endpoint']}" in finished.stdout.splitlines()
        yield state
    finally:
        trainyard("local", "down")


def is_alive(pid: object) -> bool:
    try:
        os.kill(int(str(pid)), 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_up_outlives_its_command_and_down_stops_it(trainyard: Trainyard, up: dict[str, object], tmp_path: Path) -> None:
    with urllib.request.urlopen(f"{up['endpoint']}/trainyard/health") as answer:
        assert json.load(answer)["pid"] == up["pid"]
    stopped = trainyard("local", "down")
    assert stopped.returncode == 0
    assert "stopped the embedded AWS" in stopped.stderr
    assert not is_alive(up["pid"])
    assert not (tmp_path / ".trainyard/emulator.json").exists()
    again = trainyard("local", "down")
    assert again.returncode == 0
    assert f"no embedded AWS runs (looked for {tmp_path}/.trainyard/emulator.json)" in again.stderr


def test_without_a_command_it_says_what_to_do_next(trainyard: Trainyard, up: dict[str, object]) -> None:
    unconnected = trainyard()
    assert unconnected.returncode == 0
    assert 'eval "$(trainyard local env)"' in unconnected.stdout
    exported = (line.removeprefix("export ").partition("=") for line in trainyard("local", "env").stdout.splitlines())
    connected = trainyard(environment={name: value for name, _, value in exported})
    assert "stage 'dev' is not deployed here" in connected.stdout
    assert "trainyard --stage dev local up" in connected.stdout
    trainyard("local", "down")
    assert "  trainyard demo " in trainyard().stdout


def test_what_runs_is_shown_and_not_started_twice(
    trainyard: Trainyard, up: dict[str, object], clean_environment: dict[str, str]
) -> None:
    status = json.loads(trainyard("local", "status", "-o", "json").stdout)
    assert (status["pid"], status["executor"], status["endpoint"]) == (up["pid"], "process", up["endpoint"])
    assert str(up["endpoint"]) in trainyard("local", "status").stdout

    again = trainyard("local", "up", "--no-deploy")
    assert again.returncode == 0
    assert f"runs already at {up['endpoint']}" in again.stderr
    other_port = trainyard("local", "up", "--no-deploy", "--port", "1")
    assert other_port.returncode == 3
    assert "next: trainyard local down" in other_port.stderr
    assert "--executor process, not as asked" in other_port.stderr

    lines = trainyard("local", "env", environment={"AWS_PROFILE": "mine"}).stdout
    shell = ["sh", "-c", f"{lines}\nenv"]
    environment = {**clean_environment, "AWS_PROFILE": "mine"}
    shown = subprocess.run(shell, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert f"AWS_ENDPOINT_URL={up['endpoint']}" in shown
    assert "AWS_DEFAULT_REGION=us-east-1" in shown
    assert "AWS_PROFILE=mine" not in shown


def test_it_says_where_runs_and_data_are_kept(trainyard: Trainyard, tmp_path: Path) -> None:
    started = trainyard("local", "up", "--no-deploy", "--keep=~/kept")
    try:
        assert started.returncode == 0, started.stderr
        assert f"runs and data are kept in {tmp_path}/home/kept" in started.stderr
        assert f"{tmp_path}/home/kept" in trainyard("local", "status").stdout
        elsewhere = trainyard("local", "up", "--no-deploy", "--keep", "elsewhere")
        assert elsewhere.returncode == 3
        assert f"--executor process --keep {tmp_path}/home/kept, not as asked" in elsewhere.stderr
    finally:
        trainyard("local", "down")


def test_env_hands_out_credentials_that_only_their_owner_can_read(
    trainyard: Trainyard, up: dict[str, object], tmp_path: Path
) -> None:
    assert stat.S_IMODE((tmp_path / ".trainyard/emulator.json").stat().st_mode) == 0o600
    lines = trainyard("local", "env").stdout.splitlines()
    assert f"export AWS_ACCESS_KEY_ID={up['access_key_id']}" in lines
    assert f"export AWS_SECRET_ACCESS_KEY={up['secret_access_key']}" in lines
    key = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    refused = trainyard("list", environment={**key, "AWS_ENDPOINT_URL": str(up["endpoint"])})
    assert refused.returncode == 3
    assert 'eval "$(trainyard local env)"' in refused.stderr

    trainyard("local", "down")
    assert trainyard("local", "up", "--no-deploy").returncode == 0
    assert str(up["access_key_id"]) not in trainyard("local", "env").stdout


def test_a_stage_that_no_settings_have_is_refused_with_the_closest_one(
    trainyard: Trainyard, up: dict[str, object]
) -> None:
    refused = trainyard("--stage", "pord", "local", "up")
    assert refused.returncode == 2
    assert "infra/settings.py has no stage 'pord'; did you mean 'prod'?" in refused.stderr
    assert "next: trainyard --stage NAME local up" in refused.stderr
    # The CDK CLI, which knows nothing of the mistake, was not asked.
    assert "cdk" not in refused.stderr.lower()


def test_a_port_that_is_taken(trainyard: Trainyard, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        finished = trainyard("local", "up", "--no-deploy", "--port", str(port))
    assert finished.returncode == 3
    assert f"error: port {port} is taken" in finished.stderr
    assert "next: choose another with --port" in finished.stderr
    assert not (tmp_path / ".trainyard/emulator.json").exists()


def test_a_server_that_does_not_answer_is_neither_gone_nor_replaced(
    up: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_server, "ANSWER_TIMEOUT_SECONDS", 0.5)
    state_file = tmp_path / ".trainyard/emulator.json"
    pid = int(str(up["pid"]))
    os.kill(pid, signal.SIGSTOP)
    try:
        commands: list[Callable[[], None]] = [
            lambda: local.down("dev", state_file, yes=False),
            lambda: local.up("dev", state_file, port=0, executor=None, keep=None, deploy=False),
            lambda: local.status(state_file, output="json"),
        ]
        for command in commands:
            with pytest.raises(ConfigurationError, match=rf"\(process {pid}\) does not answer") as error:
                command()
            assert error.value.next_step
            assert f"kill {pid}" in error.value.next_step
        assert state_file.exists()
    finally:
        os.kill(pid, signal.SIGCONT)
    found = embedded_server.running(state_file)
    assert found is not None
    assert found.pid == pid


def test_a_state_file_that_a_killed_server_left_is_no_obstacle(
    trainyard: Trainyard, up: dict[str, object], tmp_path: Path
) -> None:
    os.kill(int(str(up["pid"])), 9)
    give_up_at = time.monotonic() + 10
    while is_alive(up["pid"]) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    assert (tmp_path / ".trainyard/emulator.json").exists()
    assert trainyard("local", "status").returncode == 3
    assert trainyard("local", "up", "--no-deploy").returncode == 0
    assert trainyard("local", "status").returncode == 0


def test_several_that_start_at_once_start_one_server(trainyard: Trainyard, tmp_path: Path) -> None:
    # GIVEN links in the folder by the names of files that a start makes
    precious = tmp_path / "home/.bashrc"
    precious.write_text("precious")
    (tmp_path / ".trainyard").mkdir()
    for name in ("emulator.log", "emulator.lock"):
        (tmp_path / ".trainyard" / name).symlink_to(precious)
    # WHEN three start one
    with ThreadPoolExecutor(3) as pool:
        started = list(pool.map(lambda _: trainyard("local", "up", "--no-deploy"), range(3)))
    try:
        # THEN one of them does, and the others wait for it
        assert [up.returncode for up in started] == [0, 0, 0], started
        (exported,) = {up.stdout for up in started}
        assert "export AWS_ENDPOINT_URL=http://localhost:" in exported
        (server,) = servers_in(tmp_path)
        assert sum("the embedded AWS answers at" in up.stderr for up in started) == 1
        assert any("waiting for it to end" in up.stderr for up in started)
    finally:
        trainyard("local", "down")
    assert not is_alive(server.pid)
    assert servers_in(tmp_path) == []
    assert precious.read_text() == "precious"


def servers_in(folder: Path) -> list[psutil.Process]:
    state_file = str(folder / ".trainyard/emulator.json")
    return [process for process in psutil.process_iter(["cmdline"]) if state_file in (process.info["cmdline"] or [])]


STATE = {
    "endpoint": "http://localhost:4566",
    "port": 4566,
    "pid": 4566,
    "executor": "process",
    "access_key_id": "key",
    "secret_access_key": "secret",
}


@pytest.mark.parametrize(
    "changes",
    [
        {"endpoint": "{folder_url}"},
        {"endpoint": "http://attacker.example:4566"},
        {"endpoint": "https://localhost:4566"},
        {"endpoint": "http://localhost:4567"},
        {"endpoint": "http://localhost:4566@attacker.example"},
        {"endpoint": "http://localhost:4566/../x"},
        {"endpoint": "http://[::1"},
        {"port": "4566"},
        {"port": 0, "endpoint": "http://localhost:0"},
        {"pid": -1},
        {"pid": 1},
        {"secret_access_key": ["secret"]},
        {"keep": 5},
        {"shell": "rm"},
    ],
    ids=str,
)
def test_a_state_file_that_came_with_the_folder_is_believed_for_loopback_only(
    trainyard: Trainyard, tmp_path: Path, changes: dict[str, object]
) -> None:
    # GIVEN a repository's folder, with a state file and what its endpoint would answer if it were a file
    state_file = tmp_path / ".trainyard/emulator.json"
    (state_file.parent / "trainyard").mkdir(parents=True)
    (state_file.parent / "trainyard/health").write_text(json.dumps({"pid": STATE["pid"]}))
    state_file.write_text(json.dumps({**STATE, **changes}).replace("{folder_url}", f"file://{state_file.parent}"))
    # WHEN it is asked for the lines that a shell evaluates, or to stop what runs
    for command in (("env",), ("status",), ("down", "--yes")):
        refused = trainyard("local", *command)
        # THEN it says what is wrong with the file, and nothing is sent anywhere
        assert refused.returncode == 3, command
        assert refused.stdout == ""
        assert f"error: {state_file.relative_to(tmp_path)} " in refused.stderr
        assert "next: " in refused.stderr
    assert state_file.exists()


def test_down_does_not_stop_unasked_what_runs_or_was_not_fetched(
    *,
    run_command: RunCommand,
    embedded: Aws,
    stage: DeployedStage,
    deployed_aws: EmbeddedAws,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_command(["true"])
    plan = planned_to_run(embedded, stage, ["sleep", "60"])
    job_id = send(embedded, plan)
    monkeypatch.chdir(tmp_path)  # where no run was fetched to
    with pytest.raises(UsageError, match="was not stopped, since all that is in it would be lost") as refused:
        local.down("dev", deployed_aws.state_file, yes=False)
    assert f"not ended yet: {plan.run_id}" in str(refused.value)
    assert " not in ./runs: " in str(refused.value)
    batch.terminate_id(embedded, job_id, reason="enough")
    wait_for(embedded, stage, job_id)
