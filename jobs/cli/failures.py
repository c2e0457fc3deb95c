"""Errors become the end of a command: its exit code, and one `error:` and one `next:` line in place of a traceback.

With `-o json` the error is one JSON object on stderr: {"error": …, "next": …, "exit_code": …}.
"""

import errno
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jobs.cli.plain import print_text
from jobs.core.errors import Detached, TrainyardError, UsageError
from jobs.core.output import checked_output
from jobs.core.urls import without_logins
from jobs.core.words import json_text, shortened

ABORTED_EXIT_CODE = 1


def run_reporting(command: Callable[[Sequence[str]], Any], arguments: Sequence[str]) -> int:
    """Run `command` on `arguments` and return its exit code; what is no user's error keeps its traceback."""
    import typer

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
    """Raise UsageError where the shell gave bytes that are no text, which neither AWS nor a spec could take."""
    for number, argument in enumerate(arguments, start=1):
        try:
            argument.encode()
        except UnicodeEncodeError:  # noqa: PERF203 - the first one ends it
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
            f"{error.filename}: {error.strerror or error}", next_step="free some space, then again" if full else None
        )
    return None


def _wants_json(arguments: Sequence[str]) -> bool:
    """Return whether `-o json` is among the arguments, even where they are too wrong to be parsed."""
    pairs = itertools.pairwise(arguments)
    return any(pair in (("-o", "json"), ("--output", "json")) for pair in pairs) or any(
        argument in ("-ojson", "--output=json") for argument in arguments
    )
