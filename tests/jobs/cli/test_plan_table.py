"""What a submitter reads of the price before paying."""

import io
import json
import sys
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest
from rich.console import Console

from jobs.cli.live import print_line
from jobs.cli.tables import Pairs, plan_json, plan_table, print_json, show
from jobs.cli.tables import stdout as console
from jobs.client.logs import LogLine
from jobs.contract.plan import plan
from jobs.contract.prices import Prices, Quote
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


@pytest.mark.parametrize(
    ("resources", "instances"),
    [
        ({"nproc_per_node": 1}, "1 x dl1.24xlarge, 1 rank"),
        ({}, "1 x dl1.24xlarge, 8 ranks"),
        ({"nnodes": 2}, "2 x dl1.24xlarge, 8 ranks each"),
    ],
    ids=str,
)
def test_instances_and_ranks_are_counted(
    capsys: pytest.CaptureFixture[str], resources: dict[str, Any], instances: str
) -> None:
    show(plan_table(plan(spec(resources=resources), LARGE, run_id=RUN_ID), embedded=False), on=console())
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("instances")]
    assert line.removeprefix("instances").strip() == instances


def test_prices_of_today_are_said_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    prices = Prices(
        on_demand=Quote(usd_per_hour=13.5, date="2026-11-23", source="AWS"),
        spot=Quote(usd_per_hour=4.25, date="2022-08-24", source="a row"),
    )
    planned = replace(plan(spec(), LARGE, run_id=RUN_ID), prices=prices)
    show(plan_table(planned, embedded=False), on=console())
    shown = " ".join(capsys.readouterr().out.split())
    assert "13.50 USD/h On-Demand (as of 2026-11-23, from AWS), 4.25 USD/h Spot (as of 2022-08-24, from a row)" in shown
    answer = plan_json(planned)
    assert (answer["usd_per_hour"], answer["price_date"], answer["price_source"]) == (4.25, "2022-08-24", "a row")


def test_a_script_reads_the_capacity_and_what_it_is_expected_to_cost() -> None:
    spot = plan_json(plan(spec(), LARGE, run_id=RUN_ID))
    assert (spot["queue"], spot["capacity"], spot["usd_per_hour"]) == ("spot", "spot", 3.93)
    on_demand = plan_json(plan(spec(resources={"capacity": "on-demand"}), LARGE, run_id=RUN_ID))
    assert (on_demand["capacity"], on_demand["usd_per_hour"]) == ("on-demand", 13.10904)


def test_text_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    arn = "arn:aws:secretsmanager:us-east-1:123456789012:secret:token[0]"
    show(Pairs([("secret", arn)]), on=console())
    console().print(arn)
    assert capsys.readouterr().out.count(arn) == 2


@pytest.mark.parametrize("width", [80, 120])
def test_a_long_address_stays_whole_and_sentences_are_broken_between_words(width: int) -> None:
    shown = io.StringIO()
    screen = Console(file=shown, width=width, force_terminal=True, color_system=None)
    address = "s3://trainyard-dev-storage-runs-0123456789abcdef/" + "research/" * 8 + "massive-20260131-120000-00ab/"
    sentence = "one node of dl1.24xlarge: Spot, started again after a reclaim, " * 3
    show(Pairs([("files", address), ("queue", sentence)]), on=screen)
    lines = shown.getvalue().splitlines()
    assert sum(address in line for line in lines) == 1
    others = [line for line in lines if address not in line]
    assert max(len(line) for line in others) <= width
    assert " ".join(" ".join(others).split()) == f"queue {sentence.strip()}"


def test_text_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show(Pairs([("reason", "\x1b]0;owned\x07it failed\x9b2J")]), on=console())
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
