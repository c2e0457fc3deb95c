"""`trainyard exec`: commands in the containers of running jobs."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import psutil
import pytest

from jobs.aws.connection import Aws
from jobs.core.stage import DeployedStage
from jobs.runs import batch
from jobs.runs.connect import IN_SCRIPT
from jobs.runs.job import Job
from jobs.spec.code import ENVIRONMENT_FILE
from tests.jobs.cli.conftest import Trainyard
from tests.support.container.scripts import write_files
from tests.support.jobs.proxies import Fault, FaultyProxy
from tests.support.jobs.submitting import Begin, planned_to_run
from tests.support.jobs.terminal import TRAINYARD, Terminal
from tests.support.running_emulator import Emulator, environment_of
from tests.support.waiting import wait_until

Start = Callable[..., Job]

SLEEP = "echo of the job > marker; exec sleep 120"


@pytest.fixture
def start(emulated: Aws, stage: DeployedStage, begin: Begin) -> Start:
    """Return a function that starts a job with a shell script and returns it once it is in `state`."""

    def start_one(script: str = SLEEP, *, state: str | None = "RUNNING", definition: str | None = None) -> Job:
        plan = planned_to_run(emulated, stage, ["sh", "-c", script], name="entered")
        plan.request.update({"jobDefinition": definition} if definition else {})
        return begin(plan, state=state)

    return start_one


def test_a_command_runs_in_the_folder_and_environment_of_the_job(
    start: Start, aws_trainyard: Trainyard, deployed_aws: Emulator
) -> None:
    job = start()
    asked = "cat marker; echo $AWS_BATCH_JOB_ID; echo $1; exit 3"
    # Before `--`, global options are recognized anywhere.
    aws_trainyard("exec", job.run_id, "sh", "-c", asked, "-", "--region", expect=2)
    finished = aws_trainyard("exec", job.run_id, "--", "sh", "-c", asked, "-", "--region", expect=0)
    # THEN its output is unchanged; its exit code is not returned, as on AWS
    assert finished.stdout.splitlines() == ["of the job", job.id, "--region"]
    assert finished.stderr == ""
    # AND the log records who ran what
    assert re.search(rf"'.+' runs \"sh -c .*exit 3.* in job {job.id}", deployed_aws.log.read_text())
    # AND errors name the next step
    aws_trainyard("exec", "no-such-run", expect=4)
    refused = aws_trainyard("exec", "--node", "1", job.run_id, "ls", expect=2)
    assert f"{job.run_id} has no node 1: its nodes are 0 to 0" in refused.stderr
    refused = aws_trainyard("exec", job.run_id, "no-such-program", expect=1)
    assert f"error: no-such-program does not run in {job.run_id}: No such file" in refused.stderr
    assert f"trainyard exec {job.run_id} -- sh -c 'LINE'" in refused.stderr
    ended = start("true", state=None)
    refused = aws_trainyard("exec", ended.run_id, "ls", expect=1)
    assert f"error: {ended.run_id} has ended (SUCCEEDED), so it has no container" in refused.stderr
    assert f"next: trainyard logs {ended.run_id}, " in refused.stderr


def test_a_command_has_the_folder_and_environment_of_a_script(aws_trainyard: Trainyard, tmp_path: Path) -> None:
    script = "import time; print('started', flush=True); time.sleep(120)"
    write_files(tmp_path, {"code/train.py": script, "code/src/it's.txt": ""})
    arguments = {"code": "code", "command": "train.py", "parameters": {"note": "it's two\nlines"}}
    spec = {"name": "scripted", "job": "script", "resources": {"nproc_per_node": 1}, "arguments": arguments}
    write_files(tmp_path, {"spec.yaml": json.dumps(spec)})
    aws_trainyard("submit", "spec.yaml", "--detach", expect=0)
    wait_until(lambda: aws_trainyard("logs", "scripted").stdout, lambda log: "started" in log)
    asked = 'ls; echo "$TRAINYARD_PARAMETER_NOTE"; echo kept > $TRAINYARD_OUTPUT/note.txt; echo ${RANK:-none}; pwd'
    finished = aws_trainyard("exec", "scripted", "--", "sh", "-c", asked, expect=0)
    *lines, folder = finished.stdout.splitlines()
    assert lines == ["src", "train.py", "it's two", "lines", "none"]
    # What a container's shell is given, because the command runs there without the CLI.
    container = ["sh", "-c", IN_SCRIPT, "trainyard", "sh", "-c", asked]
    shell = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path / "scratch")}
    scratch = next(place for place in Path(folder).parents if (place / ENVIRONMENT_FILE).exists())
    write_files(tmp_path, {f"scratch/trainyard-0/{ENVIRONMENT_FILE}": (scratch / ENVIRONMENT_FILE).read_text()})
    printed = subprocess.run(container, env=shell, capture_output=True, text=True, check=True).stdout
    assert printed == finished.stdout
    aws_trainyard("cancel", "scripted", expect=0)
    wait_until(lambda: aws_trainyard("fetch", "scripted").stdout, lambda files: "output/note.txt" in files)
    # AND `resume` says that it does not send the folder again
    plan = wait_until(lambda: aws_trainyard("resume", "scripted", "--dry-run").stdout, lambda text: "queue" in text)
    assert "runs the code as submitted; to send the folder as it is now: --set arguments.code=FOLDER" in plan


def test_a_shell_handles_ctrl_c_itself_and_ends_with_the_job(
    start: Start, emulated: Aws, aws_environment: dict[str, str], tmp_path: Path
) -> None:
    job = start()
    environment = {**aws_environment, "PS1": "$ "}
    # Started like from a terminal's shell, so that Ctrl-C reaches the foreground process.
    command: list[str | Path] = ["setsid", "--ctty", "--wait", TRAINYARD, "exec", job.run_id]
    with Terminal(command, environment=environment, folder=tmp_path) as terminal:
        terminal.type("sleep 100 && echo never\n")
        terminal.wait_until_shown("sleep 100")
        program = psutil.Process(terminal.process.pid)
        wait_until(
            lambda: [child.cmdline() for child in program.children(recursive=True)],
            lambda commands: ["sleep", "100"] in commands,
        )
        terminal.type("\x03")
        terminal.type("cat marker; echo still $((40 + 2))\n")
        terminal.wait_until_shown("still 42")
        assert "of the job\r\n" in terminal.shown
        # WHEN the job ends, THEN nothing stays in its folder
        batch.terminate(emulated, job.id, reason="the test")
        terminal.wait_until_shown(f"{job.run_id} has ended")
        assert terminal.wait() == 0
    assert "Traceback" not in terminal.shown


def test_exec_is_refused_if_the_stage_switches_it_off(
    start: Start, aws_trainyard: Trainyard, emulated: Aws, stage: DeployedStage
) -> None:
    # GIVEN a job with the job definition of a stage that has commands_in_jobs=False
    given = stage.job_definition("research", "finetune-classification")
    [definition] = emulated.batch.describe_job_definitions(jobDefinitions=[given])["jobDefinitions"]
    [task] = definition["ecsProperties"]["taskProperties"]
    assert task["enableExecuteCommand"] is True
    task["enableExecuteCommand"] = False
    closed = emulated.batch.register_job_definition(
        jobDefinitionName="closed", type="container", ecsProperties={"taskProperties": [task]}
    )["jobDefinitionArn"]
    job = start(definition=closed)
    finished = aws_trainyard("exec", job.run_id, expect=3)
    assert f"error: commands cannot run in {job.run_id}: commands_in_jobs of stage 'dev' was off" in finished.stderr
    assert "next: set commands_in_jobs in infra/settings.py" in finished.stderr
    # AND the emulator refuses it too
    assert emulated.post_to_emulator(f"/trainyard/jobs/{job.id}/enter", {}) is None
    assert emulated.post_to_emulator(f"/trainyard/jobs/{start().id}/enter", {}) is not None


SESSION = {"sessionId": "ecs-execute-command-0f", "streamUrl": "wss://ssmmessages.example/", "tokenValue": "t0ken"}


class EcsProxy(FaultyProxy):
    """Answers ExecuteCommand, which the emulator lacks, as in the API reference of Amazon ECS."""

    asked: dict[str, object]

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        if request.headers.get("X-Amz-Target", "").endswith(".ExecuteCommand") and not self.faults["executecommand"]:
            self.asked = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
            self._answer(request, 200, {}, json.dumps({"session": SESSION}).encode())
        else:
            super().handle(request)


PLUGIN = f"""#!{sys.executable}
import json, os, sys
sys.exit("Cannot perform start session: EOF") if not os.isatty(0) else print(json.dumps(sys.argv[1:]))
"""
"""A Session Manager plugin that prints its arguments. Like the real one, it fails without a terminal."""


def test_the_plugin_gets_the_session_that_ecs_opens(
    start: Start, trainyard: Trainyard, deployed_aws: Emulator, tmp_path: Path
) -> None:
    job = start()
    plugin = tmp_path / "bin/session-manager-plugin"
    plugin.parent.mkdir()
    plugin.write_text(PLUGIN)
    plugin.chmod(0o755)
    # An address other than localhost, because jobs run elsewhere on AWS.
    with EcsProxy(deployed_aws.endpoint, host="127.0.0.2") as on_aws:
        environment = {**environment_of(on_aws.url), "PATH": f"{plugin.parent}{os.pathsep}{os.environ['PATH']}"}
        finished = trainyard("exec", job.run_id, "echo", "two words", environment=environment)
        on_aws.faults["executecommand"].append(Fault("answer", status=400, code="AccessDeniedException"))
        refused = trainyard("exec", job.run_id, environment=environment)
    assert finished.returncode == 0, finished.stderr
    [detail] = deployed_aws.client("batch").describe_jobs(jobs=[job.id])["jobs"]
    [task] = detail["ecsProperties"]["taskProperties"]
    assert on_aws.asked == {
        "cluster": task["taskArn"].split("/")[1],
        "task": task["taskArn"],
        "container": task["containers"][0]["name"],
        "command": "echo 'two words'",
        "interactive": True,
    }
    session, *rest = json.loads(finished.stdout)
    assert json.loads(session) == SESSION
    assert rest == ["us-east-1", "StartSession"]
    assert refused.returncode == 3, refused.stderr
    assert "only members of team 'research' may" in refused.stderr
    assert "next: assume the role of team 'research'" in refused.stderr
