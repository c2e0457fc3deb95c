"""Which share of a queue with a fair-share policy is served next. Pure.

Source: AWS Batch user guide, "Use share identifiers to identify workloads": the scheduler weighs each share's usage as
T * weightFactor, T being vCPUs over time, and picks from the share with the least. How usage fades within
shareDecaySeconds is not published; here it fades evenly.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_WINDOW_SECONDS = 600.0
"""What shareDecaySeconds = 0 stands for."""
MINIMUM_USE_SECONDS = 60.0
"""What a job that was just started counts for at least, so that one look does not give all room to one share."""


@dataclass(kw_only=True)
class Usage:
    """vCPUs that one share held from `started` to `stopped` (None: still), in seconds of one clock."""

    share: str
    vcpus: float
    started: float
    stopped: float | None = None


def weight_factor(policy: Mapping[str, Any], share: str) -> float:
    """The weight of a share: its own entry's, its prefix's, or 1. A lower one means more of the capacity."""
    for entry in policy.get("shareDistribution") or ():
        name = entry["shareIdentifier"]
        if name == share or (name.endswith("*") and share.startswith(name[:-1])):
            return float(entry.get("weightFactor", 1.0))
    return 1.0


def weighted_usage(policy: Mapping[str, Any], usages: Iterable[Usage], share: str, now: float) -> float:
    """The share's vCPU seconds within the policy's window, recent ones counting more, times its weight."""
    window = float(policy.get("shareDecaySeconds") or DEFAULT_WINDOW_SECONDS)
    total = sum(usage.vcpus * _faded_seconds(usage, now, window) for usage in usages if usage.share == share)
    return total * weight_factor(policy, share)


def is_forgotten(policy: Mapping[str, Any], usage: Usage, now: float) -> bool:
    """Say whether a usage has left the window."""
    window = float(policy.get("shareDecaySeconds") or DEFAULT_WINDOW_SECONDS)
    return usage.stopped is not None and usage.stopped < now - window


def _faded_seconds(usage: Usage, now: float, window: float) -> float:
    """The integral of a weight that falls from 1 now to 0 at the window's far end."""
    end = now if usage.stopped is None else usage.stopped
    age_from = min(window, now - usage.started)
    age_to = min(window, now - end)
    faded = (age_from - age_to) - (age_from**2 - age_to**2) / (2 * window)
    return max(faded, MINIMUM_USE_SECONDS) if usage.stopped is None else faded
