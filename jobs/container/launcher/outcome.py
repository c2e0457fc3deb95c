"""Derive how an attempt ended on a node from how its ranks ended."""

import errno
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from jobs.core.errors import INTERRUPTED_EXIT_CODE

Cause = Literal["killed", "own", "peers", "hung", "idle", "lost", "ended", "done"]
"""Why the ranks ended. One was killed by a signal (killed), failed or aborted with its own error (own), or lost its
peers (peers). They hung (hung), all cards were idle (idle), a node was lost (lost), or the launcher ended them (ended).
Or they finished, or saved and stopped (done)."""

_PEERS_GONE = re.compile(
    # Gloo and PyTorch's store.
    r"connection (closed|reset) by (remote )?peer|connection was likely closed|connection refused|broken pipe"
    r"|socket closed|socket timeout|timed out waiting|caused pair closure|DistNetworkError"
    # NCCL's errors in PyTorch's words (NCCLUtils.cpp), and PyTorch's watchdog (ProcessGroupNCCL.cpp).
    r"|remote process exited|ncclRemoteError|watchdog caught collective operation timeout"
    # HCL, which is below HCCL (github.com/HabanaAI/HCL, commit 54fed3a): coordinator, network_utils, hcl_ibv_eq and
    # hcl_device.cpp.
    r"|peer disconnected|peer unexpectedly closed|max-retry-cnt exceeded|failed to synchronize remote ranks",
    re.IGNORECASE,
)
"""Messages by which communication libraries report a lost peer. A rank that prints one did not cause the failure."""

_NO_SPACE = os.strerror(errno.ENOSPC)

_FULL_BYTES = 1 << 20
"""A disk with less free space counts as full."""


@dataclass(frozen=True, kw_only=True)
class End:
    """How an attempt ended on one node, or on all."""

    code: int
    """The exit code for Batch."""
    reason: str | None
    cause: Cause
    lines: tuple[str, ...] = ()
    """The last lines of the ranks that caused it, for the log. Empty if the reason is complete without them."""

    @property
    def is_retried(self) -> bool:
        """Whether Batch may retry the job and the reason does not yet include what was saved."""
        return self.code == INTERRUPTED_EXIT_CODE and self.cause != "done"


class Failure(NamedTuple):
    """How one rank failed."""

    code: int
    """The exit code. A negative code is the signal that ended the rank."""
    time: int
    message: str
    is_explained: bool
    """Whether the message names the problem and the next step. It is then the same on every rank."""
    last_line: str = ""
    """The last line that the rank printed, if the message only has its exit code."""

    @property
    def lost_peers(self) -> bool:
        """Whether the rank failed only because its peers were gone, with an error or an abort."""
        is_error = self.code > 0 or self.code == -signal.SIGABRT
        return is_error and not self.is_explained and bool(_PEERS_GONE.search(self.message))


def retried(reason: str, cause: Cause) -> End:
    """Return the end of an attempt that failed through no fault of the job, so that Batch retries it."""
    return End(code=INTERRUPTED_EXIT_CODE, reason=reason, cause=cause)


def outcome(
    failures: Mapping[int, Failure],
    *,
    node: int,
    last_lines: Callable[[list[int]], tuple[str, ...]],
    out_of_memory: bool | None,
) -> End:
    """Return how the attempt ended on a node, from its failed ranks.

    `last_lines` returns the last lines of the given ranks. `out_of_memory` is True if the kernel's OOM killer was
    active during the attempt, None if that is unknown. A rank that was killed although there was enough memory is not
    at fault.

    The first rank that failed decides. Ranks that the launcher then stopped (SIGTERM) are ignored, and ranks that lost
    their peers count only if no other rank failed. A rank that a signal ended counts as the first, because it broke the
    connections over which its peers fail within the same second.
    """
    own = {rank: failure for rank, failure in failures.items() if failure.code != -signal.SIGTERM}
    if not own:
        return retried("the ranks received SIGTERM", "ended")
    rank = min(own, key=lambda number: (own[number].lost_peers, own[number].code > 0, own[number].time))
    code, _, message, is_explained, last_line = own[rank]
    if code == INTERRUPTED_EXIT_CODE and is_explained:  # a failure of this node only, so the reason names the node
        return retried(f"rank {rank} of node {node}: {message}", "ended")
    if code == INTERRUPTED_EXIT_CODE:
        return End(code=code, reason=message, cause="done")
    if is_explained:
        return End(code=1, reason=message, cause="own")
    cause: Cause = "killed"
    if code == -signal.SIGABRT and own[rank].lost_peers:
        # NCCL and HCCL abort a process that lost its peers. The lost peers are on other nodes.
        return replace(
            retried(f"rank {rank} of node {node} lost its peers: {message}", "peers"), lines=last_lines([rank])
        )
    if code == -signal.SIGKILL and out_of_memory is False:
        killed = retried(f"rank {rank} of node {node} was killed (SIGKILL), not by the OOM killer", cause)
        return replace(killed, lines=last_lines([rank]))
    if code == -signal.SIGKILL:
        reason = " was killed (SIGKILL), probably out of memory. Next: lower max_batch_size_per_rank"
    elif code < 0:
        reason = f" was ended by {signal.Signals(-code).name}"
        cause = "own" if code == -signal.SIGABRT else cause  # a lost node may be the reason
    else:
        last = f"; its last line: {last_line}" if last_line else ""
        reason, cause = f": {message}{last}", "peers" if own[rank].lost_peers else "own"
    return End(code=1, reason=f"rank {rank} of node {node}{reason}", cause=cause, lines=last_lines([rank]))


def with_full_disk(end: End, scratch: Path) -> End:
    """If the disk is full, add that to the reason of a failure.

    A rank may be unable to report it: its error file is on that disk, and a write to mapped memory ends in SIGBUS.
    """
    usage = shutil.disk_usage(scratch)
    reason = end.reason or ""
    is_full = usage.free < _FULL_BYTES or _NO_SPACE in " ".join([reason, *end.lines])
    if end.code != 1 or "Next: " in reason or not is_full:
        return end
    free = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free"
    next_step = "give the instance a larger volume and resume the run"
    return replace(end, reason=f"{end.reason}; the disk of {scratch} is full ({free}). Next: {next_step}")


def with_early_ends(end: End, left: Sequence[int], *, node: int) -> End:
    """If a rank failed because it lost its peers, add to the reason which ranks of the node had ended well before.

    `left` are the ranks whose script has ended without an error.
    """
    if end.cause != "peers" or not left:
        return end
    ranks = f"rank{'s' if len(left) > 1 else ''} {', '.join(map(str, left))} of node {node}"
    return replace(
        end,
        reason=f"{end.reason}; {ranks} had already ended without an error. Next: make all ranks run the same number of "
        "steps",
    )


def line_of_lost_peers(lines: Iterable[str]) -> str | None:
    """Return the first line of a rank's output that reports lost peers, or None."""
    return next((line.strip() for line in lines if _PEERS_GONE.search(line)), None)


def of_node(index: int, end: End) -> End:
    """Return the end of another node, with its number in the reason."""
    reason = end.reason or ""
    is_named = f"of node {index}" in reason or reason.startswith(f"node {index} ")
    return end if is_named else replace(end, reason=f"node {index}: {end.reason}")
