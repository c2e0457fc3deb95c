"""Draws the pictures of README.md: one real run in a terminal and in a browser. Its records are next to the pictures.

trainyard demo && python -m tests.support.jobs.pictures runs/RUN        use another run and draw its pictures
python -m tests.support.jobs.pictures                                   draw the pictures of the stored run again
"""

import argparse
import io
import re
import shutil
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from jobs.cli import tables
from jobs.cli.report import ready_spec
from jobs.core.run import CLASSES, DATA, METRICS, RECEIPT, SPEC
from jobs.data_checks.classes import ClassReport
from jobs.report.run_page import run_page
from jobs.runs.recorded_run import RecordedRun
from jobs.runs.run_records import read_fetched_run
from tests.support.jobs.pages import OpenedPage

PICTURES = Path("jobs/docs/pictures")
RECORDS = PICTURES / "run"
TERMINAL, REPORT = PICTURES / "terminal.svg", PICTURES / "report.png"
WIDTH, HEIGHT, COLUMNS = 1180, 1000, 100


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
        without_texts = classes.model_copy(update={"mistakes": []})  # the texts have other authors
        (RECORDS / CLASSES).write_text(without_texts.model_dump_json(indent=1) + "\n", encoding="utf-8")
    run = read_fetched_run(RECORDS)
    run = replace(run, location=f"s3://runs/{run.team}/{run.run_id}/")
    TERMINAL.write_text(terminal(run), encoding="utf-8")
    photograph(run)
    print(TERMINAL, REPORT, sep="\n")


def terminal(run: RecordedRun) -> str:
    """Return the output of `trainyard receipt` for the run, without its location, as SVG that loads no font."""
    assert run.receipt is not None
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        _environ={},  # the same picture on any terminal, or without one
    )
    console.print(Text(f"$ trainyard receipt runs/{run.run_id}", style="bold"))
    tables.show_result(tables.receipt_table(run.receipt, location="", emulated=True), run.classes, on=console)
    template = re.sub(r"(?s)@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT)
    return console.export_svg(title="trainyard", code_format=template).rstrip() + "\n"


def photograph(run: RecordedRun) -> None:
    """Draw the report of the run one minute after its end."""
    ended = max(attempt.finished_at for attempt in run.attempts if attempt.finished_at)
    html = run_page(run, now=ended + timedelta(minutes=1), recipe=ready_spec(run))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder, "report.html")
        path.write_text(html, encoding="utf-8")
        program = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = OpenedPage(browser).open(path, width=WIDTH)
        page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        page.screenshot(path=REPORT)
        browser.close()


if __name__ == "__main__":
    main()
