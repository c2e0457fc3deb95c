"""The ranks of one node: started, watched, and how they ended. torchrun as a library, since its command turns every
failure into 1.
"""

import collections
import contextlib
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from jobs.contract.errors import INTERRUPTED_EXIT_CODE
from jobs.train.accelerator import Accelerator
from jobs.train.launcher import shutdown
from jobs.train.launcher.gang import GangMember, Latecomers
from jobs.train.launcher.instance import InstanceMetadata
from jobs.train.launcher.nodes import Nodes
from jobs.train.launcher.outcome import End, Failure, outcome, retried
from jobs.train.launcher.request import Launch, Node
from jobs.train.launcher.shutdown import Interrupted, Shutdown
from jobs.train.launcher.watchdog import Watchdog
from jobs.train.rank import ALLOW_CHANGES_VARIABLE, LAUNCHER_PID_VARIABLE, SCRATCH_VARIABLE

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C++
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

log = logging.getLogger("trainyard")

RENDEZVOUS_SECONDS = 900
"""Torchrun's own limit; the nodes have met before."""

VMSTAT = Path("/proc/vmstat")

_LAST_LINES = 10

_TAIL_BYTES = 64 * 1024
"""The end of a rank's file that holds those lines."""

_LOOK_SECONDS = 0.1

_GOODBYE_SECONDS = 5.0


def run_ranks(
    launch: Launch, accelerator: Accelerator, scratch: Path, nodes: Nodes | None, gang: GangMember | None
) -> End:
    """Run this node's ranks until they have ended. Returns how the attempt ended, for all nodes on the main one."""
    with shutdown.signals_held_back():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

    _silence_torchrun()
    lines = RankLines(scratch, node=launch.node, nproc_per_node=launch.nproc_per_node)
    os.environ.update(_rank_environment(launch, accelerator, scratch))
    store = _own_store() if launch.node.nnodes == 1 else None  # there until the ranks have ended
    config = _torchrun_config(launch, lines, port=launch.node.port if store is None else store.port)
    stopping = _shutdown_of_ranks(launch, scratch)
    watchdog = Watchdog(
        scratch,
        node=launch.node,
        nodes=nodes,
        nproc_per_node=launch.nproc_per_node,
        hang_timeout_seconds=launch.options.hang_timeout_seconds,
        last_lines=lines.last,
        end_ranks=stopping.end_now,
    )
    latecomers = Latecomers(gang, stopping.ask_to_stop) if gang is not None and launch.node.is_main else None
    kills_before = memory_kills()
    end = End(code=0, reason=None, cause="done")
    try:
        with lines, stopping, watchdog, latecomers or contextlib.nullcontext():
            elastic_launch(config, sys.executable)("-m", launch.kind.entrypoint, *launch.arguments.to_flags())
    except (Interrupted, SignalException) as interruption:
        end = _interrupted(interruption, stopping)
    except ChildFailedError as error:
        lacked_memory = None if kills_before is None else memory_kills() != kills_before
        end = _failed(error.failures, launch, lines, stopping, lacked_memory=lacked_memory)
    end = watchdog.concluded(end)
    for line in end.lines:
        log.info("%s", line)
    return end


def memory_kills(vmstat: Path = VMSTAT) -> int | None:
    """Return how often the kernel has killed a process for want of memory since the machine started.

    It counts those in all containers, whichever limit was passed (`oom_kill` of proc_vmstat), and tells a rank that
    took too much from one that somebody killed. None where nobody counts: on other systems than Linux.
    """
    try:
        counters = vmstat.read_text().splitlines()
    except OSError:
        return None
    named = (line.partition(" ") for line in counters)
    return next((int(value) for name, _, value in named if name == "oom_kill"), None)


class RankLines:
    """What a node's ranks print: rank 0's lines on their way into the job's log, and the last lines of each.

    Torchrun writes a rank's lines to a file and then puts the rank before each of them. Those of rank 0 are the job's
    own, so they pass through a pipe as they are: a disk that is full does not stop them. A context
    manager, while the ranks run.
    """

    def __init__(self, scratch: Path, *, node: Node, nproc_per_node: int) -> None:
        self.pipe: Path | None = None
        """The pipe that rank 0 writes to; None on a node that it is not on."""
        self._scratch = scratch
        self._node = node
        self._nproc_per_node = nproc_per_node
        self._newest: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._closed = threading.Event()
        if node.is_main:
            self.pipe = scratch / "rank-0"
            os.mkfifo(self.pipe)
            # Open for both, there is no end of the file before the rank has come, and none when it has gone.
            self._reader = os.open(self.pipe, os.O_RDWR | os.O_NONBLOCK)
            self._thread = threading.Thread(target=self._pass_on, name="rank-lines", daemon=True)

    def launch_options(self) -> dict[str, Any]:
        """Return the arguments of torchrun's LaunchConfig for where the ranks write, and what of it the log gets."""
        from torch.distributed.elastic.multiprocessing import api

        pipe = self.pipe
        tee = {
            rank: api.Std.NONE if rank == 0 and self._node.is_main else api.Std.ALL
            for rank in range(self._nproc_per_node)
        }

        class Logs(api.DefaultLogsSpecs):
            def reify(self, envs: dict[int, dict[str, str]]) -> Any:
                found = super().reify(envs)
                if pipe is not None:
                    found.stdouts[0] = found.stderrs[0] = str(pipe)
                return found

        logs = Logs(log_dir=str(self._scratch / "logs"), tee=tee)
        return {"logs_specs": logs, "log_line_prefix_template": "[rank ${rank}] "}

    def last(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Return the last lines of those of these ranks that are on this node, for the log."""
        first = self._node.index * self._nproc_per_node
        here = [rank for rank in ranks if first <= rank < first + self._nproc_per_node]
        return tuple(
            f"rank {rank} of node {self._node.index} wrote last: {line}"
            for rank in here
            for line in (list(self._newest) if rank == 0 else self._from_file(rank - first))
        )

    def __enter__(self) -> Self:
        if self.pipe is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close once all that was written has been passed on."""
        self._closed.set()
        if self.pipe is not None:
            self._thread.join(_GOODBYE_SECONDS)

    def _pass_on(self) -> None:
        begun = b""
        is_last = False
        while not is_last:
            is_last = self._closed.is_set()  # what was written before is still there
            while select.select([self._reader], [], [], 0 if is_last else _LOOK_SECONDS)[0]:
                *lines, begun = (begun + os.read(self._reader, _TAIL_BYTES)).split(b"\n")
                self._print(lines)
        self._print([begun] if begun else [])
        os.close(self._reader)

    def _print(self, lines: list[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace")
            self._newest.append(text)
            with contextlib.suppress(OSError, ValueError):  # rank 0 must not wait for a pipe that nobody empties
                sys.stdout.write(f"{text}\n")

    def _from_file(self, local_rank: int) -> list[str]:
        """Return the last lines of standard output, or of standard error where the rank did not come so far as to join
        the two.
        """
        for name in ("stdout.log", "stderr.log"):
            for path in self._scratch.glob(f"logs/*/attempt_0/{local_rank}/{name}"):
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                    lines = file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
                if lines:
                    return lines
        return []


def _silence_torchrun() -> None:
    """Turn off torchrun's own log: what it has to say (a table, a line for each signal) our own last line says."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # PyTorch 2.2 gives each of its loggers a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _own_store() -> "TCPStore":
    """Make a single node's store at any free port, no race for it: torch's rendezvous is another tenant of this server
    (jobs.train.launcher.nodes).
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C++

    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)


def _torchrun_config(launch: Launch, lines: RankLines, *, port: int) -> "LaunchConfig":
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=launch.node.nnodes,
        max_nodes=launch.node.nnodes,
        nproc_per_node=launch.nproc_per_node,
        run_id=f"attempt-{launch.attempt}",
        # Batch has numbered the nodes, so rank 0 is on the main node. Torch's other rendezvous keeps a store for the
        # ranks in later releases only; PyTorch 2.2 leaves them a port where nobody answers.
        rdzv_backend="static",
        rdzv_endpoint=f"{launch.node.main_address}:{port}",
        rdzv_configs={"rank": launch.node.index, "timeout": RENDEZVOUS_SECONDS},
        local_addr="localhost" if launch.node.nnodes == 1 else None,
        max_restarts=0,  # Batch's retry is the restart, on a node that is known to live
        start_method="spawn",
        **lines.launch_options(),
    )


def _rank_environment(launch: Launch, accelerator: Accelerator, scratch: Path) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return {
        # Each rank's share of the cores; PyTorch takes them all for each of its processes.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // launch.nproc_per_node))),
        # The one rank of a node that tokenizes turns it on for that time (jobs.train.data.labelled_tokens).
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # transformers looks for TensorFlow and Flax otherwise, and loads what it finds.
        "USE_TF": "0",
        "USE_FLAX": "0",
        # Releases of datasets before 4 run the code of a data set on the hub otherwise.
        "HF_DATASETS_TRUST_REMOTE_CODE": "0",
        SCRATCH_VARIABLE: str(scratch),
        "TMPDIR": str(scratch),  # PyTorch leaves folders in there
        LAUNCHER_PID_VARIABLE: str(os.getpid()),
        ALLOW_CHANGES_VARIABLE: str(int(launch.options.allow_changes)),
        **accelerator.environment,
    }


def _shutdown_of_ranks(launch: Launch, scratch: Path) -> Shutdown:
    """Return the Shutdown that takes SIGTERM once torchrun has started the ranks."""
    from torch.distributed.elastic.multiprocessing import api

    stopping = Shutdown(
        scratch,
        metadata=InstanceMetadata.of(os.environ, on_instance=launch.on_instance),
        stop_timeout_seconds=launch.stop_timeout_seconds,
        give_up=_end_at_once,
    )
    # Torch makes this its handler of SIGTERM once it has started the ranks; its own ends them at once, saved or not.
    # No release lets one choose it, and the older ones of our images have no setting for the signals either.
    api._terminate_process_handler = lambda signum, frame: stopping.on_signal(signum)  # noqa: SLF001, ARG005
    return stopping


def _end_at_once(number: int) -> None:
    """Have torchrun end the ranks, saved or not."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    raise SignalException(signal.Signals(number).name, sigval=signal.Signals(number))


def _interrupted(interruption: BaseException, stopping: Shutdown) -> End:
    """Return how the attempt ended where the launcher ended the ranks."""
    number = getattr(interruption, "sigval", None)
    reason = stopping.reason or (str(interruption) if number is None else shutdown.signal_name(number))
    late = f"; not saved within {stopping.overdue_seconds:.0f} s" if stopping.overdue_seconds is not None else ""
    return retried(f"{reason}{late}", "ended")


def _failed(
    failures: "dict[int, ProcessFailure]",
    launch: Launch,
    lines: RankLines,
    stopping: Shutdown,
    *,
    lacked_memory: bool | None,
) -> End:
    """Return how the attempt ended where ranks ended by themselves, before their work was done."""
    known = {rank: _failure(failure) for rank, failure in failures.items()}
    end = outcome(known, node=launch.node.index, last_lines=lines.last, lacked_memory=lacked_memory)
    if stopping.reason is not None and end.code != INTERRUPTED_EXIT_CODE:
        # Whether that was its own fault, the next attempt shows: what ends an instance may well break a rank first.
        return retried(f"{stopping.reason}; {end.reason}", "ended")
    return end


def _failure(failure: "ProcessFailure") -> Failure:
    """Return what torchrun found of a rank, with what the rank told it (jobs.train.rank), if it did."""
    told = failure.error_file_data if "timestamp" in failure.error_file_data else None
    return Failure(
        code=failure.exitcode,
        time=failure.timestamp,
        message=failure.message if told else f"it ended with exit code {failure.exitcode}",
        is_explained=bool(told and told.get("explained")),
    )
