"""Write the output of containers to CloudWatch Logs while they run.

The rules are those of Docker's awslogs driver, which ECS uses: one event per line, no empty lines, long lines split.
One rule differs: a carriage return ends a line too. Otherwise a progress bar would appear only when it is done.
"""

import re
import time
from collections.abc import Mapping
from threading import Lock
from typing import Any

from moto.logs.models import LogGroup, LogsBackend, LogStream

MAX_EVENT_BYTES = 256 * 1024 - 26
"""CloudWatch's limit of 256 KiB per event, minus its overhead of 26 bytes (maximumBytesPerEvent of awslogs)."""

BATCH_LOG_GROUP = "/aws/batch/job"
"""The default log group of jobs; Batch creates it."""

_creating = Lock()


class LogDestinationError(Exception):
    """The log group does not exist, and the job definition does not ask to create it."""


class LogStreamWriter:
    """Writes the output of one container to one log stream."""

    def __init__(self, stream: LogStream | None) -> None:
        """`stream` is None if the container's log driver does not write to CloudWatch."""
        self._stream = stream
        self._lines = LineSplitter()
        self._last_timestamp = 0

    @property
    def name(self) -> str | None:
        return None if self._stream is None else str(self._stream.log_stream_name)

    def write(self, output: bytes) -> None:
        self._put(self._lines.feed(output))

    def close(self) -> None:
        """Write the last line, if it has no line end."""
        self._put(self._lines.flush())

    def _put(self, messages: list[str]) -> None:
        if messages and self._stream is not None:
            # Never go back in time, even if the clock does: readers page through a stream in order.
            self._last_timestamp = max(self._last_timestamp, time.time_ns() // 1_000_000)
            self._stream.put_log_events(
                [{"timestamp": self._last_timestamp, "message": message} for message in messages]
            )


class LineSplitter:
    """Splits a stream of bytes into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, output: bytes) -> list[str]:
        """Add output; return the lines that are now complete."""
        *lines, rest = re.split(rb"[\r\n]", self._rest + output)
        *full, self._rest = _pieces(rest)
        pieces = [piece for line in lines if line for piece in _pieces(line)]
        return [piece.decode(errors="replace") for piece in (*pieces, *full)]

    def flush(self) -> list[str]:
        """Return the incomplete last line."""
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace")] if rest else []


def open_log_stream(
    backend: LogsBackend, configuration: Mapping[str, Any] | None, *, definition: str, container: str, task_id: str
) -> LogStreamWriter:
    """Open the log stream of a container: `<prefix, or name of the definition>/<container>/<task id>`.

    Raises LogDestinationError if its group does not exist.
    """
    configuration = configuration or {"logDriver": "awslogs"}
    if configuration.get("logDriver", "awslogs") != "awslogs":
        return LogStreamWriter(None)
    options = configuration.get("options") or {}
    group_name = options.get("awslogs-group", BATCH_LOG_GROUP)
    create = group_name == BATCH_LOG_GROUP or options.get("awslogs-create-group") == "true"
    stream_name = f"{options.get('awslogs-stream-prefix', definition)}/{container}/{task_id}"
    if group_name not in backend.groups and not create:
        raise LogDestinationError(
            "failed to initialize logging driver: failed to create Cloudwatch log stream: "
            f"ResourceNotFoundException: The specified log group does not exist. ({group_name})"
        )
    return LogStreamWriter(add_stream(backend, group_name, stream_name))


def add_stream(backend: LogsBackend, group_name: str, stream_name: str) -> LogStream:
    """Create a log stream, and its group if necessary."""
    with _creating:
        if group_name not in backend.groups:
            # Replace the dictionaries instead of changing them: requests iterate over them without a lock.
            group = LogGroup(backend.account_id, backend.region_name, group_name)
            backend.groups = {**backend.groups, group_name: group}
        group = backend.groups[group_name]
        stream = LogStream(group, stream_name)
        group.streams = {**group.streams, stream_name: stream}
    return stream


def _pieces(line: bytes) -> list[bytes]:
    """Split a line into pieces that fit into an event."""
    pieces = []
    while len(line) > MAX_EVENT_BYTES:
        cut = _cut(line)
        pieces.append(line[:cut])
        line = line[cut:]
    return [*pieces, line]


def _cut(line: bytes) -> int:
    """Return where to split a long line: at the limit, or before it so that no UTF-8 character is split."""
    cut = MAX_EVENT_BYTES
    while cut > MAX_EVENT_BYTES - 4 and line[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut
