"""Start a job's ranks inside its container, watch over them, and tell Batch how it ended.

    python -m jobs.train.launch --instance-type=dl1.24xlarge --nproc-per-node=8 finetune-classification --model=… …

TRAINYARD_RUN_URI says where the run lies, TRAINYARD_ACCELERATOR what it trains on; the rest comes from Batch's own
variables. Exit codes: 0 done; 1 the job's own fault, not to be started again; 75 interrupted, to be resumed.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jobs.errors import INTERRUPTED_EXIT_CODE, TrainyardError
from jobs.instance_types import SCRATCH
from jobs.queues import Capacity
from jobs.train import accelerator as accelerators
from jobs.train import s3 as object_store
from jobs.train.accelerator import Accelerator
from jobs.train.attempts import AttemptRecord, job_id, number_in_run
from jobs.train.budget_watch import BudgetWatch
from jobs.train.endings import Endings
from jobs.train.instance_metadata import InstanceMetadata
from jobs.train.launch_request import Launch, parse
from jobs.train.nodes import Nodes
from jobs.train.outcome import RESUMES, End, outcome, retried
from jobs.train.rank import ALLOW_CHANGES_VARIABLE, LAUNCHER_PID_VARIABLE, SCRATCH_VARIABLE, one_line
from jobs.train.sign import read_signs
from jobs.train.utilization import UtilizationLog
from jobs.train.watchdog import Watchdog

log = logging.getLogger("trainyard")

INTERRUPTS = (signal.SIGTERM, signal.SIGINT)

MEETING_SECONDS = 900
"""How long the nodes of a job wait for each other: EC2 may start them minutes apart."""


class Interrupted(BaseException):
    """SIGTERM (or Ctrl-C) arrived: the job is to be resumed.

    No Exception: botocore takes one that is raised while it waits for an answer for a broken line, and tries again.
    """


def main(
    argv: Sequence[str] | None = None, *, disks: Path = Path(SCRATCH), stop_timeout_seconds: float | None = None
) -> int:
    """The exit code for Batch. `disks`: where the container has its instance's own disks, if any.

    `stop_timeout_seconds`: between SIGTERM and SIGKILL; None: what our instances or, elsewhere, ECS itself have.
    """
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
    log.setLevel(logging.INFO)
    for number in INTERRUPTS:
        signal.signal(number, _interrupt)
    try:
        launch = parse(sys.argv[1:] if argv is None else argv, os.environ)
        if stop_timeout_seconds is not None:
            launch = replace(launch, stop_timeout_seconds=stop_timeout_seconds)
        launch = replace(launch, capacity=_capacity(launch))
        _one_live_stream()
        with _interrupts_held_back():
            accelerator = accelerators.choose(launch.accelerator_asked, nproc_per_node=launch.nproc_per_node)
        if launch.node.is_main:
            log.info("accelerator: %s", accelerator)
        scratch = _scratch(launch, disks)
        try:
            return _attempt(launch, accelerator, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except (TrainyardError, ValidationError) as error:
        print(f"error: {one_line(error)}", flush=True)
        return 1
    except SystemExit as end:
        return 1 if end.code else 0  # argparse leaves with 2 on an unknown flag, with 0 after --help
    except Interrupted as interruption:
        log.info("interrupted: %s before the ranks had started", interruption)
        return INTERRUPTED_EXIT_CODE


def _capacity(launch: Launch) -> Capacity | None:
    """What its instance is really paid as: where Spot has none, a Spot queue may have started an On-Demand one."""
    metadata = InstanceMetadata.of(os.environ, on_instance=launch.on_instance)
    if metadata is None or launch.capacity == "on-demand" or not launch.node.is_main:
        return launch.capacity
    return metadata.capacity() or launch.capacity


def _scratch(launch: Launch, disks: Path) -> Path:
    """A new folder for what the attempt downloads and writes: on the instance's own disks where the container has
    some, which are larger and faster than its root volume.
    """
    if launch.on_instance:
        with contextlib.suppress(OSError):  # no such folder, or none of ours
            return Path(tempfile.mkdtemp(prefix="trainyard-", dir=disks))
    return Path(tempfile.mkdtemp(prefix="trainyard-"))


def _attempt(launch: Launch, accelerator: Accelerator, scratch: Path) -> int:
    """One attempt, from its record's first line to its last."""
    record = watch = None
    number = launch.attempt
    if launch.node.is_main:
        s3, job = object_store.connect(), job_id()
        number = number_in_run(s3, launch.run, job_id=job, attempt=launch.attempt)
        record = AttemptRecord(
            s3,
            launch.run,
            job=launch.kind.name,
            instance=launch.instance,
            number=number,
            job_id=job,
            accelerator=accelerator.name,
            capacity=launch.capacity,
            budget=launch.budget,
            on_instance=launch.on_instance,
            nnodes=launch.node.nnodes,
            world_size=launch.world_size,
            scratch=scratch,
        )
        record.start()
        watch = BudgetWatch(
            record=record,
            budget=launch.budget,
            row=launch.instance,
            capacity=launch.capacity,
            nnodes=launch.node.nnodes,
            run_id=launch.run.key.strip("/").rpartition("/")[2],
        )
    try:
        if launch.node.is_main:
            log.info(
                "attempt %s of %s: %s, %s ranks on %s node(s) over %s",
                number,
                launch.run,
                launch.kind.name,
                launch.world_size,
                launch.node.nnodes,
                accelerator.backend,
            )
        if watch is not None and not watch.start():
            code, reason = 1, watch.reason
        else:
            with UtilizationLog(accelerator.name, node=launch.node.index):
                code, reason = _run_ranks(launch, accelerator, scratch)
    except Interrupted as interruption:
        code, reason = INTERRUPTED_EXIT_CODE, f"{interruption}; {RESUMES}"
    except Exception as error:  # noqa: BLE001 - whatever it was, the attempt's record must not say "running" for ever
        traceback.print_exc()
        code, reason = 1, f"{type(error).__name__}: {error}"
    if watch is not None:
        watch.stop()
        if watch.reason is not None and code == INTERRUPTED_EXIT_CODE:
            code, reason = 1, watch.reason  # another attempt would not get further
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)  # the ranks have ended; what is left takes a second and must be done
    if record is not None:
        try:
            record.finish(code, reason)
        except TrainyardError as error:
            if code == 0:
                raise
            # The code decides whether Batch starts the job again; a record that is late must not change that.
            log.warning("warning: the attempt's record is unfinished: %s", error.args[0])
    if reason is not None:
        print(f"{'interrupted' if code == INTERRUPTED_EXIT_CODE else 'error'}: {reason}", flush=True)
    return code


def _run_ranks(launch: Launch, accelerator: Accelerator, scratch: Path) -> tuple[int, str | None]:
    """Exit code and reason of the attempt."""
    if launch.node.nnodes == 1:
        end = _run_ranks_of_node(launch, accelerator, scratch, None)
        return end.code, end.reason
    with _interrupts_held_back():
        import torch.distributed  # noqa: F401 - the nodes' store is its
    with Nodes(launch.node, lambda: read_signs(scratch)) as nodes:
        try:
            absent = nodes.meet(MEETING_SECONDS)
        except Interrupted as interruption:
            nodes.tell(retried(str(interruption), "ended"))
            raise
        if absent:
            missing = ", ".join(f"node {index}" for index in absent)
            end = retried(f"{missing} did not come within {MEETING_SECONDS} s", "lost")
            nodes.tell(end)
        else:
            end = _run_ranks_of_node(launch, accelerator, scratch, nodes)
    return end.code, end.reason


def _run_ranks_of_node(launch: Launch, accelerator: Accelerator, scratch: Path, nodes: Nodes | None) -> End:
    """How the attempt ended. torchrun as a library, since its command turns every failure into 1."""
    with _interrupts_held_back():
        from torch.distributed.elastic.multiprocessing import api as processes
        from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What it has to say (a table of the failed ranks, a line for each signal) is said below in one line.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.update(_rank_environment(launch, accelerator, scratch))
    config = LaunchConfig(
        min_nodes=launch.node.nnodes,
        max_nodes=launch.node.nnodes,
        nproc_per_node=launch.nproc_per_node,
        run_id=f"attempt-{launch.attempt}",
        # One node: any free port, no race for it. Several: Batch has numbered them, so rank 0 is on the main node.
        rdzv_backend="c10d" if launch.node.nnodes == 1 else "static",
        rdzv_endpoint=f"{launch.node.main_address}:{launch.node.port}",
        rdzv_configs={"rank": launch.node.index, "timeout": MEETING_SECONDS},
        local_addr="localhost" if launch.node.nnodes == 1 else None,
        max_restarts=0,  # Batch's retry is the restart, on a node that is known to live
        start_method="spawn",
        log_line_prefix_template="[rank ${rank}] ",
        logs_specs=DefaultLogsSpecs(
            log_dir=str(scratch / "logs"),
            # Local rank 0 writes straight to our own stream, unless it is not the first of all.
            tee={
                rank: Std.NONE if rank == 0 and launch.node.is_main else Std.ALL
                for rank in range(launch.nproc_per_node)
            },
        ),
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
        hang_timeout_seconds=launch.hang_timeout_seconds,
        end_ranks=endings.end_now,
    )
    end = End(code=0, reason=None, cause="done")
    try:
        with endings, watchdog:
            elastic_launch(config, sys.executable)(*command)
    except (Interrupted, SignalException) as interruption:
        reason = endings.reason or _signal_name(interruption)
        late = f"; not saved within {endings.overdue_seconds:.0f} s" if endings.overdue_seconds is not None else ""
        end = retried(f"{reason}{late}", "ended")
    except ChildFailedError as error:
        end = outcome(
            {rank: (failure.exitcode, failure.timestamp, failure.message) for rank, failure in error.failures.items()}
        )
        if endings.reason is not None and end.code != INTERRUPTED_EXIT_CODE:
            # Whether that was its own fault, the next attempt shows: what ends an instance may well break a rank first.
            end = retried(f"{endings.reason}; {end.reason}", "ended")
    return watchdog.concluded(end)


def _rank_environment(launch: Launch, accelerator: Accelerator, scratch: Path) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return {
        # Each rank's share of the cores; PyTorch takes them all for each of its processes.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // launch.nproc_per_node))),
        # The one rank of a node that tokenizes turns it on for that time (jobs.train.tokenized_text).
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # transformers looks for TensorFlow and Flax otherwise, and loads what it finds.
        "USE_TF": "0",
        "USE_FLAX": "0",
        SCRATCH_VARIABLE: str(scratch),
        "TMPDIR": str(scratch),  # PyTorch leaves folders in there
        LAUNCHER_PID_VARIABLE: str(os.getpid()),
        ALLOW_CHANGES_VARIABLE: str(int(launch.allow_changes)),
        **accelerator.environment,
    }


def _one_live_stream() -> None:
    """Standard error joins standard output, line by line: a job's log is one stream."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # TextIO does not declare it
    sys.stdout.flush()
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())


_arrived: list[str] = []
"""Names of the signals that came."""


def _interrupt(number: int, _: Any) -> None:
    _arrived.append(signal.Signals(number).name)
    raise Interrupted(_arrived[0])


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """An interrupt waits for the end of the block: modules, while imported, may swallow what is raised in them.

    One that was swallowed before the block is raised again at its end, so none is lost before the ranks start.
    """
    for number in INTERRUPTS:
        signal.signal(number, lambda number, _: _arrived.append(signal.Signals(number).name))
    try:
        yield
    finally:
        for number in INTERRUPTS:
            signal.signal(number, _interrupt)
    if _arrived:
        raise Interrupted(_arrived[0])


def _signal_name(interruption: BaseException) -> str:
    number = getattr(interruption, "sigval", None)
    return number.name if number is not None else str(interruption)


if __name__ == "__main__":
    sys.exit(main())
