"""Every error a user may meet, and the exit code each one owns.

    TrainyardError          1    something the user can act on went wrong
    ├── JobFailedError      1    the job ran and failed
    ├── MaybeSubmittedError 1    the answer to a submission was lost; the job may exist
    ├── UsageError          2    the command line or a spec is wrong
    ├── ConfigurationError  3    credentials, settings, a stage that is not deployed, no emulator
    ├── NotFoundError       4    a run, a file, a prefix that does not exist
    ├── TimedOutError     124    a wait or a job ran out of its time
    ├── Detached          130    the user pressed Ctrl-C; the job goes on
    └── StoppedError      130    the user pressed Ctrl-C; what ran here was stopped

A container has exit codes of its own, since AWS Batch decides by them whether to start it again:
0 done, 1 the job's own fault (never retried), `INTERRUPTED_EXIT_CODE` "interrupted, resume me" (retried), and of a
sweep's worker `SWEEP_OVER_EXIT_CODE` (never retried).
"""

import difflib
from collections.abc import Iterable, Sequence

INTERRUPTED_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: a temporary failure, the caller is invited to try again."""

SWEEP_OVER_EXIT_CODE = 3
"""A worker of a sweep found no point left to begin, and not all of its points have succeeded."""

_MOST_NAMED = 16
"""A longer list of names helps nobody."""


class TrainyardError(Exception):
    """Base of all: its message says what, where and what next, and is printed without a traceback."""

    exit_code = 1

    def __init__(self, message: str, *, next_step: str | None = None) -> None:
        """`next_step` is the command or edit that gets the user further; it is printed on a line of its own."""
        super().__init__(message)
        self.next_step = next_step

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\nNext: {self.next_step}" if self.next_step else message


class JobFailedError(TrainyardError):
    """The job ran to its end and failed."""


class MaybeSubmittedError(TrainyardError):
    """The answer to a submission was lost, and nobody could tell whether the job exists."""


class UsageError(TrainyardError):
    """The command line or a spec is wrong; nothing was submitted."""

    exit_code = 2


class ConfigurationError(TrainyardError):
    """Credentials, settings, or something that should have been deployed or started first."""

    exit_code = 3


class NotFoundError(TrainyardError):
    """A run, a file or a prefix that does not exist."""

    exit_code = 4


class TimedOutError(TrainyardError):
    """A wait, or the job itself, ran out of its time."""

    exit_code = 124


class Detached(TrainyardError):  # noqa: N818 - not an error: the job goes on
    """The user stopped watching; the job goes on."""

    exit_code = 130


class StoppedError(TrainyardError):
    """The user stopped what ran on this machine."""

    exit_code = 130


def raise_all(errors: Sequence[TrainyardError]) -> None:
    """Raise one error that says all of them, each with what next; nothing where there are none.

    Its exit code is theirs where they have the same, else that of the wrong usage.
    """
    if len(errors) == 1:
        raise errors[0]
    if errors:
        together = UsageError("\n".join(str(error).replace("\nNext: ", "; next: ") for error in errors))
        codes = {error.exit_code for error in errors}
        together.exit_code = codes.pop() if len(codes) == 1 else UsageError.exit_code
        raise together


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` with what `word` is the beginning of, else with what is closest to it.

    Where there is neither, the whole list when it is short, or nothing.
    """
    names = sorted(known)
    meant = [name for name in names if word and name.startswith(word)]
    if not 1 <= len(meant) <= _MOST_NAMED:
        meant = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if meant:
        *others, last = (f"'{name}'" for name in meant)
        return f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
    if names and len(names) <= _MOST_NAMED:
        return "; there is " + ", ".join(f"'{name}'" for name in names)
    return ""
