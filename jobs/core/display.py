"""Text that others wrote, made fit to be shown: without characters that steer a terminal, and not without end."""

import json
import re
from typing import Any

MAX_SHOWN_CHARACTERS = 1000
"""A longer text is shown without its middle."""

_UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for tabs and line ends, separators of lines, those that turn the direction of writing, and
halves of pairs."""

_COLOUR = re.compile("\x1b\\[[0-9;:]*m")
"""Sets colours and styles of a terminal (ECMA-48, "SGR"), as progress bars do."""


def printable(text: str) -> str:
    """Return the text with an escape, of letters and digits, for each character that no terminal should get."""
    return _UNSHOWABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def printable_name(name: str) -> str:
    """Return the name of a file, which may have line ends too, as one line."""
    return printable(name).replace("\n", "\\n").replace("\t", "\\t")


def log_text(text: str) -> str:
    """Return a line that a job has logged, without its colours and its line end."""
    return printable(_COLOUR.sub("", text.rstrip("\r\n")))


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return the value as JSON that is fit for a terminal: the same characters are escapes of JSON's own."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=str)
    return _UNSHOWABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def shortened(text: str) -> str:
    """Return the text, without its middle where it is long."""
    half = MAX_SHOWN_CHARACTERS // 2
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
