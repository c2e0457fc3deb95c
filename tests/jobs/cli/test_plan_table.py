"""What a submitter reads of the price before paying."""

import json
import sys
from datetime import datetime, timezone
from typing import Any

import pytest

from jobs.cli.live import print_line
from jobs.cli.tables import pairs, plan_json, plan_table, print_json, show
from jobs.cli.tables import stdout as console
from jobs.client.logs import LogLine
from jobs.contract.plan import plan
from tests.support.jobs.planning import LARGE, RUN_ID, spec


@pytest.mark.parametrize(
    ("resources", "price"),
    [
        ({}, "13.11 USD/h On-Demand, 3.93 USD/h Spot (as of"),
        ({"capacity": "on-demand"}, "13.11 USD/h On-Demand (as of"),
        ({"nnodes": 2}, "26.22 USD/h On-Demand (as of"),
    ],
    ids=str,
)
def test_the_price_is_that_of_the_capacity(
    capsys: pytest.CaptureFixture[str], resources: dict[str, Any], price: str
) -> None:
    show(plan_table(plan(spec(resources=resources), LARGE, run_id=RUN_ID), embedded=False), on=console())
    assert price in capsys.readouterr().out


def test_a_script_reads_the_capacity_and_what_it_is_expected_to_cost() -> None:
    spot = plan_json(plan(spec(), LARGE, run_id=RUN_ID))
    assert (spot["queue"], spot["capacity"], spot["usd_per_hour"]) == ("gaudi-spot", "spot", 3.93)
    on_demand = plan_json(plan(spec(resources={"capacity": "on-demand"}), LARGE, run_id=RUN_ID))
    assert (on_demand["capacity"], on_demand["usd_per_hour"]) == ("on-demand", 13.10904)


def test_text_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    arn = "arn:aws:secretsmanager:us-east-1:123456789012:secret:token[0]"
    show(pairs([("secret", arn)]), on=console())
    console().print(arn)
    assert capsys.readouterr().out.count(arn) == 2


def test_text_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show(pairs([("reason", "\x1b]0;owned\x07it failed\x9b2J")]), on=console())
    console().print("and \x1b[2J\ud800")
    shown = capsys.readouterr().out
    assert not set(shown) & {"\x1b", "\x07", "\x9b", "\ud800"}
    assert "it failed" in shown


def test_json_cannot_steer_the_terminal_either(capsys: pytest.CaptureFixture[str]) -> None:
    text = "caf\xe9 \x1b\x7f\x9b\ud800\n"
    print_json({"reason": text})
    shown = capsys.readouterr().out
    assert json.loads(shown) == {"reason": text}
    assert "caf\xe9 \\u001b\\u007f\\u009b\\ud800\\n" in shown


def test_a_log_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    text = "\x1b]0;owned\x07\x1b[2Jit is \x9bdone [1]"
    print_line(LogLine(time=datetime.now(timezone.utc), attempt=1, node=0, text=text), as_json=False)
    shown = capsys.readouterr().out
    assert not {"\x07", "\x9b"} & set(shown)
    assert "\x1b[2J" not in shown
    assert shown.startswith("[node 0] ")
    assert "done [1]" in shown
