"""How text is laid out on a terminal."""

import io

from rich.console import Console
from rich.text import Text

from jobs.cli import tables


def test_a_line_is_broken_between_words_and_an_address_stays_whole() -> None:
    address = "s3://a-bucket-with-a-long-name/research/tickets-20261125-214328-ce0d/"
    console = Console(file=io.StringIO(), width=37, force_terminal=True, color_system=None)
    tables.print_line(Text(f"attempt 1 of {address}: fine-tuning on the classes of all the tickets"), on=console)
    assert isinstance(console.file, io.StringIO)
    # The third one is as wide as the terminal, which would begin a line for a blank behind it.
    assert console.file.getvalue().splitlines() == [
        "attempt 1 of",
        f"{address}:",
        "fine-tuning on the classes of all the",
        "tickets",
    ]
