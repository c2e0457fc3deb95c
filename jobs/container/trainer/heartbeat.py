"""The heartbeats of a rank that trains: it goes on, and this is where it is. The launcher of its node watches them.

There is one at each batch, step, evaluated batch and save, each a write of one line. What may take long says so
beforehand: the start, a save, and the batches that follow one of a new shape, where graphs are compiled for those.
"""

import itertools
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jobs.container.callback import Callback
from jobs.container.channel import Heartbeat, HeartbeatFile

if TYPE_CHECKING:
    from jobs.container.rank import Rank

_COMPILING_BATCHES = 10
"""The number of batches, from one of a new shape on, of which each may wait for a graph. The host of an HPU runs ahead
of it, so the wait may come some batches later, at the latest where a loss is logged."""

_STILL_SECONDS = 3600.0
"""The longest wait for an upload; after that the rank gives no more heartbeats."""


_words = itertools.count(1)
"""Numbers of the heartbeats of a script that does not train with the library."""


def busy(seconds: float) -> None:
    """Say for this rank that what begins now may take so long, whatever part of the library its script uses."""
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
            number=next(_words),
            place=0,
            step=0,
            doing="busy",
            paced=False,
            patience_seconds=seconds,
        )
    )


class Heartbeats(Callback):
    """Gives the heartbeats of one rank, from when it is made until `end`; jobs.container.rank has given one before.

    It is to be the first of a Trainer's callbacks; the Trainer tells it of batches and saves.
    """

    newest: ClassVar["Heartbeats | None"] = None
    """Those of this process, for what is said of all of it."""

    def __init__(self, rank: "Rank", *, compiles: bool, is_patient: bool = False) -> None:
        """`compiles`: whether the accelerator compiles for each new shape of a batch.

        `is_patient`: what lies between two steps may take as long as a start does, since a script's own work is there.
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
        """The shape of the newest batch of the training; None where none is compiled."""
        self._compiling = 0
        self._steps_here = 0
        self._patience_seconds = 0.0
        self.saving_seconds = 0.0
        """Time that the training has stood still for saves."""
        self._pass("starting", slow=True)
        Heartbeats.newest = self

    def busy(self, seconds: float) -> None:
        """Say that what begins now may take so long."""
        self._patience_seconds = seconds
        self._pass("busy", slow=True)
        self._patience_seconds = 0.0

    def still(self) -> None:
        """Say that the same as before goes on: a wait for an upload, which has its own time-outs, but not for ever."""
        if time.monotonic() - self._passed_at < _STILL_SECONDS:
            self._give()

    def end(self) -> None:
        """Say that what follows has no pace: uploads have time-outs of their own, and other ranks wait for them."""
        self._paced = False
        self._pass("ending", slow=True)

    def batch(self, doing: str, inputs: Any) -> None:
        """Say that a batch of the training or of an evaluation begins."""
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
        self._pass(doing, slow=self._compiling > 0 or self._steps_here == 0)

    def saving(self) -> None:
        """Say that a save begins, for which the training stands still."""
        self._pass("saving", slow=True)

    def saved(self) -> None:
        """Note that the training goes on after a save."""
        self.saving_seconds += time.monotonic() - self._passed_at

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._step = state.global_step

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._step = state.global_step
        self._steps_here += 1
        self._pass("between steps", slow=self._is_patient or self._compiling > 0)

    def _pass(self, doing: str, *, slow: bool) -> None:
        self._place += 1
        self._doing, self._slow = doing, slow
        self._passed_at = time.monotonic()
        self._give()

    def _give(self) -> None:
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
