"""What a script of one's own stands on inside the platform: its rank, its run, the checkpoint it goes on from.

`here` is the one of this process. `trainyard`, the library that scripts import, comes here and to `attached` (for a
Trainer of transformers) and `own_loop`.
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
from jobs.container.channel import tell_stopped, write_library_note
from jobs.container.rank import Rank
from jobs.container.saving.resume import Resume, newest_complete
from jobs.container.saving.stored_checkpoints import IncompleteError, fetch
from jobs.core.errors import ConfigurationError, UsageError
from jobs.core.run import CHECKPOINTS
from jobs.spec.code import SCRIPT_VARIABLE

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")


@dataclass(frozen=True)
class ScriptArguments:
    """What decides the result of a script, as far as the platform knows."""

    values: dict[str, Any]

    def fixed_arguments(self) -> dict[str, Any]:
        return self.values


class Platform:
    """This process as a rank of a run. Made once: `here`."""

    def __init__(self, rank: Rank, arguments: ScriptArguments, accelerator: Accelerator) -> None:
        self.rank = rank
        self.arguments = arguments
        self.accelerator = accelerator
        self.s3: S3Client | None = object_store.connect() if rank.is_first_on_node else None
        self._trains = False
        if rank.is_first_on_node:
            write_library_note(rank.scratch)

    @cached_property
    def resume(self) -> Resume | None:
        """The newest complete checkpoint of the run, here and verified; None where it begins. All ranks ask for it."""
        return newest_complete(self.rank, self.s3 or object_store.connect(), self.arguments)

    def say_start(self, step: int) -> None:
        """Log the step that the training has loaded a checkpoint of; 0: it begins at its beginning."""
        if self.rank.is_first:
            log.info("start: %s", f"resumed from checkpoint step-{step}" if step else "from the beginning")

    def say_anew(self, call: str) -> None:
        """Log that the script has not loaded its checkpoint. `call` is what loads it."""
        if self.rank.is_first:
            log.warning(
                "warning: the script does not load its checkpoint, so each attempt starts over and all that was done "
                "before is lost. Next: %s",
                call,
            )

    def begin(self) -> None:
        """Note that a training begins. Raises UsageError at the second: one run has one line of checkpoints."""
        if self._trains:
            raise UsageError(
                "this script begins a second training with trainyard, and a run keeps the checkpoints of one",
                next_step="use trainyard.Callback or trainyard.Run for one of them, or make two runs of it",
            )
        self._trains = True

    def fetch_beside(self, resume: Resume, step: int) -> Path | None:
        """Return another checkpoint of the run, put beside the one that it goes on from; None where it is gone."""
        folder = resume.folder.with_name(f"checkpoint-{step}")

        def work() -> bool:
            assert self.s3 is not None  # noqa: S101 - the first rank of a node has one
            try:
                fetch(self.s3, self.rank.run / CHECKPOINTS / f"step-{step}", folder)
            except IncompleteError:
                shutil.rmtree(folder, ignore_errors=True)
            return folder.exists()

        return folder if self.rank.once_per_node(f"resume/beside/{step}", work) else None

    def leave_stopped(self, reason: str) -> None:
        """Say that the script has saved, and ends before its work is done: the launcher has the run resumed."""
        if self.rank.is_first_on_node:
            tell_stopped(self.rank.scratch, reason)


@functools.cache
def here() -> Platform:
    """Return this process's. Raises ConfigurationError where no launcher of torchrun's kind has started it."""
    _log_to_output()
    try:
        rank = Rank.from_environment()
    except ConfigurationError as error:
        raise ConfigurationError(
            f"trainyard: {error.args[0]}, so this process is no rank that the library knows",
            next_step="start it with torchrun, accelerate launch, or as a script that the platform starts",
        ) from None
    with contextlib.suppress(AttributeError, ValueError):  # no such signal, or no file behind standard error
        faulthandler.register(signal.SIGUSR1, all_threads=False)
    values = json.loads(os.environ.get(SCRIPT_VARIABLE, "{}"))
    return Platform(rank, ScriptArguments({**values, "ranks": rank.world_size}), of_rank(os.environ))


def at_exit(work: Callable[[], None]) -> None:
    """Have `work` done when this process ends, while threads can still be started: uploads start some."""
    getattr(threading, "_register_atexit", atexit.register)(work)


def _log_to_output() -> None:
    """Print the platform's lines, whatever the script does with logging."""
    if not log.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
