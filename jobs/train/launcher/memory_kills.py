"""How often the kernel has killed a process for want of memory: what tells a rank that took too much from one that
somebody killed.
"""

from pathlib import Path

VMSTAT = Path("/proc/vmstat")
_COUNTER = "oom_kill"


def memory_kills(vmstat: Path = VMSTAT) -> int | None:
    """Since the machine started, in all of its containers, whichever limit was passed: `oom_kill` of proc_vmstat.

    None where nobody counts: on other systems than Linux.
    """
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return None
    return next((int(value) for name, _, value in (line.partition(" ") for line in lines) if name == _COUNTER), None)
