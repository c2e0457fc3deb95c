"""Rows of a table that cannot be used: named with their places, counted, and left out where that is asked for."""

from collections import Counter
from collections.abc import Iterable

from jobs.core.errors import TrainyardError, UsageError

MAX_NAMED = 10
"""So many bad rows of a table are named; more are counted."""


class BadRows:
    """What was found of them, in all tables of a job."""

    def __init__(self, *, skip: bool = False, at_most: int = 0) -> None:
        """`at_most`: where they are left out, one more ends the job."""
        self.skip = skip
        self._at_most = at_most
        self._errors: dict[str, list[TrainyardError]] = {}
        self.counts: Counter[str] = Counter()
        """How many there are, by the location of their table."""
        self.warnings: list[str] = []
        """What looks like a mistake in rows that can be used."""

    def add(self, location: str, error: TrainyardError, *, rows: int = 1) -> None:
        """Note some more, for which `error` is the message. Raises UsageError where they are more than may be left out.

        `rows`: of a quoted field that ends nowhere, the lines that it takes.
        """
        self.counts[location] += rows
        errors = self._errors.setdefault(location, [])
        if len(errors) < MAX_NAMED:
            errors.append(error)
        if self.skip and self.counts.total() > self._at_most:
            raise UsageError(
                f"more than {self._at_most} bad rows, which is all that max_bad_rows lets be left out; among them:\n"
                + "\n".join(self.named(location)),
                next_step="mend the table, or set max_bad_rows higher",
            )

    def forget(self, location: str, ending: str) -> None:
        """Leave those of a table out again whose message has `ending` in it."""
        kept = [error for error in self._errors.get(location, []) if ending not in str(error.args[0])]
        if len(kept) < len(self._errors.get(location, [])):
            self._errors[location], self.counts[location] = kept, len(kept)
            if not kept:
                del self._errors[location], self.counts[location]

    def named(self, location: str) -> list[str]:
        """Return a line for each of the first ones of a table, and one for the number of those behind them."""
        errors = self._errors.get(location, [])
        lines = [str(error.args[0]) for error in errors]
        more = self.counts[location] - len(errors)
        return [*lines, f"and {more} more"] if more > 0 else lines

    def next_step(self, location: str) -> str | None:
        """Return what to do about the bad rows of a table, or None if nothing is known to help."""
        return "; or ".join(_steps(self._errors.get(location, []))[:2]) or None

    def refuse(self) -> None:
        """Raise UsageError with all that were found, unless they are left out."""
        if self.skip or not self.counts:
            return
        errors = [error for of_table in self._errors.values() for error in of_table]
        steps = _steps(errors)
        if len(errors) == 1:
            errors[0].next_step = "; or ".join([*steps, "leave such rows out with on_bad_rows: skip"])
            raise errors[0]
        raise UsageError(
            f"{self.counts.total()} bad rows:\n"
            + "\n".join(line for location in self._errors for line in self.named(location)),
            next_step="; or ".join([*steps[:2], "leave them out with on_bad_rows: skip"]),
        )


def _steps(errors: Iterable[TrainyardError]) -> list[str]:
    return list(dict.fromkeys(error.next_step for error in errors if error.next_step))
