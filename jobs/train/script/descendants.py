"""The processes that a script has started, and that have left it: they end with the attempt.

A process whose parent ends becomes the launcher's child, whatever session or group it has made for itself.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
"""Of prctl(2): a process whose parent ends becomes the child of the nearest ancestor that has asked for it."""

_END_SECONDS = 5.0
"""For so long what is killed is waited for: it may be in the kernel, at a disk that does not answer."""


def adopt_orphans() -> None:
    """Become the parent of whatever loses its own among this process's descendants; on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> set[int]:
    """Return the process ids of all descendants of a process, the dead that nobody has waited for included."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        new = [child for child in children.get(waiting.pop(), []) if child not in found]
        found.update(new)
        waiting += new
    return found


def end_descendants(*, spare: Iterable[int]) -> int:
    """Kill this process's descendants but those in `spare`, and wait for them. Returns how many there were."""
    killed: set[int] = set()
    until = time.monotonic() + _END_SECONDS
    while (left := descendants(os.getpid()) - set(spare)) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:  # those of killed ones become ours at the next look
            with contextlib.suppress(ChildProcessError):
                killed.update([pid] if os.waitpid(pid, os.WNOHANG)[0] else [])
        time.sleep(0.01)
    return len(killed)
