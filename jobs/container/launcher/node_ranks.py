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

from jobs.container.channel import ask_comparison, stopped, told_verdict
from jobs.container.instance import InstanceMetadata
from jobs.container.launcher.attempt import NodeAttempt
from jobs.container.launcher.gang import Latecomers
from jobs.container.launcher.nodes import Nodes
from jobs.container.launcher.outcome import End, Failure, line_of_lost_peers, outcome, retried, with_full_disk
from jobs.container.launcher.rank_environment import rank_environment
from jobs.container.launcher.rank_lines import RankLines
from jobs.container.launcher.request import Launch
from jobs.container.launcher.watchdog import Idleness, Silence, Watchdog
from jobs.container.rank import ARGUMENTS_FILE, one_line
from jobs.container.saving import interruption as shutdown
from jobs.container.saving.interruption import Interrupted, ShutdownWatch
from jobs.container.script.job import ScriptJob
from jobs.container.store import STORE_TIMEOUT, serve_store
from jobs.core.errors import INTERRUPTED_EXIT_CODE, TrainyardError
from jobs.spec.kinds.script import Script

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

log = logging.getLogger("trainyard")

_REASON_CHARACTERS = 200
"""More of a rank's last line than a person reads in a reason; the log has all of it."""

RENDEZVOUS_SECONDS = 900
"""Torchrun's own limit; the nodes have met before."""

VMSTAT = Path("/proc/vmstat")


def run_ranks(attempt: NodeAttempt, nodes: Nodes | None) -> End:
    """Run this node's ranks until they have ended. Returns how the attempt ended, for all nodes on the main one."""
    launch, scratch, gang = attempt.launch, attempt.scratch, attempt.gang
    with shutdown.signals_held_back():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

    _silence_torchrun()
    if launch.options.halving is not None:
        ask_comparison(scratch, launch.options.halving)
    lines = RankLines(scratch, node=launch.node, nproc_per_node=launch.nproc_per_node)
    script = _script(attempt)
    try:
        os.environ.update(rank_environment(launch, attempt.accelerator, scratch))
    except TrainyardError as error:
        return End(code=1, reason=one_line(error), cause="own")
    # Any free port, no race for it; there until the ranks have ended.
    store = serve_store(launch.node.main_address) if launch.node.nnodes == 1 else None
    config = _torchrun_config(launch, lines, port=launch.node.port if store is None else store.port)
    stopping = _shutdown_of_ranks(launch, scratch, script)
    watchdog = Watchdog(
        scratch,
        node=launch.node,
        nodes=nodes,
        nproc_per_node=launch.nproc_per_node,
        hang_timeout_seconds=launch.options.hang_timeout_seconds,
        last_lines=lines.last,
        end_ranks=stopping.end_now,
        silence=_silence(script, lines),
        idleness=Idleness(launch.idle_limit_seconds, attempt.utilization.idle_seconds),
    )
    latecomers = Latecomers(gang, stopping.ask_to_stop) if gang is not None and launch.node.is_main else None
    kills_before = memory_kills()
    end = End(code=0, reason=None, cause="done")
    try:
        with lines, stopping, watchdog, latecomers or contextlib.nullcontext():
            program = ["-m", launch.kind.entrypoint]
            if script is None:
                program += _arguments_of_ranks(launch, scratch)
            else:
                os.environ.update(script.prepare())
                program = script.program
            with script or contextlib.nullcontext():
                elastic_launch(config, sys.executable)(*program)
    except TrainyardError as error:
        end = End(code=1, reason=one_line(error), cause="own")
    except (Interrupted, SignalException) as interruption:
        end = _interrupted(interruption, stopping)
    except ChildFailedError as error:
        lacked_memory = None if kills_before is None else memory_kills() != kills_before
        end = with_full_disk(_failed(error.failures, launch, lines, stopping, lacked_memory=lacked_memory), scratch)
    if script is not None:
        end = _end_of_script(script, end, stopping, scratch)
    if end.code == 0 and (halving := launch.options.halving) is not None and told_verdict(scratch) is None:
        log.warning(
            "warning: this point was compared with no other: it had no %s at or after step %s and before its last. "
            "Next: lower sweep.halving.from_step, or evaluate more often",
            halving.metric,
            halving.from_step,
        )
    end = watchdog.concluded(end)
    for line in end.lines:
        log.info("%s", line)
    return end


def _script(attempt: NodeAttempt) -> ScriptJob | None:
    """Return what the launcher does for a script of one's own; None where the ranks are of one of our kinds."""
    launch = attempt.launch
    if not isinstance(launch.arguments, Script):
        return None
    return ScriptJob(
        launch.arguments,
        launch.run,
        attempt.scratch,
        node=launch.node.index,
        nnodes=launch.node.nnodes,
        nproc_per_node=launch.nproc_per_node,
        main_address=launch.node.main_address,
        cards=attempt.accelerator.devices,
        allow_changes=launch.options.allow_changes,
    )


def _silence(script: ScriptJob | None, lines: RankLines) -> Silence | None:
    if script is None:
        return None
    return Silence(script.silence_seconds, lambda: max(lines.last_line_at, script.last_sign()))


def _end_of_script(script: ScriptJob, end: End, stopping: ShutdownWatch, scratch: Path) -> End:
    """Keep what a script has left, and return how the attempt ended: its own exit code does not tell all."""
    if end.code == 0 and (reason := stopped(scratch)) is not None:
        end = End(code=INTERRUPTED_EXIT_CODE, reason=reason, cause="done")
    elif stopping.has_signalled and end.cause in ("done", "ended"):
        late = stopping.overdue_seconds
        how = "got SIGTERM" if late is None else f"had not ended {late:.0f} s after SIGTERM, and was killed"
        end = retried(f"{stopping.reason}; the script {how}", "ended")
    if script.refusal is not None:
        end = End(code=1, reason=one_line(script.refusal), cause="own")
    try:
        script.finish(ended_well=end.code == 0)
    except TrainyardError as error:
        if end.code == 0:
            return End(code=1, reason=f"what the script has left could not be kept: {one_line(error)}", cause="own")
        log.warning("warning: not all that the script has left is kept: %s", one_line(error))
    return end


def _arguments_of_ranks(launch: Launch, scratch: Path) -> list[str]:
    """Return the command line of each rank: a file's name where the job's arguments came in one, else flags.

    Linux takes 128 KiB of one flag.
    """
    if launch.options.arguments_file is None:
        return launch.arguments.to_flags()
    file = scratch / "arguments.json"
    file.write_text(launch.arguments.model_dump_json(exclude_none=True))
    return [f"{ARGUMENTS_FILE}{file}"]


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


def _silence_torchrun() -> None:
    """Turn off torchrun's own log: what it has to say (a table, a line for each signal) our own last line says."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # PyTorch 2.2 gives each of its loggers a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)


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
        rdzv_configs={"rank": launch.node.index, "timeout": _rendezvous_seconds(launch)},
        local_addr=launch.node.main_address if launch.node.nnodes == 1 else None,
        max_restarts=0,  # Batch's retry is the restart, on a node that is known to live
        start_method="spawn",
        **lines.launch_options(),
    )


def _rendezvous_seconds(launch: Launch) -> int:
    """Return how long a node waits for the others: those of a script may still fetch what it needs."""
    return int(STORE_TIMEOUT.total_seconds()) if isinstance(launch.arguments, Script) else RENDEZVOUS_SECONDS


def _shutdown_of_ranks(launch: Launch, scratch: Path, script: ScriptJob | None) -> ShutdownWatch:
    """Return the ShutdownWatch that takes SIGTERM once torchrun has started the ranks."""
    from torch.distributed.elastic.multiprocessing import api

    stopping = ShutdownWatch(
        scratch,
        metadata=InstanceMetadata.of(os.environ, on_instance=launch.on_instance),
        stop_timeout_seconds=launch.stop_timeout_seconds,
        give_up=_end_at_once,
        pids_of_script=script.pids if script is not None else None,
    )
    # Torch makes this its handler of SIGTERM once it has started the ranks; its own ends them at once, saved or not.
    # No release lets one choose it, and the older ones of our images have no setting for the signals either.
    api._terminate_process_handler = lambda signum, frame: stopping.on_signal(signum)  # noqa: SLF001, ARG005
    return stopping


def _end_at_once(number: int) -> None:
    """Have torchrun end the ranks, saved or not."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    raise SignalException(signal.Signals(number).name, sigval=signal.Signals(number))


def _interrupted(interruption: BaseException, stopping: ShutdownWatch) -> End:
    """Return how the attempt ended where the launcher ended the ranks."""
    number = getattr(interruption, "sigval", None)
    reason = stopping.reason or (str(interruption) if number is None else shutdown.signal_name(number))
    late = f"; not saved within {stopping.overdue_seconds:.0f} s" if stopping.overdue_seconds is not None else ""
    return retried(f"{reason}{late}", "ended")


def _failed(
    failures: "dict[int, ProcessFailure]",
    launch: Launch,
    lines: RankLines,
    stopping: ShutdownWatch,
    *,
    lacked_memory: bool | None,
) -> End:
    """Return how the attempt ended where ranks ended by themselves, before their work was done."""
    known = {rank: _failure(failure, lines.kept(rank)) for rank, failure in failures.items()}
    end = outcome(known, node=launch.node.index, last_lines=lines.last, lacked_memory=lacked_memory)
    if stopping.reason is not None and end.code != INTERRUPTED_EXIT_CODE:
        # Whether that was its own fault, the next attempt shows: what ends an instance may well break a rank first.
        return retried(f"{stopping.reason}; {end.reason}", "ended")
    return end


def _failure(failure: "ProcessFailure", kept_lines: list[str]) -> Failure:
    """Return what torchrun found of a rank, with what the rank told it (jobs.container.rank), if it did.

    One that a library aborted could tell nothing but what it wrote.
    """
    if failure.exitcode == -signal.SIGABRT and (line := line_of_lost_peers(kept_lines)):
        return Failure(code=failure.exitcode, time=failure.timestamp, message=line, is_explained=False)
    told = failure.error_file_data if "timestamp" in failure.error_file_data else None
    if not told:
        return Failure(
            code=failure.exitcode,
            time=failure.timestamp,
            message=f"it ended with exit code {failure.exitcode}",
            is_explained=False,
            last_line=_last_words(kept_lines),
        )
    return Failure(
        code=failure.exitcode,
        time=failure.timestamp,
        message=failure.message,
        is_explained=bool(told.get("explained")),
    )


def _last_words(lines: list[str]) -> str:
    """Return the last line that has any text, cut to a reason's length; of an error of ours without its next step."""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "").partition(" Next: ")[0]
    return last if len(last) <= _REASON_CHARACTERS else f"{last[: _REASON_CHARACTERS - 1]}…"
