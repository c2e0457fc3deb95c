"""Where the command line prints lines that are no table: control characters in a text are shown, never obeyed.

Tables and sentences pass through the consoles of jobs/cli/tables.py, which do the same. Everything that others wrote
passes through one of the two: names of files and runs, log lines, errors of AWS.
"""

import logging
import sys
from typing import TextIO

from jobs.core.words import printable


def print_text(text: str, *, to: TextIO | None = None) -> None:
    """Print a text on stdout, or on another stream."""
    print(printable(text), file=to or sys.stdout, flush=True)


class PrintableFormatter(logging.Formatter):
    """Formats warnings as they are, with control characters shown."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def show_warnings() -> None:
    """Have warnings printed on stderr through `PrintableFormatter`.

    Not by a handler of the root logger: it would show what libraries keep to themselves, such as urllib3.
    """
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())
