"""How an attempt ended on a node, from how its ranks did."""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jobs.errors import INTERRUPTED_EXIT_CODE

RESUMES = "a next attempt resumes from the newest checkpoint"

Cause = Literal["killed", "own", "peers", "hung", "lost", "ended", "done"]
"""A signal killed a rank; one failed by a fault of its own; one lost the line to its peers; they hung; a node was lost;
the launcher ended them; or they ended as they should, saved or finished."""

_PEERS_GONE = re.compile(
    r"connection (closed|reset) by peer|connection was likely closed|connection refused|broken pipe|socket closed"
    r"|socket timeout|timed out waiting|remote process exited|DistNetworkError",
    re.IGNORECASE,
)
"""How gloo, NCCL and PyTorch's store say that the other side is gone: no fault of the rank that says so."""


@dataclass(frozen=True, kw_only=True)
class End:
    """How an attempt ended on one node, or for all."""

    code: int
    """For Batch."""
    reason: str | None
    cause: Cause


def retried(reason: str, cause: Cause) -> End:
    """Nobody's fault: Batch starts the job again."""
    return End(code=INTERRUPTED_EXIT_CODE, reason=f"{reason}; {RESUMES}", cause=cause)


def outcome(failures: Mapping[int, tuple[int, int, str]]) -> End:
    """From the failed ranks: (exit code, time, message) of each.

    The rank that failed first decides; those that the launcher then stopped (SIGTERM) say nothing of the cause. One
    that a signal ended comes before all: its peers' errors, within the same second, are of a line that it cut.
    """
    own = {rank: failure for rank, failure in failures.items() if failure[0] != -signal.SIGTERM}
    if not own:
        return retried("the ranks got SIGTERM", "ended")
    rank = min(own, key=lambda number: (own[number][0] > 0, own[number][1]))
    code, _, message = own[rank]
    if code == INTERRUPTED_EXIT_CODE:
        return End(code=code, reason=message, cause="done")
    if code == -signal.SIGKILL:
        return End(
            code=1,
            reason=f"rank {rank} was killed (SIGKILL), most often for want of memory. Next: lower "
            "max_batch_size_per_rank",
            cause="killed",
        )
    if code < 0:
        return End(code=1, reason=f"rank {rank} was ended by {signal.Signals(-code).name}", cause="killed")
    return End(code=1, reason=message, cause="peers" if _PEERS_GONE.search(message) else "own")
