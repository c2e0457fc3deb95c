"""What the ranks of one node print: their lines on their way into the job's log, and the last lines of each."""

import collections
import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import Self

from jobs.container.launcher.request import Node

_LAST_LINES = 10

_KEPT_LINES = 200
"""More of a rank than is shown: a library that aborts writes its stack after the reason."""

_READ_BYTES = 64 * 1024
"""What a pipe holds."""

_LINE_BYTES = 64 * 1024
"""A longer line is parted; CloudWatch Logs takes 1 MiB."""

LOG_BYTES = 200_000_000
"""So much of what a node's ranks print goes into the job's log as it is: one line at each of two million steps."""

_ONE_LINE_IN = 1000
"""Of what comes after that."""

_PROGRESS = b"[progress] "
"""Begins the lines that the command line draws its bar from (jobs.core.output)."""

_BAR_SECONDS = 10.0
"""The time between two states of a bar in the log."""

_LOOK_SECONDS = 0.1

_GOODBYE_SECONDS = 5.0


@dataclass(kw_only=True)
class _Stream:
    """What one rank prints."""

    pipe: Path
    reader: int
    prefix: str
    """Stands before each of its lines; empty for rank 0, whose lines are the job's own."""
    begun: bytes = b""
    """The line that has not ended."""
    bar_at: float = 0.0
    newest: collections.deque[bytes] = field(default_factory=lambda: collections.deque(maxlen=_KEPT_LINES))

    def kept(self) -> list[str]:
        return [_text(line) for line in self.newest]


class RankLines:
    """What a node's ranks print: their lines on their way into the job's log, and the last lines of each.

    Torchrun would write a rank's lines to a file, which grows as long as it prints, and read them from there. Here they
    pass through a pipe: a disk that is full does not stop them. A context manager, while the ranks run.
    """

    def __init__(self, scratch: Path, *, node: Node, nproc_per_node: int) -> None:
        self._scratch = scratch
        self._node = node
        self._nproc_per_node = nproc_per_node
        self.last_line_at = time.monotonic()
        """When a rank of this node was last seen to print something."""
        self._closed = threading.Event()
        self._passed_bytes = self._further = self._left_out = self._left_out_bytes = 0
        self._streams = [self._stream(local_rank) for local_rank in range(nproc_per_node)]
        self._thread = threading.Thread(target=self._pass_on, name="rank-lines", daemon=True)

    @property
    def pipes(self) -> list[Path]:
        """Return the pipes that the ranks write to."""
        return [stream.pipe for stream in self._streams]

    def launch_options(self) -> dict[str, Any]:
        """Return the arguments of torchrun's LaunchConfig for where the ranks write."""
        from torch.distributed.elastic.multiprocessing import api

        pipes = dict(enumerate(map(str, self.pipes)))

        class Logs(api.DefaultLogsSpecs):
            def reify(self, envs: dict[int, dict[str, str]]) -> Any:
                found = super().reify(envs)
                found.stdouts.update(pipes)
                found.stderrs.update(pipes)
                return found

        return {"logs_specs": Logs(log_dir=str(self._scratch / "logs"))}

    def last(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Return the last lines of those of these ranks that are on this node, for the log."""
        first = self._node.index * self._nproc_per_node
        here = [rank for rank in ranks if first <= rank < first + self._nproc_per_node]
        return tuple(
            f"rank {rank} of node {self._node.index} wrote last: {line}"
            for rank in here
            for line in self.kept(rank)[-_LAST_LINES:]
        )

    def kept(self, rank: int) -> list[str]:
        """Return what is still known of what a rank of this node wrote, the newest line last."""
        return self._streams[rank - self._node.index * self._nproc_per_node].kept()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close once all that was written has been passed on."""
        self._closed.set()
        self._thread.join(_GOODBYE_SECONDS)

    def _stream(self, local_rank: int) -> _Stream:
        rank = self._node.index * self._nproc_per_node + local_rank
        pipe = self._scratch / f"rank-{rank}"
        os.mkfifo(pipe)
        # Open for both, there is no end of the file before the rank has come, and none when it has gone.
        reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        return _Stream(pipe=pipe, reader=reader, prefix=f"[rank {rank}] " if rank else "")

    def _pass_on(self) -> None:
        streams = {stream.reader: stream for stream in self._streams}
        is_last = False
        while not is_last:
            is_last = self._closed.is_set()  # what was written before is still there
            while readable := select.select(list(streams), [], [], 0 if is_last else _LOOK_SECONDS)[0]:
                self.last_line_at = time.monotonic()
                for reader in readable:
                    self._read(streams[reader])
        for stream in self._streams:
            self._print(stream, [stream.begun] if stream.begun else [])
            os.close(stream.reader)
        if self._left_out:
            self._say(
                f"log: {self._left_out} lines ({self._left_out_bytes / 1e6:.1f} MB) were left out of it; the last:"
            )
            for stream in self._streams:
                for line in stream.kept()[-_LAST_LINES:]:
                    self._say(f"{stream.prefix}{line}")

    def _read(self, stream: _Stream) -> None:
        *lines, stream.begun = (stream.begun + os.read(stream.reader, _READ_BYTES)).split(b"\n")
        self._print(stream, lines)
        self._shorten(stream)

    def _shorten(self, stream: _Stream) -> None:
        """Keep of a line that has not ended no more than is needed: of a bar that draws itself anew (with carriage
        returns) the newest state, which is printed now and then, and of one without an end no more than fits the log.
        """
        drawn, carriage_return, newest = stream.begun.rpartition(b"\r")
        if carriage_return and time.monotonic() - stream.bar_at >= _BAR_SECONDS:
            stream.bar_at = time.monotonic()
            self._print(stream, [drawn.rpartition(b"\r")[2]])
        if carriage_return:
            stream.begun = drawn.rpartition(b"\r")[2] + b"\r" + newest
        elif len(stream.begun) >= _LINE_BYTES:
            self._print(stream, [stream.begun])
            stream.begun = b""

    def _print(self, stream: _Stream, lines: list[bytes]) -> None:
        for line in lines:
            stream.newest.append(line)
            if self._fits(line):
                self._say(f"{stream.prefix}{_text(line)}")

    def _fits(self, line: bytes) -> bool:
        """Return whether the log has room for the line, which counts from then on."""
        before = self._passed_bytes
        self._passed_bytes += len(line) + 1
        if self._passed_bytes <= LOG_BYTES or line.startswith(_PROGRESS):
            return True
        if before <= LOG_BYTES:
            self._say(
                f"warning: the ranks of node {self._node.index} have printed {LOG_BYTES / 1e6:g} MB. From here on one "
                f"line in {_ONE_LINE_IN} is in the log, and the last ones at the end. Next: print less, or into a file "
                "below $TRAINYARD_OUTPUT"
            )
        self._further += 1
        if self._further % _ONE_LINE_IN == 0:
            return True
        self._left_out += 1
        self._left_out_bytes += len(line) + 1
        return False

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a rank must not wait for a pipe that nobody empties
            sys.stdout.write(f"{text}\n")


def _text(line: bytes) -> str:
    """Return a line as it is shown: of what was drawn over, the last (a bar ends with it), and no raw bytes."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
