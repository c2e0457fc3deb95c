"""Start a job's ranks inside its container, watch over them, and tell Batch how it ended.

    python -m jobs.train.launch --instance-type=dl1.24xlarge --nproc-per-node=8 finetune-classification --model=… …

TRAINYARD_RUN_URI says where the run lies, TRAINYARD_ACCELERATOR what it trains on; the rest comes from Batch's own
variables. Exit codes: 0 done; 1 the job's own fault, not to be started again; 75 interrupted, to be resumed.
"""

import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from jobs.aws import s3 as object_store
from jobs.contract.errors import INTERRUPTED_EXIT_CODE, TrainyardError
from jobs.contract.instance_types import SCRATCH
from jobs.contract.queues import Capacity
from jobs.train import accelerator as accelerators
from jobs.train.accelerator import Accelerator
from jobs.train.attempts import AttemptRecord, job_id, number_in_run
from jobs.train.channel import read_heartbeats
from jobs.train.launcher import interrupts
from jobs.train.launcher.budget_watch import BudgetWatch
from jobs.train.launcher.gang import BEAT_SECONDS, GangMember
from jobs.train.launcher.gang_address import own_address
from jobs.train.launcher.gang_folder import GangFolder
from jobs.train.launcher.instance_metadata import InstanceMetadata
from jobs.train.launcher.interrupts import Interrupted
from jobs.train.launcher.node_ranks import run_ranks
from jobs.train.launcher.nodes import Nodes
from jobs.train.launcher.outcome import RESUMES, End, retried
from jobs.train.launcher.request import Gang, Launch, parse
from jobs.train.launcher.utilization import UtilizationLog
from jobs.train.rank import one_line

log = logging.getLogger("trainyard")

GANG_MEETING_SECONDS = 120
"""In place of start_timeout_seconds where the nodes have met already, on S3: they only begin."""


def main(
    argv: Sequence[str] | None = None, *, disks: Path = Path(SCRATCH), stop_timeout_seconds: float | None = None
) -> int:
    """The exit code for Batch. `disks`: where the container has its instance's own disks, if any.

    `stop_timeout_seconds`: between SIGTERM and SIGKILL; None: what our instances or, elsewhere, ECS itself have.
    """
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
    log.setLevel(logging.INFO)
    interrupts.raised()
    try:
        launch = parse(sys.argv[1:] if argv is None else argv, os.environ)
        if stop_timeout_seconds is not None:
            launch = replace(launch, stop_timeout_seconds=stop_timeout_seconds)
        launch = replace(launch, capacity=_capacity(launch))
        _one_live_stream()
        if launch.gang is None:
            return _node(launch, disks, None)
        with _gang_member(launch, launch.gang) as member:
            return _node(launch, disks, member)
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


def _gang_member(launch: Launch, gang: Gang) -> GangMember:
    with interrupts.held_back():
        import torch.distributed  # noqa: F401 - it takes long, and who has met the others is not to be waited for
    s3 = object_store.connect()
    metadata = InstanceMetadata.of(os.environ, on_instance=launch.on_instance)
    folder = GangFolder(s3, launch.run, job_id())
    return GangMember(gang, folder, own_address(metadata, s3.meta.endpoint_url), capacity=launch.capacity)


def _node(launch: Launch, disks: Path, gang: GangMember | None) -> int:
    """What this node does, from its accelerators on."""
    with interrupts.held_back():
        accelerator = accelerators.choose(launch.accelerator_asked, nproc_per_node=launch.nproc_per_node)
    if launch.node.is_main:
        log.info("accelerator: %s", accelerator)
    if gang is not None:
        meeting = gang.meet()
        if isinstance(meeting, End):
            _say(meeting.code, meeting.reason)
            return meeting.code
        launch = replace(launch, node=gang.node(meeting), attempt=meeting.number, capacity=meeting.capacity)
    scratch = _scratch(launch, disks)
    try:
        return _attempt(launch, accelerator, scratch, gang)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _scratch(launch: Launch, disks: Path) -> Path:
    """A new folder for what the attempt downloads and writes: on the instance's own disks where the container has
    some, which are larger and faster than its root volume.
    """
    if launch.on_instance:
        with contextlib.suppress(OSError):  # no such folder, or none of ours
            return Path(tempfile.mkdtemp(prefix="trainyard-", dir=disks))
    return Path(tempfile.mkdtemp(prefix="trainyard-"))


def _attempt(launch: Launch, accelerator: Accelerator, scratch: Path, gang: GangMember | None) -> int:
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
            budget=launch.options.budget,
            on_instance=launch.on_instance,
            nnodes=launch.node.nnodes,
            world_size=launch.world_size,
            waited_instance_seconds=gang.waited_seconds if gang is not None else 0.0,
            scratch=scratch,
        )
        record.start()
        watch = BudgetWatch(
            record=record,
            budget=launch.options.budget,
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
                code, reason = _over_nodes(launch, accelerator, scratch, gang)
    except Interrupted as interruption:
        code, reason = INTERRUPTED_EXIT_CODE, f"{interruption}; {RESUMES}"
    except Exception as error:  # noqa: BLE001 - whatever it was, the attempt's record must not say "running" for ever
        traceback.print_exc()
        code, reason = 1, f"{type(error).__name__}: {error}"
        if gang is not None:
            gang.failed(reason)
    if watch is not None:
        watch.stop()
        if watch.reason is not None and code == INTERRUPTED_EXIT_CODE:
            code, reason = 1, watch.reason  # another attempt would not get further
    interrupts.ignored()  # the ranks have ended; what is left takes a second and must be done
    if record is not None:
        try:
            record.finish(code, reason)
        except TrainyardError as error:
            if code == 0:
                raise
            # The code decides whether Batch starts the job again; a record that is late must not change that.
            log.warning("warning: the attempt's record is unfinished: %s", error.args[0])
    if gang is not None and launch.node.is_main:
        gang.end(code, reason)
    _say(code, reason)
    return code


def _say(code: int, reason: str | None) -> None:
    if reason is not None:
        print(f"{'interrupted' if code == INTERRUPTED_EXIT_CODE else 'error'}: {reason}", flush=True)


def _over_nodes(
    launch: Launch, accelerator: Accelerator, scratch: Path, gang: GangMember | None
) -> tuple[int, str | None]:
    """Exit code and reason of the attempt."""
    if launch.node.nnodes == 1:
        end = run_ranks(launch, accelerator, scratch, None, gang)
        return end.code, end.reason
    with interrupts.held_back():
        import torch.distributed  # noqa: F401 - the nodes' store is its
    patience_seconds = launch.options.start_timeout_seconds if gang is None else GANG_MEETING_SECONDS
    with Nodes(launch.node, lambda: read_heartbeats(scratch)) as nodes:
        try:
            absent = _absent(nodes, patience_seconds, gang)
        except Interrupted as interruption:
            nodes.tell(retried(str(interruption), "ended"))
            raise
        if absent:
            missing = ", ".join(f"node {index}" for index in absent)
            over = gang.over() if gang is not None else None
            end = over or retried(f"{missing} did not come within {patience_seconds:g} s", "lost")
            nodes.tell(end)
        else:
            end = run_ranks(launch, accelerator, scratch, nodes, gang)
    if gang is not None and not launch.node.is_main:
        interrupts.raised()
        end = gang.followed(end)
    return end.code, end.reason


def _absent(nodes: Nodes, patience_seconds: float, gang: GangMember | None) -> list[int]:
    """Those that have not come in time. The main node of a gang may end the run before it waits for the others."""
    deadline = time.monotonic() + patience_seconds
    while absent := nodes.meet(BEAT_SECONDS if gang is not None else patience_seconds):
        if time.monotonic() >= deadline or (gang is not None and gang.is_over()):
            break
    return absent


def _one_live_stream() -> None:
    """Standard error joins standard output, line by line: a job's log is one stream."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # TextIO does not declare it
    sys.stdout.flush()
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())


if __name__ == "__main__":
    sys.exit(main())
