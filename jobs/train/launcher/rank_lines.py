"""What a node's ranks print: rank 0's lines on their way into the job's log, and the last of each for how it ended.

Torchrun writes a rank's lines to a file and then puts the rank before each of them. Those of rank 0 are the job's own,
so they pass through a pipe as they are: a disk that is full does not stop them.
"""

import collections
import contextlib
import os
import select
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

if TYPE_CHECKING:
    from jobs.train.launcher.request import Node

_LAST_LINES = 10

_TAIL_BYTES = 64 * 1024
"""Of a file that ends with those lines."""

_LOOK_SECONDS = 0.1

_GOODBYE_SECONDS = 5.0


class RankLines:
    """Of one launcher's ranks: a context manager, while they run."""

    def __init__(self, scratch: Path, *, node: "Node", nproc_per_node: int) -> None:
        self.pipe: Path | None = None
        """What rank 0 writes to; None on a node that it is not on."""
        self._scratch = scratch
        self._node = node
        self._nproc_per_node = nproc_per_node
        self._newest: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._closed = threading.Event()
        if node.is_main:
            self.pipe = scratch / "rank-0"
            os.mkfifo(self.pipe)
            # Open for both, there is no end of the file before the rank has come, and none when it has gone.
            self._reader = os.open(self.pipe, os.O_RDWR | os.O_NONBLOCK)
            self._thread = threading.Thread(target=self._pass_on, name="rank-lines", daemon=True)

    def launch_options(self) -> dict[str, Any]:
        """Arguments of torchrun's LaunchConfig: where the ranks write, and what of it goes into the job's log."""
        from torch.distributed.elastic.multiprocessing import api

        pipe = self.pipe
        tee = {
            rank: api.Std.NONE if rank == 0 and self._node.is_main else api.Std.ALL
            for rank in range(self._nproc_per_node)
        }

        class Logs(api.DefaultLogsSpecs):
            def reify(self, envs: dict[int, dict[str, str]]) -> Any:
                found = super().reify(envs)
                if pipe is not None:
                    found.stdouts[0] = found.stderrs[0] = str(pipe)
                return found

        logs = Logs(log_dir=str(self._scratch / "logs"), tee=tee)
        return {"logs_specs": logs, "log_line_prefix_template": "[rank ${rank}] "}

    def last(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """For the log, of those of these ranks that are on this node."""
        first = self._node.index * self._nproc_per_node
        here = [rank for rank in ranks if first <= rank < first + self._nproc_per_node]
        return tuple(
            f"rank {rank} of node {self._node.index} wrote last: {line}"
            for rank in here
            for line in (list(self._newest) if rank == 0 else self._from_file(rank - first))
        )

    def __enter__(self) -> Self:
        if self.pipe is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Once all that was written has been passed on."""
        self._closed.set()
        if self.pipe is not None:
            self._thread.join(_GOODBYE_SECONDS)

    def _pass_on(self) -> None:
        begun = b""
        is_last = False
        while not is_last:
            is_last = self._closed.is_set()  # what was written before is still there
            while select.select([self._reader], [], [], 0 if is_last else _LOOK_SECONDS)[0]:
                *lines, begun = (begun + os.read(self._reader, _TAIL_BYTES)).split(b"\n")
                self._print(lines)
        self._print([begun] if begun else [])
        os.close(self._reader)

    def _print(self, lines: list[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace")
            self._newest.append(text)
            with contextlib.suppress(OSError, ValueError):  # rank 0 must not wait for a pipe that nobody empties
                sys.stdout.write(f"{text}\n")

    def _from_file(self, local_rank: int) -> list[str]:
        """Of standard output, which a rank makes of both; one that did not come so far has written to the other."""
        for name in ("stdout.log", "stderr.log"):
            for path in self._scratch.glob(f"logs/*/attempt_0/{local_rank}/{name}"):
                with path.open("rb") as file:
                    file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                    lines = file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
                if lines:
                    return lines
        return []
