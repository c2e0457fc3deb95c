"""Stops a run before it passes its budget."""

import threading
from dataclasses import dataclass, field

from jobs.contract.budget import SAVE_SECONDS, Budget, Left, reached
from jobs.contract.instance_types import InstanceType
from jobs.contract.queues import Capacity
from jobs.train.attempts import AttemptRecord
from jobs.train.launcher import interrupts


@dataclass(kw_only=True)
class BudgetWatch:
    """Of the launcher of the main node, from `start` to `stop`."""

    record: AttemptRecord
    budget: Budget
    row: InstanceType
    capacity: Capacity | None
    nnodes: int
    run_id: str
    reason: str | None = None
    """Why the run was stopped; None: it was not."""
    _timer: threading.Timer | None = field(default=None, init=False)

    def start(self) -> bool:
        """Whether there is anything left; then the ranks are asked to save and stop before it is used up."""
        left = self._left()
        if left is None:
            return True
        seconds = left.seconds - SAVE_SECONDS
        if seconds <= 0:
            self._reached(left)
            return False
        self._timer = threading.Timer(seconds, self._stop_ranks, [left])
        self._timer.daemon = True
        self._timer.start()
        return True

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _left(self) -> Left | None:
        if self.budget == Budget():
            return None
        return self.budget.left(self.record.spent(), row=self.row, capacity=self.capacity, nnodes=self.nnodes)

    def _reached(self, left: Left) -> None:
        self.reason = reached(left, self.record.spent(), run_id=self.run_id, capacity=self.capacity)

    def _stop_ranks(self, left: Left) -> None:
        """As before a reclaim: the launcher takes SIGTERM for the wish that the ranks save and stop."""
        self._reached(left)
        interrupts.end_self(f"budget: {left.key} {left.limit:g} is nearly used up")
