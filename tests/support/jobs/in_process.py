"""Runs `trainyard` in this process, with a separate folder, environment and standard streams.

A separate process would need half a second or more for imports. Tests of a terminal, of signals or of two commands at
once start the program itself.
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
from jobs.cli.terminal import run_reporting, show_warnings


def run(
    arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], stdin: str
) -> subprocess.CompletedProcess[str]:
    """Run `trainyard ARGUMENTS…` in a folder with exactly this environment, and wait for its end."""
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
            patch.setattr(tempfile, "tempdir", None)  # read from TMPDIR again at its next use
            patch.setattr(sys, "argv", ["trainyard", *arguments])
            patch.setattr(logging.getLogger(), "handlers", [])  # pytest's handlers would keep warnings from stderr
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
    except BaseException:  # noqa: BLE001 - print it like the interpreter
        traceback.print_exc()
        return 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _descriptors(streams: Sequence[IO[bytes]]) -> Iterator[None]:
    """Use these files as the standard streams of this process and its children."""
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
