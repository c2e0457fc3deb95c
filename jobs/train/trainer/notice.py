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

_SAVES = 2
"""Another save may be under way when the last one begins, which waits for it."""

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
    """Return how long before the end the last save is due."""
    return _SAVES * max(measured.save, measured.under_way) + _STEPS * measured.step + SPARE_SECONDS


def action(left_seconds: float, measured: Measured, *, has_saved: bool, evaluates: bool = False) -> Action | None:
    """Return what is to be done where the ranks have to be gone in `left_seconds`; None: go on.

    `has_saved`: whether they have been told to save since the notice. In the midst of an evaluation they cannot, so
    "save" is for the step after it, and where no save was measured yet they leave it at once.
    """
    is_measured = measured.save > 0 or measured.under_way > 0
    if left_seconds > needed_seconds(measured) and (is_measured or not evaluates):
        return None if has_saved else "save"
    # One that takes longer than the last one did leaves no time for another.
    return "leave" if has_saved and measured.under_way > measured.save else "stop"
