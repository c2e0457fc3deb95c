"""The rows of a table of labelled examples that can be used: the same checks before a submission and in `data show`."""

from collections.abc import Iterable, Sequence
from typing import Any

from jobs.core.errors import UsageError
from jobs.core.labels import label_errors, text_error
from jobs.data_checks.table_rows import Broken, TableRows


def labelled_rows(
    table: TableRows, rows: Iterable[tuple[Sequence[Any] | Broken, int]], texts: Sequence[str], label: str
) -> list[tuple[tuple[str, ...], Any]]:
    """Return the texts and the label of each row that can be used. The table takes note of the others.

    `rows`: the values of the table's columns, and the line. Raises UsageError where nobody takes note of bad rows.
    """
    found, lines = list[tuple[tuple[Any, ...], Any]](), list[int]()
    for values, line in rows:
        if not isinstance(values, Broken):
            of_row = dict(zip(table.columns, values, strict=True))
            found.append((tuple(of_row[column] for column in texts), of_row[label]))
            lines.append(line)
    labels = [value for _, value in found]
    swallowed = table.refuse_joined(labels, lines)
    of_labels = label_errors(label, labels, lambda number: f"{table.unit} {lines[number]}")
    faults = {number: (reason, next_step) for number, reason, next_step in of_labels}
    usable = []
    for number, row in enumerate(found):
        if number in swallowed:
            continue
        reason = _text_fault(texts, row[0])
        fault = (reason, None) if reason else faults.get(number)
        if fault is None:
            usable.append(row)
        else:
            table.refuse(UsageError(f"{table.place(lines[number])}: {fault[0]}", next_step=fault[1]))
    return usable


def _text_fault(columns: Sequence[str], texts: Sequence[Any]) -> str | None:
    faults = (
        f"'{column}' {reason}" for column, text in zip(columns, texts, strict=True) if (reason := text_error(text))
    )
    return next(faults, None)
