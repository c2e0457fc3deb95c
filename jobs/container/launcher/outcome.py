"""How an attempt ended on a node, from how its ranks did."""

import errno
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from jobs.core.errors import INTERRUPTED_EXIT_CODE

Cause = Literal["killed", "own", "peers", "hung", "idle", "lost", "ended", "done"]
"""What ended the ranks: a signal killed one; one failed by a fault of its own, or aborted; one lost the line to its
peers; they hung; no card did anything; a node was lost; the launcher ended them; or they ended as they should, saved or
finished."""

_PEERS_GONE = re.compile(
    # Gloo and PyTorch's store.
    r"connection (closed|reset) by (remote )?peer|connection was likely closed|connection refused|broken pipe"
    r"|socket closed|socket timeout|timed out waiting|caused pair closure|DistNetworkError"
    # NCCL's errors as PyTorch tells them (NCCLUtils.cpp), and its watchdog (ProcessGroupNCCL.cpp).
    r"|remote process exited|ncclRemoteError|watchdog caught collective operation timeout"
    # HCL, which is below HCCL (github.com/HabanaAI/HCL, commit 54fed3a): coordinator, network_utils, hcl_ibv_eq and
    # hcl_device.cpp.
    r"|peer disconnected|peer unexpectedly closed|max-retry-cnt exceeded|failed to synchronize remote ranks",
    re.IGNORECASE,
)
"""How what connects the ranks says that the other side is gone: no fault of the rank that says so."""


_NO_SPACE = os.strerror(errno.ENOSPC)

_FULL_BYTES = 1 << 20
"""A disk with less room than that is full."""


@dataclass(frozen=True, kw_only=True)
class End:
    """How an attempt ended on one node, or for all."""

    code: int
    """The exit code for Batch."""
    reason: str | None
    cause: Cause
    lines: tuple[str, ...] = ()
    """The last lines of the ranks that are the cause, for the log; none where the reason says all."""

    @property
    def is_retried(self) -> bool:
        """Return True where Batch may start the job again, and the reason does not say what was saved for that."""
        return self.code == INTERRUPTED_EXIT_CODE and self.cause != "done"


class Failure(NamedTuple):
    """How a rank failed."""

    code: int
    """The exit code; below 0: the signal that ended it."""
    time: int
    message: str
    is_explained: bool
    """True where the message says what is wrong and what next: it is the same from any rank that met it."""
    last_line: str = ""
    """What it printed last, where the message can say no more than its exit code."""

    @property
    def lost_peers(self) -> bool:
        """Return True if all that happened to the rank is that the others were gone, whether it said so or aborted."""
        is_told = self.code > 0 or self.code == -signal.SIGABRT
        return is_told and not self.is_explained and bool(_PEERS_GONE.search(self.message))


def retried(reason: str, cause: Cause) -> End:
    """Return the end of an attempt for which nobody is at fault: Batch starts the job again."""
    return End(code=INTERRUPTED_EXIT_CODE, reason=reason, cause=cause)


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

    The rank that failed first decides; those that the launcher then stopped (SIGTERM) say nothing of the cause, and
    those that lost their peers little. One that a signal ended comes before all: its peers' errors, within the same
    second, are of a line that it cut.
    """
    own = {rank: failure for rank, failure in failures.items() if failure.code != -signal.SIGTERM}
    if not own:
        return retried("the ranks got SIGTERM", "ended")
    rank = min(own, key=lambda number: (own[number].lost_peers, own[number].code > 0, own[number].time))
    code, _, message, is_explained, last_line = own[rank]
    if code == INTERRUPTED_EXIT_CODE and is_explained:
        return retried(f"rank {rank} of node {node}: {message}", "ended")  # it alone: the others know nothing of it
    if code == INTERRUPTED_EXIT_CODE:
        return End(code=code, reason=message, cause="done")
    if is_explained:
        return End(code=1, reason=message, cause="own")
    cause: Cause = "killed"
    if code == -signal.SIGABRT and own[rank].lost_peers:
        # NCCL and HCCL end a process so, and it has nothing else to say: those that it lost have not failed here.
        return replace(
            retried(f"rank {rank} of node {node} lost its peers: {message}", "peers"), lines=last_lines([rank])
        )
    if code == -signal.SIGKILL and lacked_memory is False:
        killed = retried(f"rank {rank} of node {node} was killed (SIGKILL), not for want of memory", cause)
        return replace(killed, lines=last_lines([rank]))
    if code == -signal.SIGKILL:
        reason = " was killed (SIGKILL), as it seems for want of memory. Next: lower max_batch_size_per_rank"
    elif code < 0:
        reason = f" was ended by {signal.Signals(-code).name}"
        cause = "own" if code == -signal.SIGABRT else cause  # a node that is lost may be why
    else:
        last = f"; it wrote last: {last_line}" if last_line else ""
        reason, cause = f": {message}{last}", "peers" if own[rank].lost_peers else "own"
    return End(code=1, reason=f"rank {rank} of node {node}{reason}", cause=cause, lines=last_lines([rank]))


def with_full_disk(end: End, scratch: Path) -> End:
    """Return the end of ranks that failed, which also says so where the disk that they write to is full.

    A rank may not say it: the file for its last word lies on that disk, and a write to mapped memory ends it by SIGBUS.
    What it printed is in the log only, so it is the reason alone that must say what is next.
    """
    usage = shutil.disk_usage(scratch)
    reason = end.reason or ""
    is_full = usage.free < _FULL_BYTES or _NO_SPACE in " ".join([reason, *end.lines])
    if end.code != 1 or "Next: " in reason or not is_full:
        return end
    free = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free"
    next_step = "give the instance a larger volume and resume the run"
    return replace(end, reason=f"{end.reason}; the disk of {scratch} is full ({free}). Next: {next_step}")


def line_of_lost_peers(lines: Iterable[str]) -> str | None:
    """Return the first line of what a rank wrote that says that others are gone; None: there is none."""
    return next((line.strip() for line in lines if _PEERS_GONE.search(line)), None)


def of_node(index: int, end: End) -> End:
    """Return the end of another node as this one tells it: its reason names the node."""
    reason = end.reason or ""
    is_named = f"of node {index}" in reason or reason.startswith(f"node {index} ")
    return end if is_named else replace(end, reason=f"node {index}: {end.reason}")
