"""Where a script began that reads its checkpoints itself, as far as its own doing shows it.

The platform puts checkpoints back, and does not see what the script makes of them. Two signs show that it began before
the newest: it has read none of them by the time that it saves or ends, or it saves an earlier step again.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path

from jobs.train.channel import RankStatus
from jobs.train.script.complete import trainer_step
from jobs.train.script.reads import Reads

log = logging.getLogger("trainyard")

_COUNTED = re.compile(r"(step|epoch|iter|iteration|checkpoint|ckpt)[-_=]?(\d+)", re.IGNORECASE)


class Began:
    """What the record of an attempt says of its checkpoints."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._put_back: dict[Path, int] = {}
        """The checkpoints that this attempt has got back, and their steps."""
        self._reads: Reads | None = None
        self._repeats_from: int | None = None
        self._saved_at: datetime | None = None
        self._newest = 0
        self._has_warned = False

    def put_back(self, checkpoints: Mapping[Path, int]) -> None:
        """Take the checkpoints that are where the script finds them, with their steps."""
        self._put_back = dict(checkpoints)
        self._newest = max(checkpoints.values(), default=0)
        self._reads = Reads(checkpoints) if checkpoints else None
        self._note()

    def saved(self, path: Path, step: int, files: Iterable[str]) -> None:
        """Note that the script has saved a checkpoint, as its files are on S3."""
        self._newest, self._saved_at = step, datetime.now(timezone.utc)
        self._see_reads()
        self._see_repeats(path)
        if trainer_step(path.name) is not None:
            self._warn_without_optimizer(path.name, files)
        self._note()

    def ended_well(self) -> None:
        """Note that the script has come to its end."""
        self._see_reads()
        self._note()

    def close(self) -> None:
        if self._reads is not None:
            self._reads.close()

    def _note(self) -> None:
        RankStatus(
            put_back_step=max(self._put_back.values(), default=0),
            repeats_from_step=self._repeats_from,
            saved_at=self._saved_at,
            last_step=self._newest,
        ).write(self._scratch)

    def _see_reads(self) -> None:
        if self._reads is None or not self._reads.is_known or self._repeats_from is not None or self._reads.any():
            return
        self._repeats(0, "has read none of the checkpoints that were put back")

    def _see_repeats(self, path: Path) -> None:
        saved = _number(path.name)
        if saved is None or self._repeats_from is not None:
            return
        word, number = saved
        counted = {_number(other.name): step for other, step in self._put_back.items() if other.parent == path.parent}
        same = {known[1]: step for known, step in counted.items() if known is not None and known[0] == word}
        newest = max(same, default=0)
        # A name with a number may be written over and over. That of a Trainer is another one at each step.
        if number < newest or (number == newest and trainer_step(path.name) is not None):
            before = [step for known, step in same.items() if known < number]
            self._repeats(max(before, default=0), f"saves {path.name} again")

    def _repeats(self, step: int, sign: str) -> None:
        self._repeats_from = step
        log.warning(
            "warning: the script %s: it started over, and what earlier attempts did after step %s is lost. "
            "Next: have the script load its newest checkpoint as it starts",
            sign,
            step,
        )

    def _warn_without_optimizer(self, name: str, files: Iterable[str]) -> None:
        """Warn, once, if a Trainer saves what it cannot resume from."""
        if self._has_warned or any("optim" in file or file.endswith("/scheduler.pt") for file in files):
            return
        self._has_warned = True
        log.warning(
            "warning: %s has neither optimizer nor schedule: an attempt that resumes from it begins with a new "
            "optimizer and the learning rate of step 0. Next: leave save_only_model out of the TrainingArguments, or "
            "use trainyard.Callback",
            name,
        )


def _number(name: str) -> tuple[str, int] | None:
    """Return what a checkpoint's name counts and where it is: `('step', 300)`; None if it counts nothing known."""
    match = _COUNTED.search(name)
    return (match[1].lower(), int(match[2])) if match else None
