"""Run the ranks of one node: set their environment, start them, and find out how they ended.

This module uses torchrun as a library, because its command turns every failure into exit code 1.
"""

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from jobs.container import libfabric
from jobs.container.accelerator import Accelerator
from jobs.container.channel import (
    STORE_TIMEOUT,
    loopback_sockets,
    read_left,
    read_stopped,
    read_verdict,
    serve_store,
    sockets_of_interface,
    write_comparison,
)
from jobs.container.environment import ran_with
from jobs.container.instance import InstanceMetadata, cpus, source_address
from jobs.container.launcher import compiled_graphs
from jobs.container.launcher.attempt import Attempt
from jobs.container.launcher.compiled_graphs import CompiledGraphs
from jobs.container.launcher.outcome import (
    End,
    Failure,
    line_of_lost_peers,
    outcome,
    retried,
    with_early_ends,
    with_full_disk,
)
from jobs.container.launcher.rank_lines import RankLines
from jobs.container.launcher.rendezvous import LatecomerWatch
from jobs.container.launcher.request import Launch, Node
from jobs.container.launcher.watchdog import Idleness, Silence, Watchdog
from jobs.container.rank import (
    ALLOW_CHANGES_VARIABLE,
    ARGUMENTS_FILE,
    ATTEMPT_VARIABLE,
    LAUNCHED_AT_VARIABLE,
    LAUNCHER_PID_VARIABLE,
    SCRATCH_VARIABLE,
    one_line,
)
from jobs.container.saving import interruption as shutdown
from jobs.container.saving.interruption import Interrupted, ShutdownWatch
from jobs.container.script.job import ScriptJob
from jobs.core.errors import INTERRUPTED_EXIT_CODE, TrainyardError
from jobs.spec.kinds.script import Script

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

log = logging.getLogger("trainyard")

_NCCL_DUMP = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
"""After NCCL has lost a peer, PyTorch's watchdog waits four times this long for debug dumps before it ends its rank
(ProcessGroupNCCL.cpp, getDumpTimeout). By default this takes 60 s (measured with `python -m tests.benchmarks.lost_peer
--device cuda`), for which the other nodes are billed. Nobody reads the dumps."""

_RECIPES = "PT_HPU_RECIPE_CACHE_CONFIG"
"""Lets the HPUs of a node share compiled graphs instead of each compiling all of them. Habana's bridge requires this
format: a folder, whether to empty it first, and its size in MB."""

RECIPES_MB = 8 * 1024
"""Size of the recipe cache: 1 GB for each of eight cards, as in the bridge's example."""

_REASON_CHARACTERS = 200
"""Maximum length of a rank's last line in a reason. The log has the whole line."""

RENDEZVOUS_SECONDS = 900
"""Timeout of torchrun's rendezvous. The launchers have already met by then."""

VMSTAT = Path("/proc/vmstat")


def run_ranks(attempt: Attempt) -> End:
    """Run this node's ranks until they end. Returns how the attempt ended; the main node's result covers all nodes."""
    launch, scratch = attempt.launch, attempt.scratch
    with shutdown.signals_held_back():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

    _silence_torchrun()
    if launch.options.halving is not None:
        write_comparison(scratch, launch.options.halving)
    script = _script(attempt)
    lines = RankLines(
        scratch,
        node=launch.node,
        nproc_per_node=launch.nproc_per_node,
        listener=script.add_line if script is not None else None,
    )
    try:
        os.environ.update(rank_environment(launch, attempt.accelerator, scratch))
    except TrainyardError as error:
        return End(code=1, reason=one_line(error), cause="own")
    # On a single node: any free port, served until the ranks have ended, so that no other process can take it.
    store = serve_store(launch.node.main_address) if launch.node.nnodes == 1 else None
    config = _torchrun_config(launch, lines, port=launch.node.port if store is None else store.port)
    stopping = _shutdown_of_ranks(launch, scratch, script)
    watchdog = Watchdog(
        scratch,
        node=launch.node,
        nodes=attempt.nodes,
        nproc_per_node=launch.nproc_per_node,
        hang_timeout_seconds=launch.options.hang_timeout_seconds,
        last_lines=lines.last,
        end_ranks=stopping.end_now,
        silence=_silence(script, lines),
        idleness=Idleness(
            launch.idle_limit_seconds,
            attempt.utilization.idle_seconds,
            warn_of_cpu=script is not None and attempt.accelerator.name != "cpu",
        ),
    )
    late_nodes: contextlib.AbstractContextManager[object] = (
        LatecomerWatch(attempt.rendezvous, stopping.ask_to_stop)
        if attempt.rendezvous is not None and launch.node.is_main
        else contextlib.nullcontext()
    )
    kills_before = oom_kills()
    end = End(code=0, reason=None, cause="done")
    try:
        with lines, stopping, watchdog, late_nodes:
            program, python = ["-m", launch.kind.entrypoint], sys.executable
            if script is None:
                program += _arguments_of_ranks(launch, scratch)
            else:
                os.environ.update(script.prepare())
                program, python = script.program, script.python
                if script.ran_with is not None:
                    attempt.set_versions(script.ran_with)
            with script or contextlib.nullcontext(), _compiled_graphs(attempt, script, stopping):
                elastic_launch(config, python)(*program)
    except TrainyardError as error:
        end = End(code=1, reason=one_line(error), cause="own")
    except (Interrupted, SignalException) as interruption:
        end = _interrupted(interruption, stopping)
    except ChildFailedError as error:
        out_of_memory = None if kills_before is None else oom_kills() != kills_before
        end = _failed(error.failures, launch, lines, stopping, out_of_memory=out_of_memory)
        end = with_full_disk(with_early_ends(end, read_left(scratch), node=launch.node.index), scratch)
    if script is not None:
        end = _end_of_script(script, end, stopping, scratch)
    if end.code == 0 and (halving := launch.options.halving) is not None and read_verdict(scratch) is None:
        log.warning(
            "warning: this point was not compared with the others: no evaluation between step %s and the last step "
            "reported %s. Next: lower sweep.halving.from_step, or evaluate more often",
            halving.from_step,
            halving.metric,
        )
    end = watchdog.conclude(end)
    for line in end.lines:
        log.info("%s", line)
    return end


def _script(attempt: Attempt) -> ScriptJob | None:
    """Return the launcher's side of a custom script, or None for our own kinds of jobs."""
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


def _compiled_graphs(
    attempt: Attempt, script: ScriptJob | None, stopping: ShutdownWatch
) -> contextlib.AbstractContextManager[object]:
    """Return what keeps compiled graphs on S3. Habana's bridge has its own cache, which stays on the instance."""
    if attempt.accelerator.name == "hpu":
        return contextlib.nullcontext()
    versions = {**ran_with(), **((script.ran_with if script is not None else None) or {})}
    launch = attempt.launch
    return CompiledGraphs(
        launch.run,
        compiled_graphs.folder_of(attempt.scratch),
        compiled_graphs.fingerprint(versions, instance_type=launch.instance.name),
        attempt=int(os.environ[ATTEMPT_VARIABLE]) if launch.node.is_main else None,
        saves=launch.node.is_main,
        is_stopping=lambda: stopping.reason is not None,
    )


def _silence(script: ScriptJob | None, lines: RankLines) -> Silence | None:
    if script is None:
        return None
    return Silence(script.silence_seconds, lambda: max(lines.last_line_at, script.last_activity()))


def _end_of_script(script: ScriptJob, end: End, stopping: ShutdownWatch, scratch: Path) -> End:
    """Save the script's files. Returns how the attempt ended, which the exit code alone does not show."""
    if end.code == 0 and (reason := read_stopped(scratch)) is not None:
        end = End(code=INTERRUPTED_EXIT_CODE, reason=reason, cause="done")
    elif stopping.has_signalled and end.cause in ("done", "ended"):
        late = stopping.overdue_seconds
        how = "received SIGTERM" if late is None else f"had not ended {late:.0f} s after SIGTERM, and was killed"
        end = retried(f"{stopping.reason}; the script {how}", "ended")
    if script.refusal is not None:
        end = End(code=1, reason=one_line(script.refusal), cause="own")
    try:
        script.finish(ended_well=end.code == 0)
    except TrainyardError as error:
        if end.code == 0:
            return End(code=1, reason=f"the script's files could not be saved: {one_line(error)}", cause="own")
        log.warning("warning: not all of the script's files were saved: %s", one_line(error))
    return end


def _arguments_of_ranks(launch: Launch, scratch: Path) -> list[str]:
    """Return the arguments of each rank: flags, or a file's name if the job's arguments came in a file.

    Linux limits one flag to 128 KiB.
    """
    if launch.options.arguments_file is None:
        return launch.arguments.to_flags()
    file = scratch / "arguments.json"
    file.write_text(launch.arguments.model_dump_json(exclude_none=True))
    return [f"{ARGUMENTS_FILE}{file}"]


def oom_kills(vmstat: Path = VMSTAT) -> int | None:
    """Return how many processes the kernel's OOM killer has ended since boot, in all containers. None outside Linux.

    The count (`oom_kill` of vmstat) shows whether a rank was killed because it used too much memory.
    """
    try:
        counters = vmstat.read_text().splitlines()
    except OSError:
        return None
    named = (line.partition(" ") for line in counters)
    return next((int(value) for name, _, value in named if name == "oom_kill"), None)


def _silence_torchrun() -> None:
    """Turn off torchrun's log (a table, a line for each signal). The launcher's last line has the same information."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each one, because PyTorch 2.2 sets a level for each
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _torchrun_config(launch: Launch, lines: RankLines, *, port: int) -> "LaunchConfig":
    from torch.distributed.launcher.api import LaunchConfig

    # A script's nodes may still be downloading inputs when the others wait for them.
    seconds = int(STORE_TIMEOUT.total_seconds()) if isinstance(launch.arguments, Script) else RENDEZVOUS_SECONDS
    return LaunchConfig(
        min_nodes=launch.node.nnodes,
        max_nodes=launch.node.nnodes,
        nproc_per_node=launch.nproc_per_node,
        run_id=f"attempt-{launch.attempt}",
        # Batch has numbered the nodes, so rank 0 is on the main node. With PyTorch 2.2, torch's other rendezvous
        # (c10d) does not keep its store open for the ranks; later releases do.
        rdzv_backend="static",
        rdzv_endpoint=f"{launch.node.main_address}:{port}",
        rdzv_configs={"rank": launch.node.index, "timeout": seconds},
        local_addr=launch.node.main_address if launch.node.nnodes == 1 else None,
        max_restarts=0,  # Batch's retry is the restart
        start_method="spawn",
        **lines.launch_options(),
    )


def _shutdown_of_ranks(launch: Launch, scratch: Path, script: ScriptJob | None) -> ShutdownWatch:
    """Return the watch that handles SIGTERM once torchrun has started the ranks."""
    from torch.distributed.elastic.multiprocessing import api

    stopping = ShutdownWatch(
        scratch,
        metadata=InstanceMetadata.of(os.environ, on_instance=launch.on_instance),
        stop_timeout_seconds=launch.stop_timeout_seconds,
        give_up=_end_at_once,
        pids_of_script=script.pids if script is not None else None,
    )
    # Torch installs this function as its SIGTERM handler once it has started the ranks. Torch's own handler would end
    # them at once, saved or not, and no release makes it configurable.
    api._terminate_process_handler = lambda signum, frame: stopping.on_signal(signum)  # noqa: SLF001, ARG005
    return stopping


def _end_at_once(number: int) -> None:
    """Make torchrun end the ranks, saved or not."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    raise SignalException(signal.Signals(number).name, sigval=signal.Signals(number))


def _interrupted(interruption: BaseException, stopping: ShutdownWatch) -> End:
    """Return how the attempt ended after the launcher has ended the ranks."""
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
    out_of_memory: bool | None,
) -> End:
    """Return how the attempt ended after ranks have failed."""
    known = {rank: _failure(failure, lines.kept(rank)) for rank, failure in failures.items()}
    end = outcome(known, node=launch.node.index, last_lines=lines.last, out_of_memory=out_of_memory)
    if stopping.reason is not None and end.code != INTERRUPTED_EXIT_CODE:
        # The instance's shutdown may have caused the error. If the job did, the next attempt fails in the same way.
        return retried(f"{stopping.reason}; {end.reason}", "ended")
    return end


def _failure(failure: "ProcessFailure", kept_lines: list[str]) -> Failure:
    """Return a rank's failure from torchrun's report and, if there is one, the rank's error file (jobs.container.rank).

    A rank that a library aborted has no error file, only output.
    """
    if failure.exitcode == -signal.SIGABRT and (line := line_of_lost_peers(kept_lines)):
        return Failure(code=failure.exitcode, time=failure.timestamp, message=line, is_explained=False)
    reported = failure.error_file_data if "timestamp" in failure.error_file_data else None
    if not reported:
        return Failure(
            code=failure.exitcode,
            time=failure.timestamp,
            message=f"it ended with exit code {failure.exitcode}",
            is_explained=False,
            last_line=_last_line(kept_lines),
        )
    return Failure(
        code=failure.exitcode,
        time=failure.timestamp,
        message=failure.message,
        is_explained=bool(reported.get("explained")),
    )


def _last_line(lines: list[str]) -> str:
    """Return the last line that is not empty, shortened for a reason, without the next step of our own errors."""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "").partition(" Next: ")[0]
    return last if len(last) <= _REASON_CHARACTERS else f"{last[: _REASON_CHARACTERS - 1]}…"


def rank_environment(launch: Launch, accelerator: Accelerator, scratch: Path) -> dict[str, str]:
    """Return the variables that the launcher sets for its ranks, in addition to torchrun's."""
    share = str(max(1, cpus() // launch.nproc_per_node))
    return {
        # Each rank's share of the cores. By default each PyTorch process uses all of them, and torch.compile up to 32.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", share),
        "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", share),
        "PYTHONUNBUFFERED": "1",
        **_unless_set(
            {
                # A rank that tokenizes for its node enables it while it does so (jobs.container.data.labelled_tokens).
                "TOKENIZERS_PARALLELISM": "false",
                # Otherwise transformers looks for TensorFlow and Flax, and loads them if installed.
                "USE_TF": "0",
                "USE_FLAX": "0",
            }
        ),
        # Otherwise releases of datasets before 4 run the code of a data set on the hub.
        "HF_DATASETS_TRUST_REMOTE_CODE": "0",
        SCRATCH_VARIABLE: str(scratch),
        "TMPDIR": str(scratch),  # PyTorch leaves folders behind
        LAUNCHER_PID_VARIABLE: str(os.getpid()),
        LAUNCHED_AT_VARIABLE: str(psutil.Process().create_time()),
        ALLOW_CHANGES_VARIABLE: str(int(launch.options.allow_changes)),
        **(loopback_sockets() if launch.node.nnodes == 1 else _sockets_towards(launch.node)),
        **accelerator.environment,
        **_unless_set(
            {_RECIPES: f"{scratch / 'recipes'},false,{RECIPES_MB}"}
            if accelerator.name == "hpu"
            else compiled_graphs.variables(scratch)
        ),
        **libfabric.environment(accelerator.name, nnodes=launch.node.nnodes),
        **_unless_set(_NCCL_DUMP if accelerator.backend == "nccl" else {}),
    }


def _sockets_towards(node: Node) -> dict[str, str]:
    """Return the variables that make the ranks of several nodes use the network interface towards the main node.

    On the main node, that is the interface with its address. If none is found, the libraries choose an interface.
    """
    try:
        own = source_address(node.main_address, node.port)
    except OSError:
        return {}
    carriers = [name for name, found in psutil.net_if_addrs().items() if own in (one.address for one in found)]
    chosen = sockets_of_interface(carriers[0]) if carriers else {}
    return _unless_set(chosen)


def _unless_set(chosen: dict[str, str]) -> dict[str, str]:
    """Return the variables that neither the image nor the job has set."""
    return {name: value for name, value in chosen.items() if name not in os.environ}
