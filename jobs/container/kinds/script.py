"""Run one rank of a custom script, in a process that the launcher watches.

    python -m jobs.container.kinds.script CODE WORKDIR train.py --epochs 3
    python -m jobs.container.kinds.script --alone CODE WORKDIR accelerate launch train.py

A Python script runs in this process, as with `python train.py`: its folder is first on `sys.path`, and it is
`__main__`. The folder of the code and its `src/` follow on the path. Any other program replaces this process. `--alone`
is for programs that start their own ranks: it removes torchrun's variables, which would make the program act as a rank.
"""

import contextlib
import os
import re
import runpy
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType, TracebackType

from jobs.container.channel import write_left
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


_NEEDS_CUDA = re.compile(r"'_cuda_\w+'|not compiled with CUDA|doesn't have NCCL built in|No CUDA GPUs")
"""Errors of a torch without CUDA."""

_LOOK_SECONDS = 1.0

LONE_SECONDS = 60.0
"""Time from the first observed backward pass to the warning. A script may join a group at any time before it trains."""

_OTHER_GROUPS = ("horovod", "mpi4py")
"""Modules with which ranks may cooperate without torch.distributed."""


def run_script(code: Path, folder: Path, command: list[str], *, alone: bool = False) -> None:
    """Run the command in a folder of the code. Returns only if the command is a Python script and succeeds."""
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
        _add_to_path(code)
        if rank.world_size > 1 and rank.is_first and not alone:
            _watch_for_lone_ranks(rank.world_size)
        try:
            if command[0] == "-m":
                _run_module(folder, command[1], command[2:])
            elif command[0].endswith(".py"):
                _run_file(folder / command[0], command[1:])
            else:
                _exec(command)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        write_left(rank.scratch, rank.rank)
    except (TrainyardError, ConfigurationError) as error:
        report_failure(one_line(error), explained=True)
        _fail()
    except Exception as error:  # noqa: BLE001 - the process reports any error and ends
        _print_traceback(error)
        message = f"{type(error).__name__}: {error}"
        needs_cuda = _NEEDS_CUDA.search(message) is not None
        if needs_cuda:
            message += (
                ". Next: the script asks for CUDA, which this machine's torch lacks; see 'From a CUDA script to Gaudi' "
                "in jobs/docs/scripts.md"
            )
        report_failure(message, explained=needs_cuda)
        _fail()


def _add_to_path(code: Path) -> None:
    """Make the packages of the code importable, here and in the processes that the script starts.

    The launcher does not set this path, because a module of the code may have the name of a standard one.
    """
    found = [str(place) for place in (code, code / "src") if place.is_dir()]
    sys.path[1:1] = [place for place in found if place not in sys.path]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*filter(None, inherited), *found]))


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


def _watch_for_lone_ranks(world_size: int) -> None:
    """Start a thread that warns if this rank trains, but never joins a process group.

    Each rank then trains a separate model: this happens to a script for one process, and to a Trainer that starts no
    process group. Nothing fails, and the instance is paid for as if its cards shared the work.
    """
    threading.Thread(target=_warn_of_lone_ranks, args=(world_size,), name="lone-ranks", daemon=True).start()


def _warn_of_lone_ranks(world_size: int) -> None:
    """Warn once, or return when there is a process group."""
    trained_since: float | None = None
    while not _has_joined():
        now = time.monotonic()
        if trained_since is None and any(map(_is_backward, sys._current_frames().values())):  # noqa: SLF001
            trained_since = now
        if trained_since is not None and now - trained_since >= LONE_SECONDS:
            print(
                f"warning: {world_size} ranks train without a process group: each trains a separate model on all the "
                "data, and overwrites the files of the others. Next: set resources.nproc_per_node: 1 if the script is "
                "for one process; otherwise call torch.distributed.init_process_group (a Trainer of transformers 5 on "
                "CPUs needs --use_cpu)",
                flush=True,
            )
            return
        time.sleep(_LOOK_SECONDS)


def _has_joined() -> bool:
    """Return whether this rank has joined a process group, or uses another library for that."""
    distributed = sys.modules.get("torch.distributed")
    is_initialized = getattr(distributed, "is_initialized", None)  # missing while torch is being imported
    return (is_initialized is not None and is_initialized()) or any(name in sys.modules for name in _OTHER_GROUPS)


def _is_backward(frame: FrameType | None) -> bool:
    """Return whether a thread is in a backward pass of PyTorch."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "backward" and code.co_filename.endswith(("torch/_tensor.py", "torch/autograd/__init__.py")):
            return True
        frame = frame.f_back
    return False


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
    root, place, *words = sys.argv[1 + is_alone :]
    run_script(Path(root), Path(place), words, alone=is_alone)
