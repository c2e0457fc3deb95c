"""Says in the log, after the first step, what the start of the attempt took and by which parts."""

import logging
from typing import TYPE_CHECKING, Any

from jobs.container.callback import Callback

if TYPE_CHECKING:
    from jobs.container.rank import Rank

log = logging.getLogger("trainyard")


class SaidStartUp(Callback):
    """Ends the last two parts of a start, and has rank 0 write the line of all of them."""

    def __init__(self, rank: "Rank") -> None:
        self._rank = rank
        self._is_said = False

    def on_train_begin(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self._rank.start_up.done("state loaded")

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if self._is_said:
            return
        self._is_said = True
        self._rank.start_up.done("first step")
        if self._rank.is_first:
            log.info("%s", self._rank.start_up.line(state.global_step))
