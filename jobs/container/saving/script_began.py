"""Where a script began that reads its checkpoints itself, as far as its own saves show it.

The platform puts checkpoints back and does not see what the script does with them. A script that saves an earlier step
again has started before the newest.
"""

import logging
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from jobs.container.channel import RankStatus
from jobs.container.saving.script_complete import trainer_step

log = logging.getLogger("trainyard")

_COUNTED = re.compile(r"(step|epoch|iter|iteration|checkpoint|ckpt)[-_=]?(\d+)", re.IGNORECASE)


class Began:
    """What the record of an attempt says about its checkpoints."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._put_back: dict[Path, int] = {}
        self._status = RankStatus(restored_step=0)

    def put_back(self, checkpoints: Mapping[Path, int]) -> None:
        """Take the checkpoints that the script finds, with their steps."""
        self._put_back = dict(checkpoints)
        self._status.restored_step = self._status.last_step = max(checkpoints.values(), default=0)
        self._status.write(self._scratch)

    def saved(self, path: Path, step: int) -> None:
        """Note that the script has saved a checkpoint."""
        self._status.last_step, self._status.saved_at = step, datetime.now(timezone.utc)
        if self._status.repeats_from_step is None:
            self._status.repeats_from_step = self._repeats_from(path)
        self._status.write(self._scratch)

    def _repeats_from(self, path: Path) -> int | None:
        """Return the step that the script went back to, or None if its save does not show that it started over."""
        saved = _number(path.name)
        if saved is None:
            return None
        word, number = saved
        counted = {_number(other.name): step for other, step in self._put_back.items() if other.parent == path.parent}
        same = {known[1]: step for known, step in counted.items() if known is not None and known[0] == word}
        newest = max(same, default=0)
        # A name with a number may be written over and over. That of a Trainer is another one at each step.
        if number > newest or (number == newest and trainer_step(path.name) is None):
            return None
        began = max((step for known, step in same.items() if known < number), default=0)
        log.warning(
            "warning: the script saves %s again: it started over, and what earlier attempts did after step %s is lost. "
            "Next: have the script load its newest checkpoint as it starts",
            path.name,
            began,
        )
        return began


def _number(name: str) -> tuple[str, int] | None:
    """Return what a checkpoint's name counts and its number, `('step', 300)`, or None if it counts nothing known."""
    match = _COUNTED.search(name)
    return (match[1].lower(), int(match[2])) if match else None
