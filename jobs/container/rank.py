"""One rank: what it knows of its peers and its run, and how it ends.

An entrypoint's module is `python -m` of every rank; it hands its function to `run`:

    if __name__ == "__main__":
        run(finetune, FinetuneClassification)

A user's mistake ends a rank with one line and exit code 1, everything unexpected with its traceback and exit code 1.
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

from jobs.container.channel import Heartbeat, HeartbeatFile
from jobs.container.start_up import StartUp
from jobs.container.store import connect_store
from jobs.core.errors import INTERRUPTED_EXIT_CODE, ConfigurationError, TrainyardError
from jobs.core.locations import S3Location
from jobs.spec.arguments import ArgumentsT, error_in_words, parse_flags
from jobs.spec.launcher_options import RUN_URI_VARIABLE

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # re-exported from C++

log = logging.getLogger("trainyard")

SCRATCH_VARIABLE = "TRAINYARD_SCRATCH"
"""A local folder that the launcher makes for its node's ranks and removes when they have ended."""

LAUNCHER_PID_VARIABLE = "TRAINYARD_LAUNCHER_PID"

ALLOW_CHANGES_VARIABLE = "TRAINYARD_ALLOW_CHANGES"
"""1: a checkpoint that was made with other arguments is resumed all the same."""

ALONE = "--alone"
"""Stands before what a script's process runs, where that starts its own ranks."""

TORCHRUN_VARIABLES = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_")
"""Beginnings of what a rank is told of its peers. Trainer, accelerate and torchrun take themselves for a rank by it."""

_ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"

_OWN_PREFIX = "TRAINYARD_"
"""Begins the names of what `hide_place` has hidden."""

_DEEPSPEEDS_NAMES = {"LOCAL_WORLD_SIZE": "LOCAL_SIZE", "GROUP_RANK": "CROSS_RANK"}
"""What DeepSpeed's launcher calls them (deepspeed/launcher/launch.py); all else has torchrun's names."""

_MPIS_NAMES = (
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
"""What mpirun calls them: Open MPI's, which `gaudi_spawn.py --use_mpi` runs, and that of MPICH and Intel MPI."""

_PR_SET_PDEATHSIG = 1


ATTEMPT_VARIABLE = "TRAINYARD_ATTEMPT"
"""The number of the attempt in its run; there on the main node."""

ARGUMENTS_FILE = "@"
"""Stands before the name of a file that holds the arguments of a rank, in place of its flags."""


class ResumeLaterError(Exception):
    """The rank has saved and ends before its work is done: a next attempt goes on. Its message says why."""


class NodeFailedError(Exception):
    """What this node needs it cannot have now, through no fault of the job's: a next attempt starts over."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """This process among its peers."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int
    nnodes: int
    run: S3Location
    scratch: Path
    allows_changes: bool = False
    """True where a checkpoint that was made with other arguments may be resumed."""
    attempt: int | None = None
    """The number of the attempt in its run; None where it has no record, or on other nodes than the main one."""
    start_up: StartUp = field(default_factory=StartUp, compare=False, repr=False)
    """What its start takes."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_first_on_node(self) -> bool:
        return self.local_rank == 0

    @classmethod
    def from_environment(cls) -> "Rank":
        """Read what torchrun and the launcher have set. Raises ConfigurationError where they have not."""
        try:
            world_size, local_world_size = int(_place("WORLD_SIZE")), int(_place("LOCAL_WORLD_SIZE"))
            return cls(
                rank=int(_place("RANK")),
                local_rank=int(_place("LOCAL_RANK")),
                world_size=world_size,
                local_world_size=local_world_size,
                node=int(_place("GROUP_RANK")),
                nnodes=world_size // local_world_size,
                run=S3Location.parse(os.environ[RUN_URI_VARIABLE]),
                scratch=Path(os.environ[SCRATCH_VARIABLE]),
                allows_changes=os.environ.get(ALLOW_CHANGES_VARIABLE) == "1",
                attempt=int(os.environ[ATTEMPT_VARIABLE]) if ATTEMPT_VARIABLE in os.environ else None,
            )
        except KeyError as missing:
            raise ConfigurationError(
                f"{missing.args[0]} is not set: a rank is started by the launcher",
                next_step="python -m jobs.container.launch --help",
            ) from None

    @cached_property
    def store(self) -> "Store":
        """The key-value store that the launcher of the main node keeps: it outlives any rank."""
        return self.connect_store()

    def connect_store(self) -> "Store":
        """Return a connection of one's own: a thread that waits on one would block the others that share it."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # re-exported from C++

        return PrefixStore("trainyard", connect_store(_place("MASTER_ADDR"), int(_place("MASTER_PORT"))))

    def once_per_node(self, name: str, work: Callable[[], Any]) -> Any:
        """Have one rank of each node do `work()`; all get its value (which must pass through JSON).

        A rank that fails in it ends its process; the launcher then stops those that wait.
        """
        key = f"{name}/{self.node}"
        if self.is_first_on_node:
            self.store.set(key, json.dumps(work()))
        return json.loads(self.store.get(key))

    def once(self, name: str, work: Callable[[], Any]) -> Any:
        """Have rank 0 of all do `work()`; all get its value (which must pass through JSON)."""
        if self.is_first:
            self.store.set(name, json.dumps(work()))
        return json.loads(self.store.get(name))


def _place(name: str) -> str:
    """Return a variable of torchrun's: of whoever has started this rank, else what `hide_place` has hidden."""
    if "RANK" in os.environ:
        return os.environ[name if name in os.environ else _DEEPSPEEDS_NAMES.get(name, name)]
    mpis = next((names for names in _MPIS_NAMES if names["RANK"] in os.environ), {})
    if name == "GROUP_RANK" and mpis:  # mpirun fills a node before the next
        return str(int(os.environ[mpis["RANK"]]) // int(os.environ[mpis["LOCAL_WORLD_SIZE"]]))
    if name in mpis:
        return os.environ[mpis[name]]
    hidden = _OWN_PREFIX + name
    return os.environ[hidden if hidden in os.environ else name]


def hide_place() -> None:
    """Take what torchrun has set out of the environment, for a script that starts its own ranks, or is to have none.

    The platform's library still finds this process's place, and so it does in processes that it starts.
    """
    for name in [name for name in os.environ if name.startswith(TORCHRUN_VARIABLES)]:
        if name != _ERROR_FILE_VARIABLE:  # `tell_the_launcher` needs it, and so does torchrun where the script runs it
            os.environ[_OWN_PREFIX + name] = os.environ.pop(name)


def run(main: Callable[[Rank, ArgumentsT], None], arguments: type[ArgumentsT]) -> None:
    """Run an entrypoint's module as a rank: parse the arguments, become a rank, call `main`, exit."""
    parsed = _parsed(sys.argv[1:], arguments, program=f"python -m {main.__module__}")
    begin()
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
    log.setLevel(logging.INFO)
    code = 0
    try:
        rank = Rank.from_environment()
        give_first_heartbeat(rank)
        rank.start_up.done("launcher and imports")
        main(rank, parsed)
    except ResumeLaterError as interruption:
        code = INTERRUPTED_EXIT_CODE
        tell_the_launcher(str(interruption))
    except NodeFailedError as failure:
        code = INTERRUPTED_EXIT_CODE
        tell_the_launcher(str(failure), explained=True)
    except (TrainyardError, ValidationError) as error:
        code = 1
        # The launcher prints it, once for all ranks that met it.
        tell_the_launcher(one_line(error), explained=True)
    except Exception as error:  # noqa: BLE001 - the process ends here; torch's threads would otherwise keep it alive
        code = 1
        traceback.print_exc()
        tell_the_launcher(f"{type(error).__name__}: {error}")
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Not sys.exit: a rank whose peers are gone would wait for them in the clean-up of its process group.
        os._exit(code)


def _parsed(given: Sequence[str], arguments: type[ArgumentsT], *, program: str) -> ArgumentsT:
    if len(given) == 1 and given[0].startswith(ARGUMENTS_FILE):
        return arguments.model_validate_json(Path(given[0].removeprefix(ARGUMENTS_FILE)).read_bytes())
    return parse_flags(arguments, given, program=program)


def one_line(error: Exception) -> str:
    """Write an error as the one line that a log shows: what is wrong, where, and what next."""
    if isinstance(error, ValidationError):
        return "; ".join(
            f"{'.'.join(str(part) for part in item['loc']) or error.title}: {error_in_words(item)}"
            for item in error.errors(include_url=False)
        )
    return str(error).replace("\nNext: ", ". Next: ").replace("\n", "; ")


def give_first_heartbeat(rank: Rank) -> None:
    """Let the launcher see from now on if this process is stopped; a training gives further heartbeats.

    No thread gives any: a process that forks should have none.
    """
    first = Heartbeat(
        rank=rank.rank, node=rank.node, pid=os.getpid(), number=0, place=0, step=0, doing="working", paced=False
    )
    HeartbeatFile(rank.scratch, rank.local_rank).write(first)


def begin() -> None:
    """Make of this process one that its launcher watches over."""
    _die_with_the_launcher()
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())  # its last lines are those of one stream
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the launcher asks where a rank hangs


def _die_with_the_launcher() -> None:
    """Have the kernel kill this process when the launcher ends, however that ends: kill -9 of it leaves no rank."""
    launcher = os.environ.get(LAUNCHER_PID_VARIABLE)
    if launcher:
        die_with_parent(int(launcher))


def die_with_parent(pid: int) -> None:
    """Have the kernel kill this process when its parent, which is `pid`, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != pid:  # it ended before the kernel was told
            os.kill(os.getpid(), signal.SIGKILL)


def tell_the_launcher(message: str, *, explained: bool = False) -> None:
    """Write torchrun's error file, from which the launcher takes which rank failed first, and why."""
    path = os.environ.get(_ERROR_FILE_VARIABLE)
    if not path:
        print(f"error: {message}", flush=True)
    else:
        content = {"message": message, "timestamp": int(time.time()), "explained": explained}
        try:
            Path(path).write_text(json.dumps(content))
        except OSError:  # the disk is full; torchrun cannot read what is there by half
            Path(path).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                print(f"error: {message}", flush=True)
