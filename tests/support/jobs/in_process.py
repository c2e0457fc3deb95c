"""`trainyard` in this process, with a folder, an environment and standard streams of its own.

A process of its own takes half a second and more to import what this one has. Tests of a terminal, of signals or of two
commands at once start the program itself.
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest

from jobs.cli.app import app
from jobs.cli.failures import run_reporting
from jobs.cli.plain import show_warnings


def run(
    arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], stdin: str
) -> subprocess.CompletedProcess[str]:
    """Run `trainyard ARGUMENTS…` to its end in a folder, with just this environment."""
    show_warnings()
    with ExitStack() as stack:
        streams = [stack.enter_context(tempfile.TemporaryFile("w+b")) for _ in range(3)]
        streams[0].write(stdin.encode())
        streams[0].seek(0)
        with pytest.MonkeyPatch.context() as patch, _descriptors(streams):
            for name in set(os.environ) - set(environment):
                patch.delenv(name)
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.chdir(folder)
            patch.setattr(tempfile, "tempdir", None)  # read from TMPDIR when it is asked for next
            patch.setattr(sys, "argv", ["trainyard", *arguments])
            patch.setattr(logging.getLogger(), "handlers", [])  # pytest's would keep warnings from stderr
            for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
                patch.setattr(sys, name, stack.enter_context(open(number, mode, encoding="utf-8", closefd=False)))
            code = _exit_code(arguments)
            sys.stdout.flush()
            sys.stderr.flush()
        for stream in streams[1:]:
            stream.seek(0)
        stdout, stderr = (stream.read().decode(errors="replace") for stream in streams[1:])
    return subprocess.CompletedProcess(["trainyard", *arguments], code, stdout, stderr)


def _exit_code(arguments: Sequence[str]) -> int:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return run_reporting(lambda given: app(given, standalone_mode=False), arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except BaseException:  # noqa: BLE001 - what the interpreter would print
        traceback.print_exc()
        return 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _descriptors(streams: Sequence[IO[bytes]]) -> Iterator[None]:
    """Let this process, and what it starts, read and write these files in place of its standard streams."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = [os.dup(number) for number in range(3)]
    for number, stream in enumerate(streams):
        stream.flush()
        os.dup2(stream.fileno(), number)
    try:
        yield
    finally:
        for number, descriptor in enumerate(before):
            os.dup2(descriptor, number)
            os.close(descriptor)
