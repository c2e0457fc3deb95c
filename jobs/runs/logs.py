"""The log lines of a job in CloudWatch: all its attempts, all its nodes, read once or followed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from jobs.aws.connection import Aws
from jobs.aws.errors import error_code
from jobs.core.output import Progress, is_utilization_line
from jobs.runs.job import LogStream

_LAST_EVENTS = 100
"""So many of a log's last lines are searched for one of progress."""


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One line, and where it came from."""

    time: datetime
    attempt: int
    node: int | None
    """Index of the node; None: the job has one node."""
    text: str
    of_sweep: bool = False
    """The nodes are workers of a sweep."""


def newest_progress(aws: Aws, log_group: str, streams: Sequence[LogStream]) -> Progress | None:
    """Return how far a job said it was in the last lines of its newest attempt; None where they do not say."""
    newest = max((stream.attempt for stream in streams), default=0)
    for stream in streams:
        if stream.attempt != newest or stream.node not in (None, 0):
            continue
        try:
            page = aws.logs.get_log_events(
                logGroupName=log_group, logStreamName=stream.name, startFromHead=False, limit=_LAST_EVENTS
            )
        except Exception as error:
            if error_code(error) == "ResourceNotFoundException":  # it has no line yet
                return None
            raise
        told = (Progress.parse(event["message"]) for event in reversed(page["events"]))
        return next((progress for progress in told if progress is not None), None)
    return None


@dataclass
class LogReader:
    """Reads each stream on from where it last stopped."""

    aws: Aws
    log_group: str
    since: datetime | None = None
    _tokens: dict[str, str] = field(default_factory=dict, init=False)
    _lines: list[LogLine] = field(default_factory=list, init=False)

    def read(self, streams: Iterable[LogStream]) -> list[LogLine]:
        """Return what was logged since the last call: attempt by attempt, the nodes of one interleaved by time.

        The lines by which nodes report how busy they are, for the stage's dashboard, are left out.

        Where a call fails, the lines it had read come with the next one: none is lost, none comes twice.
        """
        for stream in streams:
            self._read_on(stream)
        lines = sorted(self._lines, key=lambda line: (line.attempt, line.time))
        self._lines.clear()
        return lines

    def _read_on(self, stream: LogStream) -> None:
        start = int(self.since.timestamp() * 1000) if self.since else 0
        while True:
            token = self._tokens.get(stream.name)
            try:
                page = self.aws.logs.get_log_events(
                    logGroupName=self.log_group,
                    logStreamName=stream.name,
                    startFromHead=True,
                    startTime=start,
                    **({"nextToken": token} if token else {}),  # type: ignore[arg-type]
                )
            except Exception as error:
                # The stream appears with its first line, some seconds after its container started.
                if error_code(error) == "ResourceNotFoundException":
                    return
                raise
            self._lines.extend(
                LogLine(
                    time=datetime.fromtimestamp(event["timestamp"] / 1000, timezone.utc),
                    attempt=stream.attempt,
                    node=stream.node,
                    text=event["message"],
                    of_sweep=stream.of_sweep,
                )
                for event in page["events"]
                if not is_utilization_line(event["message"])
            )
            self._tokens[stream.name] = page["nextForwardToken"]
            # CloudWatch says that a stream is read to its end by giving the same token back, not by an empty page.
            if page["nextForwardToken"] == token:
                return
