"""Write the metrics, progress and result of jobs without a Trainer."""

import json
import logging
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from jobs.aws import s3 as object_store
from jobs.container.channel import RankStatus
from jobs.container.rank import Rank
from jobs.container.saving.manifest import check_newest
from jobs.core.output import Progress
from jobs.core.records import line_with_step, read_json_lines
from jobs.core.run import METRICS
from jobs.core.words import result_label

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

PROGRESS_EVERY_SECONDS = 5.0

UPLOADS = 2
"""Maximum number of finished files on disk that are being uploaded while the next one is made."""


class JobMetrics:
    """Writes metrics.jsonl, progress lines and the result of the receipt, for jobs without a Trainer.

    A step is a shard or another part of the input.
    """

    def __init__(self, rank: Rank, s3: "S3Client", *, done_steps: int = 0) -> None:
        """`done_steps` is the number of steps that earlier attempts finished."""
        self._rank = rank
        self._s3 = s3
        self._done_before = done_steps
        place = rank.run / METRICS
        rows = read_json_lines(object_store.read(s3, place), place=place, accept=line_with_step)
        self._lines = [json.dumps(row) for row in rows if row["step"] <= done_steps]
        self._shown_at = 0.0
        self._status(done_steps)

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Record a finished step as a line of metrics.jsonl.

        Raises SupersededError if a newer attempt of the run has started.
        """
        row = {"step": step, "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"), **values}
        self._lines.append(json.dumps(row))
        check_newest(self._s3, self._rank.run, self._rank.attempt)
        object_store.write(self._s3, self._rank.run / METRICS, ("\n".join(self._lines) + "\n").encode())
        self._status(step)

    def show(self, step: int, total_steps: int, note: str, *, at_once: bool = False) -> None:
        """Print a progress line, at most every five seconds unless `at_once`."""
        now = time.monotonic()
        if at_once or now - self._shown_at >= PROGRESS_EVERY_SECONDS:
            self._shown_at = now
            print(Progress(step, total_steps, note), flush=True)

    def result(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the final metrics to the last line of metrics.jsonl, to the receipt, and to the log."""
        self.step(step, values)
        self._status(step, values)
        log.info("result: %s", ", ".join(f"{result_label(name)} {_short(value)}" for name, value in values.items()))

    def _status(self, step: int, result: Mapping[str, Any] | None = None) -> None:
        status = RankStatus(resumed_from_step=self._done_before, last_step=step, result=dict(result or {}))
        status.write(self._rank.scratch)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
