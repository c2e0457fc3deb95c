"""What a training does from a notice until its instance ends: save at once, train on, save again, and leave.

The first save is there in case the instance goes away earlier than told. The second one begins as late as what the run
has measured allows, so that the steps between the two are not lost. Where the time is too short for two saves, the
first one is the last.
"""

from dataclasses import dataclass
from typing import Literal

Action = Literal["save", "stop", "leave"]
"""save: at this step, and train on. stop: save at this step, and leave. leave: the save under way is the last one."""

SPARE_SECONDS = 2.0
"""Time for what comes after the last save: the rest of the metrics, and the end of the ranks' processes."""

_SLOWER = 1.25
"""The last save may take so many times as long as the one before, though no training goes on beside it: S3's speed
varies. What a late one loses is the time since the save before, which may be the one at the notice: with saves of 13 s
some thirty times as much as this quarter."""

_STEPS = 2
"""Ranks agree on a step ahead, so that an action may come two steps after it was due."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run has measured of itself, in seconds."""

    save: float = 0.0
    """From the beginning of the last save until its checkpoint was complete; 0: none was complete yet."""
    under_way: float = 0.0
    """Since the beginning of a save that is not complete; 0: there is none."""
    step: float = 0.0
    """The longest of the newest steps, or of the newest batches of an evaluation."""


def needed_seconds(measured: Measured) -> float:
    """Return how long before the end the last save is due. It waits for one that is under way."""
    return _saves_seconds(measured) + _STEPS * measured.step + SPARE_SECONDS


def save_seconds(measured: Measured) -> float:
    """Return how long the last save may take."""
    return max(_SLOWER * measured.save, measured.under_way)


def _saves_seconds(measured: Measured) -> float:
    one = save_seconds(measured)
    return one + (one - measured.under_way if measured.under_way else 0.0)


def action(left_seconds: float, measured: Measured, *, has_saved: bool, evaluates: bool = False) -> Action | None:
    """Return what is to be done where the ranks have to be gone in `left_seconds`; None: go on.

    `has_saved`: whether they have been told to save since the notice. In the midst of an evaluation they cannot, so
    "save" is for the step after it, and where no save was measured yet they leave it at once.
    """
    is_measured = measured.save > 0 or measured.under_way > 0
    if left_seconds > needed_seconds(measured) and (is_measured or not evaluates):
        return None if has_saved else "save"
    # The save under way is the last one where it takes too long, or has begun too late, for another to come in time.
    if not has_saved or not measured.under_way:
        return "stop"
    takes_long = measured.under_way >= save_seconds(measured)
    if takes_long or left_seconds < _saves_seconds(measured):
        return "leave"
    # Else the last one waits for it, and its time is the same whenever it is asked for until then.
    rest = save_seconds(measured) - measured.under_way
    return None if rest > _STEPS * measured.step else "stop"
