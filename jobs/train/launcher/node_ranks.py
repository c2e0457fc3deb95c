"""The ranks of one node: started, watched, and how they ended. torchrun as a library, since its command turns every
failure into 1.
"""

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.contract.errors import INTERRUPTED_EXIT_CODE
from jobs.train.accelerator import Accelerator
from jobs.train.launcher import interrupts
from jobs.train.launcher.endings import Endings
from jobs.train.launcher.gang import GangMember
from jobs.train.launcher.instance_metadata import InstanceMetadata
from jobs.train.launcher.interrupts import Interrupted
from jobs.train.launcher.latecomers import Latecomers
from jobs.train.launcher.memory_kills import memory_kills
from jobs.train.launcher.nodes import Nodes
from jobs.train.launcher.outcome import End, Failure, outcome, retried
from jobs.train.launcher.rank_lines import RankLines
from jobs.train.launcher.request import Launch
from jobs.train.launcher.watchdog import Watchdog
from jobs.train.rank import ALLOW_CHANGES_VARIABLE, LAUNCHER_PID_VARIABLE, SCRATCH_VARIABLE

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

log = logging.getLogger("trainyard")

RENDEZVOUS_SECONDS = 900
"""Torchrun's own limit; the nodes have met before."""


def run_ranks(
    launch: Launch, accelerator: Accelerator, scratch: Path, nodes: Nodes | None, gang: GangMember | None
) -> End:
    """How the attempt ended."""
    with interrupts.held_back():
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C++
        from torch.distributed.elastic.multiprocessing import api as processes
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What it has to say (a table of the failed ranks, a line for each signal) is said below in one line.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # PyTorch 2.2 gives each of its loggers a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)
    lines = RankLines(scratch, node=launch.node, nproc_per_node=launch.nproc_per_node)

    os.environ.update(_rank_environment(launch, accelerator, scratch))
    port = launch.node.port
    if launch.node.nnodes == 1:
        # Any free port, no race for it: torch's rendezvous is another tenant of this server (nodes.py).
        server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        port = server.port
    config = LaunchConfig(
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
    command = ["-m", launch.kind.entrypoint, *launch.arguments.to_flags()]

    def end_at_once(number: int) -> None:
        raise SignalException(signal.Signals(number).name, sigval=signal.Signals(number))

    endings = Endings(
        scratch,
        metadata=InstanceMetadata.of(os.environ, on_instance=launch.on_instance),
        stop_timeout_seconds=launch.stop_timeout_seconds,
        give_up=end_at_once,
    )
    # Torch makes this its handler of SIGTERM once it has started the ranks; its own ends them at once, saved or not.
    # No release lets one choose it, and the older ones of our images have no setting for the signals either.
    processes._terminate_process_handler = lambda signum, frame: endings.on_signal(signum)  # noqa: SLF001, ARG005
    watchdog = Watchdog(
        scratch,
        node=launch.node,
        nodes=nodes,
        nproc_per_node=launch.nproc_per_node,
        hang_timeout_seconds=launch.options.hang_timeout_seconds,
        last_lines=lines.last,
        end_ranks=endings.end_now,
    )
    latecomers = Latecomers(gang, endings.ask_to_stop) if gang is not None and launch.node.is_main else None
    kills_before = memory_kills()
    end = End(code=0, reason=None, cause="done")
    try:
        with lines, endings, watchdog, latecomers or contextlib.nullcontext():
            elastic_launch(config, sys.executable)(*command)
    except (Interrupted, SignalException) as interruption:
        reason = endings.reason or _signal_name(interruption)
        late = f"; not saved within {endings.overdue_seconds:.0f} s" if endings.overdue_seconds is not None else ""
        end = retried(f"{reason}{late}", "ended")
    except ChildFailedError as error:
        failures = {rank: _failure(failure) for rank, failure in error.failures.items()}
        lacked_memory = None if kills_before is None else memory_kills() != kills_before
        end = outcome(failures, node=launch.node.index, last_lines=lines.last, lacked_memory=lacked_memory)
        if endings.reason is not None and end.code != INTERRUPTED_EXIT_CODE:
            # Whether that was its own fault, the next attempt shows: what ends an instance may well break a rank first.
            end = retried(f"{endings.reason}; {end.reason}", "ended")
    end = watchdog.concluded(end)
    for line in end.lines:
        log.info("%s", line)
    return end


def _failure(failure: "ProcessFailure") -> Failure:
    """What torchrun found of a rank, with what the rank told it (jobs.train.rank), if it did."""
    told = failure.error_file_data if "timestamp" in failure.error_file_data else None
    return Failure(
        code=failure.exitcode,
        time=failure.timestamp,
        message=failure.message if told else f"it ended with exit code {failure.exitcode}",
        is_explained=bool(told and told.get("explained")),
    )


def _rank_environment(launch: Launch, accelerator: Accelerator, scratch: Path) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return {
        # Each rank's share of the cores; PyTorch takes them all for each of its processes.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // launch.nproc_per_node))),
        # The one rank of a node that tokenizes turns it on for that time (jobs.train.data.tokenized_text).
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # transformers looks for TensorFlow and Flax otherwise, and loads what it finds.
        "USE_TF": "0",
        "USE_FLAX": "0",
        SCRATCH_VARIABLE: str(scratch),
        "TMPDIR": str(scratch),  # PyTorch leaves folders in there
        LAUNCHER_PID_VARIABLE: str(os.getpid()),
        ALLOW_CHANGES_VARIABLE: str(int(launch.options.allow_changes)),
        **accelerator.environment,
    }


def _signal_name(interruption: BaseException) -> str:
    number = getattr(interruption, "sigval", None)
    return interrupts.name(number) if number is not None else str(interruption)
