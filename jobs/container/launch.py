"""Start a job's ranks inside its container, watch over them, and tell Batch how it ended.

    python -m jobs.container.launch --instance-type=dl1.24xlarge --nproc-per-node=8 finetune-classification --model=… …

TRAINYARD_RUN_URI says where the run lies, TRAINYARD_ACCELERATOR what it trains on; the rest comes from Batch's own
variables. Exit codes: 0 done; 1 the job's own fault, not to be started again; 75 interrupted, to be resumed.

This module tells one attempt in the order in which it happens. It is also the entry to all that runs in the container:

    jobs/container/              imports          holds
      launch.py              launcher         the container's entry: this module
      launcher/              script           one process a node: from Batch's environment to ranks and their end
        request.py                            what is to be started: the command line and Batch's variables, checked
        attempt.py                            what an attempt has on this node
        gang.py, gang_folder.py               nodes that are jobs of their own meet on S3
        sweep.py                              a worker of a sweep: point after point, each in a launcher of its own
        nodes.py                              the nodes of one attempt hear each other
        health.py                             whether this node is well, before its ranks start
        node_ranks.py, rank_lines.py          the ranks of this node: started by torchrun, and what they print
        rank_environment.py                   the variables that ranks find
        watchdog.py                           ranks that hang, nodes that are lost
        shutdown.py                           SIGTERM and Spot notice: the ranks save and stop
        outcome.py                            how the attempt ended, and whether Batch starts it again
        accounting.py                         attempts/N.json, receipt.json and the budget
        instance.py, utilization.py           the EC2 instance, and how busy its accelerators are
      script/                data             what a node does for a script of one's own, before its ranks run and while
      kinds/                 trainer, models, data    the entrypoint of each kind of job, which is what a rank runs
      trainer/                                Trainer, checkpoints, metrics, and the ranks' part in a shutdown
      models/                data             models of our own
      data/                                   what jobs read and make: tables, corpora, tokens
      rank.py                                 a rank: its peers, its run, how it ends
      start_up.py                             what the start of an attempt takes, by its parts
      health_rank.py                          a card's part in the check of its node's health
      gaudi_config.py        data             how optimum-habana uses an HPU, as a file of one's own
      libfabric.py                            what cards of several nodes talk over, and whether it is there
      packages.py                             what is installed on top of the image's packages
      stored_checkpoints.py, saved_folder.py  checkpoints, and a folder, as they lie on S3
      channel.py                              files by which the launcher of a node and its ranks talk
      store.py                                the key-value store of launchers and ranks, and who can reach it
      accelerator.py, batch_job.py            the accelerator; the Batch job
      imports.py                              imports that take seconds
      environment.py                          the image that the code runs in, and its packages
      hub.py                 data             the push to the Hugging Face Hub

A room imports itself, those that are named beside it, and the modules after them. Launcher and ranks are processes of
their own: the launcher knows an entrypoint by its name only, and a rank knows nothing of the launcher.
"""

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from jobs.aws import s3 as object_store
from jobs.container import accelerator as accelerators
from jobs.container.channel import read_heartbeats
from jobs.container.instance import capacity_paid, own_address, scratch_folder
from jobs.container.launcher.accounting import AttemptRecord, BudgetWatch
from jobs.container.launcher.attempt import NodeAttempt
from jobs.container.launcher.gang import GangMember
from jobs.container.launcher.health import check_nodes
from jobs.container.launcher.node_ranks import run_ranks
from jobs.container.launcher.nodes import Nodes, wait_for_all
from jobs.container.launcher.outcome import End, retried
from jobs.container.launcher.request import Launch, parse, parse_worker
from jobs.container.launcher.sweep import Worker
from jobs.container.launcher.utilization import Utilization
from jobs.container.rank import ATTEMPT_VARIABLE, one_line
from jobs.container.saving import interruption as shutdown
from jobs.container.saving.interruption import Interrupted
from jobs.core.errors import INTERRUPTED_EXIT_CODE, TrainyardError
from jobs.core.instance_types import SCRATCH
from jobs.core.words import counted
from jobs.spec.recipe import hpu_trainer

log = logging.getLogger("trainyard")


def main(
    argv: Sequence[str] | None = None, *, disks: Path = Path(SCRATCH), stop_timeout_seconds: float | None = None
) -> int:
    """Return the exit code for Batch. `disks` is where the container has its instance's own disks, if any.

    `stop_timeout_seconds` is the time between SIGTERM and SIGKILL; None: that of our instances or, elsewhere, of ECS.
    """
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
    log.setLevel(logging.INFO)
    shutdown.raise_on_signals()
    try:
        argv = sys.argv[1:] if argv is None else argv
        if (sweep := parse_worker(argv, os.environ)) is not None:
            _join_standard_error_to_output()
            return Worker(*sweep, os.environ).work()
        launch = parse(argv, os.environ)
        if stop_timeout_seconds is not None:
            launch = replace(launch, stop_timeout_seconds=stop_timeout_seconds)
        _join_standard_error_to_output()
        if launch.node.is_main:
            capacity = capacity_paid(launch.capacity, os.environ, on_instance=launch.on_instance)
            launch = replace(launch, capacity=capacity)
        if launch.gang is None:
            return _on_accelerator(launch, disks, None)
        with GangMember.of(launch, launch.gang) as gang:
            return _on_accelerator(launch, disks, gang)
    except (TrainyardError, ValidationError) as error:
        print(f"error: {one_line(error)}", flush=True)
        return 1
    except SystemExit as end:
        return 1 if end.code else 0  # argparse leaves with 2 on an unknown flag, with 0 after --help
    except Interrupted as interruption:
        log.info("interrupted: %s before the ranks had started", interruption)
        return INTERRUPTED_EXIT_CODE


def _on_accelerator(launch: Launch, disks: Path, gang: GangMember | None) -> int:
    """Find this node's accelerators, meet the gang if it is of one, and make the attempt. Returns the exit code."""
    with shutdown.signals_held_back():
        accelerator = accelerators.choose(
            launch.accelerator_asked,
            nproc_per_node=launch.nproc_per_node,
            cards=_cards_checked(launch),
            hpu_trainer=hpu_trainer(launch.arguments),
        )
    if launch.node.is_main:
        log.info("accelerator: %s", accelerator)
    if gang is not None:
        meeting = gang.meet()
        if isinstance(meeting, End):
            return _said(meeting)
        launch = replace(launch, node=gang.node(meeting), attempt=meeting.number, capacity=meeting.capacity)
    with scratch_folder(disks, launch.run, node=launch.node.index, on_instance=launch.on_instance) as scratch:
        utilization = Utilization(accelerator.name, node=launch.node.index, limit_seconds=launch.idle_limit_seconds)
        return _make(
            NodeAttempt(
                launch=launch,
                accelerator=accelerator,
                scratch=scratch,
                disks=disks,
                gang=gang,
                utilization=utilization,
            )
        )


def _cards_checked(launch: Launch) -> int | None:
    """Return the cards that the check of the node's health counts; None where it does not come to that."""
    row = launch.instance
    checked = launch.options.health.seconds_on(launch.accelerator_asked, on_instance=launch.on_instance)
    return row.accelerators if checked and launch.accelerator_asked == row.accelerator else None


def _make(attempt: NodeAttempt) -> int:
    """Make one attempt, from its record's first line to its last. Returns the exit code."""
    gang, is_main = attempt.gang, attempt.node.is_main
    record = budget = None
    if is_main:
        record = AttemptRecord(attempt)
        record.start()
        os.environ[ATTEMPT_VARIABLE] = str(record.number)
        budget = BudgetWatch(record, attempt.launch)
    try:
        if record is not None:
            _announce(attempt, record.number)
        end = budget.start() if budget is not None else None
        if end is None:
            with attempt.utilization:
                end = _on_all_nodes(attempt)
    except Interrupted as interruption:
        end = retried(str(interruption), "ended")
    except Exception as error:  # noqa: BLE001 - whatever it was, the attempt's record must not say "running" for ever
        traceback.print_exc()
        end = End(code=1, reason=f"{type(error).__name__}: {error}", cause="own")
        if gang is not None:
            gang.failed(end.reason or "")
    if budget is not None:
        end = budget.stop(end)
    shutdown.ignore_signals()  # the ranks have ended; what is left takes a second and must be done
    if record is not None:
        end = record.with_outlook(end, comes_again=gang is not None)
        record.finish(end)
    if gang is not None and is_main:
        gang.end(end.code, end.reason)
    return _said(end)


def _on_all_nodes(attempt: NodeAttempt) -> End:
    """Meet the other nodes, and run the ranks of this one until all have ended. Returns how the attempt ended."""
    node, gang = attempt.node, attempt.gang
    if node.nnodes == 1:
        return check_nodes(attempt, None) or run_ranks(attempt, None)
    if gang is None and node.is_main:
        # Not what EC2 says: AWS Batch gives such a container a network interface of its own.
        node = replace(node, main_address=own_address(None, object_store.connect().meta.endpoint_url))
        attempt = replace(attempt, launch=replace(attempt.launch, node=node))
    with shutdown.signals_held_back():
        import torch.distributed  # noqa: F401 - the nodes' store is its
    utilization = attempt.utilization
    with Nodes(node, lambda: read_heartbeats(attempt.scratch), use=lambda: utilization.newest) as nodes:
        utilization.other_nodes = lambda: list(nodes.uses.values())
        end = (
            wait_for_all(nodes, gang, start_timeout_seconds=attempt.launch.options.start_timeout_seconds)
            or check_nodes(attempt, nodes)
            or run_ranks(attempt, nodes)
        )
    if gang is not None and not node.is_main:
        shutdown.raise_on_signals()
        end = gang.followed(end)
    return end


def _announce(attempt: NodeAttempt, number: int) -> None:
    launch = attempt.launch
    log.info(
        "attempt %s of %s: %s, %s on %s over %s",
        number,
        launch.run,
        launch.kind.name,
        counted(launch.world_size, "rank"),
        counted(launch.node.nnodes, "node"),
        attempt.accelerator.backend,
    )


def _said(end: End) -> int:
    """Print why the attempt ended, unless it is done, and return its exit code."""
    if end.reason is not None:
        print(f"{'interrupted' if end.code == INTERRUPTED_EXIT_CODE else 'error'}: {end.reason}", flush=True)
    return end.code


def _join_standard_error_to_output() -> None:
    """Make a job's log one stream, written line by line."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # TextIO does not declare it
    sys.stdout.flush()
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())


if __name__ == "__main__":
    sys.exit(main())
