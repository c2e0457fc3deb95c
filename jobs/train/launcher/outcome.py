"""How an attempt ended on a node, from how its ranks did."""

import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from jobs.contract.errors import INTERRUPTED_EXIT_CODE

RESUMES = "a next attempt resumes from the newest checkpoint"

Cause = Literal["killed", "own", "peers", "hung", "lost", "ended", "done"]
"""What ended the ranks: a signal killed one; one failed by a fault of its own; one lost the line to its peers; they
hung; a node was lost; the launcher ended them; or they ended as they should, saved or finished."""

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
    """The exit code for Batch."""
    reason: str | None
    cause: Cause
    lines: tuple[str, ...] = ()
    """The last lines of the ranks that are the cause, for the log; none where the reason says all."""


class Failure(NamedTuple):
    """How a rank failed."""

    code: int
    """The exit code; below 0: the signal that ended it."""
    time: int
    message: str
    is_explained: bool
    """True where the message says what is wrong and what next: it is the same from any rank that met it."""


def retried(reason: str, cause: Cause) -> End:
    """Return the end of an attempt for which nobody is at fault: Batch starts the job again."""
    return End(code=INTERRUPTED_EXIT_CODE, reason=f"{reason}; {RESUMES}", cause=cause)


def outcome(
    failures: Mapping[int, Failure],
    *,
    node: int,
    last_lines: Callable[[list[int]], tuple[str, ...]],
    lacked_memory: bool | None,
) -> End:
    """Return how the attempt ended on a node, from its failed ranks.

    `last_lines` returns those of ranks, for the log. `lacked_memory` is True if the kernel killed something for want of
    memory meanwhile, None if that is not known. A rank that was killed though memory sufficed has done nothing wrong.

    The rank that failed first decides; those that the launcher then stopped (SIGTERM) say nothing of the cause. One
    that a signal ended comes before all: its peers' errors, within the same second, are of a line that it cut.
    """
    own = {rank: failure for rank, failure in failures.items() if failure.code != -signal.SIGTERM}
    if not own:
        return retried("the ranks got SIGTERM", "ended")
    rank = min(own, key=lambda number: (own[number].code > 0, own[number].time))
    code, _, message, is_explained = own[rank]
    if code == INTERRUPTED_EXIT_CODE:
        return End(code=code, reason=message, cause="done")
    if is_explained:
        return End(code=1, reason=message, cause="own")
    cause: Cause = "killed"
    if code == -signal.SIGKILL and lacked_memory is False:
        killed = retried(f"rank {rank} of node {node} was killed (SIGKILL), not for want of memory", cause)
        return replace(killed, lines=last_lines([rank]))
    if code == -signal.SIGKILL:
        reason = " was killed (SIGKILL), as it seems for want of memory. Next: lower max_batch_size_per_rank"
    elif code < 0:
        reason = f" was ended by {signal.Signals(-code).name}"
    else:
        reason, cause = f": {message}", "peers" if _PEERS_GONE.search(message) else "own"
    return End(code=1, reason=f"rank {rank} of node {node}{reason}", cause=cause, lines=last_lines([rank]))


def of_node(index: int, end: End) -> End:
    """Return the end of another node as this one tells it: its reason names the node."""
    return end if f"of node {index}" in (end.reason or "") else replace(end, reason=f"node {index}: {end.reason}")
