"""Tables at different widths, and that no text controls the terminal."""

import ast
import io
import json
import logging
import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

import jobs.cli
from jobs.cli import tables
from jobs.cli.list import ListedRun, show_runs
from jobs.cli.live import LiveView, print_line
from jobs.cli.tables import Pairs, plan_json, plan_table, print_json, show
from jobs.cli.tables import stdout as console
from jobs.cli.terminal import PrintableFormatter
from jobs.core.words import printable_name
from jobs.money.prices import Prices, Quote
from jobs.runs.logs import LogLine
from jobs.spec.plan import plan
from tests.support.jobs.planning import LARGE, RUN_ID, spec
from tests.support.jobs.recorded_runs import job_of, three_attempts


@pytest.mark.parametrize(
    ("resources", "instances", "price"),
    [
        ({"nproc_per_node": 1}, "1 x dl1.24xlarge, 1 rank", "13.11 USD/h On-Demand, 3.93 USD/h Spot (as of"),
        ({"nnodes": 2}, "2 x dl1.24xlarge, 8 ranks each", "26.22 USD/h On-Demand (as of"),
    ],
    ids=str,
)
def test_instances_and_ranks_are_counted_and_priced(
    capsys: pytest.CaptureFixture[str], resources: dict[str, Any], instances: str, price: str
) -> None:
    planned = plan(spec(resources=resources), LARGE, run_id=RUN_ID)
    show(plan_table(planned, emulated=False), on=console())
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["instances"] == instances
    assert shown["price"].startswith(price)


def test_prices_are_shown_with_date_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    prices = Prices(
        on_demand=Quote(usd_per_hour=13.5, date="2026-11-23", source="AWS"),
        spot=Quote(usd_per_hour=4.25, date="2022-08-24", source="example.org/prices, a/b.csv (the month: unconfirmed)"),
    )
    planned = replace(plan(spec(), LARGE, run_id=RUN_ID), prices=prices)
    show(plan_table(planned, emulated=False), on=console())
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "13.50 USD/h On-Demand (as of 2026-11-23, AWS), 4.25 USD/h Spot (as of 2022-08-24, example.org/prices)" in shown
    )
    answer = plan_json(planned)
    assert (answer["usd_per_hour"], answer["price_date"], answer["price_source"]) == (
        4.25,
        "2022-08-24",
        "example.org/prices, a/b.csv (the month: unconfirmed)",
    )


@pytest.mark.parametrize(
    ("width", "priority", "headings"),
    [
        (160, 0, ["RUN", "STATE", "METRIC", "USD", "TOOK", "ATTEMPT", "TEAM", "QUEUE", "SUBMITTED"]),
        (80, 0, ["RUN", "STATE", "METRIC", "USD", "TOOK"]),
        (80, 5, ["RUN", "STATE", "PRIORITY", "METRIC", "USD"]),
        (50, 0, ["RUN", "STATE"]),
    ],
)
def test_a_narrow_list_leaves_columns_out(width: int, priority: int, headings: list[str]) -> None:
    job = job_of("finetune-massive-20260131-120000-0a1b", state="SUCCEEDED", priority=priority)
    shown = io.StringIO()
    runs = [ListedRun(job=job, receipt=three_attempts(200).receipt)]
    show_runs(runs, on=Console(width=width, file=shown))
    heading, row = shown.getvalue().splitlines()
    assert heading.split() == headings
    assert row.split()[:2] == [job.run_id, "SUCCEEDED"]
    assert ("accuracy 0.874" in row) == ("METRIC" in headings)


def test_lines_wrap_between_words_and_addresses_stay_whole() -> None:
    address = "s3://a-bucket-with-a-long-name/research/tickets-20261125-214328-ce0d/"
    shown = io.StringIO()
    screen = Console(file=shown, width=37, force_terminal=True, color_system=None)
    tables.print_line(Text(f"attempt 1 of {address}: fine-tuning on the classes of all the tickets"), on=screen)
    # The third line is as wide as the terminal; a blank behind it would begin another line.
    broken = ["attempt 1 of", f"{address}:", "fine-tuning on the classes of all the", "tickets"]
    assert shown.getvalue().splitlines() == broken
    shown.truncate(0)
    show(Pairs([("files", address), ("queue", "one node of dl1.24xlarge: Spot, started again ")]), on=screen)
    lines = shown.getvalue().splitlines()
    assert sum(address in line for line in lines) == 1
    assert max(len(line) for line in lines if address not in line) <= 37


def test_rows_in_a_pipe_are_not_wrapped_or_padded(capsys: pytest.CaptureFixture[str]) -> None:
    long = "word " * 100
    show(Pairs([("note", long), ("queue", "spot")]), on=console())
    assert capsys.readouterr().out.splitlines() == [f"note   {long.rstrip()}", "queue  spot"]


def test_no_text_controls_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    arn = "arn:aws:secretsmanager:us-east-1:123456789012:secret:token[0]"
    show(Pairs([("secret", arn), ("reason", "\x1b]0;owned\x07it failed\x9b2J")]), on=console())
    console().print("and \x1b[2J\ud800")
    shown = capsys.readouterr().out
    assert arn in shown, "':secret:' is not an emoji, and brackets are not a style"
    assert not set(shown) & {"\x1b", "\x07", "\x9b", "\ud800"}
    assert "it failed" in shown
    text = "caf\xe9 \x1b\x7f\x9b\ud800\n"
    print_json({"reason": text})
    shown = capsys.readouterr().out
    assert json.loads(shown) == {"reason": text}
    assert "caf\xe9 \\u001b\\u007f\\u009b\\ud800\\n" in shown
    record = logging.makeLogRecord({"msg": "warning: \x1b[2J"})
    assert PrintableFormatter().format(record) == "warning: \\x1b[2J"
    assert printable_name("a\nb\x1b\t\ud800\u2028") == r"a\nb\x1b\t\ud800\u2028"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_log_cannot_control_the_terminal(
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


def test_only_terminal_py_calls_print() -> None:
    """All other output goes through it, or through the consoles of tables.py, which escape control characters."""
    command_line = Path(jobs.cli.__file__).parent
    prints = {
        str(path.relative_to(command_line))
        for path in command_line.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert prints == {"terminal.py"}
