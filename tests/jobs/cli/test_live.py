"""What a run that goes on shows: a panel on a terminal, plain lines elsewhere, and `status` at any time."""

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from jobs.aws.connection import Aws
from jobs.cli import live
from jobs.cli.live import LiveView
from jobs.cli.submit import send
from jobs.client.job import Job
from jobs.client.logs import LogLine
from jobs.contract.records import CardUse, Receipt
from jobs.contract.stage import DeployedStage
from tests.jobs.cli.conftest import Trainyard
from tests.support.jobs.recorded_runs import three_attempts
from tests.support.jobs.submitting import planned_to_run, wait_for
from tests.support.jobs.terminal import TRAINYARD, Terminal

BUSY = "HPUs 93 % busy (88 % on average), 61 % of their memory in use"


def running_receipt(run_id: str) -> Receipt:
    """Of a run whose third attempt, on busy cards, has made nine tenths of its steps."""
    receipt = three_attempts(100, run_id=run_id, end="running").receipt
    assert receipt is not None
    cards = CardUse(utilization_percent=93.0, memory_percent=61.0, mean_utilization_percent=88.0, idle_seconds=0.0)
    last = receipt.attempts[-1].model_copy(update={"cards": cards})
    return receipt.model_copy(update={"attempts": [*receipt.attempts[:-1], last]})


def test_a_panel_and_status_tell_how_busy_the_cards_are_what_it_costs_and_how_long_it_takes(
    *,
    trainyard: Trainyard,
    embedded: Aws,
    stage: DeployedStage,
    clean_environment: dict[str, str],
    deployed_environment: Mapping[str, str],
    tmp_path: Path,
) -> None:
    further, end = tmp_path / "further", tmp_path / "end"
    wait = "while [ ! -e {} ]; do sleep 0.05; done"
    steps = (
        f"echo [progress] 900/1000 loss 0.5; {wait.format(further)}; "
        f"echo [progress] 950/1000 loss 0.4; {wait.format(end)}"
    )
    plan = planned_to_run(embedded, stage, ["sh", "-c", steps])
    job_id = send(embedded, plan)
    place = plan.run_location / "receipt.json"
    body = running_receipt(plan.run_id).model_dump_json().encode()
    with Terminal(
        [TRAINYARD, "logs", plan.run_id, "--follow"],
        environment={**clean_environment, **deployed_environment},
        folder=tmp_path,
    ) as terminal:
        terminal.wait_until_shown("900/1000")
        assert "busy" not in terminal.shown, "there is no receipt yet"
        embedded.s3.put_object(Bucket=place.bucket, Key=place.key, Body=body)
        terminal.wait_until_shown(BUSY)
        terminal.wait_until_shown("in AWS it would cost ")
        terminal.wait_until_shown(" USD so far; On-Demand ")
        status = trainyard("status", plan.run_id, environment=deployed_environment).stdout
        further.touch()
        # By the pace of the two lines it can say when it will end, and at what cost.
        terminal.wait_until_shown(" to the last step")
        terminal.wait_until_shown(" at the end")
        end.touch()
        terminal.wait_until_shown("[SUCCEEDED]")
        assert terminal.wait() == 0
    wait_for(embedded, stage, job_id)
    told = {line[:22].strip(): line[22:].strip() for line in status.splitlines()}
    assert told["cards"] == BUSY
    assert told["progress"] == "900 of 1000 (90 %): loss 0.5"
    assert told["time left"].endswith(" to the last step")
    assert " USD at the end; On-Demand " in told["in AWS it would cost"]


def test_of_a_sweep_workers_are_told_and_none_is_kept_by_anything_once_it_has_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweep = Job(
        id="7c1e",
        run_id="probe-20260131-120000-0a1b",
        state="RUNNING",
        reason="",
        queue="spot",
        team="research",
        kind="script",
        moved="",
        created_at=datetime(2026, 1, 31, 12, tzinfo=timezone.utc),
        started_at=None,
        stopped_at=None,
        attempts=(),
        max_attempts=3,
        log_streams=(),
        points=2,
        nodes={"RUNNING": 1, "SUCCEEDED": 1},
    )
    waits = replace(sweep, nodes={"RUNNABLE": 1, "RUNNING": 1})
    line = LogLine(time=sweep.created_at, attempt=1, node=1, text="point 2", of_sweep=True)
    with LiveView(show_log=True) as view:
        for event in (waits, line, sweep):
            view.show(event)
    shown = capsys.readouterr()
    assert shown.out == "[worker 1] point 2\n"
    assert shown.err.splitlines() == [
        f"[RUNNING] attempt 1 of 3, 1 of 2 workers (what keeps the others: trainyard why {sweep.run_id})",
        "[RUNNING] attempt 1 of 3, 1 of 2 workers still running",
    ]


@pytest.fixture
def shown_without_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[str, str]]:
    """What goes to stdout and stderr, neither of which is a terminal, of two steps a minute apart and a receipt."""
    monkeypatch.setattr(live, "SAY_SECONDS", 0.0)
    at = datetime(2026, 11, 1, 13, tzinfo=timezone.utc)

    def shown(*, as_json: bool = False) -> tuple[str, str]:
        log = io.StringIO()
        with LiveView(show_log=True, as_json=as_json, log_to=log) as view:
            for minute, step in enumerate((900, 950)):
                text = f"[progress] {step}/1000 loss 0.5"
                view.show(LogLine(time=at + timedelta(minutes=minute), attempt=3, node=None, text=text))
            view.show(running_receipt("massive-20261101-120000-00ab"))
        out, err = capsys.readouterr()
        assert out == ""
        return log.getvalue(), err

    return shown


def test_without_a_terminal_every_line_is_printed_and_now_and_then_what_a_panel_would_say(
    shown_without_terminal: Callable[..., tuple[str, str]],
) -> None:
    log, said = shown_without_terminal()
    assert log.splitlines() == ["[progress] 900/1000 loss 0.5", "[progress] 950/1000 loss 0.5"]
    cards, money = said.splitlines()
    assert cards == BUSY
    assert money.endswith("; 1 min to the last step")
    assert " USD so far, " in money
    assert "\x1b" not in said + log
