"""The command line `trainyard`.

trainyard submit SPEC      submit a spec and follow it        trainyard local up    start the emulator
trainyard --help           list all commands

Data goes to stdout, messages go to stderr. Exit codes are listed in jobs/core/errors.py. A command imports boto3,
pydantic and rich when it runs, which keeps --help and completion fast.
"""

import gc
import sys


def main() -> None:
    """Run the console script `trainyard`."""
    from jobs.cli.app import app
    from jobs.cli.terminal import run_reporting, show_warnings

    show_warnings()
    try:
        sys.exit(run_reporting(lambda arguments: app(arguments, standalone_mode=False), sys.argv[1:]))
    finally:
        # At exit the interpreter would search all of boto3 for garbage: a quarter of a short command's time.
        gc.freeze()
