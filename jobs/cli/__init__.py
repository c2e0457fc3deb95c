"""The command `trainyard`: what researchers type.

trainyard submit SPEC      submit a spec and follow it        trainyard local up    the emulator
trainyard --help           the other commands

Data goes to stdout, everything said about it to stderr. Exit codes are those of jobs/core/errors.py. Each command
imports what it needs when it runs, so that help and completion stay quick.
"""

import gc
import sys


def main() -> None:
    """Entry point of the console script."""
    from jobs.cli.app import app
    from jobs.cli.failures import run_reporting
    from jobs.cli.plain import show_warnings

    show_warnings()
    try:
        sys.exit(run_reporting(lambda arguments: app(arguments, standalone_mode=False), sys.argv[1:]))
    finally:
        # The interpreter would search all of boto3 for what can be freed, a quarter of a short command's time, and then
        # end anyway.
        gc.freeze()
