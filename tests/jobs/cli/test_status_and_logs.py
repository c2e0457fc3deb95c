"""`trainyard status` and `logs` of ended and running runs, with and without a terminal."""

import io
import json
import re
import signal
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from jobs.aws.connection import Aws
from jobs.cli import live
from jobs.cli.live import LiveView
from jobs.core.output import UTILIZATION_KEY
from jobs.core.records import CardUse, Receipt
from jobs.core.stage import DeployedStage
from jobs.runs import batch
from jobs.runs.logs import LogLine
from jobs.runs.submit import send
from tests.jobs.cli.conftest import Trainyard
from tests.support.jobs.proxies import Fault, FaultyProxy
from tests.support.jobs.recorded_runs import BEGIN, job_of, three_attempts
from tests.support.jobs.submitting import Begin, RunCommand, planned_to_run
from tests.support.jobs.terminal import TRAINYARD, Terminal
from tests.support.running_emulator import environment_of
from tests.support.waiting import wait_until

TWO_ATTEMPTS = ["sh", "-c", 'echo "hello from attempt $AWS_BATCH_JOB_ATTEMPT"; exit $((76 - AWS_BATCH_JOB_ATTEMPT))']
BUSY = "HPUs 93 % busy (88 % on average), 61 % of their memory in use"


def wait_for_file(path: Path) -> str:
    """Return a shell command that waits for a file."""
    return f"while [ ! -e {path} ]; do sleep 0.05; done"


def running_receipt(run_id: str) -> Receipt:
    """Return the receipt of a run whose third attempt, on busy cards, has done nine tenths of its steps."""
    receipt = three_attempts(100, run_id=run_id, end="running").receipt
    assert receipt is not None
    cards = CardUse(utilization_percent=93.0, memory_percent=61.0, mean_utilization_percent=88.0, idle_seconds=0.0)
    last = receipt.attempts[-1].model_copy(update={"cards": cards})
    return receipt.model_copy(update={"attempts": [*receipt.attempts[:-1], last]})


def test_status_and_logs_have_each_attempt(aws_trainyard: Trainyard, emulated: Aws, run_command: RunCommand) -> None:
    run = run_command(TWO_ATTEMPTS)
    place = run.plan.run_location / "metrics.jsonl"
    line = b'{"step": 3, "time": "2026-11-28T14:41:16+00:00", "numbered": true, "loss": 0.17}\n'
    emulated.s3.put_object(Bucket=place.bucket, Key=place.key, Body=line)
    shown = aws_trainyard("status", run.plan.run_id).stdout
    assert re.search(r"^metrics +step 3, training loss 0.17$", shown, re.MULTILINE)
    assert "FAILED, attempt 2 of 3" in shown
    attempts = [line.split() for line in shown.splitlines() if line[:1] in "12" and line[1:2] == " "]
    assert [(row[0], row[5]) for row in attempts] == [("1", "75"), ("2", "74")]
    assert str(run.plan.run_location) in shown
    as_json = json.loads(aws_trainyard("status", run.plan.run_id, "-o", "json").stdout)
    assert as_json["job"]["state"] == "FAILED"
    assert as_json["receipt"] is None

    printed = aws_trainyard("logs", run.plan.run_id)
    assert printed.stdout.splitlines() == ["hello from attempt 1", "hello from attempt 2"]
    assert printed.stderr.splitlines() == ["attempt 1", "attempt 2"]
    lines = [json.loads(line) for line in aws_trainyard("logs", run.plan.run_id, "-o", "json").stdout.splitlines()]
    assert [(line["attempt"], line["node"], line["text"]) for line in lines] == [
        (1, None, "hello from attempt 1"),
        (2, None, "hello from attempt 2"),
    ]
    later = (datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()
    none = aws_trainyard("logs", run.plan.run_id, "--since", later)
    assert none.stdout == ""
    assert "has logged nothing since" in none.stderr
    assert aws_trainyard("logs", run.plan.run_id, "--since", "1h").stdout == printed.stdout
    last = aws_trainyard("logs", run.plan.run_id, "--tail", "1")
    assert (last.stdout, last.stderr) == ("hello from attempt 2\n", "attempt 2\n")


def test_following_continues_after_the_last_lines(
    emulated: Aws, aws_trainyard: Trainyard, begin: Begin, stage: DeployedStage, tmp_path: Path
) -> None:
    over = tmp_path / "over"
    # More lines than a request for three lines returns, because utilization lines are not shown.
    busy = f"for i in $(seq 300); do echo '{{\"{UTILIZATION_KEY}\": 1}}'; done"
    script = f"seq 50; {busy}; echo before; {wait_for_file(over)}; echo after"
    job = begin(planned_to_run(emulated, stage, ["sh", "-c", script]))
    wait_until(lambda: aws_trainyard("logs", job.run_id, "-n1").stdout, lambda shown: shown == "before\n")
    assert aws_trainyard("logs", job.run_id, "-n", "3").stdout.splitlines() == ["49", "50", "before"]
    assert len(aws_trainyard("logs", job.run_id, "-n", "999").stdout.splitlines()) == 51
    over.touch()
    followed = aws_trainyard("logs", job.run_id, "--tail", "2", "--follow", expect=0).stdout.splitlines()
    assert followed[-2:] == ["before", "after"] or followed == ["50", "before", "after"]


def test_the_panel_and_status_show_cards_cost_and_time_left(
    *,
    aws_trainyard: Trainyard,
    emulated: Aws,
    stage: DeployedStage,
    begin: Begin,
    aws_environment: dict[str, str],
    tmp_path: Path,
) -> None:
    further = tmp_path / "further"
    steps = f"echo [progress] 900/1000 loss 0.5; {wait_for_file(further)}; echo [progress] 950/1000 loss 0.4; sleep 60"
    plan = planned_to_run(emulated, stage, ["sh", "-c", steps])
    job_id = begin(plan).id
    place = plan.run_location / "receipt.json"
    body = running_receipt(plan.run_id).model_dump_json().encode()
    with Terminal(
        [TRAINYARD, "logs", plan.run_id, "--follow"], environment=aws_environment, folder=tmp_path
    ) as terminal:
        terminal.wait_until_shown("900/1000")
        assert "busy" not in terminal.shown, "there is no receipt yet"
        emulated.s3.put_object(Bucket=place.bucket, Key=place.key, Body=body)
        terminal.wait_until_shown(BUSY)
        terminal.wait_until_shown("in AWS it would cost ")
        terminal.wait_until_shown(" USD so far; On-Demand ")
        status = aws_trainyard("status", plan.run_id).stdout
        further.touch()
        # From the two lines the view can tell when the job will end, and at what cost.
        terminal.wait_until_shown(" to the last step")
        terminal.wait_until_shown(" at the end")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait() == 130
    assert f"detached from {plan.run_id}, which continues" in terminal.shown
    assert f"next: trainyard logs {plan.run_id} --follow" in terminal.shown
    [job] = batch.describe(emulated, stage, [job_id])
    assert job.state == "RUNNING"
    rows = {line[:22].strip(): line[22:].strip() for line in status.splitlines()}
    assert rows["cards"] == BUSY
    assert rows["runs on"] == "1 x dl1.24xlarge"
    assert rows["progress"] == "900 of 1000 (90 %): loss 0.5"
    assert rows["time left"].endswith(" to the last step")
    assert " USD at the end; On-Demand " in rows["in AWS it would cost"]


def test_without_a_terminal_lines_and_figures_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "REPORT_SECONDS", 0.0)
    log = io.StringIO()
    with LiveView(show_log=True, log_to=log) as view:
        for minute, step in enumerate((900, 950)):
            text = f"[progress] {step}/1000 loss 0.5"
            view.show(LogLine(time=BEGIN + timedelta(minutes=minute), attempt=3, node=None, text=text))
        view.show(running_receipt("massive-20261101-120000-00ab"))
    assert log.getvalue().splitlines() == ["[progress] 900/1000 loss 0.5", "[progress] 950/1000 loss 0.5"]
    cards, money = capsys.readouterr().err.splitlines()
    assert cards == BUSY
    assert money.endswith("; 1 min to the last step")
    assert " USD so far, " in money


def test_log_lines_of_a_sweep_name_its_workers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweep = job_of("probe-20260131-120000-0a1b", points=2, nodes={"RUNNING": 1, "SUCCEEDED": 1})
    waits = replace(sweep, nodes={"RUNNABLE": 1, "RUNNING": 1})
    line = LogLine(time=sweep.created_at, attempt=1, node=1, text="point 2", of_sweep=True)
    with LiveView(show_log=True) as view:
        for event in (waits, line, sweep):
            view.show(event)
    shown = capsys.readouterr()
    assert shown.out == "[worker 1] point 2\n"
    assert shown.err.splitlines() == [
        f"[RUNNING] attempt 1 of 3, 1 of 2 workers (why the others wait: trainyard why {sweep.run_id})",
        "[RUNNING] attempt 1 of 3, 1 of 2 workers still running",
    ]


def test_last_lines_of_a_failed_rank_are_shown_once() -> None:
    lines = [
        "step 1",
        "[rank 1] ValueError: no label",
        "rank 1 of node 0 wrote last: ValueError: no label",
        "error: rank 1",
    ]
    log = io.StringIO()
    with LiveView(show_log=True, log_to=log) as view:
        for text in [*lines, "rank 2 of node 0 wrote last: was not shown"]:
            view.show(LogLine(time=BEGIN, attempt=1, node=None, text=text))
    assert log.getvalue().splitlines() == [*lines[:2], lines[3], "rank 2 of node 0 wrote last: was not shown"]
    assert list(view.tail)[:2] == ["ValueError: no label", "error: rank 1"]


@pytest.mark.parametrize("reported", ["rank 1 failed", None])
def test_an_error_that_the_command_reports_is_not_printed(reported: str | None) -> None:
    log = io.StringIO()
    lines = ["error: printed by the script", "step 1", "error: rank 0 failed", "error: rank 1 failed"]
    with LiveView(show_log=True, log_to=log, hold_errors=True) as view:
        for text in lines:
            view.show(LogLine(time=BEGIN, attempt=1, node=None, text=text))
        if reported:
            view.drop_error(reported)
    assert log.getvalue().splitlines() == (lines[:-1] if reported else lines)


def test_following_survives_throttling_without_losing_lines(
    trainyard: Trainyard, emulated: Aws, stage: DeployedStage, faulty: FaultyProxy, tmp_path: Path
) -> None:
    over = tmp_path / "over"
    script = f"for i in 1 2 3; do echo line $i; done; {wait_for_file(over)}; for i in 4 5 6; do echo line $i; done"
    plan = planned_to_run(emulated, stage, ["sh", "-c", script])
    send(emulated, plan)
    throttled = Fault("answer", status=429, code="TooManyRequestsException")
    # The first call finds the run; then more calls fail in a row than boto3 itself retries.
    faulty.faults["describejobs"].extend([None, *[throttled] * 6])
    faulty.faults["getlogevents"].extend([Fault("cut"), *[Fault("answer", status=500)] * 6])
    faulty.when_over = over.touch
    finished = trainyard("logs", plan.run_id, "--follow", environment=environment_of(faulty.url))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == [f"line {number}" for number in range(1, 7)]
