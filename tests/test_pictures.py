"""The pictures of README.md show what users see today."""

import json

from tests.support.jobs import pictures

AGAIN = "python -m tests.support.jobs.pictures"


def test_the_terminal_shows_what_a_receipt_prints() -> None:
    assert pictures.TERMINAL.read_text(encoding="utf-8") == pictures.terminal(), AGAIN


def test_the_report_has_the_headings_and_figures_of_its_picture() -> None:
    assert json.loads(pictures.SHOWN.read_text(encoding="utf-8")) == pictures.shown(pictures.report()), AGAIN
    assert pictures.REPORT.read_bytes().startswith(b"\x89PNG")
