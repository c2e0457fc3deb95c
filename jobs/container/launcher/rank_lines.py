"""Pass the output of a node's ranks to the job's log, and keep the last lines of each rank."""

import collections
import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import Self

from jobs.container.launcher.request import Node
from jobs.core.output import LAST_LINE

_LAST_LINES = 10

_KEPT_LINES = 200
"""Lines kept of each rank. More than are shown, because a library that aborts prints its stack after the reason."""

_READ_BYTES = 64 * 1024
"""The capacity of a pipe."""

_LINE_BYTES = 64 * 1024
"""Longer lines are split. CloudWatch Logs accepts 1 MiB."""

LOG_BYTES = 200_000_000
"""Bytes of a node's output that are logged in full. Enough for one line at each of two million steps."""

_ONE_LINE_IN = 1000
"""After `LOG_BYTES`, one line in this many is logged."""

_PROGRESS = b"[progress] "
"""Prefix of the lines from which the command line draws its progress bar (jobs.core.output)."""

_BAR_SECONDS = 10.0
"""Interval at which a progress bar is logged."""

_POLL_SECONDS = 0.1

_CLOSE_SECONDS = 5.0


@dataclass(kw_only=True)
class _Stream:
    """The output of one rank."""

    pipe: Path
    reader: int
    prefix: str
    """Prefix of each of its lines in the log. Empty for rank 0."""
    unfinished: bytes = b""
    """The unfinished last line."""
    bar_at: float = 0.0
    newest: collections.deque[bytes] = field(default_factory=lambda: collections.deque(maxlen=_KEPT_LINES))

    def kept(self) -> list[str]:
        return [_text(line) for line in self.newest]


class RankLines:
    """Passes the output of a node's ranks to the job's log, and keeps the last lines of each. A context manager.

    Torchrun would write each rank's output to a growing file and read it from there. A pipe also works on a full disk.
    """

    def __init__(
        self, scratch: Path, *, node: Node, nproc_per_node: int, listener: Callable[[str], None] | None = None
    ) -> None:
        """`listener` is called with each line of rank 0. The ranks wait until it returns."""
        self._scratch = scratch
        self._listener = listener
        self._node = node
        self._nproc_per_node = nproc_per_node
        self.last_line_at = time.monotonic()
        """When a rank of this node last printed something."""
        self._closed = threading.Event()
        self._passed_bytes = self._sampled = self._left_out = self._left_out_bytes = 0
        self._streams = [self._stream(local_rank) for local_rank in range(nproc_per_node)]
        self._thread = threading.Thread(target=self._pass_on, name="rank-lines", daemon=True)

    @property
    def pipes(self) -> list[Path]:
        """The pipes that the ranks write to."""
        return [stream.pipe for stream in self._streams]

    def launch_options(self) -> dict[str, Any]:
        """Return the arguments of torchrun's LaunchConfig that send the ranks' output to the pipes."""
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
        """Return the last lines of the given ranks that are on this node, for the log."""
        first = self._node.index * self._nproc_per_node
        here = [rank for rank in ranks if first <= rank < first + self._nproc_per_node]
        return tuple(
            LAST_LINE.format(rank=rank, node=self._node.index, line=line)
            for rank in here
            for line in self.kept(rank)[-_LAST_LINES:]
        )

    def kept(self, rank: int) -> list[str]:
        """Return the kept lines of a rank of this node, oldest first."""
        return self._streams[rank - self._node.index * self._nproc_per_node].kept()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Pass on all remaining output, then close."""
        self._closed.set()
        self._thread.join(_CLOSE_SECONDS)

    def _stream(self, local_rank: int) -> _Stream:
        rank = self._node.index * self._nproc_per_node + local_rank
        pipe = self._scratch / f"rank-{rank}"
        os.mkfifo(pipe)
        # Opened for reading and writing, the pipe has no end-of-file before the rank opens it or after it closes it.
        reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        return _Stream(pipe=pipe, reader=reader, prefix=f"[rank {rank}] " if rank else "")

    def _pass_on(self) -> None:
        streams = {stream.reader: stream for stream in self._streams}
        is_last = False
        while not is_last:
            is_last = self._closed.is_set()  # one more round for output that was written before
            while readable := select.select(list(streams), [], [], 0 if is_last else _POLL_SECONDS)[0]:
                self.last_line_at = time.monotonic()
                for reader in readable:
                    self._read(streams[reader])
        for stream in self._streams:
            self._print(stream, [stream.unfinished] if stream.unfinished else [])
            os.close(stream.reader)
        if self._left_out:
            self._write_line(
                f"log: {self._left_out} lines ({self._left_out_bytes / 1e6:.1f} MB) were left out; the last lines:"
            )
            for stream in self._streams:
                for line in stream.kept()[-_LAST_LINES:]:
                    self._write_line(f"{stream.prefix}{line}")

    def _read(self, stream: _Stream) -> None:
        *lines, stream.unfinished = (stream.unfinished + os.read(stream.reader, _READ_BYTES)).split(b"\n")
        self._print(stream, lines)
        self._shorten(stream)

    def _shorten(self, stream: _Stream) -> None:
        """Shorten an unfinished line.

        A progress bar redraws itself with carriage returns. Only its newest state is kept, and logged at an interval.
        Any other line is split at the maximum length.
        """
        drawn, carriage_return, newest = stream.unfinished.rpartition(b"\r")
        if carriage_return and time.monotonic() - stream.bar_at >= _BAR_SECONDS:
            stream.bar_at = time.monotonic()
            self._print(stream, [drawn.rpartition(b"\r")[2]])
        if carriage_return:
            stream.unfinished = drawn.rpartition(b"\r")[2] + b"\r" + newest
        elif len(stream.unfinished) >= _LINE_BYTES:
            self._print(stream, [stream.unfinished])
            stream.unfinished = b""

    def _print(self, stream: _Stream, lines: list[bytes]) -> None:
        for line in lines:
            stream.newest.append(line)
            if self._listener is not None and not stream.prefix:
                self._listener(_text(line))
            if self._fits(line):
                self._write_line(f"{stream.prefix}{_text(line)}")

    def _fits(self, line: bytes) -> bool:
        """Count the line, and return whether to log it."""
        before = self._passed_bytes
        self._passed_bytes += len(line) + 1
        if self._passed_bytes <= LOG_BYTES or line.startswith(_PROGRESS):
            return True
        if before <= LOG_BYTES:
            self._write_line(
                f"warning: the ranks of node {self._node.index} have printed {LOG_BYTES / 1e6:g} MB. From now on the "
                f"log has one line in {_ONE_LINE_IN}, and the last lines at the end. Next: print less, or print to a "
                "file in $TRAINYARD_OUTPUT"
            )
        self._sampled += 1
        if self._sampled % _ONE_LINE_IN == 0:
            return True
        self._left_out += 1
        self._left_out_bytes += len(line) + 1
        return False

    def _write_line(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a rank must not block on a pipe that is never read
            sys.stdout.write(f"{text}\n")


def _text(line: bytes) -> str:
    """Return a line as text: the last state of a redrawn line, with undecodable bytes replaced."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
