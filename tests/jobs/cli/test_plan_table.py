"""What a submitter reads of the price before paying."""

import ast
import io
import json
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import jobs.cli
from jobs.cli.live import LiveView, print_line
from jobs.cli.tables import Pairs, plan_json, plan_table, print_json, show
from jobs.cli.tables import stdout as console
from jobs.client.logs import LogLine
from jobs.contract.display import printable_name
from jobs.contract.plan import plan
from jobs.contract.prices import Prices, Quote
from tests.support.jobs.planning import LARGE, RUN_ID, spec


@pytest.mark.parametrize(
    ("resources", "instances", "price"),
    [
        ({"nproc_per_node": 1}, "1 x dl1.24xlarge, 1 rank", "13.11 USD/h On-Demand, 3.93 USD/h Spot (as of"),
        ({"capacity": "on-demand"}, "1 x dl1.24xlarge, 8 ranks", "13.11 USD/h On-Demand (as of"),
        ({"nnodes": 2}, "2 x dl1.24xlarge, 8 ranks each", "26.22 USD/h On-Demand (as of"),
    ],
    ids=str,
)
def test_instances_and_ranks_are_counted_and_priced(
    capsys: pytest.CaptureFixture[str], resources: dict[str, Any], instances: str, price: str
) -> None:
    planned = plan(spec(resources=resources), LARGE, run_id=RUN_ID)
    show(plan_table(planned, embedded=False), on=console())
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["instances"] == instances
    assert shown["price"].startswith(price)
    capacity = "spot" if resources == {"nproc_per_node": 1} else "on-demand"
    assert plan_json(planned)["capacity"] == capacity


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


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_log_cannot_steer_the_terminal_that_it_is_shown_on_now_or_later(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    text = "\x1b]0;owned\x07\x1b]8;;https://example.org\x1b\\here\x1b[2J\0 \x1b[1;32mit is\x1b[0m \x9bdone [1]\r\n"
    line = LogLine(time=datetime.now(timezone.utc), attempt=1, node=0, text=text)
    shown = r"[node 0] \x1b]0;owned\x07\x1b]8;;https://example.org\x1b\here\x1b[2J\x00 it is \x9bdone [1]"
    print_line(line, as_json=False)
    assert " ".join(capsys.readouterr().out.splitlines()) == shown, "without the colours of a bar"
    log = io.StringIO()
    with LiveView(show_log=True, log_to=log) as view:
        view.show(line)
    assert log.getvalue() == f"{shown}\n"


def test_names_are_one_line_and_warnings_show_what_would_steer() -> None:
    assert printable_name("a\nb\x1b\t\ud800\u2028") == r"a\nb\x1b\t\ud800\u2028"
    # In a process of its own: pytest's handlers take warnings before the last resort.
    program = (
        "import logging; from jobs.cli.plain import show_warnings; show_warnings(); "
        "logging.getLogger('quiet').addHandler(logging.NullHandler()); logging.getLogger('quiet').warning('hidden'); "
        "logging.getLogger('trainyard').warning('warning: \\x1b[2J')"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr
    assert shown == "warning: \\x1b[2J\n"


def test_one_place_prints() -> None:
    """All else goes through it, or through the consoles of tables.py: what others wrote cannot be told from ours."""
    command_line = Path(jobs.cli.__file__).parent
    prints = {
        str(path.relative_to(command_line))
        for path in command_line.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert prints == {"plain.py"}
