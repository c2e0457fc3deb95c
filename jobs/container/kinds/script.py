"""Run one rank of a custom script, in a process that the launcher watches.

    python -m jobs.container.kinds.script FOLDER train.py --epochs 3
    python -m jobs.container.kinds.script --alone FOLDER accelerate launch train.py

A Python script runs in this process, as with `python train.py`: its folder is first on `sys.path`, and it is
`__main__`. Any other program replaces this process. `--alone` is for programs that start their own ranks: it removes
torchrun's variables, which would make the program act as a rank.
"""

import contextlib
import os
import runpy
import shutil
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType

from jobs.container.rank import (
    ALONE,
    Rank,
    hide_torchrun_variables,
    one_line,
    prepare_process,
    report_failure,
    write_first_heartbeat,
)
from jobs.core.errors import ConfigurationError, TrainyardError, UsageError
from jobs.spec.recipe import TRACKER_VARIABLES

CLEAN_UP_SECONDS = 10.0
"""Time limit for the exit handlers of a failed script. Its peers are waiting for it, or gone."""


def run_script(folder: Path, command: list[str], *, alone: bool = False) -> None:
    """Run the command in the folder. Returns only if the command is a Python script and succeeds."""
    prepare_process()
    if alone:
        hide_torchrun_variables()
    with contextlib.suppress(PermissionError):  # this process already leads a session
        os.setpgid(0, 0)  # so that its child processes end with it
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # TextIO does not declare it
    try:
        rank = Rank.from_environment()
        write_first_heartbeat(rank)
        if rank.is_first and not os.environ.keys().isdisjoint(TRACKER_VARIABLES.values()):
            # Imported here, because it is slow and most scripts do not need it.
            from jobs.container.trainer.trackers import join_run_of_script

            join_run_of_script(rank.run)
        os.chdir(folder)
        if command[0] == "-m":
            _run_module(folder, command[1], command[2:])
        elif command[0].endswith(".py"):
            _run_file(folder / command[0], command[1:])
        else:
            _exec(command)
    except (TrainyardError, ConfigurationError) as error:
        report_failure(one_line(error), explained=True)
        _fail()
    except Exception as error:  # noqa: BLE001 - the process reports any error and ends
        _print_traceback(error)
        report_failure(f"{type(error).__name__}: {error}")
        _fail()


def _run_file(path: Path, arguments: list[str]) -> None:
    if not path.is_file():
        raise UsageError(f"the code has no file '{path}'", next_step="correct arguments.command")
    sys.argv = [str(path), *arguments]
    sys.path[0] = str(path.parent)
    runpy.run_path(str(path), run_name="__main__")


def _run_module(folder: Path, module: str, arguments: list[str]) -> None:
    sys.argv = [module, *arguments]
    sys.path[0] = str(folder)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _exec(command: list[str]) -> None:
    """Replace this process with the program, which still dies with the launcher (prctl survives exec)."""
    found = shutil.which(command[0]) or (f"./{command[0]}" if Path(command[0]).is_file() else None)
    if found is None:
        raise UsageError(
            f"there is no program '{command[0]}' in the image, in the requirements, or in the code",
            next_step="correct arguments.command, or add the package that contains it to the requirements",
        )
    sys.stdout.flush()
    try:
        os.execv(found, command)  # noqa: S606 - the user's program, run without a shell
    except OSError as error:
        raise UsageError(
            f"'{command[0]}' cannot be run: {error.strerror}", next_step="check that it is executable"
        ) from None


def _print_traceback(error: BaseException) -> None:
    """Print the traceback without our own frames."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _fail() -> None:
    """Exit with code 1, at most ten seconds later."""
    sys.stdout.flush()
    timer = threading.Timer(CLEAN_UP_SECONDS, os._exit, [1])
    timer.daemon = True
    timer.start()
    raise SystemExit(1)


if __name__ == "__main__":
    is_alone = sys.argv[1] == ALONE
    place, *words = sys.argv[1 + is_alone :]
    run_script(Path(place), words, alone=is_alone)
