"""A rank of a script of one's own: the script, in a process that its launcher watches over.

    python -m jobs.container.kinds.script FOLDER train.py --epochs 3
    python -m jobs.container.kinds.script --alone FOLDER accelerate launch train.py

A Python script runs in this process, as `python train.py` would: its folder is the first place that it imports from and
`__main__` is its own. Any other program takes this process's place. `--alone` is for what starts its own ranks: it
finds nothing in its environment by which it would take itself for one.
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

from jobs.container.rank import ALONE, Rank, begin, give_first_heartbeat, hide_place, one_line, tell_the_launcher
from jobs.core.errors import ConfigurationError, TrainyardError, UsageError
from jobs.spec.recipe import TRACKER_VARIABLES

CLEAN_UP_SECONDS = 10.0
"""The time that a script which has failed gets for what it does at its exit: its peers are waiting, or gone."""


def run_script(folder: Path, command: list[str], *, alone: bool = False) -> None:
    """Run the command in the folder. Ends this process, unless the script comes to its end."""
    begin()
    if alone:
        hide_place()
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setpgid(0, 0)  # what it starts ends with it
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # TextIO does not declare it
    try:
        rank = Rank.from_environment()
        give_first_heartbeat(rank)
        if rank.is_first and not os.environ.keys().isdisjoint(TRACKER_VARIABLES.values()):
            from jobs.container.trainer.trackers import (
                join_run_of_script,
            )  # its imports take time that others need not wait for

            join_run_of_script(rank.run)
        os.chdir(folder)
        if command[0] == "-m":
            _run_module(folder, command[1], command[2:])
        elif command[0].endswith(".py"):
            _run_file(folder / command[0], command[1:])
        else:
            _become(command)
    except (TrainyardError, ConfigurationError) as error:
        tell_the_launcher(one_line(error), explained=True)
        _leave()
    except Exception as error:  # noqa: BLE001 - the process ends here, and says why
        _print_own(error)
        tell_the_launcher(f"{type(error).__name__}: {error}")
        _leave()


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


def _become(command: list[str]) -> None:
    """Let the program take this process's place; the kernel's word to the launcher's end goes with it."""
    found = shutil.which(command[0]) or (f"./{command[0]}" if Path(command[0]).is_file() else None)
    if found is None:
        raise UsageError(
            f"there is no program '{command[0]}' in the image, in the requirements, or in the code",
            next_step="correct arguments.command, or name the package that brings it in the requirements",
        )
    sys.stdout.flush()
    try:
        os.execv(found, command)  # noqa: S606 - the user's own program, whose words no shell reads
    except OSError as error:
        raise UsageError(f"'{command[0]}' cannot be run: {error.strerror}", next_step="is it executable?") from None


def _print_own(error: BaseException) -> None:
    """Print the traceback from the script's own first line on."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _leave() -> None:
    """End with exit code 1, in some seconds whatever holds this process."""
    sys.stdout.flush()
    timer = threading.Timer(CLEAN_UP_SECONDS, os._exit, [1])
    timer.daemon = True
    timer.start()
    raise SystemExit(1)


if __name__ == "__main__":
    is_alone = sys.argv[1] == ALONE
    place, *words = sys.argv[1 + is_alone :]
    run_script(Path(place), words, alone=is_alone)
