"""No process outlives its job, even if it is detached or the server is killed."""

import subprocess
import sys
import uuid
from pathlib import Path

import psutil

from tests.support.emulator.batch_calls import Batch, container_of, overrides, prepare, until
from tests.support.running_emulator import run_emulator

DETACHED = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:                       # a daemon: its parents have exited, and it has a new session
    os.setsid()
    if os.fork() == 0:
        for stream in (0, 1, 2):
            os.close(stream)
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        time.sleep(600)
    os._exit(0)
os.wait()
print("ready", flush=True)
while not os.path.exists(os.environ["GATE"]):
    time.sleep(0.03)
"""
"""Runs until its gate opens: a command, a daemon that ignores SIGTERM, and its child in a third session."""

EXECUTOR = """
import sys, threading
from infra.emulator.containers import ContainerRun
from infra.emulator.containers.process_executor import ProcessExecutor

executor = ProcessExecutor()
for program in sys.argv[2:]:
    run = ContainerRun(
        name="run",
        command=("python", "-c", program),
        environment={"MARKER": sys.argv[1], "GATE": "/none", "NAME": program},
        properties={},
        task={},
        job_id="",
        on_output=lambda output: None,
    )
    threading.Thread(target=executor.start(run).wait).start()
"""
"""Starts two jobs like a server, in a process that can be killed within a second."""


def marked(marker: str) -> list[psutil.Process]:
    """Return all processes with the marker in their environment."""
    return [process for process in psutil.process_iter() if _environment(process).get("MARKER") == marker]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:  # exited, a zombie, or another user's
        return {}


def submit_detached(batch: Batch, gate: Path) -> tuple[str, str]:
    """Submit a job; return its id and the marker of its processes when all of them run."""
    marker = uuid.uuid4().hex
    definition, given = batch.definition("python", "-c", DETACHED), {"MARKER": marker, "GATE": str(gate)}
    job_id = batch.submit(definition, batch.queue(), ecsPropertiesOverride=overrides(environment=given))
    batch.wait_for_line(job_id, "ready")
    until(lambda: marked(marker)[3:] or None, "init process, command, daemon and its child run")
    return job_id, marker


def test_leftover_processes_are_killed_when_a_job_exits(batch: Batch, tmp_path: Path) -> None:
    job_id, marker = submit_detached(batch, tmp_path / "gate")
    (tmp_path / "gate").touch()
    assert batch.wait_for_end(job_id)["status"] == "SUCCEEDED"
    assert marked(marker) == []


KILLS_INIT = """
import os, signal, subprocess
subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
os.kill(os.getppid(), signal.SIGKILL)
subprocess.Popen(["sleep", "600"], start_new_session=True)
"""
"""A job that kills its init process, and starts children in new sessions before and after that."""


def test_job_that_kills_its_init_process_leaves_nothing(batch: Batch) -> None:
    marker = uuid.uuid4().hex
    definition, queue = batch.definition("python", "-c", KILLS_INIT), batch.queue()
    given = overrides(environment={"MARKER": marker})
    # Several jobs, because the kill may come before the init process reports that the command runs.
    jobs = [batch.submit(definition, queue, ecsPropertiesOverride=given) for _ in range(8)]
    for job_id in jobs:
        assert container_of(batch.wait_for_end(job_id))["exitCode"] == 137
    assert marked(marker) == []


STOPS_INIT = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print("ready", flush=True)
while True:
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(float(os.environ.get("AGAIN_SECONDS", 600)))
"""
"""A job that stops its init process once or repeatedly, and ignores SIGTERM."""


def submit_stopping(batch: Batch, **variables: str) -> tuple[str, str]:
    """Submit a job that stops its init process, with a timeout; return its id and the marker of its processes."""
    marker = uuid.uuid4().hex
    given = overrides(environment={"MARKER": marker, **variables})
    definition = batch.definition("python", "-c", STOPS_INIT, timeout={"attemptDurationSeconds": 2})
    job_id = batch.submit(definition, batch.queue(), ecsPropertiesOverride=given)
    until(lambda: stopped(marker) or None, "the init process is stopped")
    return job_id, marker


def stopped(marker: str) -> list[psutil.Process]:
    return [process for process in marked(marker) if process.status() == psutil.STATUS_STOPPED]


def test_job_that_stops_its_init_process_ends_at_its_timeout(batch: Batch) -> None:
    job_id, marker = submit_stopping(batch, AGAIN_SECONDS="0.001")
    ended = batch.wait_for_end(job_id)
    assert (ended["status"], ended["statusReason"]) == ("FAILED", "Job attempt duration exceeded timeout")
    assert marked(marker) == []


def test_many_jobs_take_a_bounded_number_of_threads(batch: Batch) -> None:
    definition, queue = batch.definition("sleep", "600"), batch.queue(batch.environment(max_vcpus=1000))
    parent = batch.submit(definition, queue, arrayProperties={"size": 200})

    def started() -> dict[str, int] | None:
        states: dict[str, int] = batch.job(parent)["arrayProperties"]["statusSummary"]
        return states if states.get("RUNNING", 0) >= 32 and not states.get("STARTING") else None

    states = until(started, "32 jobs run")
    threads = psutil.Process(batch.aws.process.pid).num_threads()
    batch.client.terminate_job(jobId=parent, reason="enough")
    assert batch.wait_for_end(parent)["status"] == "FAILED"
    assert states["RUNNABLE"] == 200 - 32
    assert threads < 130


def test_stopped_server_leaves_nothing(tmp_path: Path) -> None:
    with run_emulator(tmp_path) as aws:
        batch = prepare(aws)
        _, marker = submit_detached(batch, tmp_path / "gate")
        directory = Path(marked(marker)[0].cwd())
        _, other_marker = submit_stopping(batch)
        aws.process.terminate()
        assert aws.process.wait(30) == 0
    assert marked(marker) == marked(other_marker) == []
    assert not directory.exists()


def test_killed_server_leaves_nothing() -> None:
    marker = uuid.uuid4().hex
    with subprocess.Popen([sys.executable, "-c", EXECUTOR, marker, DETACHED, STOPS_INIT]) as server:
        try:
            # Init process, command and child of both jobs, and a daemon.
            until(lambda: (stopped(marker) and marked(marker)[6:]) or None, "the processes of two jobs run")
            directories = {Path(process.cwd()) for process in marked(marker)}
        finally:
            server.kill()
    until(lambda: None if marked(marker) else True, "the processes of both jobs are gone")
    assert len(directories) == 2
    until(lambda: None if any(path.exists() for path in directories) else True, "the working directories are gone")
