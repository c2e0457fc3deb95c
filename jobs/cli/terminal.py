"""Prints plain text, asks questions, and turns errors into `error:` and `next:` lines and an exit code.

Control characters are escaped in all output, because file names, run names, log lines and AWS's errors are untrusted.
Tables print through the consoles of jobs/cli/tables.py, which escape them too.
"""

import errno
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import typer

from jobs.core.errors import Detached, TrainyardError, UsageError
from jobs.core.output import checked_output
from jobs.core.urls import without_logins
from jobs.core.words import json_text, printable, shortened

ABORTED_EXIT_CODE = 1


def print_text(text: str, *, to: TextIO | None = None) -> None:
    """Print a line on stdout, or on another stream, with control characters escaped."""
    print(printable(text), file=to or sys.stdout, flush=True)


def print_commands(steps: Iterable[tuple[str, str]]) -> None:
    """Print the commands to run next, each with its effect."""
    steps = list(steps)
    width = max((len(command) for command, _ in steps), default=0)
    for command, effect in steps:
        print_text(f"  {command:{width}}  {effect}".rstrip())


def write_page(path: Path, html: str) -> None:
    """Write an HTML page, creating its folder. Raises UsageError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", next_step="name another file") from None


def ask(question: str, *, unasked: UsageError) -> None:
    """Ask before spending money or deleting anything.

    Raises `unasked` if there is no terminal, typer.Abort if the answer is no.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise unasked
    typer.confirm(question, abort=True, err=True)


class PrintableFormatter(logging.Formatter):
    """Formats warnings without a prefix, with control characters escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def show_warnings() -> None:
    """Print warnings on stderr through `PrintableFormatter`.

    Changes logging's last-resort handler, because a handler on the root logger would also print the logs of libraries
    such as urllib3.
    """
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())


def run_reporting(command: Callable[[Sequence[str]], Any], arguments: Sequence[str]) -> int:
    """Run `command` with `arguments` and return its exit code.

    A user error is printed as an `error:` and a `next:` line, or with `-o json` as one JSON object on stderr:
    {"error": …, "next": …, "exit_code": …}. Any other exception keeps its traceback.
    """
    try:
        with checked_output():
            _check_utf_8(arguments)
            code = command(arguments)
    except TrainyardError as error:
        return _report(error, arguments)
    except typer.TyperException as error:
        return _report(_usage_error(error), arguments)
    except typer.Abort:
        return ABORTED_EXIT_CODE
    except Exception as error:
        explained = _explain(error)
        if explained is None:
            raise
        return _report(explained, arguments)
    return code if isinstance(code, int) else 0


def _check_utf_8(arguments: Sequence[str]) -> None:
    """Raise UsageError for an argument that is not UTF-8: neither AWS nor a spec accepts it."""
    for number, argument in enumerate(arguments, start=1):
        try:
            argument.encode()
        except UnicodeEncodeError:  # noqa: PERF203 - the first one ends the loop
            raise UsageError(f"argument {number}, {argument}, is not UTF-8", next_step="trainyard --help") from None


def _report(error: TrainyardError, arguments: Sequence[str]) -> int:
    message = without_logins(str(error.args[0]))
    if _wants_json(arguments):
        report = {"error": message, "next": error.next_step, "exit_code": error.exit_code}
        print_text(json_text(report), to=sys.stderr)
    else:
        prefix = "" if isinstance(error, Detached) else "error: "
        for line in message.splitlines():
            print_text(prefix + shortened(line), to=sys.stderr)
        if error.next_step:
            print_text(f"next: {shortened(without_logins(error.next_step))}", to=sys.stderr)
    return error.exit_code


def _usage_error(error: Any) -> TrainyardError:
    context = getattr(error, "ctx", None)
    usage = TrainyardError(
        error.format_message(), next_step=f"{context.command_path if context else 'trainyard'} --help"
    )
    usage.exit_code = error.exit_code
    return usage


def _explain(error: Exception) -> TrainyardError | None:
    """Return a user error for an error of boto3, Docker or the file system; None for a bug of ours."""
    if "botocore" in sys.modules:
        from jobs.aws.errors import explain

        if explained := explain(error):
            return explained
    if "docker" in sys.modules:
        from docker.errors import DockerException
        from requests import RequestException

        if isinstance(error, (DockerException, RequestException)):
            from jobs.images import engine

            return engine.explain(error)
    if isinstance(error, OSError) and error.filename:
        full = error.errno == errno.ENOSPC
        return TrainyardError(
            f"{error.filename}: {error.strerror or error}", next_step="free some disk space and retry" if full else None
        )
    return None


def _wants_json(arguments: Sequence[str]) -> bool:
    """Return whether `-o json` is among the arguments, even if they cannot be parsed."""
    pairs = itertools.pairwise(arguments)
    return any(pair in (("-o", "json"), ("--output", "json")) for pair in pairs) or any(
        argument in ("-ojson", "--output=json") for argument in arguments
    )
