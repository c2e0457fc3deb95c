"""Run one attempt of a job in its container: start the ranks, watch them, and report to Batch how they ended.

    python -m jobs.container.launch --instance-type=dl1.24xlarge --nproc-per-node=8 finetune-classification --model=… …

`TRAINYARD_RUN_URI` names the run's folder on S3, `TRAINYARD_ACCELERATOR` the accelerator. Batch sets all other
variables. Exit codes: 0 done; 1 error of the job, not retried; 75 interrupted, to be retried.

The launcher and its ranks are separate processes: the launcher starts an entrypoint by its module's name, and the code
of a rank does not use the launcher's. `ARCHITECTURE.md` lists the folders of the container.
"""

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from jobs.container.launcher.attempt import Attempt
from jobs.container.launcher.health import check_nodes
from jobs.container.launcher.node_ranks import run_ranks
from jobs.container.launcher.outcome import End, retried
from jobs.container.launcher.request import parse, parse_worker
from jobs.container.launcher.sweep import Worker
from jobs.container.rank import one_line
from jobs.container.saving import interruption as shutdown
from jobs.container.saving.interruption import Interrupted
from jobs.core.errors import INTERRUPTED_EXIT_CODE, TrainyardError
from jobs.core.instance_types import SCRATCH

log = logging.getLogger("trainyard")


def main(
    argv: Sequence[str] | None = None, *, disks: Path = Path(SCRATCH), stop_timeout_seconds: float | None = None
) -> int:
    """Run one attempt on this node, or a worker of a sweep. Returns the exit code for Batch.

    `disks` is the folder of the instance's own disks. `stop_timeout_seconds` is the time between SIGTERM and SIGKILL.
    Its default is the value set on our instances or, elsewhere, ECS's default.
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
        with Attempt(launch, disks) as attempt:
            end = attempt.prepare()
            if end is None:
                attempt.open_record()
                end = attempt.close_record(_run(attempt))
            return _report(end)
    except (TrainyardError, ValidationError) as error:
        print(f"error: {one_line(error)}", flush=True)
        return 1
    except SystemExit as end_of_parsing:
        return 1 if end_of_parsing.code else 0  # argparse exits with 2 on an unknown flag and with 0 after --help
    except Interrupted as interruption:
        log.info("interrupted: %s before the ranks had started", interruption)
        return INTERRUPTED_EXIT_CODE


def _run(attempt: Attempt) -> End:
    """Run this node's ranks until the ranks of all nodes have ended. Returns how the attempt ended. Never raises."""
    try:
        end = attempt.start()
        if end is None:
            with attempt.utilization, attempt.connected():
                end = attempt.wait_for_nodes() or check_nodes(attempt) or run_ranks(attempt)
            end = attempt.agreed_end(end)
    except Interrupted as interruption:
        end = retried(str(interruption), "ended")
    except Exception as error:  # noqa: BLE001 - the record must not stay "running" forever
        traceback.print_exc()
        end = End(code=1, reason=f"{type(error).__name__}: {error}", cause="own")
        attempt.fail(end.reason or "")
    return end


def _report(end: End) -> int:
    """Print why the attempt ended, unless it succeeded. Returns its exit code."""
    if end.reason is not None:
        print(f"{'interrupted' if end.code == INTERRUPTED_EXIT_CODE else 'error'}: {end.reason}", flush=True)
    return end.code


def _join_standard_error_to_output() -> None:
    """Send standard error to standard output, written line by line, so that a job has one log stream."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # TextIO does not declare it
    sys.stdout.flush()
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())


if __name__ == "__main__":
    sys.exit(main())
