"""`trainyard local`: the emulator as a separate process, without a deployment."""

import json
import os
import re
import signal
import stat
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from jobs.aws.connection import Aws
from jobs.cli import emulator as emulator_server
from jobs.cli.local import STATE_FILE, down
from jobs.core.errors import ConfigurationError, UsageError
from jobs.core.stage import DeployedStage
from jobs.runs import batch
from jobs.runs.submit import send
from tests.jobs.cli.conftest import Trainyard
from tests.support.container.scripts import write_files
from tests.support.jobs.submitting import Begin, RunCommand, planned_to_run, wait_for
from tests.support.running_emulator import Emulator
from tests.support.waiting import wait_until

# `up` leaves its server running, and these tests run the command in their own process.
pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")


@pytest.fixture
def up(trainyard: Trainyard, tmp_path: Path) -> Iterator[dict[str, object]]:
    """Start a server without a deployment, and return its state file's content.

    The folder is hostile: it has modules named like ours and Python's, which must not be imported, and a link in place
    of the log.
    """
    hostile = "raise SystemExit('a module of the working directory was imported')"
    write_files(tmp_path, dict.fromkeys(("infra/__init__.py", "random.py"), hostile))
    precious = tmp_path / "home/.bashrc"
    write_files(tmp_path, {"home/.bashrc": "precious", ".trainyard/.keep": ""})
    (tmp_path / ".trainyard/emulator.log").symlink_to(precious)
    finished = trainyard("local", "up", "--no-deploy", "--keep=~/kept")
    try:
        assert finished.returncode == 0, finished.stderr
        state: dict[str, object] = json.loads((tmp_path / STATE_FILE).read_text())
        assert f"export AWS_ENDPOINT_URL={state['endpoint']}" in finished.stdout.splitlines()
        yield state
    finally:
        trainyard("local", "down")
    assert precious.read_text() == "precious"


def is_alive(pid: object) -> bool:
    return psutil.pid_exists(int(str(pid))) and psutil.Process(int(str(pid))).status() != psutil.STATUS_ZOMBIE


def test_the_emulator_runs_once_until_it_is_stopped(
    trainyard: Trainyard, up: dict[str, object], clean_environment: dict[str, str], tmp_path: Path
) -> None:
    with urllib.request.urlopen(f"{up['endpoint']}/trainyard/health") as answer:
        assert json.load(answer)["pid"] == up["pid"]
    status = json.loads(trainyard("local", "status", "-o", "json").stdout)
    assert (status["pid"], status["executor"], status["endpoint"]) == (up["pid"], "process", up["endpoint"])
    assert f"{tmp_path}/home/kept" in trainyard("local", "status").stdout
    again = trainyard("local", "up", "--no-deploy")
    assert again.returncode == 0
    assert f"already running at {up['endpoint']}" in again.stderr
    assert trainyard("local", "up", "--no-deploy", "--port", str(up["port"])).returncode == 0
    for option in (("--port", "1"), ("--keep", "elsewhere"), ("--executor", "docker")):
        other = trainyard("local", "up", "--no-deploy", *option)
        assert other.returncode == 3
        assert "runs with other options: --port " in other.stderr
        assert f"--executor process --keep {tmp_path}/home/kept" in other.stderr
        assert "next: trainyard local down" in other.stderr
    # WHEN a shell evaluates the lines, THEN it is connected
    lines = trainyard("local", "env", environment={"AWS_PROFILE": "mine"}).stdout
    environment = {**clean_environment, "AWS_PROFILE": "mine"}
    shell = ["sh", "-c", f"{lines}\nenv"]
    shown = subprocess.run(shell, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {f"AWS_ENDPOINT_URL={up['endpoint']}", "AWS_DEFAULT_REGION=us-east-1"} <= set(shown)
    assert "AWS_PROFILE=mine" not in shown
    # AND `trainyard` alone says what to do next
    assert 'eval "$(trainyard local env)"' in trainyard().stdout
    connected = trainyard(environment=exported(lines))
    assert "trainyard --stage dev local up" in connected.stdout
    # AND a client needs the key in its state file
    assert stat.S_IMODE((tmp_path / STATE_FILE).stat().st_mode) == 0o600
    key = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    denied = trainyard("list", environment={**key, "AWS_ENDPOINT_URL": str(up["endpoint"])})
    assert denied.returncode == 3
    assert 'eval "$(trainyard local env)"' in denied.stderr

    stopped = trainyard("local", "down")
    assert stopped.returncode == 0
    assert "stopped the emulator" in stopped.stderr
    assert not is_alive(up["pid"])
    assert not (tmp_path / STATE_FILE).exists()
    assert f"no emulator is running (looked for {tmp_path}/{STATE_FILE})" in trainyard("local", "down").stderr
    assert "  trainyard demo " in trainyard().stdout


def exported(lines: str) -> Mapping[str, str]:
    pairs = (line.removeprefix("export ").partition("=") for line in lines.splitlines() if line.startswith("export "))
    return {name: value for name, _, value in pairs}


def test_a_silent_server_is_kept_and_a_killed_one_replaced(
    trainyard: Trainyard, up: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulator_server, "ANSWER_TIMEOUT_SECONDS", 0.5)
    state_file, pid = tmp_path / STATE_FILE, int(str(up["pid"]))
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(ConfigurationError, match=rf"\(process {pid}\) did not answer") as error:
            down("dev", state_file, yes=False)
        assert f"kill {pid}" in str(error.value.next_step)
        assert state_file.exists()
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    os.kill(pid, signal.SIGKILL)
    give_up_at = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    assert trainyard("local", "status").returncode == 3
    assert trainyard("local", "up", "--no-deploy").returncode == 0
    assert str(up["access_key_id"]) not in trainyard("local", "env").stdout, "each server has its own key"


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
        {"endpoint": "file://{folder}"},
        {"endpoint": "http://attacker.example:4566"},
        {"endpoint": "http://localhost:4566@attacker.example"},
        {"port": 0, "endpoint": "http://localhost:0"},
        {"pid": 1},
        {"secret_access_key": ["secret"]},
        {"shell": "rm"},
    ],
    ids=str,
)
def test_a_state_file_may_only_name_localhost(trainyard: Trainyard, tmp_path: Path, changes: dict[str, object]) -> None:
    # GIVEN a folder with a state file, and the answer of its endpoint in case that is a file
    state_file = tmp_path / STATE_FILE
    write_files(state_file.parent, {"trainyard/health": json.dumps({"pid": STATE["pid"]})})
    state_file.write_text(json.dumps({**STATE, **changes}).replace("{folder}", str(state_file.parent)))
    # WHEN the lines for a shell are requested
    refused = trainyard("local", "env")
    # THEN the error says what is wrong with the file
    assert (refused.returncode, refused.stdout) == (3, "")
    assert f"error: {STATE_FILE} " in refused.stderr
    assert "next: " in refused.stderr


def test_reclaim_ends_the_attempt_of_one_node(
    *,
    trainyard: Trainyard,
    emulated: Aws,
    stage: DeployedStage,
    deployed_aws: Emulator,
    begin: Begin,
    tmp_path: Path,
) -> None:
    assert "no emulator is running" in trainyard("local", "reclaim", "latest").stderr
    write_files(tmp_path, {str(STATE_FILE): deployed_aws.state_file.read_text()})
    plan = planned_to_run(emulated, stage, ["sh", "-c", "exec sleep 120"])
    plan.request["arrayProperties"] = {"size": 2}
    job = begin(plan)
    wait_until(lambda: batch.describe(emulated, stage, [job.id])[0].nodes, lambda nodes: nodes == {"RUNNING": 2})
    refused = trainyard("local", "reclaim", job.run_id, "--node", "2")
    assert f"{job.run_id} has no node 2: its nodes are 0 to 1" in refused.stderr
    # The shell needs no connection to the emulator of its folder.
    reclaimed = trainyard("local", "reclaim", job.run_id, "--node", "1")
    assert reclaimed.returncode == 0, reclaimed.stderr
    assert reclaimed.stderr.splitlines() == [
        f"reclaimed node 1 of {job.run_id} in attempt 1 of 3",
        f"next: trainyard logs {job.run_id} --follow",
    ]
    wait_until(
        lambda: emulated.batch.describe_jobs(jobs=[f"{job.id}:1"])["jobs"][0]["attempts"],
        lambda attempts: [attempt["statusReason"][:8] for attempt in attempts] == ["Host EC2"],
    )
    assert emulated.batch.describe_jobs(jobs=[f"{job.id}:0"])["jobs"][0]["attempts"] == []


def test_down_confirms_losing_jobs_and_unfetched_runs(
    *,
    run_command: RunCommand,
    emulated: Aws,
    stage: DeployedStage,
    deployed_aws: Emulator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = run_command(["true"]).plan.run_id
    plan = planned_to_run(emulated, stage, ["sleep", "60"])
    job_id = send(emulated, plan)
    monkeypatch.chdir(tmp_path)  # where no run was fetched to, but the code of one
    (tmp_path / f"runs/{ended}/code").mkdir(parents=True)
    with pytest.raises(UsageError, match="was not stopped, because this would be lost") as refused:
        down("dev", deployed_aws.state_file, yes=False)
    assert f"unfinished job: {plan.run_id}" in str(refused.value)
    assert re.search(rf" not in ./runs: .*{ended}", str(refused.value))
    (tmp_path / f"runs/{ended}/receipt.json").touch()
    with pytest.raises(UsageError, match="would be lost") as refused:
        down("dev", deployed_aws.state_file, yes=False)
    assert ended not in str(refused.value)
    batch.terminate(emulated, job_id, reason="enough")
    wait_for(emulated, stage, job_id)
