"""Run an entrypoint as one rank of a job, and report how it ended.

Every rank runs an entrypoint's module with `python -m`. The module passes its function to `run`:

    if __name__ == "__main__":
        run(finetune, FinetuneClassification)

The rank reports a user's mistake in one line, an unexpected error with its traceback. Both end it with exit code 1.
"""

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from jobs.container.channel import Heartbeat, HeartbeatFile, connect_store
from jobs.core.errors import INTERRUPTED_EXIT_CODE, ConfigurationError, TrainyardError
from jobs.core.locations import S3Location
from jobs.spec.arguments import ArgumentsT, error_in_words, parse_flags
from jobs.spec.launcher_options import RUN_URI_VARIABLE, TORCHRUN_VARIABLES

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # re-exported from C++


LAUNCHED_AT_VARIABLE = "TRAINYARD_LAUNCHED_AT"
"""Unix time at which the launcher's process started."""


class StartUp:
    """Measures the parts of a rank's start-up, from the start of its launcher to the end of the first step.

    The log line is:

        start-up: … s to the end of step N (CPU of this rank in brackets): launcher and imports … (…), tokenizer …

    A part that takes longer than its CPU time was waiting for the network, a disk, a card, or a busy processor.
    """

    def __init__(self) -> None:
        began = os.environ.get(LAUNCHED_AT_VARIABLE)
        self._ended = time.monotonic() - (max(0.0, time.time() - float(began)) if began else 0.0), 0.0
        self.parts: dict[str, tuple[float, float]] = {}
        """Seconds and CPU seconds of this process for each part, in order."""

    def done(self, name: str) -> None:
        """End the current part and give it a name. Times of parts with the same name are added."""
        now = time.monotonic(), time.process_time()
        taken = self.parts.get(name, (0.0, 0.0))
        self.parts[name] = taken[0] + now[0] - self._ended[0], taken[1] + now[1] - self._ended[1]
        self._ended = now

    def line(self, step: int) -> str:
        """Return the parts as a log line. `step` is the first step of the attempt."""
        total = sum(seconds for seconds, _ in self.parts.values())
        parts = ", ".join(f"{name} {seconds:.1f} ({cpu:.1f})" for name, (seconds, cpu) in self.parts.items())
        return f"start-up: {total:.1f} s to the end of step {step} (CPU of this rank in brackets): {parts}"


log = logging.getLogger("trainyard")

SCRATCH_VARIABLE = "TRAINYARD_SCRATCH"
"""A local folder that the launcher creates for its node's ranks and removes when they have ended."""

LAUNCHER_PID_VARIABLE = "TRAINYARD_LAUNCHER_PID"

ALLOW_CHANGES_VARIABLE = "TRAINYARD_ALLOW_CHANGES"
"""1 allows resuming a checkpoint that was made with other arguments."""

ALONE = "--alone"
"""Flag before the command of a script that starts its own ranks."""

_ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"

_HIDDEN_PREFIX = "TRAINYARD_"
"""Prefix that `hide_torchrun_variables` adds to the names of variables."""

_DEEPSPEED_NAMES = {"LOCAL_WORLD_SIZE": "LOCAL_SIZE", "GROUP_RANK": "CROSS_RANK"}
"""Variables of DeepSpeed's launcher (deepspeed/launcher/launch.py) whose names differ from torchrun's."""

_MPI_NAMES = (
    {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    {
        "RANK": "PMI_RANK",
        "WORLD_SIZE": "PMI_SIZE",
        "LOCAL_RANK": "MPI_LOCALRANKID",
        "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
    },
)
"""Variables of mpirun: of Open MPI, which `gaudi_spawn.py --use_mpi` runs, and of MPICH and Intel MPI."""

_PR_SET_PDEATHSIG = 1


ATTEMPT_VARIABLE = "TRAINYARD_ATTEMPT"
"""The number of the attempt in its run. Set on the main node only."""

ARGUMENTS_FILE = "@"
"""Prefix of a file name that a rank gets in place of flags. The file contains its arguments."""


class ResumeLaterError(Exception):
    """The rank has saved and ends early; the next attempt resumes. The message says why."""


class NodeFailedError(Exception):
    """This node lacks something, through no fault of the job. The next attempt starts over."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One process of the job, with its place among its peers and the location of its run."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int
    nnodes: int
    run: S3Location
    scratch: Path
    allows_changes: bool = False
    """Whether a checkpoint that was made with other arguments may be resumed."""
    attempt: int | None = None
    """The number of the attempt in its run. None without a record, and on nodes other than the main one."""
    start_up: StartUp = field(default_factory=StartUp, compare=False, repr=False)
    """The times of the parts of the rank's start-up."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_first_on_node(self) -> bool:
        return self.local_rank == 0

    @classmethod
    def from_environment(cls) -> "Rank":
        """Read the variables that torchrun and the launcher set. Raises ConfigurationError if one is missing."""
        try:
            world_size = int(_torchrun_variable("WORLD_SIZE"))
            local_world_size = int(_torchrun_variable("LOCAL_WORLD_SIZE"))
            return cls(
                rank=int(_torchrun_variable("RANK")),
                local_rank=int(_torchrun_variable("LOCAL_RANK")),
                world_size=world_size,
                local_world_size=local_world_size,
                node=int(_torchrun_variable("GROUP_RANK")),
                nnodes=world_size // local_world_size,
                run=S3Location.parse(os.environ[RUN_URI_VARIABLE]),
                scratch=Path(os.environ[SCRATCH_VARIABLE]),
                allows_changes=os.environ.get(ALLOW_CHANGES_VARIABLE) == "1",
                attempt=int(os.environ[ATTEMPT_VARIABLE]) if ATTEMPT_VARIABLE in os.environ else None,
            )
        except KeyError as missing:
            raise ConfigurationError(
                f"{missing.args[0]} is not set; ranks must be started by the launcher",
                next_step="python -m jobs.container.launch --help",
            ) from None

    @cached_property
    def store(self) -> "Store":
        """The key-value store that the main node's launcher serves. It outlives all ranks."""
        return self.connect_store()

    def connect_store(self) -> "Store":
        """Return another connection, for a thread that waits. On `store` it would block the other threads."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # re-exported from C++

        address, port = _torchrun_variable("MASTER_ADDR"), int(_torchrun_variable("MASTER_PORT"))
        return PrefixStore("trainyard", connect_store(address, port))

    def once_per_node(self, name: str, work: Callable[[], Any]) -> Any:
        """Run `work()` on one rank of each node, and return its value on all of them. The value must be valid JSON.

        If `work` fails, its process ends, and the launcher stops the ranks that wait.
        """
        key = f"{name}/{self.node}"
        if self.is_first_on_node:
            self.store.set(key, json.dumps(work()))
        return json.loads(self.store.get(key))

    def once(self, name: str, work: Callable[[], Any]) -> Any:
        """Run `work()` on rank 0, and return its value on all ranks. The value must be valid JSON."""
        if self.is_first:
            self.store.set(name, json.dumps(work()))
        return json.loads(self.store.get(name))


def _torchrun_variable(name: str) -> str:
    """Return a torchrun variable: as set for this rank, by DeepSpeed and mpirun too, or else its hidden value."""
    if "RANK" in os.environ:
        return os.environ[name if name in os.environ else _DEEPSPEED_NAMES.get(name, name)]
    mpi_names = next((names for names in _MPI_NAMES if names["RANK"] in os.environ), {})
    if name == "GROUP_RANK" and mpi_names:  # mpirun fills one node after the other
        return str(int(os.environ[mpi_names["RANK"]]) // int(os.environ[mpi_names["LOCAL_WORLD_SIZE"]]))
    if name in mpi_names:
        return os.environ[mpi_names[name]]
    hidden = _HIDDEN_PREFIX + name
    return os.environ[hidden if hidden in os.environ else name]


def hide_torchrun_variables() -> None:
    """Hide torchrun's variables from a script that starts its own ranks or needs none.

    The library `trainyard` still finds them, also in processes that the script starts.
    """
    for name in [name for name in os.environ if name.startswith(TORCHRUN_VARIABLES)]:
        if name != _ERROR_FILE_VARIABLE:  # needed by `report_failure`, and by torchrun if the script runs it
            os.environ[_HIDDEN_PREFIX + name] = os.environ.pop(name)


def run(main: Callable[[Rank, ArgumentsT], None], arguments: type[ArgumentsT]) -> None:
    """Run an entrypoint as a rank: parse the arguments, call `main`, report errors, exit."""
    parsed = _parsed(sys.argv[1:], arguments, program=f"python -m {main.__module__}")
    prepare_process()
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
    log.setLevel(logging.INFO)
    code = 0
    try:
        rank = Rank.from_environment()
        write_first_heartbeat(rank)
        rank.start_up.done("launcher and imports")
        main(rank, parsed)
    except ResumeLaterError as interruption:
        code = INTERRUPTED_EXIT_CODE
        report_failure(str(interruption))
    except NodeFailedError as failure:
        code = INTERRUPTED_EXIT_CODE
        report_failure(str(failure), explained=True)
    except (TrainyardError, ValidationError) as error:
        code = 1
        # The launcher prints the message once, even if several ranks report it.
        report_failure(one_line(error), explained=True)
    except Exception as error:  # noqa: BLE001 - torch's threads would otherwise keep the process alive
        code = 1
        traceback.print_exc()
        report_failure(f"{type(error).__name__}: {error}")
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Not sys.exit: it would clean up the process group, and wait there for peers that are gone.
        os._exit(code)


def _parsed(given: Sequence[str], arguments: type[ArgumentsT], *, program: str) -> ArgumentsT:
    if len(given) == 1 and given[0].startswith(ARGUMENTS_FILE):
        return arguments.model_validate_json(Path(given[0].removeprefix(ARGUMENTS_FILE)).read_bytes())
    return parse_flags(arguments, given, program=program)


def one_line(error: Exception) -> str:
    """Return an error as one line for the log: what is wrong, where, and what to do next."""
    if isinstance(error, ValidationError):
        return "; ".join(
            f"{'.'.join(str(part) for part in item['loc']) or error.title}: {error_in_words(item)}"
            for item in error.errors(include_url=False)
        )
    return str(error).replace("\nNext: ", ". Next: ").replace("\n", "; ")


def write_first_heartbeat(rank: Rank) -> None:
    """Write a first heartbeat, so that the launcher notices if this process is stopped. Training writes the next ones.

    No thread writes heartbeats, because a process that forks should have no threads.
    """
    first = Heartbeat(
        rank=rank.rank, node=rank.node, pid=os.getpid(), number=0, place=0, step=0, doing="working", paced=False
    )
    HeartbeatFile(rank.scratch, rank.local_rank).write(first)


def prepare_process() -> None:
    """Make this process die with its launcher, use one output stream, and print its stack on SIGUSR1."""
    if launcher := os.environ.get(LAUNCHER_PID_VARIABLE):
        die_with_parent(int(launcher))
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())  # one stream, so that its last lines are in order
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # sent by the launcher when ranks hang


def die_with_parent(pid: int) -> None:
    """Make the kernel kill this process when its parent `pid` ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != pid:  # the parent ended before prctl
            os.kill(os.getpid(), signal.SIGKILL)


def report_failure(message: str, *, explained: bool = False) -> None:
    """Write torchrun's error file. The launcher reads from these files which rank failed first, and why."""
    path = os.environ.get(_ERROR_FILE_VARIABLE)
    if not path:
        print(f"error: {message}", flush=True)
    else:
        content = {"message": message, "timestamp": int(time.time()), "explained": explained}
        try:
            Path(path).write_text(json.dumps(content))
        except OSError:  # the disk is full, and torchrun cannot read a partial file
            Path(path).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                print(f"error: {message}", flush=True)


class Callback:
    """Receives the events of a training, like transformers' TrainerCallback. Base class of all our callbacks.

    Both a Trainer and a custom script's loop call it. It does not inherit from TrainerCallback, because a loop without
    transformers should not wait seconds for that import.
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., None]:
            """Return a method that does nothing for an event without a handler. Releases differ in their events."""
            if name.startswith("on_"):
                setattr(Callback, name, staticmethod(_nothing))  # skips this method next time: events are frequent
                return _nothing
            raise AttributeError(f"'{type(self).__name__}' has no attribute '{name}'")


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Ignore an event."""
