"""Every error that a user can see, and its exit code.

    TrainyardError          1    something the user can act on went wrong
    ├── JobFailedError      1    the job ran and failed
    ├── MaybeSubmittedError 1    the response to a submission was lost; the job may exist
    ├── UsageError          2    the command line or a spec is wrong
    ├── ConfigurationError  3    credentials, settings, a stage that is not deployed, no emulator
    ├── NotFoundError       4    a run, a file, a prefix that does not exist
    ├── TimedOutError     124    a wait or a job timed out
    ├── Detached          130    the user pressed Ctrl-C; the job continues
    └── StoppedError      130    the user pressed Ctrl-C; the local process was stopped

A container has different exit codes, because AWS Batch uses them to decide whether to retry the job: 0 for success, 1
for the job's own error (never retried), `INTERRUPTED_EXIT_CODE` for "interrupted, resume me" (retried), and
`SWEEP_OVER_EXIT_CODE` from a sweep's worker (never retried).
"""

import difflib
from collections.abc import Iterable, Sequence

INTERRUPTED_EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: a temporary failure, after which the caller should try again."""

SWEEP_OVER_EXIT_CODE = 3
"""The worker found no point of the sweep left to start, and not all points have succeeded."""

_MAX_NAMED = 16
"""Longer lists of names are not printed."""


class TrainyardError(Exception):
    """Base class. Its message names what is wrong, where, and what to do next; it is printed without a traceback."""

    exit_code = 1

    def __init__(self, message: str, *, next_step: str | None = None) -> None:
        """Store the message and `next_step`: the command or edit that solves the problem, printed on its own line."""
        super().__init__(message)
        self.next_step = next_step

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\nNext: {self.next_step}" if self.next_step else message


class JobFailedError(TrainyardError):
    """The job ran to its end and failed."""


class MaybeSubmittedError(TrainyardError):
    """The response to a submission was lost, so the job may or may not exist."""


class UsageError(TrainyardError):
    """The command line or a spec is wrong; nothing was submitted."""

    exit_code = 2


class ConfigurationError(TrainyardError):
    """Credentials or settings are wrong, or something must be deployed or started first."""

    exit_code = 3


class NotFoundError(TrainyardError):
    """A run, a file or a prefix that does not exist."""

    exit_code = 4


class TimedOutError(TrainyardError):
    """A wait, or the job itself, timed out."""

    exit_code = 124


class Detached(TrainyardError):  # noqa: N818 - not an error: the job continues
    """The user stopped watching; the job continues."""

    exit_code = 130


class StoppedError(TrainyardError):
    """The user stopped a process on this machine."""

    exit_code = 130


def raise_all(errors: Sequence[TrainyardError]) -> None:
    """Raise one error with the messages and next steps of all `errors`. Do nothing if there are none.

    The exit code is that of `errors` if they all have the same one, else UsageError's.
    """
    if len(errors) == 1:
        raise errors[0]
    if errors:
        together = UsageError("\n".join(str(error).replace("\nNext: ", "; next: ") for error in errors))
        codes = {error.exit_code for error in errors}
        together.exit_code = codes.pop() if len(codes) == 1 else UsageError.exit_code
        raise together


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` with the names that start with `word`, else with the closest one, else with those
    that contain it.

    If there is neither, return the whole list if it is short, else an empty string.
    """
    names = sorted(known)
    meant = [name for name in names if word and name.startswith(word)]
    if not 1 <= len(meant) <= _MAX_NAMED:
        meant = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not meant and len(word) > 2:
        meant = [name for name in names if word in name][:_MAX_NAMED]
    if meant:
        *others, last = (f"'{name}'" for name in meant)
        return f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
    if names and len(names) <= _MAX_NAMED:
        return "; available: " + ", ".join(f"'{name}'" for name in names)
    return ""
