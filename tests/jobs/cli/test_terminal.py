"""Users' errors: message, next step, exit code, and never a traceback."""

import errno
import json
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from jobs.cli.local import STATE_FILE
from jobs.cli.terminal import run_reporting
from jobs.runs.spec_file import READY_SPECS
from tests.jobs.cli.conftest import Trainyard
from tests.support.jobs.terminal import TRAINYARD

REVIEWS = READY_SPECS / "finetune-reviews.yaml"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
REGION = {"AWS_DEFAULT_REGION": "us-east-1"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def check(
    finished: subprocess.CompletedProcess[str], *, exit_code: int, error: str, next_step: str | None = None
) -> None:
    assert finished.returncode == exit_code, finished.stderr
    assert f"error: {error}" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.stdout == ""
    if next_step is not None:
        assert f"next: {next_step}" in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "error", "next_step"),
    [
        (["sumbit"], "No such command 'sumbit'. Did you mean 'submit'?", "trainyard --help"),
        (["stop", "my run"], "No such command 'stop'.", "trainyard cancel 'my run'\n"),
        (["ps"], "No such command 'ps'.", "trainyard list\n"),
        (["--stage", "dev", "local", "stop"], "No such command 'local stop'.", "trainyard local down\n"),
        (["submit"], "Missing argument", "trainyard submit --help"),
        (["list", "--limit", "0"], "Invalid value for '--limit'", "trainyard list --help"),
        (["submit", REVIEWS, "--wait", "--detach"], "Invalid value: --wait and --detach cannot be combined", None),
        (["submit", REVIEWS, "--set", "epochs"], "--set epochs: expected KEY=VALUE", None),
    ],
)
def test_wrong_usage(trainyard: Trainyard, arguments: list[str | Path], error: str, next_step: str | None) -> None:
    check(trainyard(*arguments), exit_code=2, error=error, next_step=next_step)


def test_each_error_of_a_spec_is_on_its_own_line(trainyard: Trainyard, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("name: Bad Name\njob: finetune-classification\nattempts: 99\nteem: x\n")
    finished = trainyard("submit", "bad.yaml")
    check(finished, exit_code=2, error="bad.yaml: name: ")
    lines = finished.stderr.splitlines()
    assert len([line for line in lines if line.startswith("error: bad.yaml: ")]) == 4
    assert "error: bad.yaml: teem: unknown key; did you mean 'team'?" in lines


@pytest.mark.parametrize(
    ("environment", "error", "next_step"),
    [
        ({}, "no AWS region is set", "--region NAME, or AWS_DEFAULT_REGION; for the emulator"),
        (REGION, "no AWS credentials found", "aws configure"),
        ({**REGION, "AWS_PROFILE": "nobody"}, "The config profile (nobody) could not be found", "aws configure list"),
        (
            {**KEYS, **REGION, "AWS_ENDPOINT_URL": "localhost:1"},
            "AWS_ENDPOINT_URL=localhost:1 is not",
            "correct or unset",
        ),
        (
            {**KEYS, **REGION, "AWS_CONFIG_FILE": "config"},
            "Invalid endpoint: localhost:1 is not an HTTP URL",
            "correct endpoint_url",
        ),
    ],
)
def test_wrong_credentials_and_settings(
    trainyard: Trainyard, tmp_path: Path, environment: Mapping[str, str], error: str, next_step: str
) -> None:
    (tmp_path / "config").write_text("[default]\nendpoint_url = localhost:1\n")
    check(trainyard("list", environment=environment), exit_code=3, error=error, next_step=next_step)


@pytest.mark.parametrize(
    ("stdout", "error"),
    [(">&-", "standard output is closed"), (">/dev/full", "cannot write to standard output: No space")],
)
def test_an_output_that_cannot_be_written(clean_environment: Mapping[str, str], stdout: str, error: str) -> None:
    shell = ["sh", "-c", f'"{TRAINYARD}" schema {stdout}']
    finished = subprocess.run(shell, env=dict(clean_environment), capture_output=True, text=True, check=False)
    check(finished, exit_code=1, error=error, next_step="redirect it to a file ")


def test_a_full_disk_is_reported_with_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    def write(_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/x/model/weights")

    assert run_reporting(write, []) == 1
    full = "error: runs/x/model/weights: No space left on device\nnext: free some disk space and retry\n"
    assert capsys.readouterr().err == full


def test_global_options_may_follow_the_command(trainyard: Trainyard) -> None:
    for arguments in (["--profile", "nobody", "list"], ["list", "--profile=nobody"]):
        check(trainyard(*arguments, environment=REGION), exit_code=3, error="The config profile (nobody)")


def test_an_emulator_that_is_not_running(trainyard: Trainyard) -> None:
    endpoint = f"http://localhost:{free_port()}"
    environment = {**KEYS, **REGION, "AWS_ENDPOINT_URL": endpoint}
    silent = f"the emulator at {endpoint} does not respond"
    check(trainyard("list", environment=environment), exit_code=3, error=silent, next_step="trainyard local up")
    # `trainyard` alone reports that too, with the next step.
    shown = trainyard(environment=environment)
    assert (shown.returncode, f"The runs cannot be listed: {silent}" in shown.stdout) == (0, True)
    check(trainyard("local", "env"), exit_code=3, error="no emulator is running", next_step="trainyard local up")


def test_errors_are_json_with_json_output(trainyard: Trainyard) -> None:
    finished = trainyard("list", "-o", "json", environment=REGION)
    error = json.loads(finished.stderr)
    assert finished.returncode == error["exit_code"] == 3
    assert error["error"] == "no AWS credentials found"
    assert "aws sso login" in error["next"]
    usage = trainyard("list", "--nonsense", "--output=json")
    assert json.loads(usage.stderr)["exit_code"] == usage.returncode == 2


def test_an_argument_that_is_not_utf_8(trainyard: Trainyard) -> None:
    finished = trainyard("status", "\udcff", environment={**KEYS, **REGION})
    check(finished, exit_code=2, error="argument ")
    assert "is not UTF-8" in finished.stderr


def test_control_characters_do_not_reach_the_terminal(trainyard: Trainyard, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(REVIEWS.read_text() + '"\\e]0;owned\\a\\e[2J\\x9b": 1\n')
    (tmp_path / "half.yaml").write_text(REVIEWS.read_text() + '"\\e[2J\\ud800": 1\n')
    json_output = ["submit", "bad.yaml", "-o", "json"]
    for arguments in (["submit", "bad.yaml"], ["submit", "half.yaml"], json_output, ["\x1b[2Jsubmit"]):
        finished = trainyard(*arguments)
        assert finished.returncode == 2
        assert "Traceback" not in finished.stderr
        assert not set(finished.stdout + finished.stderr) & {"\x1b", "\x07", "\x9b"}


def test_an_invalid_state_file(trainyard: Trainyard, tmp_path: Path) -> None:
    state_file = tmp_path / STATE_FILE
    state_file.parent.mkdir()
    (tmp_path / "list.json").write_text("[]")
    for target in (tmp_path / "list.json", tmp_path, Path("/proc/self/mem"), Path("/dev/zero")):
        state_file.unlink(missing_ok=True)
        state_file.symlink_to(target)
        check(trainyard("local", "status"), exit_code=3, error=f"{STATE_FILE} is not the state file of an emulator")
