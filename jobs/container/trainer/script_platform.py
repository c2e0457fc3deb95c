"""A script's process inside the platform: its rank, its run, and the checkpoint from which it resumes.

The library `trainyard`, which scripts import, uses it through `script_trainer` (for a transformers Trainer) and
`script_loop` (for a custom loop).
"""

import atexit
import contextlib
import faulthandler
import functools
import json
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.aws import s3 as object_store
from jobs.container.accelerator import Accelerator, of_rank
from jobs.container.channel import mark_library_used, write_stopped
from jobs.container.rank import Rank
from jobs.container.saving.manifest import IncompleteError, fetch
from jobs.container.saving.resume import Resume, newest_complete
from jobs.core.errors import ConfigurationError, UsageError
from jobs.core.run import CHECKPOINTS
from jobs.spec.code import SCRIPT_VARIABLE

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")


@dataclass(frozen=True)
class ScriptArguments:
    """The known arguments that decide a script's result."""

    values: dict[str, Any]

    def fixed_arguments(self) -> dict[str, Any]:
        return self.values


class Platform:
    """This process as a rank of a run. Created once, by `current_platform()`."""

    def __init__(self, rank: Rank, arguments: ScriptArguments, accelerator: Accelerator) -> None:
        self.rank = rank
        self.arguments = arguments
        self.accelerator = accelerator
        self.s3: S3Client | None = object_store.connect() if rank.is_first_on_node else None
        self._trains = False
        if rank.is_first_on_node:
            mark_library_used(rank.scratch)

    @cached_property
    def resume(self) -> Resume | None:
        """The run's newest complete checkpoint, downloaded and verified, or None in a new run. All ranks use it."""
        return newest_complete(self.rank, self.s3 or object_store.connect(), self.arguments)

    def log_start(self, step: int) -> None:
        """Log the step from which the training resumes, or that it starts from the beginning (0)."""
        if self.rank.is_first:
            log.info("start: %s", f"resumed from checkpoint step-{step}" if step else "from the beginning")

    def warn_starts_over(self, call: str) -> None:
        """Log a warning that the script has not loaded its checkpoint. `call` is the code that loads it."""
        if self.rank.is_first:
            log.warning(
                "warning: the script does not load its checkpoint, so each attempt starts over and all earlier work "
                "is lost. Next: %s",
                call,
            )

    def begin(self) -> None:
        """Record that a training begins. Raises UsageError for a second one: a run has one series of checkpoints."""
        if self._trains:
            raise UsageError(
                "this script begins a second training with trainyard, and a run keeps the checkpoints of only one",
                next_step="use trainyard.Callback or trainyard.Run for one of them, or make them two runs",
            )
        self._trains = True

    def fetch_other(self, resume: Resume, step: int) -> Path | None:
        """Download another checkpoint beside the newest. Return its folder, or None if it cannot be used."""
        folder = resume.folder.with_name(f"checkpoint-{step}")

        def work() -> bool:
            assert self.s3 is not None  # noqa: S101 - the first rank of a node has one
            try:
                fetch(self.s3, self.rank.run / CHECKPOINTS / f"step-{step}", folder)
            except IncompleteError:
                shutil.rmtree(folder, ignore_errors=True)
            return folder.exists()

        return folder if self.rank.once_per_node(f"resume/beside/{step}", work) else None

    def report_stopped(self, reason: str) -> None:
        """Report that the script has saved and ends early, so that the launcher requeues the run."""
        if self.rank.is_first_on_node:
            write_stopped(self.rank.scratch, reason)


@functools.cache
def current_platform() -> Platform:
    """Return this process's Platform. Raises ConfigurationError if no launcher such as torchrun has started it."""
    _log_to_output()
    try:
        rank = Rank.from_environment()
    except ConfigurationError as error:
        raise ConfigurationError(
            f"trainyard: {error.args[0]}, so this process is not a rank",
            next_step="start it with torchrun, accelerate launch, or as a script that the platform starts",
        ) from None
    with contextlib.suppress(AttributeError, ValueError):  # no such signal, or no file behind standard error
        faulthandler.register(signal.SIGUSR1, all_threads=False)
    values = json.loads(os.environ.get(SCRIPT_VARIABLE, "{}"))
    return Platform(rank, ScriptArguments({**values, "ranks": rank.world_size}), of_rank(os.environ))


def at_exit(work: Callable[[], None]) -> None:
    """Call `work` when this process ends, but before new threads are refused, which uploads need."""
    getattr(threading, "_register_atexit", atexit.register)(work)


def _log_to_output() -> None:
    """Print the platform's log lines independently of the script's logging."""
    if not log.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
