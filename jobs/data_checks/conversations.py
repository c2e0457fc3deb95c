"""Read training examples of a language model, on the laptop and in a script: lines of JSON in one of three forms.

{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
{"prompt": "…", "completion": "…"}      # or both as lists of messages
{"text": "…"}
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

from jobs.core.errors import UsageError
from jobs.core.labels import text_error
from jobs.core.words import counted
from jobs.data_checks.table_rows import BadRows, Broken, TableRows

TEXT = "text"
"""The role of the only message of a plain text."""

_LEAST = 2
"""Examples that a training needs: one to train on, and one to hold out."""

_FORMS_NEXT = (
    "write each line as a JSON object with `messages` (a list of objects with `role` and `content`), or with `prompt` "
    "and `completion`, or with `text`"
)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One example."""

    messages: list[dict[str, Any]]
    """Each has a `role` and its `content`, which is text."""
    line: int
    """The line of the file."""

    @property
    def is_text(self) -> bool:
        return [message["role"] for message in self.messages] == [TEXT]


class Conversations(NamedTuple):
    """The examples of a file."""

    usable: list[Conversation]
    left_out: int
    """Number of conversations without an answer: no assistant's turn follows another message."""


def read_conversations(path: Path) -> Conversations:
    """Read the examples of a file. Raises UsageError that names all bad lines, or if there are too few examples."""
    try:
        with path.open("rb") as file:
            return conversations(file, path.name)
    except OSError as error:
        raise UsageError(f"{path.name} cannot be read: {error.strerror}", next_step="name one file") from None


def conversations(stream: BufferedIOBase, location: str, *, is_whole: bool = True) -> Conversations:
    """Read examples like `read_conversations`. If `is_whole` is False, the file has more lines than `stream`."""
    bad = BadRows()
    table = TableRows(
        location=location, columns=(), missing_next=_FORMS_NEXT, bad=bad, whole_rows=True, is_head=not is_whole
    )
    usable: list[Conversation] = []
    left_out = 0
    for values, _, line in table.rows_of_text(stream):
        if isinstance(values, Broken):
            continue
        row: Any = values[0]
        try:
            found = Conversation(messages=_messages(row), line=line)
            _check_form(found, usable)
        except UsageError as error:
            reason = UsageError(f"{table.place(line)}: {error.args[0]}", next_step=_FORMS_NEXT)
            if not (usable or left_out or bad.counts or _has_known_form(row)):
                raise reason from None  # no line has a form that the first line lacks
            table.refuse(reason)
            continue
        if found.is_text or any(message["role"] == "assistant" for message in found.messages[1:]):
            usable.append(found)
        else:
            left_out += 1
    if lines := bad.named(location):
        many = f"{counted(bad.counts.total(), 'bad line')}:\n" if len(lines) > 1 else ""
        raise UsageError(many + "\n".join(lines), next_step=bad.next_step(location))
    if is_whole and len(usable) < _LEAST:
        without = f", and {counted(left_out, 'conversation')} without an answer" if left_out else ""
        raise UsageError(
            f"{location} has {counted(len(usable), 'example')}{without}",
            next_step=f"add examples: a training needs at least {_LEAST}, one of which is held out",
        )
    return Conversations(usable, left_out)


def _check_form(found: Conversation, before: Sequence[Conversation]) -> None:
    """Raise UsageError if a text is among conversations, or the reverse: they are trained in different ways."""
    if before and found.is_text != before[0].is_text:
        raise UsageError(f"only one of this line and line {before[0].line} has `text`")


def _has_known_form(row: dict[str, Any]) -> bool:
    return "text" in row or "messages" in row or {"prompt", "completion"} <= row.keys()


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a line in any form. Raises UsageError with what is wrong."""
    if "text" in row:
        return [{"role": TEXT, "content": _text(row["text"], "`text`")}]
    if "messages" in row:
        return _turns(row["messages"], "`messages`")
    if not _has_known_form(row):
        names = f"; it has {', '.join(f'`{name}`' for name in row)}" if row else ""
        raise UsageError(f"has neither `messages` nor `prompt` and `completion` nor `text`{names}")
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*_turns(prompt, "`prompt`"), *_turns(completion, "`completion`")]
    return [
        {"role": "user", "content": _text(prompt, "`prompt`")},
        {"role": "assistant", "content": _text(completion, "`completion`")},
    ]


def _turns(messages: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise UsageError(f"{name} is not a list but {_short(messages)}")
    found = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UsageError(f"message {number} of {name} has no `role`: {_short(message)}")
        content = _text(message.get("content"), f"the `content` of message {number} of {name}")
        found.append({**message, "content": content})
    return found


def _text(value: Any, name: str) -> str:
    """Return text, or the joined texts of a list of parts. Raises UsageError for anything else."""
    if isinstance(value, list) and value and all(isinstance(part, dict) and part.get("type") == TEXT for part in value):
        return "".join(_text(part.get(TEXT), name) for part in value)
    if not isinstance(value, str):
        raise UsageError(f"{name} is not text but {_short(value)}")
    if reason := text_error(value):
        raise UsageError(f"{name} {reason}")
    return value


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:39]}…"
