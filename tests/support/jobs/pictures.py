"""The pictures of README.md: what a terminal and a browser show of one real run.

trainyard demo && python -m tests.support.jobs.pictures runs/RUN        another run, and its pictures
python -m tests.support.jobs.pictures                                   those of the run that is there, drawn anew

The run's own records are beside the pictures.
"""

import argparse
import io
import json
import re
import shutil
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

import yaml
from playwright.sync_api import sync_playwright
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from jobs.cli import tables
from jobs.cli.report import ready_spec
from jobs.contract.classes import ClassReport
from jobs.contract.data_summary import DataSummary
from jobs.contract.recorded_run import RecordedRun, metrics_line
from jobs.contract.records import Receipt
from jobs.contract.run import CLASSES, DATA, METRICS, RECEIPT, SPEC
from jobs.contract.spec import parse_spec
from jobs.report.page import run_page
from tests.support.jobs.pages import OpenedPage

PICTURES = Path("jobs/docs/pictures")
RECORDS = PICTURES / "run"
TERMINAL = PICTURES / "terminal.svg"
REPORT = PICTURES / "report.png"

WIDTH, HEIGHT = 1180, 1000
COLUMNS = 100


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.jobs.pictures", description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", help="a run of `trainyard fetch`")
    options = parser.parse_args()
    if options.run:
        shutil.rmtree(RECORDS, ignore_errors=True)
        RECORDS.mkdir(parents=True)
        for name in (SPEC, RECEIPT, METRICS, DATA):
            shutil.copy(options.run / name, RECORDS / name)
        classes = ClassReport.model_validate_json((options.run / CLASSES).read_bytes())
        without_texts = classes.model_copy(update={"mistakes": []})  # they are others'
        (RECORDS / CLASSES).write_text(without_texts.model_dump_json(indent=1) + "\n", encoding="utf-8")
    TERMINAL.write_text(terminal(), encoding="utf-8")
    _photograph(report())
    for path in (TERMINAL, REPORT):
        print(path)


def recorded() -> RecordedRun:
    """Return the run whose records are there."""
    receipt = Receipt.model_validate_json((RECORDS / RECEIPT).read_bytes())
    spec_text = (RECORDS / SPEC).read_text(encoding="utf-8")
    lines = map(json.loads, (RECORDS / METRICS).read_text(encoding="utf-8").splitlines())
    return RecordedRun(
        run_id=receipt.run_id,
        team=receipt.team,
        location=f"s3://runs/{receipt.team}/{receipt.run_id}/",
        spec_text=spec_text,
        spec=parse_spec(yaml.safe_load(spec_text), origin=SPEC),
        receipt=receipt,
        metrics=[found for line in lines if (found := metrics_line(line))],
        classes=ClassReport.model_validate_json((RECORDS / CLASSES).read_bytes()),
        data=DataSummary.model_validate_json((RECORDS / DATA).read_bytes()),
    )


def terminal() -> str:
    """Return what `trainyard receipt` prints of the run, less its place, as SVG that loads no font."""
    run = recorded()
    assert run.receipt is not None
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        _environ={},  # the same picture from whatever terminal, or from none
    )
    console.print(Text(f"$ trainyard receipt runs/{run.run_id}", style="bold"))
    tables.show_result(tables.receipt_table(run.receipt, location="", embedded=True), run.classes, on=console)
    template = re.sub(r"(?s)@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT)
    return console.export_svg(title="trainyard", code_format=template).rstrip() + "\n"


def report() -> str:
    """Return the page of the run as of a minute after its end."""
    run = recorded()
    ended = [attempt.finished_at for attempt in run.attempts if attempt.finished_at]
    made_at: datetime = max(ended) + timedelta(minutes=1)
    return run_page(run, now=made_at, recipe=ready_spec(run))


def _photograph(html: str) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder, "report.html")
        path.write_text(html, encoding="utf-8")
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = OpenedPage(browser).open(path, width=WIDTH)
        page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        page.screenshot(path=REPORT)
        browser.close()


if __name__ == "__main__":
    main()
