"""Reads the JSON that a run has left of itself, as far as it can be read.

What only a later release knows is ignored. A file or a line that is damaged is left out, with one warning that names
it: the account of a run must not keep it from going on.
"""

import functools
import json
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pydantic import BaseModel

from jobs.core.display import printable
from jobs.core.errors import TrainyardError
from jobs.core.instance_types import instance_type
from jobs.core.records import Attempt, Receipt
from jobs.core.words import counted

log = logging.getLogger("trainyard")

Record = TypeVar("Record", bound=BaseModel)

_WARNINGS_KEPT = 4096
"""Records are read every half minute, and each warning is given once: so many are remembered."""

_LARGEST_STEP = 2**53

_LEFT_OUT = "cannot be read: it is left out"
_AS_IT_IS = "trainyard fetch RUN brings it as it is; its run is resumed without it"


class UnreadableError(TrainyardError):
    """A file that is no record of its kind: it is damaged, or of a release that writes another one."""


def parse(model: type[Record], content: bytes, *, place: object) -> Record:
    """Return the record that lies at `place`. Raises UnreadableError where it is none."""
    try:
        return model.model_validate_json(content, extra="ignore")
    except (ValueError, RecursionError) as error:
        raise UnreadableError(
            f"{place} cannot be read: {_first_line(error)}",
            next_step=_AS_IT_IS,
        ) from None


def read(model: type[Record], content: bytes | None, *, place: object) -> Record | None:
    """Return the record that lies at `place`; None where there is none, or, with a warning, none that can be read."""
    try:
        return None if content is None else parse(model, content, place=place)
    except UnreadableError:
        _warn(f"{place} {_LEFT_OUT}")
        return None


def parse_receipt(content: bytes, *, place: object) -> Receipt:
    """Return the receipt that lies at `place`. Raises UnreadableError where it is none, or cannot be priced here."""
    receipt = parse(Receipt, content, place=place)
    receipt = receipt.model_copy(update={"result": _finite(receipt.result, place)})
    if not receipt.attempts:
        raise UnreadableError(f"{place} cannot be read: it has no attempt", next_step=_AS_IT_IS)
    try:
        for attempt in receipt.attempts:
            instance_type(attempt.instance_type)  # an older release may not know it
    except TrainyardError as error:
        raise UnreadableError(f"{place} cannot be read: {error.args[0]}", next_step=_AS_IT_IS) from None
    return receipt


def read_receipt(content: bytes | None, *, place: object) -> Receipt | None:
    """Return the receipt that lies at `place`; None where there is none, or, with a warning, none that can be read."""
    try:
        return None if content is None else parse_receipt(content, place=place)
    except UnreadableError:
        _warn(f"{place} {_LEFT_OUT}")
        return None


def read_attempt(content: bytes, *, place: object) -> Attempt | None:
    """Return the record of an attempt; None, with a warning, where it cannot be read or priced."""
    try:
        attempt = parse(Attempt, content, place=place)
        instance_type(attempt.instance_type)  # an older release may not know it
    except TrainyardError:
        _warn(f"{place} cannot be read: it is left out, and so is what that attempt took")
        return None
    return attempt


def read_lines(
    content: bytes | None, *, place: object, accept: Callable[[dict[str, Any]], dict[str, Any] | None] = dict
) -> list[dict[str, Any]]:
    """Return the objects of a file that has one a line, each as `accept` returns it.

    What is no object is left out with one warning for the file, and so is what `accept` returns None for.
    """
    found = map(_object, (content or b"").splitlines())
    accepted = [None if line is None else accept(line) for line in found]
    lines = [None if line is None else _finite(line, place) for line in accepted]
    if None in lines:
        _warn(
            f"{place}: left out {counted(lines.count(None), 'line')} that cannot be read, the first at line "
            f"{lines.index(None) + 1}"
        )
    return [line for line in lines if line is not None]


def with_step(line: dict[str, Any]) -> dict[str, Any] | None:
    """Return a line of metrics.jsonl as it is; None where it has no step."""
    return line if is_step(line.get("step")) else None


def is_step(value: object) -> bool:
    """Return whether a value counts steps: a whole number that a program in any language can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST_STEP


def _finite(values: dict[str, Any], place: object) -> dict[str, Any]:
    """Return values with None for each number that no metric can be: JSON takes 400 digits, and infinity by 1e999."""
    numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    nonsense = [name for name, value in numbers.items() if not abs(value) <= sys.float_info.max]
    if not nonsense:
        return values
    _warn(f"{place}: {', '.join(nonsense)} has values that are no finite number: these are left out")
    return {**values, **dict.fromkeys(nonsense)}


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _first_line(error: Exception) -> str:
    errors: Iterable[Any] = error.errors() if hasattr(error, "errors") else ()
    for item in errors:
        return str(item["msg"])
    return str(error).splitlines()[0]


@functools.lru_cache(maxsize=_WARNINGS_KEPT)
def _warn(text: str) -> None:
    log.warning("warning: %s", printable(text))
