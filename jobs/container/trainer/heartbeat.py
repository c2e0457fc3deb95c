"""The heartbeats of a training rank, by which its node's launcher detects hangs.

A rank writes a heartbeat, one line, at each batch, step, evaluated batch and save. It announces slow activities: the
start, saves, and the first batches of a new shape if the accelerator compiles a graph for each shape.
"""

import itertools
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jobs.container.channel import Heartbeat, HeartbeatFile
from jobs.container.rank import Callback

if TYPE_CHECKING:
    from jobs.container.rank import Rank

_COMPILING_BATCHES = 10
"""Number of batches, from the first of a new shape, that may each wait for a graph. An HPU's host runs ahead of the
device, so the wait may come some batches later, at the latest when a loss is logged."""

_UPLOAD_WAIT_SECONDS = 3600.0
"""Longest wait for an upload, after which the rank writes no more heartbeats."""


_numbers = itertools.count(1)
"""Numbers of the heartbeats of a script that does not train with the library."""


def busy(seconds: float) -> None:
    """Announce that this rank's next activity may take `seconds`. Works in every script."""
    if Heartbeats.newest is not None:
        Heartbeats.newest.busy(seconds)
        return
    from jobs.container.rank import Rank

    rank = Rank.from_environment()
    HeartbeatFile(rank.scratch, rank.local_rank).write(
        Heartbeat(
            rank=rank.rank,
            node=rank.node,
            pid=os.getpid(),
            number=next(_numbers),
            place=0,
            step=0,
            doing="busy",
            paced=False,
            patience_seconds=seconds,
        )
    )


class Heartbeats(Callback):
    """Writes the heartbeats of one rank, after the first one from jobs.container.rank.

    It must be the first of a Trainer's callbacks. The Trainer also calls it at batches and saves.
    """

    newest: ClassVar["Heartbeats | None"] = None
    """The instance of this process, for functions that apply to the whole process."""

    def __init__(self, rank: "Rank", *, compiles: bool, is_patient: bool = False) -> None:
        """`compiles` is True if the accelerator compiles a graph for each new shape of a batch.

        `is_patient` allows as much time between two steps as for a start, because a script's code runs there.
        """
        self._rank = rank
        self._compiles = compiles
        self._is_patient = is_patient
        self._file = HeartbeatFile(rank.scratch, rank.local_rank)
        self._pid = os.getpid()
        self._number = self._place = self._step = 0
        self._doing, self._slow, self._paced = "starting", True, True
        self._shapes: set[Any] = set()
        self.training_shape: Any = None
        """Shape of the newest training batch; None if the accelerator does not compile."""
        self._compiling = 0
        self._steps_here = 0
        self._patience_seconds = 0.0
        self.saving_seconds = 0.0
        """Time that the training has waited for saves."""
        self._enter("starting", slow=True)
        Heartbeats.newest = self

    def busy(self, seconds: float) -> None:
        """Announce that the next activity may take `seconds`."""
        self._patience_seconds = seconds
        self._enter("busy", slow=True)
        self._patience_seconds = 0.0

    def keep_alive(self) -> None:
        """Repeat the last heartbeat during an upload, which has its own timeouts, for at most an hour."""
        if time.monotonic() - self._entered_at < _UPLOAD_WAIT_SECONDS:
            self._write()

    def end(self) -> None:
        """Announce that there is no regular pace from now on: ranks wait for uploads, which have their own timeouts."""
        self._paced = False
        self._enter("ending", slow=True)

    def batch(self, doing: str, inputs: Any) -> None:
        """Announce a batch of the training or of an evaluation."""
        if self._compiles:
            values = inputs.values() if isinstance(inputs, Mapping) else ()
            shape = (doing, *(getattr(value, "shape", None) for value in values))
            if doing == "training":
                self.training_shape = shape
            if shape not in self._shapes:
                self._shapes.add(shape)
                self._compiling = _COMPILING_BATCHES
            else:
                self._compiling = max(0, self._compiling - 1)
        self._enter(doing, slow=self._compiling > 0 or self._steps_here == 0)

    def saving(self) -> None:
        """Announce a save, for which the training waits."""
        self._enter("saving", slow=True)

    def saved(self) -> None:
        """Add the time of a save that has ended."""
        self.saving_seconds += time.monotonic() - self._entered_at

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._step = state.global_step

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._step = state.global_step
        self._steps_here += 1
        self._enter("between steps", slow=self._is_patient or self._compiling > 0)

    def _enter(self, doing: str, *, slow: bool) -> None:
        self._place += 1
        self._doing, self._slow = doing, slow
        self._entered_at = time.monotonic()
        self._write()

    def _write(self) -> None:
        self._number += 1
        self._file.write(
            Heartbeat(
                rank=self._rank.rank,
                node=self._rank.node,
                pid=self._pid,
                number=self._number,
                place=self._place,
                step=self._step,
                doing=self._doing,
                slow=self._slow,
                paced=self._paced,
                patience_seconds=self._patience_seconds,
            )
        )
